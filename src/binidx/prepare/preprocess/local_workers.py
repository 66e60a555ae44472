"""Worker processes of this machine, which end with the process that began them, however that ends.

    driver ──── pipe ────► worker      the driver never writes: the pipe's end is the sign to stop
                  └──────► worker

A worker waits for that end in a thread. Then it stops between two batches, and in any case some seconds later.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection, wait

from binidx.prepare.preprocess.stopping import stop

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Source: glibc, malloc.h."""

KEPT_BYTES, LARGEST_BYTES = 256 << 20, 32 << 20
"""Free memory that a worker does not give back, and what is asked of the kernel alone: at most that, says glibc."""

GRACE_SECONDS = 5.0
"""For a worker to end what it writes."""


class LocalExecutor(ProcessPoolExecutor):
    """`count` processes; fresh ones, as a fork would take threads and connections of this one along."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, self._end = context.Pipe(duplex=False)
        super().__init__(count, context, begin_worker, (ours,))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """With `cancel_futures` what is under way is stopped, too."""
        if cancel_futures:
            self._end.close()
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._end.close()


def begin_worker(end: Connection) -> None:
    """What each worker does first."""
    # A Ctrl-C reaches all processes of a terminal; the driver alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settle_malloc()
    threading.Thread(target=_stop_at_end, args=(end,), daemon=True).start()


def settle_malloc() -> None:
    """Have glibc's malloc use one arena for all threads, and buffers of megabytes again.

    Arenas of their own would each keep what they freed: from S3 to S3 a worker grew by 60 MB within eight parts. And
    buffers that the kernel is asked for, one by one, come as zeros and go: a twentieth of the CPU.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGEST_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES)):
            mallopt(name, value)


def _stop_at_end(end: Connection) -> None:
    wait([end])
    stop()
    time.sleep(GRACE_SECONDS)
    os._exit(1)
