"""Retries: which failures are tried again, after which pause, and the error when none of the tries succeeded.

    429, 408, 5xx, resets, timeouts, bodies cut off     until the deadline of the read
    a wrong response: `response_check`                  four tries: a proxy in a bad moment, or a broken one
    no response from a store that never sent one        four tries: it may not exist
    404, 403, 412, 416, certificates, the rest          one try

The pauses grow with full jitter (Brooker, AWS Architecture Blog 2015): uniform from 0 to 0.1 s, 0.2 s, 0.4 s ... 8 s.
Without jitter all clients of a store that was down for a moment would return together, and again together.

`ReadRequests` holds the requests of one read and their responses, for the scheduler.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from binidx.errors import BinidxError, ShortReadError, StorageError, UnreachableError
from binidx.storage.interfaces import Range
from binidx.storage.stores.driver_errors import (
    TRANSIENT_STATUSES,
    cause_of,
    class_names,
    driver_text,
    hidden_cause,
    http_status,
    translated,
)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 8.0
"""Seconds: the upper ends of the first pause and of the last ones."""

FEW_TRIES = 4
"""For a failure that a pause is unlikely to mend."""

LOST = {"ConnectionError", "TimeoutError", "ClientError", "HTTPClientError", "IncompleteReadError", "TransportError"}
LOST_FOR_GOOD = {"SSLError", "ClientSSLError", "InvalidURL", "ClientResponseError", "TooManyRedirects"}
"""Names of classes, or of their bases, raised when no response came: builtin or of drivers."""

Found = TypeVar("Found")


def patience(error: Exception, *, opening: bool = False) -> int:
    """Return how often in all a request may fail in this way; 0: as often as the deadline allows."""
    if not passes(error) and not isinstance(error, ShortReadError):
        return 1
    unheard_of = opening and http_status(error) is None
    return FEW_TRIES if unheard_of or isinstance(error, ShortReadError) else 0


def passes(error: BaseException) -> bool:
    """Return whether the same request may succeed in a moment."""
    names = class_names(error)
    if "FileNotFoundError" in names:
        hidden = hidden_cause(error)
        return hidden is not None and passes(hidden)
    status = http_status(error)
    if status is not None and status >= 400:
        return status in TRANSIENT_STATUSES
    if isinstance(error, BinidxError):
        return error.__cause__ is not None and passes(error.__cause__)
    return bool(names & LOST) and not names & LOST_FOR_GOOD


def pause(failures: int) -> float:
    """Return the seconds to wait after so many failed tries."""
    # Jitter is what must differ between processes, so no seed of ours holds here.
    return random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1)))


class History:
    """Failed tries of one request: when, and with which error."""

    def __init__(self, began: float, *, tries: int = 0, opening: bool = False) -> None:
        self.began, self.tries, self.opening = began, tries, opening
        self.failures: list[tuple[float, Exception]] = []

    def note(self, error: Exception) -> None:
        self.failures.append((time.monotonic() - self.began, error))

    def hopeless(self) -> bool:
        """Return whether the last failure is one too many of its kind."""
        allowed = patience(self.failures[-1][1], opening=self.opening)
        alike = sum(patience(error, opening=self.opening) == allowed for _, error in self.failures)
        return 0 < allowed <= alike or len(self.failures) == self.tries

    def __str__(self) -> str:
        """Return `failed 9 times in 60.1 s: 0.0 s 503 SlowDown, ...`, without the middle of a long one."""
        told = [f"{seconds:.1f} s {_shortly(error)}" for seconds, error in self.failures]
        if len(told) > 6:
            told[3:-3] = [f"... {len(told) - 6} more ..."]
        elapsed = time.monotonic() - self.began
        return f"failed {_times(len(self.failures))} in {elapsed:.1f} s: {', '.join(told)}"


def given_up(uri: str, history: History, where: str) -> Exception:
    """Return the error of a request that is not tried again: that of the last failure, with the history.

    Args:
        where: names the request in the message.
    """
    failure = history.failures[-1][1]
    error = failure if isinstance(failure, BinidxError) else translated(uri, failure)
    if len(history.failures) > 1:
        error = type(error)(f"{error}; {where} {history}")
    if error is not failure:
        error.__cause__ = cause_of(failure) if not isinstance(failure, BinidxError) else failure.__cause__
    return error


def out_of_time(uri: str, where: str, history: History, seconds: float) -> StorageError:
    """Return the error of a read whose deadline passed while this range had no response."""
    last = history.failures[-1][1] if history.failures else None
    told = f"{history}, the last of {driver_text(last)}" if last else "no answer came"
    unheard_of = isinstance(translated(uri, last), UnreachableError) if last else history.opening
    error = (UnreachableError if unheard_of else StorageError)(
        f"{uri}: {where} not done within {seconds:.0f} s; {told}; "
        f"deadline_seconds of storage_options['binidx'] allows more"
    )
    error.__cause__ = last
    return error


def retried(uri: str, ask: Callable[[], Found], *, deadline_seconds: float) -> Found:
    """Return `ask()`, called again in this thread after transient failures.

    Raises:
        BinidxError: it failed for good; with the history if there was more than one try.
    """
    history = History(time.monotonic())
    while True:
        try:
            return ask()
        except Exception as error:
            history.note(error)
            wait = pause(len(history.failures))
            late = time.monotonic() + wait > history.began + deadline_seconds
            if history.hopeless() or late:
                raise given_up(uri, history, "this")  # noqa: B904 (it has its cause)
        time.sleep(wait)


def _shortly(error: Exception) -> str:
    status = http_status(error)
    # fsspec's http says FileNotFoundError whatever happened.
    hidden = hidden_cause(error) if isinstance(error, FileNotFoundError) else None
    told = hidden or (error.__cause__ if isinstance(error, BinidxError) and error.__cause__ else error)
    name = type(told).__name__
    return f"{name} {status}" if status else name


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


SLOWEST = 1_000_000
"""Bytes per second; a slower link counts as stalled."""


class ReadRequests:
    """One read: its requests, numbered as in `ranges`, and their responses.

    Args:
        fetch: sends the request of a range.
        tries: how often a request may fail, if less often than above.
        opening: whether it is the first request to a store, which may not exist.
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
        self.unsent, self.unanswered = 0, len(ranges)  # number of the next request; requests without a response
        self.seconds = deadline_seconds
        # By the loop's clock: when its first request was sent, its last response came, and it ended.
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
        """Return the bytes of the range of a request."""
        start, stop = self.ranges[place]
        return stop - start

    def where(self, place: int) -> str:
        """Return the name of a request in messages."""
        return "opening" if self.opening else "range {}-{}".format(*self.ranges[place])

    def due(self, bytes_in_flight: int) -> float:
        """Return when the read fails, by the loop's clock: its deadline plus the time of its bytes on the slowest link.

        A long read fails sooner if no response comes: the time of the bytes in flight after the last response.
        """
        in_all = sum(stop - start for start, stop in self.ranges)
        return self.seconds + min(self.began + in_all / SLOWEST, self.answered_at + bytes_in_flight / SLOWEST)

    def end(self, error: BaseException | None = None) -> None:
        if not self.over:
            self.ended = time.monotonic()  # the clock of event loops
        with suppress(InvalidStateError):
            self.outcome.set_exception(error) if error else self.outcome.set_result(self.answers)
        if self.timer is not None:
            self.timer.cancel()


class Trouble:
    """State of a request that failed or is late: its failures, its hedges in flight, and whether it was hedged."""

    def __init__(self, read: ReadRequests, sent: float) -> None:
        # time.monotonic is the clock of event loops.
        self.history = History(sent, tries=read.tries, opening=read.opening)
        self.beside = 0
        self.hedged = False
