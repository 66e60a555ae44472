"""Terminal output: short lines, aligned figures, units; colour only on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO, TypeVar

T = TypeVar("T")

EIGHTHS = "▏▎▍▌▋▊▉"

BOLD, DIM, GREEN = "1", "2", "32"


class Screen:
    """Writer of lines to a stream, or to nothing.

    Args:
        stream: the stream; None for no output, as under --json.
        plain: no colours and no progress bars, even on a terminal.
    """

    def __init__(self, stream: TextIO | None, *, plain: bool = False) -> None:
        self._stream = stream
        self._plain = plain
        self._colour = stream is not None and not plain and takes_colour(stream)
        self._unicode = stream is not None and takes_text(stream, "█" + EIGHTHS)

    def line(self, text: str = "") -> None:
        """Print one line and flush."""
        if self._stream is not None:
            print(text, file=self._stream, flush=True)

    def heading(self, name: str, text: str) -> None:
        """Print the name of the next stage."""
        self.line(f"{self.bold(f'{name:<10}')} {text}")

    def detail(self, text: str) -> None:
        """Print a line below a heading."""
        self.line(f"{'':<10} {text}")

    def bold(self, text: str) -> str:
        return self._paint(text, BOLD)

    def dim(self, text: str) -> str:
        return self._paint(text, DIM)

    def green(self, text: str) -> str:
        return self._paint(text, GREEN)

    def bar(self, share: float, width: int) -> str:
        """Return a bar over this share of the width, to an eighth of a character."""
        full, eighths = divmod(round(8 * width * min(1.0, share)), 8)
        bar = "█" * full + (EIGHTHS[eighths - 1] if eighths else "")
        return (bar if self._unicode else "#" * full).ljust(width)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Print a table, the first column aligned left, the others right; the first row is dimmed."""
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            text = "   ".join([row[0].ljust(len(first)), *others]).rstrip()
            self.line(self.dim(text) if number == 0 else text)

    def progress(self, items: Iterable[T], what: str, total: int) -> Iterable[T]:
        """Iterate over the items, with a bar on stderr if that is a terminal."""
        from tqdm import tqdm

        off = self._plain or not sys.stderr.isatty()
        return tqdm(items, desc=f"{'':<10} {what}", total=total, disable=off, leave=False, ncols=80)

    def _paint(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colour else text


def takes_colour(stream: TextIO) -> bool:
    """Return whether the stream is a terminal and NO_COLOR is not set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def takes_text(stream: TextIO, text: str) -> bool:
    """Return whether the stream's encoding has these characters."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
