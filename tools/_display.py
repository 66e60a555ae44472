"""Output of the commands: progress on stderr, tables that fit the terminal, numbers for people."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

GAP = 2
MOST_ROWS = 40


EACH_SECONDS = 60.0
"""Time between two lines of progress where no bar can be drawn."""


class Bar:
    """Progress watcher: a bar on stderr if that is a terminal, else a line a minute; messages are always printed.

    Args:
        command: name of the command.
        form: "json" for lines of JSON: at the begin and the end of each stage, and each minute between; None otherwise.
    """

    def __init__(self, command: str, form: str | None = None) -> None:
        from tqdm import tqdm

        self._command, self._form, self._tqdm = command, form, tqdm
        self._bar: Any = tqdm(disable=True)
        self._what, self._unit, self._total, self._before, self._done = "", "bytes", 0, 0, 0
        self._began, self._ended, self._drawing = time.monotonic(), threading.Event(), threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._report, name="binidx-progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.end_stage()
        self._ended.set()

    def begin(self, what: str, total: int, done: int, unit: str = "bytes") -> None:
        """Start a new stage; the bar of the previous one vanishes.

        Args:
            what: name of the stage.
            total, done: units of the whole stage, and of the part that was done before.
            unit: name of the units, in the plural; "": only the time is shown.
        """
        self.end_stage()
        self._what, self._unit, self._total, self._before, self._done = what, unit, total, done, done
        self._began = time.monotonic()
        if self._form:
            self.print_progress()
            return
        shown, divisor = ("B", 1024) if unit == "bytes" else (f" {unit}", 1000)
        verb, blank, name = re.sub(r"\S*/(?=\S)", "", what).rpartition(" ")
        label = f"{verb}{blank}{shortened(name, max(12, columns(sys.stderr) - METER - len(verb + blank)))}"
        # disable=None: no bar unless it is a terminal. smoothing=0: the rate is the mean since the start of the bar.
        self._bar = self._tqdm(
            desc=label, total=total or None, initial=done, unit=shown, unit_scale=True, unit_divisor=divisor,
            disable=None, smoothing=0, leave=False, bar_format=None if unit else "{desc}: {elapsed}",
        )  # fmt: skip

    def advance(self, count: int) -> None:
        """Advance the stage."""
        self._done += count
        self._bar.update(count)

    def say(self, message: str) -> None:
        """Print a line on stderr, above the bar."""
        print_note(f"binidx {self._command}", message)

    def print_progress(self) -> None:
        """Print a line on stderr: the units done and in total, the rate and the time that is left."""
        seconds = time.monotonic() - self._began
        rate = (self._done - self._before) / max(seconds, 1e-9)
        left = (self._total - self._done) / rate if rate else None
        if self._form:
            values = {"command": self._command, "stage": self._what, "unit": self._unit, "done": self._done}
            values |= {"total": self._total, "seconds": seconds, "per_second": rate, "seconds_left": left}
            print(json.dumps({"progress": values}), file=sys.stderr, flush=True)
            return
        if not self._unit:
            print(f"binidx {self._command}: {self._what}: {human_seconds(seconds)}", file=sys.stderr, flush=True)
            return
        share = f" ({self._done / self._total:.0%})" if self._total else ""
        counted = f"{self._amount(self._done)} of {self._amount(self._total)}{share}, {self._amount(rate)}/s"
        rest = "" if left is None else f", {human_seconds(left)} left"
        print(f"binidx {self._command}: {self._what}: {counted}{rest}", file=sys.stderr, flush=True)

    def _amount(self, count: float) -> str:
        return human_bytes(count) if self._unit == "bytes" else f"{count:,.0f} {self._unit}"

    def end_stage(self) -> None:
        """End the stage; its bar vanishes."""
        with self._drawing:
            self._bar.close()
        if self._form and self._what:
            self.print_progress()
        self._what = ""

    def _report(self) -> None:
        drawn = sys.stderr.isatty() and not self._form
        while not self._ended.wait(1.0 if drawn else EACH_SECONDS):
            with self._drawing:
                self._bar.refresh()  # its clock runs while nothing advances
            if self._what and not drawn:
                self.print_progress()


def print_above(text: str, stream: Any = None) -> None:
    """Print lines on stdout, or another stream, above the bar if there is one."""
    from tqdm import tqdm

    tqdm.write(text, file=stream or sys.stdout)


METER = 56
"""Columns of a bar without its label."""


def columns(stream: Any) -> int:
    """Return the columns of a terminal; 80 of another stream, unless COLUMNS names more."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return shutil.get_terminal_size().columns


def fitted(text: str, stream: Any) -> str:
    """Return a text whose lines are wrapped between words if a terminal shows it; else the text."""
    if not stream.isatty():
        return text
    width, lines = columns(stream), []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + GAP)
        wrapped = textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False, expand_tabs=False,
        ) if len(line) > width else [line]  # fmt: skip
        lines += wrapped
    return "\n".join(lines)


COLOURS = {"error": "31", "warning": "33"}


def print_note(subject: str, message: str, kind: str = "") -> None:
    """Print a line on stderr; on a terminal it is wrapped, and the subject of an error or a warning has a colour.

    Args:
        kind: "error", "warning" or "".
    """
    text = fitted(f"{subject}: {message}", sys.stderr)
    if kind and sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        text = f"\033[{COLOURS[kind]}m{text[: len(subject)]}\033[0m{text[len(subject) :]}"
    print_above(text, sys.stderr)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    most_rows: int = MOST_ROWS,
    num_rows: int | None = None,
) -> str:
    """Return a table, the first column aligned left, the others right.

    If the columns do not fit side by side, the first has a line of its own; if the others do not fit either, they
    follow as text. A name longer than the line loses its middle. Rows after `most_rows` are only counted.

    Args:
        width: columns of the terminal; by default those it has, or 80.
        num_rows: number of all rows, of which `rows` may be the first.
    """
    if (num_rows := num_rows or len(rows)) > most_rows:
        more = f"... and {num_rows - most_rows:,} more; --json has all"
        return f"{table(head, rows[:most_rows], width, most_rows)}\n{more}"
    width = width or shutil.get_terminal_size().columns
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
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


def row_table(rows: Sequence[Mapping[str, Any]], number: str = "{}") -> str:
    """Return rows of JSON values with the same keys as a table of all of them.

    Args:
        number: format of the whole numbers; others have three digits.
    """

    def cell(value: Any) -> str:
        if isinstance(value, int | float):
            return number.format(value) if isinstance(value, int) else f"{value:.3f}"
        return value or ""

    cells = [[*map(cell, row.values())] for row in rows]
    return table([name.replace("_", " ") for name in rows[0]] if rows else [], cells, most_rows=len(rows))


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


def counts_of_dataset(made: Any) -> str:
    """Format the counts in the result of a command that makes a dataset."""
    return counts(documents=made.num_documents, sequences=made.num_sequences, tokens=made.num_tokens)


def human_seconds(seconds: float) -> str:
    """Format seconds: 75.3 -> `1 min 15 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
