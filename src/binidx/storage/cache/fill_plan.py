"""Plan of the filling of disk caches: which extents are fetched, in which order, and which reads wait for one.

    extents of 8 MiB     0 1 2 3 4 5 6 7 ...      an extent is one request
    read ahead           9 % 0 11 % 8 % 10 % ...  share of it that this node reads in the steps ahead
    chosen               0 2 3 4                  those that pay, as many as there is room for, by first need
    filled               4 0 3 2                  by a few threads of one process of the node

    round     choose ── some are missing ──► they are fetched, and it is chosen again
                │  all that pays is there, or is not needed any more ──► the end
                └─ no room ──► a pause of 15 s to 8 minutes

    extent    pending ─► begun ─► in flight ─► filled
              urgent ──┘            └─ no room, or an error: the round ends; an error ends the filling, too

An extent pays if its bytes arrive sooner than its needed bytes would by ranges: if the share exceeds the rate of ranges
divided by the rate of extents, both in bytes per second, both measured. Until they are, 1 % does; after the first
sixteen extents it is chosen again.

Missing bytes of an object that is being filled are read as exact ranges, or are waited for if their extent is in flight
and expected sooner. A trainer that waits most of the time anyway waits for extents, those that it needs next first, if
all is filled in a few seconds. Blocks with chosen extents that a later step needs are not evicted, so a cache smaller
than its objects keeps what it has instead of exchanging it: with every future read known, that is Belady's rule,
applied to the blocks that a fill brought.

Source: ours; NoPFS (Dryden et al. 2021) for the known future, CoorDL (Mohan et al. 2020) for the cache that keeps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from binidx.storage.cache.block_files import CachedContent

EXTENT_BYTES = 8 << 20
"""Bytes that one request fetches: at 25 ms to the first byte and 100 MB/s a connection is then 77 % busy."""

PAYING_SHARE = 0.01
"""Share of an extent that pays before rates are measured: ranges of 2.6 MB/s against extents of 273 (30 ms, S3)."""

ROOM_PART = 8
"""An eighth of the room of a cache stays for its tables, index files and chunks of other reads."""

FOREVER = np.iinfo(np.int64).max
"""Step of the last read of an extent that is to stay."""

FILL_PROBES = 16
"""Extents that are fetched before the choice is made again with measured rates."""

SOON_SECONDS = 15.0
"""While a filling ends within this time, little is read ahead by ranges: the CPU of one sample fetches 1 MB of extents.
A trainer that waits most of the time anyway waits for extents then: the ranges beside a filling of 1 GB took a tenth of
the CPU of two cores that also ran proxy and server.
"""

ASSUMED_RATE = 100e6
"""Bytes per second of extents before they are measured."""

YIELD_SECONDS, WAITING_SHARE = 0.2, 0.5
"""Longest pause before an extent while the trainer waits for ranges; no pause if it has waited for more than this share
of the time: then ranges do not suffice, and extents are what it waits for."""


@dataclass(frozen=True)
class FillSizes:
    """Sizes and times of a filling.

    Args:
        extent_bytes: bytes that one request fetches.
        choose_seconds, most_choose_seconds: shortest and longest time between two choices while the room is full.
        in_flight: extents in flight.
    """

    extent_bytes: int = EXTENT_BYTES
    choose_seconds: float = 15.0
    most_choose_seconds: float = 480.0
    in_flight: int = 16


@dataclass(frozen=True)
class ExtentUses:
    """Extents of some objects, and their use by the steps ahead; each array has shape (n,).

    Attributes:
        objects, numbers: number of the object, and of the extent in it.
        sizes: bytes of the extent.
        used: bytes of it that are read; counted twice if they are read twice.
        first, last: steps of the first and of the last read; -1: none.
    """

    objects: NDArray[np.int64]
    numbers: NDArray[np.int64]
    sizes: NDArray[np.int64]
    used: NDArray[np.float64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


def paying_share(range_rate: float = 0.0, extent_rate: float = 0.0) -> float:
    """Return the share of an extent that pays.

    Args:
        range_rate: needed bytes per second by ranges; 0: unknown.
        extent_rate: bytes per second by extents; 0: unknown.
    """
    return range_rate / extent_rate if range_rate > 0 and extent_rate > 0 else PAYING_SHARE


def choose_extents(uses: ExtentUses, share: float, room_bytes: float, step: int) -> NDArray[np.int64]:
    """Return the extents to have in the cache at a step, in the order of their first need.

    Of those that pay the most used ones fit first.

    Args:
        uses: what the steps ahead read.
        share: least share of an extent that pays; 0: all of those with a later step.
        room_bytes: bytes of extents that the cache has room for.
        step: number of the next step; extents without a later one are left out.
    """
    worth = uses.used / np.maximum(uses.sizes, 1)
    pays = np.flatnonzero((worth >= share) & (uses.last >= step))
    by_worth = pays[np.lexsort((uses.first[pays], -worth[pays]))]
    chosen = by_worth[np.cumsum(uses.sizes[by_worth]) <= room_bytes]
    ordered: NDArray[np.int64] = chosen[np.argsort(uses.first[chosen], kind="stable")]
    return ordered


class Throughput:
    """Bytes per second of some reads, by the time in which at least one of them ran, and their mean duration."""

    def __init__(self) -> None:
        self._running, self._since = 0, 0.0
        self.num_bytes = self.busy_seconds = self.all_seconds = 0.0
        self.count = 0

    def begin(self, now: float) -> None:
        """Count a read from now on."""
        self._since = now if not self._running else self._since
        self._running += 1

    def end(self, began: float, num_bytes: int, now: float) -> None:
        """End a read; it has brought some bytes; 0: it failed, or there was no room for them."""
        self._running -= 1
        self.busy_seconds += 0.0 if self._running else now - self._since
        self.num_bytes += num_bytes
        if num_bytes:
            self.all_seconds += now - began
            self.count += 1

    def rate(self, now: float) -> float:
        """Bytes per second of the reads that have ended; 0 before the first one."""
        busy = self.busy_seconds + (now - self._since if self._running else 0.0)
        return self.num_bytes / busy if self.num_bytes else 0.0

    @property
    def seconds(self) -> float:
        """Mean duration of a read that has brought bytes; infinite before the first one."""
        return self.all_seconds / self.count if self.count else math.inf


class FillPlan:
    """Machine that chooses and counts extents. All times are seconds of one clock.

    Args:
        sizes: of the filling.
        bytes_left: bytes that are to be filled, as far as they are known before the choice.

    Attributes:
        step: number of the next step of the trainer.
        ranges, extents: throughput of the reads of each kind.
        objects: key of the content of each object -> its number.
        in_flight: (key of the content, extent) -> time at which its request was sent.
        share: share of an extent that pays, as last chosen.
        has_ended: whether an error or `stop` has ended the filling.
    """

    def __init__(self, sizes: FillSizes, bytes_left: int) -> None:
        self.sizes, self.bytes_left = sizes, bytes_left
        self.step, self.share, self.has_ended = 0, 0.0, False
        self.ranges, self.extents = Throughput(), Throughput()
        self.objects: dict[str, int] = {}
        self.in_flight: dict[tuple[str, int], float] = {}
        self._pause = sizes.choose_seconds
        self._keeps_all, self._is_short_of_room = False, False
        self._begun, self._pending, self._urgent = set[int](), deque[int](), deque[int]()
        self._coming: dict[tuple[int, int], int] = {}
        self._probes, self._room = 0, 0.0
        self._last_steps: dict[str, int] = {}
        self._waits_since = math.inf
        self.begin(0.0)

    # The trainer

    def begin(self, now: float) -> None:
        """Count from now how long the trainer waits."""
        self._began, self._waited = now, 0.0

    def begin_waiting(self, now: float) -> None:
        """The trainer waits for a batch from now on."""
        self._waits_since = now

    def end_waiting(self, now: float) -> None:
        """The trainer has its batch."""
        since, self._waits_since = self._waits_since, math.inf
        self._waited += max(0.0, now - since)

    def is_awaited(self, now: float) -> bool:
        """Return whether the trainer has waited for most of the time since the filling began."""
        waited = self._waited + max(0.0, now - self._waits_since)
        return waited > WAITING_SHARE * (now - self._began)

    def yields(self, now: float) -> bool:
        """Return whether the next extent is to wait, as the trainer waits for ranges."""
        return self._waits_since < math.inf and not self.is_awaited(now)

    def ends_soon(self, now: float) -> bool:
        """Return whether all is likely to be filled soon after the start: reading far ahead does not pay then."""
        rate = self.extents.rate(now) if self.extents.count >= FILL_PROBES else ASSUMED_RATE
        is_short = 0 < self.bytes_left < SOON_SECONDS * rate
        return is_short and now < self._began + 2 * SOON_SECONDS

    # Reads of missing chunks

    def chunks_to_await(self, content: CachedContent, chunks: Sequence[int], now: float) -> list[int]:
        """Return the missing chunks that come sooner with their extent, which is in flight, than by a range."""
        if not self.in_flight or not self.extents.count:
            return []
        latest = now + self.ranges.seconds - self.extents.seconds
        began = (self.in_flight.get((content.key, self._extent_of(content, chunk)), math.inf) for chunk in chunks)
        return [chunk for chunk, sent in zip(chunks, began, strict=True) if sent < latest]

    def coming(self, content: CachedContent, chunks: Sequence[int], now: float) -> list[int]:
        """Return the extents of missing chunks that are worth waiting for: the trainer waits most of the time anyway,
        and all is filled soon.
        """
        if not self._coming or not self.is_awaited(now) or not self.ends_soon(now):
            return []
        number = self.objects.get(content.key, -1)
        extents = {(number, self._extent_of(content, chunk)) for chunk in chunks}
        return [place for extent in sorted(extents) if (place := self._coming.get(extent)) is not None]

    def hurry(self, places: Iterable[int]) -> None:
        """Fetch some extents before all others."""
        self._urgent.extend(places)

    def _extent_of(self, content: CachedContent, chunk: int) -> int:
        return chunk * content.chunk_bytes // self.sizes.extent_bytes

    # What stays

    def needs(self, path: str) -> bool:
        """Return whether a later step needs an extent that is kept in a block, by the path of its file."""
        return self._last_steps.get(path, -1) >= self.step

    def unneeded(self, paths: Iterable[str]) -> list[str]:
        """Return the blocks with chosen extents that no later step needs."""
        return [path for path in paths if self._last_steps.get(path, FOREVER) < self.step]

    def keep(self, place: int, paths: Iterable[str]) -> None:
        """Keep the blocks of an extent until the last step that reads it."""
        for path in paths:
            self._last_steps[path] = max(int(self.uses.last[place]), self._last_steps.get(path, -1))

    # Rounds

    def count(self, uses: ExtentUses, *, keeps_all: bool) -> None:
        """Plan for these uses; with `keeps_all` every extent pays, and stays."""
        self.uses = replace(uses, last=np.full(len(uses.sizes), FOREVER)) if keeps_all else uses
        self._keeps_all = keeps_all
        self.filled = np.zeros(len(uses.sizes), bool)

    def choose(self, capacity: int, step: int, now: float) -> float | None:
        """Choose the extents of the next round; return the seconds until it begins, None if all is done, or has ended.

        Args:
            capacity: bytes of the cache.
            step: number of the next step when blocks were unmapped for the choice: what a later one does not need
                any more can be evicted for it.
        """
        self._room = capacity * (1 - 1 / ROOM_PART)
        chosen = self._choose(self._room, step, now)
        missing = chosen[~self.filled[chosen]]
        self.bytes_left = int(self.uses.sizes[missing].sum())
        if self.has_ended or (not len(missing) and len(chosen) == len(self._choose(math.inf, step, now))):
            return None
        if len(missing) and not self._is_short_of_room:
            self._pending, self._urgent, self._begun = deque(missing.tolist()), deque(), set()
            self._probes = 0 if self.extents.count else FILL_PROBES
            extents = zip(self.uses.objects[missing].tolist(), self.uses.numbers[missing].tolist(), strict=True)
            self._coming = dict(zip(extents, self._pending, strict=True)) if self.ends_soon(now) else {}
            return 0.0
        # Wait until extents in the room are not needed any more, or others have left room.
        self._is_short_of_room = False
        pause, self._pause = self._pause, min(2 * self._pause, self.sizes.most_choose_seconds)
        return pause

    def _choose(self, room: float, step: int, now: float) -> NDArray[np.int64]:
        rates = self.ranges.rate(now), self.extents.rate(now)
        self.share = 0.0 if self._keeps_all else paying_share(*rates)
        return choose_extents(self.uses, self.share, room, step)

    def next(self, now: float) -> int | None:
        """Return the next extent to fetch; None if the round has ended."""
        if self.has_ended or self._is_short_of_room:
            return None
        if 0 < self._probes <= self.extents.count:
            # Leave out what does not pay at the measured rates.
            chosen, self._probes = self._begun | {*self._choose(self._room, self.step, now).tolist()}, 0
            self._pending = deque(filter(chosen.__contains__, self._pending))
            self._coming = {extent: place for extent, place in self._coming.items() if place in chosen}
        for queue in (self._urgent, self._pending):
            while queue:
                if (place := queue.popleft()) not in self._begun and not self.filled[place]:
                    self._begun.add(place)
                    return place
        return None

    def is_needed(self, place: int) -> bool:
        """Return whether a later step reads an extent."""
        return bool(self.uses.last[place] >= self.step)

    def begin_fetch(self, key: tuple[str, int], now: float) -> None:
        """A request for an extent is sent."""
        self.in_flight[key] = now
        self.extents.begin(now)

    def end_fetch(self, key: tuple[str, int], num_bytes: int, now: float) -> None:
        """The request has ended, and has brought some bytes; 0: it failed, or there was no room for them."""
        self.extents.end(self.in_flight.pop(key), num_bytes, now)

    def end_extent(self, place: int, *, has_room: bool) -> None:
        """An extent is filled, or the cache has no room for it."""
        self.filled[place] = has_room
        self._is_short_of_room = self._is_short_of_room or not has_room
        self.bytes_left = max(0, self.bytes_left - int(self.uses.sizes[place]))
        self._coming.pop((int(self.uses.objects[place]), int(self.uses.numbers[place])), None)

    def end_round(self) -> None:
        """All fetches of the round have ended. Where there was no room, nothing comes for a while."""
        self._coming = {}
        if not self._is_short_of_room:
            self._pause = self.sizes.choose_seconds

    def end(self) -> None:
        """End the filling after an error, or as the trainer has stopped; called by finalizers, too."""
        self.has_ended, self.bytes_left = True, 0
