"""What reading cost: counters on every reader, and their sum over the process.

requests      ranges sent to the store, with those below (of a local file: views taken)
retries       of these, sent again because the answer before was none
hedges        of these, sent beside one that was late; the first answer wins
bytes_asked   what the caller wanted
bytes_moved   what came over the wire for it: more through gaps and whole chunks, less through a cache
seconds       time spent waiting, summed over objects, also of those waited for together
"""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass
class ReadStats:
    """Counters of one reader. Use `add`, from any thread; read the fields at any time."""

    requests: int = 0
    bytes_asked: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0
    retries: int = 0
    hedges: int = 0

    def add(
        self,
        *,
        requests: int = 0,
        bytes_asked: int = 0,
        bytes_moved: int = 0,
        seconds: float = 0.0,
        retries: int = 0,
        hedges: int = 0,
    ) -> None:
        with _lock:
            for each in self._counted_in():
                each.requests += requests
                each.bytes_asked += bytes_asked
                each.bytes_moved += bytes_moved
                each.seconds += seconds
                each.retries += retries
                each.hedges += hedges

    def _counted_in(self) -> tuple[ReadStats, ...]:
        """The counters that grow when these do."""
        return (self,)

    def __sub__(self, before: ReadStats) -> ReadStats:
        """What happened since `before`."""
        return ReadStats(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(ReadStats)))


class ObjectStats(ReadStats):
    """The same for readers that talk to a store themselves: these also count in `total()`.

    Args:
        store: the protocol, "file" for local ones; what requests cost depends on it.
    """

    def __init__(self, store: str = "other") -> None:
        super().__init__()
        self.store = store
        with _lock:
            self._in_store = _stores.setdefault(store, ReadStats())

    def _counted_in(self) -> tuple[ReadStats, ...]:
        return self, self._in_store

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStats, (self.store,)  # another process counts for itself, from zero


class LayerStats(ReadStats):
    """Of a reader over a reader: `requests` and `bytes_moved` are what it asked of the one below it."""

    def _counted_in(self) -> tuple[ReadStats, ...]:
        return self, _layers


@dataclass
class CacheStats(LayerStats):
    """Of a cache.

    hits, misses    chunks that were here, and that were not, when they were wanted
    waits           of the misses: chunks that another read was fetching already
    damaged         of the misses: chunks that were here, but not as their sums say
    cache           the kind whose sum they count in: "memory" or "disk"
    """

    hits: int = 0
    misses: int = 0
    waits: int = 0
    damaged: int = 0
    cache: str = "memory"

    def count_chunks(self, *, hits: int = 0, misses: int = 0, waits: int = 0, damaged: int = 0) -> None:
        with _lock:
            for each in (self, _caches.setdefault(self.cache, CacheStats(cache=self.cache))):
                each.hits += hits
                each.misses += misses
                each.waits += waits
                each.damaged += damaged


def total() -> ReadStats:
    """What all objects read in this process have cost so far. A cache is not counted: what it fetches is, below it."""
    found = ReadStats()
    for each in by_store().values():
        found.add(**asdict(each))
    return found


def by_store() -> dict[str, ReadStats]:
    """The same for each protocol."""
    with _lock:
        return {store: replace(each) for store, each in _stores.items()}


def remote_requests() -> int:
    """Requests to all stores but the files of this machine."""
    with _lock:
        return sum(each.requests for store, each in _stores.items() if store != "file")


def in_layers() -> ReadStats:
    """What was asked of all layers over objects, and what they asked below: the difference is what they added."""
    with _lock:
        return replace(_layers)


def by_cache() -> dict[str, CacheStats]:
    """Chunks found and missed by all caches of each kind; their other counters are `in_layers`."""
    with _lock:
        return {cache: replace(each) for cache, each in _caches.items()}


def _after_fork() -> None:
    # Another thread may have held the lock when the parent forked; nobody in the child would ever release it.
    global _lock
    _lock = threading.Lock()


# One lock for all counters: a lock in each would have to be found and renewed after a fork.
_lock = threading.Lock()
_stores: dict[str, ReadStats] = {}
_caches: dict[str, CacheStats] = {}
_layers = ReadStats()
os.register_at_fork(after_in_child=_after_fork)
