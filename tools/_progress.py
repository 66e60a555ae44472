"""Progress bars of the commands, on stderr when it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from binidx.prepare.preprocess.record import Progress

from ._command import human_seconds


class Bar:
    """A progress watcher with a bar on stderr, if that is a terminal; messages are always printed."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        """Start a new bar, below the previous one."""
        self._end()
        # disable=None: no bar unless it is a terminal.
        self._bar = tqdm(
            desc=what, total=total_bytes, initial=done_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=None
        )

    def advance(self, num_bytes: int) -> None:
        """Advance the bar by a number of bytes."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def say(self, message: str) -> None:
        """Print a line on stderr."""
        self._end()
        print(f"binidx {self._command}: {message}", file=sys.stderr)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


class PreprocessBar(Bar):
    """A watcher of preprocess: one bar for all parts, and one for the step after them."""

    def __init__(self) -> None:
        super().__init__("preprocess")
        self._shown: Progress | None = None

    def __enter__(self) -> PreprocessBar:
        return self

    def show(self, progress: Progress) -> None:
        """Update the bar; it counts finished parts, so it moves by parts."""
        text = ", ".join(_told(progress))
        if self._shown is None:
            total, done = progress.total_bytes, progress.done_bytes
            self._bar = tqdm(desc=text, total=total, initial=done, bar_format=FORMAT, dynamic_ncols=True, disable=None)
        assert self._bar is not None
        before = self._shown.done_bytes if self._shown else progress.done_bytes
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(progress.done_bytes - before)
        self._bar.refresh()
        self._shown = progress


FORMAT = "{percentage:3.0f}%|{bar:10}| {desc}"
"""tqdm's own rate is of the last part, with the start of a worker; this one is of all parts of this run."""


def _told(progress: Progress) -> Iterator[str]:
    """Yield the fields of the description, the most important first: the terminal may cut off the end."""
    yield f"part {progress.parts_done:,} of {progress.parts:,}"
    if progress.parts < progress.all_parts:
        yield f"{progress.all_parts_done:,} of {progress.all_parts:,} of all shards"
    if progress.seconds_left is not None:
        yield f"{progress.bytes_per_second / 1e6:,.1f} MB/s"
        yield f"{human_seconds(progress.seconds_left)} left"
    yield f"{progress.num_tokens / 1e6:,.1f} M tokens"
    yield f"{progress.num_documents:,} documents"
    if progress.machines > 1:
        yield f"{progress.machines:,} machines"
