"""Small tables in HTML, as notebooks show objects: a title, and rows of a name and values, all escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

MOST_ROWS = 20
"""Rows that are shown of a long table; the others are counted."""


def format_html_table(title: str, rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Return a table for `_repr_html_`.

    Args:
        title: text above the table.
        rows: cells of each row. Whole numbers are grouped by thousands; numbers stand on the right.
        head: names of the columns.
    """
    shown, left = rows[:MOST_ROWS], len(rows) - MOST_ROWS
    lines = [f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>"] if head else []
    lines += [f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown]
    lines += [f"<tr><td>and {left:,} more</td></tr>"] if left > 0 else []
    return f"<table><caption>{html.escape(title)}</caption>{''.join(lines)}</table>"


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f'<td style="text-align: left">{html.escape("" if value is None else str(value))}</td>'
    return f'<td style="text-align: right">{f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"}</td>'
