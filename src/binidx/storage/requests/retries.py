"""Retries: which failures are tried again, after which pause, and the error when none of the tries succeeded.

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
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from binidx.errors import BinidxError, ShortReadError, StorageError, UnreachableError, redacted
from binidx.storage.location import Location
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

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 8.0
"""Seconds: the upper ends of the first pause and of the last ones."""

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

ANSWERED: dict[str, float] = {}
"""Store that sent a good response to this process, or to one that it was forked from -> time of the last one, by
`time.monotonic`."""

Result = TypeVar("Result")


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


def patience_of(store: str, history: History, began: float, settings: ReadSettings) -> tuple[float, float]:
    """Return since when, by `time.monotonic`, and for how many seconds a request is sent again during an outage.

    Args:
        store: `Location.place` of the object.
        began: begin of the outage.
    """
    longest = settings.deadline_seconds if history.is_of_unknown_store() else math.inf
    answered = ANSWERED.get(store, began) if is_refusal(history.failures[-1][1]) else began
    return max(began, answered), min(settings.patience_seconds, longest)


def warn_of_outage(store: str, error: Exception, began: float, patience: float) -> None:
    """Log an outage or throttling of a store that has lasted a minute, at most once a minute.

    Args:
        store: `Location.place` of the object.
        began: begin of the outage, by `time.monotonic`.
        patience: seconds for which requests are retried.
    """
    now, store = time.monotonic(), redacted(store)
    if min(now - began, now - _warned.get(store, -math.inf)) >= WARN_SECONDS:
        _warned[store] = now
        state, since = ("throttled", " after its last response") if is_refusal(error) else ("out", "")
        logger.warning(
            "%s: %s for %.0f s (%s); requests are tried again for %.0f s%s (outage_seconds)",
            *(store, state, now - began, shortly(error), patience, since),
        )


_warned: dict[str, float] = {}


def pause(failures: int) -> float:
    """Return the seconds to wait after `failures` failed tries: random, up to a bound that doubles with each."""
    # Jitter is what must differ between processes, so no seed of ours holds here.
    return random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1)))


class History:
    """Failed tries of one request, when and with which error, and its hedges.

    Args:
        began: when it was first sent, by `time.monotonic`, the clock of event loops.
        opening: whether it is the first request to a store, which may not exist.
    """

    def __init__(self, began: float, *, opening: bool = False) -> None:
        self.began, self.opening = began, opening
        self.failures: list[tuple[float, Exception]] = []
        self.hedged, self.hedges_in_flight = False, 0

    def note(self, error: Exception) -> None:
        self.failures.append((time.monotonic() - self.began, error))

    def is_of_unknown_store(self) -> bool:
        """Return whether its store may not exist: nothing came from it, not even a refusal."""
        return self.opening and not is_refusal(self.failures[-1][1])

    def is_final(self) -> bool:
        """Return whether the last failure is one too many of its kind."""
        allowed = allowed_tries(self.failures[-1][1], opening=self.opening)
        alike = sum(allowed_tries(error, opening=self.opening) == allowed for _, error in self.failures)
        return 0 < allowed <= alike

    def __str__(self) -> str:
        """Return `failed 9 times in 60.1 s: 0.0 s ClientError 503, ...`, without the middle ones of many tries."""
        tries = [f"{seconds:.1f} s {shortly(error)}" for seconds, error in self.failures]
        if len(tries) > 6:
            tries[3:-3] = [f"... {len(tries) - 6} more ..."]
        times = "once" if len(self.failures) == 1 else f"{len(self.failures)} times"
        return f"failed {times} in {time.monotonic() - self.began:.1f} s: {', '.join(tries)}"


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


def out_of_time(
    uri: str, where: str, history: History, seconds: float, setting: str = "deadline_seconds"
) -> StorageError:
    """Return the error of a read whose time is over while one of its requests has no response.

    Args:
        where: names that request in the message.
        seconds: time that the read took.
        setting: setting that limits the time.
    """
    last = history.failures[-1][1] if history.failures else None
    reason = f"{history}, the last of {driver_text(last)}" if last else "no answer came"
    unreachable = isinstance(translated(uri, last), UnreachableError) if last else history.opening
    error = (UnreachableError if unreachable else StorageError)(
        f"{uri}: {where} not done within {seconds:.0f} s; {reason}; {setting} of storage_options['binidx'] allows more"
    )
    error.__cause__ = last and cause_of(last)
    return error


def retried(
    location: Location, request: Callable[[], Result], settings: ReadSettings | None = None, *, opening: bool = False
) -> Result:
    """Call `request` until it succeeds, with pauses in this thread after transient failures; return its result.

    Args:
        location: object of the request, for error messages and default settings.
        request: blocking function without arguments, which can be called again after a failure.
        settings: time limits of the retries; None for those of the location.
        opening: True if the request may be the first to a store, which may not exist. As long as the store has sent no
            good response to this process, the fourth transient failure without an HTTP status is then final. If False,
            such failures are retried within the time limits.

    Raises:
        BinidxError: the failure is not transient, or the tries or the time are used up. After more than one try, the
            message lists the tries.
    """
    store, settings = location.place, settings or location.settings
    history = History(time.monotonic(), opening=opening and store not in ANSWERED)
    while True:
        try:
            response = request()
        except Exception as error:
            history.note(error)
            wait, now = pause(len(history.failures)), time.monotonic()
            left = history.began + settings.deadline_seconds - now
            if is_outage(error):
                began, patience = patience_of(store, history, history.began, settings)
                left = began + patience - now
                wait = min(wait, left)  # the last try is at the end of the patience
                warn_of_outage(store, error, began, patience)
            if history.is_final() or wait > left or left <= 0:
                raise given_up(location.uri, history, "this")  # noqa: B904 (it has its cause)
        else:
            ANSWERED[store] = time.monotonic()
            return response
        time.sleep(wait)


def shortly(error: Exception) -> str:
    """Return the class of an error, or of the cause that it hides, and its HTTP status if there is one."""
    status = http_status(error)
    # fsspec's http says FileNotFoundError whatever happened.
    hidden = hidden_cause(error) if isinstance(error, FileNotFoundError) else None
    cause = hidden or (error.__cause__ if isinstance(error, BinidxError) and error.__cause__ else error)
    name = type(cause).__name__
    return f"{name} {status}" if status else name
