"""Work that kills whoever does it, as the kernel kills what takes too much memory. Nothing heavy is imported for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def kills_its_worker() -> Callable[[int], int]:
    """Number 3 does. Made anew, so that other machines get it as it is, not by the name of this module."""

    def work(task: int) -> int:
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    return work


def local_work(task: int) -> int:
    """The same, for processes of this machine."""
    return kills_its_worker()(task)
