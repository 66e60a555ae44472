"""Simulated stores that refuse requests: by rate, in partitions that need not be folders, at random, or all for a time.

store = Store(rate=220.0, random_share=0.2, partition_of=lambda folder: "")     # one limit over all folders
store.grants("folder/7", now, draw)                                             # False: refused
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from servers.grants import Bucket


@dataclass(frozen=True)
class Fault:
    """A time in which a store is other than usual.

    Attributes:
        begin, end: times of it.
        kind: "out": refuses all; "tenant": another client takes `amount` of the rate; "rate": grants `amount` a second;
            "random": refuses a share of `amount`, whatever the rate.
    """

    begin: float
    end: float
    kind: str
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.amount:g} from {self.begin:.1f} to {self.end:.1f} s"


@dataclass
class Store:
    """Store with a limit for each partition.

    Args:
        rate, burst_seconds, doubling_seconds: of each partition: `servers.grants.Bucket`.
        random_share: refusals whatever the rate.
        round_trip: median seconds until a response, or a refusal, comes.
        partition_of: partition of a folder.
        faults: times in which it is different.
    """

    rate: float = math.inf
    burst_seconds: float = 1.0
    doubling_seconds: float = math.inf
    random_share: float = 0.0
    round_trip: float = 0.03
    partition_of: Callable[[str], str] = lambda folder: ""
    faults: tuple[Fault, ...] = ()
    buckets: dict[str, Bucket] = field(default_factory=dict)
    refused: int = 0

    def bucket(self, folder: str) -> Bucket:
        """Return the bucket of a folder."""
        name = self.partition_of(folder)
        if name not in self.buckets:
            self.buckets[name] = Bucket(min(self.rate, 1e9), self.burst_seconds, self.doubling_seconds)
        return self.buckets[name]

    def grants(self, folder: str, now: float, draw: random.Random) -> bool:
        """Return whether a request that comes now is answered."""
        bucket, share, is_out, rate = self.bucket(folder), self.random_share, False, None
        for fault in self.faults:
            if fault.begin <= now < fault.end:
                is_out = is_out or fault.kind == "out"
                share = fault.amount if fault.kind == "random" else share
                rate = fault.amount if fault.kind == "rate" else rate
                rate = self.rate - fault.amount if fault.kind == "tenant" else rate
        if self.faults:
            bucket.rate = min(self.rate, 1e9) if rate is None else rate
        granted = not is_out and bucket.grants(now) and not (share and draw.random() < share)
        self.refused += not granted
        return granted

    def delay(self, draw: random.Random) -> float:
        """Return the seconds of one way: half of a round trip, with jitter."""
        return self.round_trip * (0.45 + 0.2 * draw.random())
