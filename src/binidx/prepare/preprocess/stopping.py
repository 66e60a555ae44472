"""How work in another process is told to stop: between two batches, so that it leaves nothing half written behind."""

from __future__ import annotations

import threading

from binidx.errors import CancelledReadError

_told = threading.Event()


def stop() -> None:
    """From now on `stop_if_told` stops whoever asks in this process."""
    _told.set()


def stop_if_told() -> None:
    """CancelledReadError if this process was told to stop."""
    if _told.is_set():
        raise CancelledReadError("told to stop: another part failed, or the job was interrupted")
