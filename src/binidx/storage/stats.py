"""What reading cost: counters on every reader, and their sum over the process.

requests      ranges sent to the store, with those below (of a local file: views taken)
retries       of these, sent again because the answer before was none
hedges        of these, sent beside one that was late; the first answer wins
bytes_asked   what the caller wanted
bytes_moved   what came over the wire for it: more through gaps and whole chunks, less through a cache
seconds       time spent waiting, summed over objects, also of those waited for together

What reading cost, in one line for people: requests, bytes, caches, waiting, money.

    819,200 tokens in 4.10 s, waited 0.02 s (0.5%); 1,412 requests (2 retries, 1 hedge) moved 1.78 MB for 1.64 MB wanted
    (1.09x); chunk cache 12% hits; requests $0.00056 at list price, $689.45 for 1e+12 tokens

Counters are collected into one flat table, name -> number, which can be added, subtracted and shared between processes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
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


Usage = Mapping[str, float]


"""Counter -> its value, such as "s3 requests": 12; names are those of NAMES."""


DOLLARS_PER_REQUEST: dict[str, float] = {}


"""Name of a store -> list price of a read; filled by `declare_store`."""


STORES = {"file": "file"}


"""URL scheme -> the name of the store that its requests are counted under; filled by `declare_store`."""


CACHES = {"memory": "chunk cache", "disk": "disk cache"}


"""Kind of cache -> its name in the line."""


AGAIN = {"retries": "retry", "hedges": "hedge"}


SERVED = ("samples", "tokens", "seconds", "wait_seconds")


"""What loaders count: what they gave, since when, and how much of that time the trainer waited for them."""


NAMES = [
    *(f"{store} {each.name}" for store in dict.fromkeys([*STORES.values(), "other"]) for each in fields(ReadStats)),
    *(f"{cache} {count}" for cache in CACHES for count in ("hits", "misses")),
    "layers added",
    *SERVED,
]


def declare_store(scheme: str, name: str, dollars_per_read: float) -> None:
    """Count the requests to a URL scheme under the name of its store; other schemes are counted as "other"."""
    STORES[scheme] = name
    if dollars_per_read:
        DOLLARS_PER_REQUEST[name] = dollars_per_read
    for each in fields(ReadStats):
        if (counter := f"{name} {each.name}") not in NAMES:
            NAMES.append(counter)
            _told.setdefault(counter, 0.0)


def usage() -> dict[str, float]:
    """All counters of this process so far, and what its loaders' workers told it."""
    found = dict.fromkeys(NAMES, 0.0)
    for protocol, reads in by_store().items():
        for each in fields(ReadStats):
            found[f"{STORES.get(protocol, 'other')} {each.name}"] += getattr(reads, each.name)
    for cache, chunks in by_cache().items():
        found[f"{cache} hits"] += chunks.hits
        found[f"{cache} misses"] += chunks.misses
    layers = in_layers()
    found["layers added"] = layers.bytes_moved - layers.bytes_asked
    with _lock:
        return {name: count + _told[name] for name, count in found.items()}


def add_usage(counts: Usage) -> None:
    """Add to the counters of this process what no reader in it counts."""
    with _lock:
        for name, count in counts.items():
            _told[name] += count


def since(before: Usage) -> dict[str, float]:
    """What was counted after `before`."""
    return {name: count - before[name] for name, count in usage().items()}


def report(run_tokens: float = 1e12) -> str:
    """The line of this process so far.

    Args:
        run_tokens: of the run that the cost of the requests is stated for.
    """
    return report_line(usage(), run_tokens)


def log_report(used: Usage) -> None:
    """The line to the logger "binidx", at INFO."""
    logging.getLogger("binidx").info("%s", report_line(used))


def report_line(used: Usage, run_tokens: float = 1e12) -> str:
    """One line for people; parts without anything to say are left out."""
    parts = [served_part(used), reads_part(used), *caches_parts(used), cost_part(used, run_tokens)]
    return "; ".join(filter(None, parts)) or "nothing was read"


def served_part(used: Usage) -> str:
    if not used["samples"]:
        return ""
    what = "tokens" if used["tokens"] else "samples"
    share = used["wait_seconds"] / used["seconds"] if used["seconds"] else 0.0
    waited = f"waited {used['wait_seconds']:,.2f} s ({share:.1%})"
    return f"{used[what]:,.0f} {what} in {used['seconds']:,.2f} s, {waited}"


def reads_part(used: Usage) -> str:
    """Requests that went to stores, and what came for what was wanted above all layers: less than that from caches."""
    requests, moved = remote(used, "requests"), remote(used, "bytes_moved")
    if not requests:
        return f"{bytes_text(used['file bytes_asked'])} from local files" if used["file bytes_asked"] else ""
    again = ", ".join(counted(remote(used, name), one, name) for name, one in AGAIN.items() if remote(used, name))
    wanted = remote(used, "bytes_asked") - used["layers added"]
    sent = counted(requests, "request", "requests") + (f" ({again})" if again else "")
    ratio = f" ({moved / wanted:.2f}x)" if wanted > 0 else ""
    return f"{sent} moved {bytes_text(moved)} for {bytes_text(wanted)} wanted{ratio}"


def caches_parts(used: Usage) -> list[str]:
    """How much of what was asked of each cache was there."""
    chunks = {cache: used[f"{cache} hits"] + used[f"{cache} misses"] for cache in CACHES}
    return [f"{CACHES[cache]} {used[f'{cache} hits'] / count:.0%} hits" for cache, count in chunks.items() if count]


def cost_part(used: Usage, run_tokens: float) -> str:
    """What the requests cost at list price, and those of a run of so many tokens that goes on like this."""
    dollars = dollars_of(used)
    if not dollars:
        return ""
    of_run = f", ${dollars / used['tokens'] * run_tokens:,.2f} for {run_tokens:.3g} tokens" if used["tokens"] else ""
    return f"requests ${dollars:.2g} at list price{of_run}"


def dollars_of(used: Usage) -> float:
    """The list price of the requests."""
    return sum(used[f"{store} requests"] * price for store, price in DOLLARS_PER_REQUEST.items())


def remote(used: Usage, count: str) -> float:
    """A counter summed over the stores that are not files of this machine."""
    return sum(used[f"{store} {count}"] for store in {*STORES.values(), "other"} - {"file"})


def counted(count: float, one: str, many: str) -> str:
    return f"{count:,.0f} {one if count == 1 else many}"


def bytes_text(count: float) -> str:
    """Decimal units, as stores bill them: 1.64 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


_told = dict.fromkeys(NAMES, 0.0)


os.register_at_fork(after_in_child=_after_fork)
