"""Cost of each stage: seconds, requests and bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from binidx.storage.stats import total


@dataclass
class Cost:
    """Seconds of one stage, requests to stores, bytes that reads requested, and bytes that were transferred."""

    seconds: float = 0.0
    requests: int = 0
    bytes_asked: int = 0
    bytes_moved: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.requests + other.requests,
            self.bytes_asked + other.bytes_asked,
            self.bytes_moved + other.bytes_moved,
        )


@dataclass
class Ledger:
    """The cost of each stage by its name, in the order of the stages."""

    costs: dict[str, Cost] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the cost of the block, in this process, under this name."""
        start, before = time.perf_counter(), total()
        yield
        read = total() - before
        seconds = time.perf_counter() - start
        self.book(name, Cost(seconds, read.requests, read.bytes_asked, read.bytes_moved))

    def book(self, name: str, cost: Cost) -> None:
        """Add a cost of any process."""
        self.costs[name] = self.costs.get(name, Cost()) + cost

    @property
    def total(self) -> Cost:
        """The cost of all stages."""
        return sum(self.costs.values(), Cost())
