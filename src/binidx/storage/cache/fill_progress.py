"""Progress of the filling of disk caches, which reads ask: extents in flight, rates, and whether to wait for them."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from binidx.storage.cache.block_files import CachedContent
from binidx.storage.cache.memory import Flight

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


class Throughput:
    """Bytes per second of some reads, by the time in which at least one of them ran, and their mean duration."""

    def __init__(self) -> None:
        self._lock, self._running, self._since = threading.Lock(), 0, 0.0
        self.num_bytes = self.busy_seconds = self.all_seconds = 0.0
        self.count = 0

    @contextlib.contextmanager
    def measured(self, num_bytes: int) -> Iterator[None]:
        """Count a read of some bytes, if it succeeds in the block."""
        began = time.monotonic()
        with self._lock:
            self._since = began if not self._running else self._since
            self._running += 1
        read = 0
        try:
            yield
            read = num_bytes
        finally:
            now = time.monotonic()
            with self._lock:
                self._running -= 1
                self.busy_seconds += 0.0 if self._running else now - self._since
                self.num_bytes += read
                self.all_seconds += now - began
                self.count += 1

    @property
    def rate(self) -> float:
        """Bytes per second of the reads that have ended; 0 before the first one."""
        with self._lock:
            busy = self.busy_seconds + (time.monotonic() - self._since if self._running else 0.0)
        return self.num_bytes / busy if self.num_bytes else 0.0

    @property
    def seconds(self) -> float:
        """Mean duration of a read; infinite before the first one."""
        return self.all_seconds / self.count if self.count else math.inf


class FillProgress:
    """Progress of a filling. Its threads write it, and reads of the same process ask it.

    Args:
        extent_bytes: bytes of an extent.
        bytes_left: bytes that are to be filled, as far as they are known before the choice.

    Attributes:
        ranges, extents: throughput of the reads of each kind.
        objects: key of the content of each object -> its number.
        in_flight: (key of the content, extent) -> time at which its request was sent.
        coming: of a filling that ends soon: (object, extent) -> its place in `ExtentUses`.
        urgent: places to fetch first.
        calm: set while the trainer does not wait.
    """

    def __init__(self, extent_bytes: int, bytes_left: int) -> None:
        self.extent_bytes, self.bytes_left = extent_bytes, bytes_left
        self.ranges, self.extents = Throughput(), Throughput()
        self.objects: dict[str, int] = {}
        self.in_flight: dict[tuple[str, int], float] = {}
        self.coming: dict[tuple[int, int], int] = {}
        self.urgent, self._arrival = deque[int](), Flight[int, None]()
        self.calm = threading.Event()
        self.calm.set()
        self._waits_since = math.inf
        self.begin()

    def begin(self) -> None:
        """Count from now how long the trainer waits."""
        self._began, self._waited = time.monotonic(), 0.0

    @contextlib.contextmanager
    def trainer_waiting(self) -> Iterator[None]:
        """Begin no extent in the block, in which the trainer waits for a batch, unless it waits most of the time."""
        self._waits_since = began = time.monotonic()
        self.calm.clear()
        try:
            yield
        finally:
            self.calm.set()
            self._waits_since = math.inf
            self._waited += time.monotonic() - began

    def chunks_to_await(self, content: CachedContent, chunks: Sequence[int]) -> list[int]:
        """Return the missing chunks that come sooner with their extent, which is in flight, than by a range."""
        in_flight = self.in_flight
        latest = time.monotonic() + self.ranges.seconds - self.extents.seconds

        def is_sooner(chunk: int) -> bool:
            began = in_flight.get((content.key, chunk * content.chunk_bytes // self.extent_bytes))
            return began is not None and began < latest

        return [*filter(is_sooner, chunks)] if in_flight and self.extents.count else []

    def wait_for_extents(self, content: CachedContent, chunks: Sequence[int]) -> None:
        """Wait for the extents of missing chunks, if the trainer waits most of the time, and all is filled soon."""
        number = self.objects.get(content.key, -1)
        extents = {(number, chunk * content.chunk_bytes // self.extent_bytes) for chunk in chunks}
        is_urgent = False
        while True:
            arrival = self._arrival
            places = [place for extent in extents if (place := self.coming.get(extent)) is not None]
            if not places or not self.is_awaited or not self.ends_soon:
                return
            if not is_urgent:
                self.urgent.extend(places)
                is_urgent = True
            arrival.wait(YIELD_SECONDS)

    def note_arrival(self) -> None:
        """Wake the reads that wait for extents."""
        arrival, self._arrival = self._arrival, Flight()
        arrival.land({})

    @property
    def is_awaited(self) -> bool:
        """True if the trainer has waited for most of the time since the filling began."""
        now = time.monotonic()
        waited = self._waited + max(0.0, now - self._waits_since)
        return waited > WAITING_SHARE * (now - self._began)

    @property
    def ends_soon(self) -> bool:
        """True if all is likely to be filled soon after the start, so that reading far ahead by ranges does not pay."""
        rate = self.extents.rate if self.extents.count >= FILL_PROBES else ASSUMED_RATE
        is_short = 0 < self.bytes_left < SOON_SECONDS * rate
        return is_short and time.monotonic() < self._began + 2 * SOON_SECONDS
