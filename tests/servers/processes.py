"""Whether a process is gone, for tests that kill."""

from __future__ import annotations

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    """Linux only: a process that ended and was not waited for is a zombie, and not running.

    One that is waited for between the opening and the reading of its file is not found either (ESRCH).
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after {seconds} s"
        time.sleep(0.01)
