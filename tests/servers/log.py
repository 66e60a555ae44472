"""What passed a proxy: the sums, and every request."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Requests that came, and the bytes of the answers that left; `most_at_once` is the peak of requests in flight."""

    requests: int = 0
    bytes: int = 0
    head_bytes: int = 0
    connections: int = 0
    most_at_once: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def __sub__(self, before: Counts) -> Counts:
        """What passed since `before`; a peak cannot be taken apart and stays."""
        names = [each.name for each in dataclasses.fields(self)]
        found = Counts(**{name: getattr(self, name) - getattr(before, name) for name in names})
        found.most_at_once = self.most_at_once
        return found


@dataclass
class Logged:
    """One request; its client's connection, numbered from 1, and how often the range was asked for before.

    `status` and `ended` are None while nothing was answered, `fault` while nothing went wrong; times are seconds.
    `bytes` are those of the answer, `sent` those of the request.
    """

    connection: int
    method: str
    path: str
    range: str
    time: int
    began: float
    status: int | None = None
    fault: str | None = None
    bytes: int = 0
    ended: float | None = None
    sent: int = 0
