"""Retries: which failures are tried again, after which pause, and the error when none of the tries succeeded. Pure.

    timeouts, bodies cut off, malformed responses       until the deadline of the read
    an outage: 408, 5xx, no connection, resets          for `outage_seconds`; logged once a minute
    throttling: 429, 503                                the same, counted from the last good response of the store to
                                                        any process of this node: if it answers others, it is not out
    a wrong response: `stores.identity`                  four tries: a proxy in a bad moment, or a broken one
    one byte too many or too few of an fsspec driver     one try: it always does that
    no response from a store that never sent one        four tries: it may not exist
    404, 403, 412, 416, certificates, the rest          one try

A store that never sent a response, not even a refusal, has until the deadline to end its outage. A 404 of an object
that was opened, and that a HEAD request still finds, counts as malformed.

The pauses grow with full jitter (Brooker, AWS Architecture Blog 2015): uniform from 0 to 0.1 s, 0.2 s, 0.4 s ... 8 s,
and are as long as Retry-After demands. Without jitter all clients of a store that was down for a moment would return
together, and again together.

`scheduler` carries this out, on the event loop and in threads; times are those of the clock of event loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from binidx.errors import BinidxError, ShortReadError, StorageError, UnreachableError, redacted
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.driver_errors import (
    TRANSIENT_STATUSES,
    DriverFaultError,
    cause_of,
    class_names,
    driver_text,
    hidden_cause,
    http_status,
    is_malformed,
    translated,
)

FIRST_PAUSE, LONGEST_PAUSE, MOST_DOUBLINGS = 0.1, 8.0, 7
"""Seconds: the upper ends of the first pause and of the last ones, and by how many doublings these are reached."""

FEW_TRIES = 4
"""Tries in all after a failure that a pause is unlikely to mend."""

LOST = {
    *("ConnectionError", "TimeoutError", "ClientError", "HTTPClientError", "IncompleteReadError", "TransportError"),
    "FalseAbsenceError",
}
LOST_FOR_GOOD = {"SSLError", "ClientSSLError", "InvalidURL", "ClientResponseError", "TooManyRedirects"}
"""Names of builtin and drivers' exceptions, or of their bases, raised when no response came; the latter are final."""

AWAY = {"ConnectionError", "ConnectionClosedError", "ClientConnectionError", "TransportError"}
"""Names of classes raised when no connection was made, or the store closed it; aiohttp's also when it is silent."""

WARN_SECONDS = 60.0
"""Age of an outage that is logged, and the time between two warnings of one store."""


