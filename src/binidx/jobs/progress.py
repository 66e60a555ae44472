"""Receivers of the progress of long work."""

from __future__ import annotations

from typing import Literal, Protocol

Unit = Literal["bytes", "rows", "samples", "tokens", "indices", ""]
"""Name of what is counted; "" for work of which only the time is shown."""


class ProgressWatcher(Protocol):
    """Receiver of progress and messages of long work."""

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None:
        """Begin a phase of the work, of which a restarted one has done a part before.

        Args:
            what: name of the phase.
            total, done: units of the whole phase, and of the part done before.
        """

    def advance(self, count: int) -> None:
        """Add units to those done in this phase."""

    def say(self, message: str) -> None:
        """Show a message."""


class SilentWatcher:
    """Watcher that shows nothing."""

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None: ...

    def advance(self, count: int) -> None: ...

    def say(self, message: str) -> None: ...
