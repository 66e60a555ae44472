"""Tables that fit the width of the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

GAP = 2
MOST_ROWS = 40


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, most_rows: int = MOST_ROWS
) -> str:
    """Return a table, the first column aligned left, the others right.

    If the columns do not fit side by side, the first has a line of its own; if the others do not fit either, they
    follow as text. A name longer than the line loses its middle. Rows after `most_rows` are only counted.

    Args:
        width: width of the terminal; by default its own, or 80.
    """
    if len(rows) > most_rows:
        more = f"... and {len(rows) - most_rows:,} more; --json has all"
        return f"{table(head, rows[:most_rows], width, most_rows)}\n{more}"
    width = width or shutil.get_terminal_size().columns
    columns = [*zip(head, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    rest = sum(each + GAP for each in widths[1:])
    if widths[0] + rest <= width:
        return "\n".join(_line(row, widths) for row in (head, *rows))
    if GAP + rest > width:
        return "\n".join(line for row in rows for line in _in_words(head, row, width))
    indented = [GAP, *widths[1:]]
    lines = [head[0], _line(["", *head[1:]], indented)]
    for first, *others in rows:
        lines += [shortened(first, width), _line(["", *others], indented)]
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """Return `text` without its middle if it is longer than `width`."""
    if len(text) <= width:
        return text
    left = (width - 1) // 3
    return f"{text[:left]}…{text[left + 1 - width :]}"


def _in_words(head: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    words = [f"{name} {cell}".strip() for name, cell in zip(head[1:], row[1:], strict=True) if cell]
    blanks = " " * GAP
    rest = textwrap.fill(", ".join(words), width, initial_indent=blanks, subsequent_indent=blanks)
    return [shortened(row[0], width), rest]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    line = f"{first:<{widths[0]}}"
    return (line + "".join(f"{cell:>{width + GAP}}" for cell, width in zip(others, widths[1:], strict=True))).rstrip()