def allowed_tries(error: Exception, *, opening: bool = False) -> int:
    """Return how often in all a request may fail in this way; 0: as often as the deadline allows.

    Args:
        opening: whether it is the first request to a store, which may not exist.
    """
    if isinstance(error, ShortReadError):
        return 1 if isinstance(error, DriverFaultError) else FEW_TRIES
    if not is_transient(error):
        return 1
    return FEW_TRIES if opening and http_status(error) is None else 0


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed in a moment."""
    names = class_names(error)
    if "FileNotFoundError" in names:
        hidden = hidden_cause(error)
        return hidden is not None and is_transient(hidden)
    status = http_status(error)
    if status is not None and status >= 400:
        return status in TRANSIENT_STATUSES
    if isinstance(error, BinidxError):
        return error.__cause__ is not None and is_transient(error.__cause__)
    return (bool(names & LOST) and not names & LOST_FOR_GOOD) or is_malformed(error)


def is_outage(error: BaseException) -> bool:
    """Return whether a transient failure means that the whole store is out: by its status, or without a connection."""
    if isinstance(error, BinidxError | FileNotFoundError) and error.__cause__:
        return is_outage(error.__cause__)
    names = class_names(error)
    silent = "TimeoutError" in names and "ConnectionTimeoutError" not in names
    return http_status(error) in TRANSIENT_STATUSES or (bool(names & AWAY) and not silent)


def is_refusal(error: BaseException) -> bool:
    """Return whether a store refused a request because there are too many: 429, or 503 (SlowDown)."""
    return http_status(error) in (429, 503)


class Failure:
    """A failed try, as far as it decides what follows. All that is needed of its error is read here.

    Args:
        error: what the driver raised.
        retry_after: seconds for which the store forbids further requests.

    Attributes:
        tries, opening_tries: how often in all a request, or the first one to a store, may fail so: `allowed_tries`.
        name, text: of the error, in a history and in a message.
    """

    def __init__(self, error: Exception, retry_after: float = 0.0) -> None:
        self.error, self.retry_after = error, retry_after
        self.tries, self.opening_tries = allowed_tries(error), allowed_tries(error, opening=True)
        self.is_outage, self.is_refusal = is_outage(error), is_refusal(error)
        self.name, self.text = shortly(error), driver_text(error)


class History:
    """Failed tries of one request, when and why, and its hedges.

    Args:
        began: when it was first sent.
        opening: whether it is the first request to a store, which may not exist.

    Attributes:
        is_hedged, num_hedges: whether its last try was hedged, and hedges in flight.
        refusals_began, outage_began: when its store began to refuse it, and to be out for it.
    """

    def __init__(self, began: float, *, opening: bool = False) -> None:
        self.began, self.opening = began, opening
        self.failures: list[tuple[float, Failure]] = []
        self.is_hedged, self.num_hedges = False, 0
        self.refusals_began = self.outage_began = math.inf

    @property
    def last(self) -> Failure:
        """The last failure."""
        return self.failures[-1][1]

    def note(self, failure: Failure, now: float) -> None:
        self.failures.append((now - self.began, failure))

    def is_of_unknown_store(self) -> bool:
        """Return whether its store may not exist: nothing came from it, not even a refusal."""
        return self.opening and not self.last.is_refusal

    def is_final(self) -> bool:
        """Return whether the last failure is one too many of its kind."""
        tries = [failure.opening_tries if self.opening else failure.tries for _, failure in self.failures]
        return 0 < tries[-1] <= tries.count(tries[-1])

    def text(self, now: float) -> str:
        """Return `failed 9 times in 60.1 s: 0.0 s ClientError 503, ...`, without the middle ones of many tries."""
        tries = [f"{seconds:.1f} s {failure.name}" for seconds, failure in self.failures]
        if len(tries) > 6:
            tries[3:-3] = [f"... {len(tries) - 6} more ..."]
        times = "once" if len(self.failures) == 1 else f"{len(self.failures)} times"
        return f"failed {times} in {now - self.began:.1f} s: {', '.join(tries)}"


@dataclass(frozen=True)
class StoreTimes:
    """Times of the stores of a process, by `Location.place`.

    Args:
        warn: logs a line about an outage.

    Attributes:
        answered: when a store sent its last good response to this process, or to one that it was forked from.
        warned: when its outage was logged last.
    """

    warn: Callable[[str], object]
    answered: dict[str, float] = field(default_factory=dict)
    warned: dict[str, float] = field(default_factory=dict)

    def patience_left(self, store: str, history: History, began: float, now: float, settings: ReadSettings) -> float:
        """Return for how many seconds a request is sent again during an outage; log one that has lasted a minute.

        Args:
            began: begin of the outage; of refusals, the last good response counts if it came later.
        """
        longest = settings.deadline_seconds if history.is_of_unknown_store() else math.inf
        patience, state, since = min(settings.patience_seconds, longest), "out", ""
        if history.last.is_refusal:
            began = max(began, self.answered.get(store, began))
            state, since = "throttled", " after its last response"
        if min(now - began, now - self.warned.get(store, -math.inf)) >= WARN_SECONDS:
            self.warned[store] = now
            self.warn(
                f"{redacted(store)}: {state} for {now - began:.0f} s ({history.last.name}); requests are tried again "
                f"for {patience:.0f} s{since} (outage_seconds)"
            )
        return began + patience - now


def longest_pause(num_failures: int) -> float:
    """Return the most seconds to wait after so many failed tries; the pause is uniform from 0 to that."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(num_failures - 1, MOST_DOUBLINGS))


def given_up(uri: str, history: History, where: str, now: float) -> Exception:
    """Return the error of a request that is not tried again: that of the last failure, with the history.

    Args:
        where: names the request in the message.
    """
    failure = history.last.error
    error = failure if isinstance(failure, BinidxError) else translated(uri, failure)
    if len(history.failures) > 1:
        error = type(error)(f"{error}; {where} {history.text(now)}")
    if error is not failure:
        error.__cause__ = cause_of(failure) if not isinstance(failure, BinidxError) else failure.__cause__
    return error


def out_of_time(
    uri: str, where: str, history: History, began: float, now: float, setting: str = "deadline_seconds"
) -> StorageError:
    """Return the error of a read whose time is over while one of its requests has no response.

    Args:
        where: names that request in the message.
        began: begin of the read.
        setting: setting that limits the time.
    """
    last = history.last if history.failures else None
    reason = f"{history.text(now)}, the last of {last.text}" if last else "no answer came"
    unreachable = isinstance(translated(uri, last.error), UnreachableError) if last else history.opening
    error = (UnreachableError if unreachable else StorageError)(
        f"{uri}: {where} not done within {now - began:.0f} s; {reason}; {setting} of storage_options['binidx'] allows "
        "more"
    )
    error.__cause__ = cause_of(last.error) if last else None
    return error


def shortly(error: Exception) -> str:
    """Return the class of an error, or of the cause that it hides, and its HTTP status if there is one."""
    status = http_status(error)
    # fsspec's http says FileNotFoundError whatever happened.
    hidden = hidden_cause(error) if isinstance(error, FileNotFoundError) else None
    cause = hidden or (error.__cause__ if isinstance(error, BinidxError) and error.__cause__ else error)
    name = type(cause).__name__
    return f"{name} {status}" if status else name
