"""Output of the commands: progress bars on stderr, tables that fit the terminal, numbers for people."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Self

from tqdm import tqdm

from binidx.storage.writing.copy import Unit

GAP = 2
MOST_ROWS = 40


class Bar:
    """Progress watcher with a bar on stderr, if stderr is a terminal; messages are always printed."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._bar: tqdm[Any] = tqdm(disable=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None:
        """Start a new bar, below the previous one.

        Args:
            what: name of the stage.
            total, done: units of the whole stage, and of the part that was done before.
            unit: name of the units, in the plural.
        """
        self._bar.close()
        shown, divisor = ("B", 1024) if unit == "bytes" else (f" {unit}", 1000)
        # disable=None: no bar unless it is a terminal. smoothing=0: the rate is the mean since the start of the bar.
        self._bar = tqdm(
            desc=what, total=total, initial=done, unit=shown, unit_scale=True, unit_divisor=divisor, disable=None,
            smoothing=0,
        )  # fmt: skip

    def advance(self, count: int) -> None:
        """Advance the bar."""
        self._bar.update(count)

    def say(self, message: str) -> None:
        """Print a line on stderr."""
        self._bar.close()
        print(f"binidx {self._command}: {message}", file=sys.stderr)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, most_rows: int = MOST_ROWS
) -> str:
    """Return a table, the first column aligned left, the others right.

    If the columns do not fit side by side, the first has a line of its own; if the others do not fit either, they
    follow as text. A name longer than the line loses its middle. Rows after `most_rows` are only counted.

    Args:
        width: columns of the terminal; by default those it has, or 80.
    """
    if len(rows) > most_rows:
        more = f"... and {len(rows) - most_rows:,} more; --json has all"
        return f"{table(head, rows[:most_rows], width, most_rows)}\n{more}"
    width = width or shutil.get_terminal_size().columns
    columns = [*zip(head, *rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    rest = sum(column + GAP for column in widths[1:])
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
    """Return `text` without its middle if it is longer than `width`.

    Args:
        width: most characters.
    """
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


def human_bytes(count: float) -> str:
    """Format bytes: 12_345_678 -> `11.8 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"


def counts(**numbers: int) -> str:
    """Format counts: documents=1, tokens=2034 -> `1 document, 2,034 tokens`."""
    return ", ".join(f"{count:,} {name[: -1 if count == 1 else None]}" for name, count in numbers.items())


def human_seconds(seconds: float) -> str:
    """Format seconds: 75.3 -> `1 min 15 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
