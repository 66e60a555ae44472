"""Small tables in HTML, as notebooks show objects: a title, and rows of a name and values, all escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

MOST_HTML_ROWS = 20
"""Rows that are shown of a long table; the others are counted."""


def format_html_table(title: str, rows: Sequence[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Return a table for `_repr_html_`.

    Args:
        title: text above the table.
        rows: cells of each row. Whole numbers are grouped by thousands.
        head: names of the columns; below one, numbers stand on the right.
    """
    shown, left = rows[:MOST_HTML_ROWS], len(rows) - MOST_HTML_ROWS
    sides = ["right" if head and isinstance(value, int | float) else "left" for value in (*rows, head)[0]]
    lines = [_line("th", head, sides)] if head else []
    lines += [_line("td", row, sides) for row in shown]
    lines += [f"<tr><td>and {left:,} more</td></tr>"] if left > 0 else []
    return f'<table><caption style="text-align: left">{html.escape(title)}</caption>{"".join(lines)}</table>'


def _line(tag: str, values: Sequence[object], sides: Sequence[str]) -> str:
    cells = [
        f'<{tag} style="text-align: {side}">{_text(value)}</{tag}>' for value, side in zip(values, sides, strict=True)
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return html.escape("" if value is None else str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
