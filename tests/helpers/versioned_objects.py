"""Objects for caches to keep: with a mark of their content, and a log of what is fetched that outlives processes."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

from binidx.storage.interfaces import Range
from binidx.testing import MemoryObject


class MarkedObject(MemoryObject):
    """Bytes in memory under a URI, with an ETag as S3 would give them."""

    def __init__(self, data: bytes, uri: str = "memory-object") -> None:
        super().__init__(data, uri)
        self.identity = {"size": len(data), "etag": hashlib.md5(data).hexdigest()}

    def __reduce__(self) -> tuple[type[MarkedObject], tuple[bytes, str]]:
        return MarkedObject, (self.data, self.uri)


class LoggedObject(MarkedObject):
    """The same, made anew from its arguments in each process; each range fetched is a line of a file.

    Args:
        log: "pid start stop" of each range of each read, written before it waits.
        delay: seconds that a read takes.
    """

    def __init__(self, size: int, log: str, delay: float = 0.0, seed: int = 0) -> None:
        super().__init__(random.Random(seed).randbytes(size), f"logged-{seed}")
        self.log, self.delay, self.seed = log, delay, seed

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        lines = "".join(f"{os.getpid()} {start} {stop}\n" for start, stop in ranges)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, lines.encode())
        os.close(descriptor)
        time.sleep(self.delay)
        return super().read(ranges)

    def __reduce__(self) -> tuple[type[LoggedObject], tuple[int, str, float, int]]:  # type: ignore[override]
        return LoggedObject, (self.size, self.log, self.delay, self.seed)


def fetched(log: str | os.PathLike[str]) -> list[Range]:
    """The ranges in a log, in the order they were asked."""
    if not os.path.exists(log):
        return []
    lines = [line.split() for line in Path(log).read_text().splitlines()]
    return [(int(start), int(stop)) for _, start, stop in lines]


def chunks_fetched(log: str | os.PathLike[str], chunk_bytes: int) -> list[int]:
    """Each chunk as often as it was fetched, sorted."""
    return sorted(each for start, stop in fetched(log) for each in range(start // chunk_bytes, -(-stop // chunk_bytes)))
