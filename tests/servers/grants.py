"""Which requests a store with a published limit answers: a token bucket for each partition; no I/O and no clock.

fixed        `rate` a second, up to `burst_seconds` of it at once
ramp         the rate doubles every `doubling_seconds` of demand above half of it, as GCS does
partitions   each of these parts of a path has a bucket of its own; all other paths share one
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Bucket:
    """One partition."""

    rate: float
    burst_seconds: float = 1.0
    doubling_seconds: float = math.inf
    tokens: float = field(init=False)
    at: float = -math.inf
    granted: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.rate * self.burst_seconds

    def grants(self, now: float) -> bool:
        """Whether a request that comes now is answered."""
        seconds = now - self.at if self.at > -math.inf else 0.0
        if self.tokens < self.rate * self.burst_seconds / 2:
            self.rate *= 2 ** (seconds / self.doubling_seconds)
        self.tokens = min(self.tokens + seconds * self.rate, self.rate * self.burst_seconds)
        self.at = now
        granted = self.tokens >= 1
        self.tokens -= granted
        self.granted += granted
        self.refused += not granted
        return granted


@dataclass
class Grants:
    """All partitions of a store."""

    rate: float
    burst_seconds: float = 1.0
    doubling_seconds: float = math.inf
    partitions: Sequence[str] = ()
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def of(self, path: str) -> Bucket:
        name = next((part for part in self.partitions if part in path), "")
        if name not in self.buckets:
            self.buckets[name] = Bucket(self.rate, self.burst_seconds, self.doubling_seconds)
        return self.buckets[name]
