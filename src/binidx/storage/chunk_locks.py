"""Which process fetches a chunk: a lock on one byte of a file for each, which dies with its process.

POSIX record locks: they work on NFS and on every Unix, and a forked child has none of its parent's. What belongs to a
process does not tell its threads apart, so threads agree first (`single_flight`); and closing any descriptor of the
file drops the process' locks on it, so there is one ChunkLocks for a file in a process.

Nothing depends on these locks but that a chunk is fetched once: where they do not work everybody fetches.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence

from binidx.storage.chunk_cache import runs_of


class ChunkLocks:
    """The locks of one object.

    Raises:
        OSError: the file can be neither opened nor made.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    @contextlib.contextmanager
    def held(self, chunks: Sequence[int]) -> Iterator[list[int]]:
        """Those of the sorted chunks that no other process holds, held for the block; nobody is waited for."""
        held: list[tuple[int, int]] = []
        try:
            for run in runs_of(chunks):
                self._take(run, held)
            yield [chunk for run in held for chunk in range(*run)]
        finally:
            for first, stop in held:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN, stop - first, first)

    def _take(self, run: tuple[int, int], held: list[tuple[int, int]]) -> None:
        """Lock a run, or what can be had of it: by halves."""
        first, stop = run
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, stop - first, first)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                middle = (first + stop) // 2
                for half in ((first, middle), (middle, stop)) if middle > first else ():
                    self._take(half, held)
                return
        held.append(run)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the interpreter modules may be gone before this object.
        try:  # noqa: SIM105
            close(self._descriptor)
        except (OSError, AttributeError):
            pass
