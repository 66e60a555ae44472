"""A read that waits for its requests, and what is known of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from binidx.storage.ranges import Range
from binidx.storage.retries import History

Fetch = Callable[[int, int], Coroutine[Any, Any, bytes]]
"""The bytes from start to stop of one object, asked once; whoever makes it checks that they are as many."""

SLOWEST = 1_000_000
"""Bytes per second: a link that is slower is taken for one that stands still."""


class PendingRead:
    """One read: its requests, by their place in `ranges`, and what has come of them.

    Args:
        tries: how often a request may fail, where that is less than `retries` allow.
        opening: whether it is the first that is heard of a store, which may not exist.
    """

    def __init__(
        self,
        uri: str,
        fetch: Callable[[int, int], Coroutine[Any, Any, Any]],
        ranges: Sequence[Range],
        *,
        deadline_seconds: float,
        hedge: bool,
        tries: int = 0,
        opening: bool = False,
    ) -> None:
        self.uri = uri
        self.store = "/".join(uri.split("/", 3)[:3])  # s3://bucket, https://host
        self.tries, self.opening = tries, opening
        self.fetch = fetch
        self.ranges = ranges
        self.answers: list[Any] = [None] * len(ranges)
        self.unsent, self.unanswered = 0, len(ranges)  # the first place that was not asked yet; how many have no answer
        self.seconds = deadline_seconds
        # By the loop's clock: when its first request was sent, its last answered, and it was over.
        self.began = self.answered_at = self.ended = 0.0
        self.hedge = hedge
        self.sent = self.retries = self.hedges = 0
        self.troubles: dict[int, Trouble] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.outcome: Future[list[Any]] = Future()

    @property
    def over(self) -> bool:
        return self.outcome.done()

    def size(self, place: int) -> int:
        """Bytes asked by a request."""
        start, stop = self.ranges[place]
        return stop - start

    def where(self, place: int) -> str:
        """Of a request, for people."""
        return "opening" if self.opening else "range {}-{}".format(*self.ranges[place])

    def due(self, bytes_in_flight: int) -> float:
        """When it is given up, by the loop's clock: after its deadline, and what its bytes need on the slowest link.

        A long read ends sooner if nothing comes: as late after its last answer as what is in flight would need.
        """
        in_all = sum(stop - start for start, stop in self.ranges)
        return self.seconds + min(self.began + in_all / SLOWEST, self.answered_at + bytes_in_flight / SLOWEST)

    def end(self, error: BaseException | None = None) -> None:
        if not self.over:
            self.ended = time.monotonic()  # as loops tell it
        with suppress(InvalidStateError):
            self.outcome.set_exception(error) if error else self.outcome.set_result(self.answers)
        if self.timer is not None:
            self.timer.cancel()


class Trouble:
    """Of a request that failed or is late: what failed, how many are in flight beside it, whether it was hedged."""

    def __init__(self, read: PendingRead, sent: float) -> None:
        # Loops tell the time as time.monotonic does.
        self.history = History(sent, tries=read.tries, opening=read.opening)
        self.beside = 0
        self.hedged = False
