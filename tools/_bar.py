"""The progress bar of the commands that move bytes."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class Bar:
    """A Watch that draws a progress bar on stderr when it is a terminal, and says messages there always."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def begin(self, what: str, total_bytes: int, done_bytes: int) -> None:
        """A new bar, below the one before."""
        self._end()
        # disable=None: no bar unless it is a terminal.
        self._bar = tqdm(
            desc=what, total=total_bytes, initial=done_bytes, unit="B", unit_scale=True, unit_divisor=1024, disable=None
        )

    def advance(self, num_bytes: int) -> None:
        """So much more is done."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def say(self, message: str) -> None:
        """A line on stderr."""
        self._end()
        print(f"binidx {self._command}: {message}", file=sys.stderr)

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None
