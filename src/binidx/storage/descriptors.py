"""File descriptors: a blend of thousands of mapped files needs more than the 1024 that most shells allow.

A process may raise its own (soft) limit up to the hard one, which is 524,288 or more on today's Linux. It is raised
once, when half of the descriptors are taken: sockets and the pipes of a DataLoader's workers need some, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable
from typing import TypeVar

Opened = TypeVar("Opened")

WAYS_OUT = {
    errno.EMFILE: "raise the limit of open files, ulimit -n (the hard one, ulimit -Hn, is where we stopped)",
    errno.ENFILE: "the machine is out of open files, sysctl fs.file-max",
    errno.ENOMEM: "raise the number of maps a process may have, sysctl vm.max_map_count",
}
"""errno -> what to do, where opening fails for want of room"""

# Where a limit is "unlimited", macOS takes no more than this.
MANY = 10_240


def with_room(open_it: Callable[[], Opened]) -> Opened:
    """`open_it()`, once more under a higher limit if it finds no descriptor left."""
    try:
        return open_it()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    raise_limit()
    return open_it()


def keep_room(descriptor: int) -> None:
    """Raise the limit if more than half of the descriptors are taken. Costs 2 us."""
    lowest_free = os.dup(descriptor)
    os.close(lowest_free)
    if lowest_free > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        raise_limit()


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
