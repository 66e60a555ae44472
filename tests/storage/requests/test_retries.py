"""What passes, how long is waited for it, when something is late: no I/O here."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import aiohttp
import pytest

from binidx.errors import ShortReadError, StorageError, UnreachableError
from binidx.storage.location import Location
from binidx.storage.requests.cancellation import Scope, cancellable
from binidx.storage.requests.request_schedule import LARGEST_BUDGET, LATE_TIMES, HedgeTimer
from binidx.storage.requests.retries import (
    FEW_TRIES,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    WARN_SECONDS,
    Failure,
    History,
    StoreTimes,
    allowed_tries,
    given_up,
    is_outage,
    is_transient,
    longest_pause,
    out_of_time,
)
from binidx.storage.requests.scheduler import pause, retried
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.driver_errors import HTTPStatusError, retry_after


class StatusError(OSError):
    def __init__(self, status: int) -> None:
        super().__init__("said no")
        self.status = status


def because(cause: BaseException) -> StorageError:
    error = StorageError("x: broken")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "does"),
    [
        (StatusError(503), True),
        (StatusError(429), True),
        (StatusError(404), False),
        (StatusError(412), False),
        (StatusError(501), False),
        (because(StatusError(500)), True),
        (because(StatusError(403)), False),
        (StorageError("x: no cause"), False),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (ssl.SSLCertVerificationError(), False),
        (PermissionError(), False),
        (FileNotFoundError(), False),
        (ValueError(), False),
    ],
)
def test_transient_failures(error: Exception, does: bool) -> None:
    assert is_transient(error) is does


class ConnectionTimeoutError(aiohttp.ServerTimeoutError):
    """aiohttp's, which 3.9 lacks."""


@pytest.mark.parametrize(
    ("error", "does"),
    [
        (StatusError(503), True),
        (StatusError(429), True),
        (because(StatusError(500)), True),
        (because(ConnectionRefusedError()), True),
        (ConnectionResetError(), True),
        (aiohttp.ServerDisconnectedError(), True),
        (ConnectionTimeoutError(), True),
        (TimeoutError(), False),
        (aiohttp.ServerTimeoutError(), False),
        (aiohttp.ClientPayloadError(), False),
        (ShortReadError("x"), False),
    ],
)
def test_outages_are_of_the_whole_store(error: Exception, does: bool) -> None:
    assert is_outage(error) is does


def failed(*errors: Exception, began: float = 0.0, opening: bool = False) -> History:
    """Return the history of a request with these failures, a second each."""
    history = History(began, opening=opening)
    for number, error in enumerate(errors, 1):
        history.note(Failure(error), began + number)
    return history


def test_an_outage_is_logged_when_it_is_old_and_once_a_minute_for_a_store() -> None:
    lines = list[str]()
    times, settings = StoreTimes(lines.append), ReadSettings(outage_seconds=480.0)
    for now in (0.0, WARN_SECONDS, 1.5 * WARN_SECONDS, 2 * WARN_SECONDS):
        times.patience_left("s3://logged", failed(StatusError(500)), 0.0, now, settings)
    times.patience_left("s3://busy", failed(StatusError(503)), 0.0, 61.0, settings)
    assert lines == [
        "s3://logged: out for 60 s (StatusError 500); requests are tried again for 480 s (outage_seconds)",
        "s3://logged: out for 120 s (StatusError 500); requests are tried again for 480 s (outage_seconds)",
        "s3://busy: throttled for 61 s (StatusError 503); requests are tried again for 480 s after its last "
        "response (outage_seconds)",
    ]


@pytest.mark.parametrize(("opening", "seconds"), [(True, 60.0), (False, 480.0)])
def test_the_first_request_of_a_process_waits_for_a_store_from_its_own_beginning(opening: bool, seconds: float) -> None:
    settings = ReadSettings(deadline_seconds=60.0, outage_seconds=480.0)
    history = failed(StatusError(500), began=5.0, opening=opening)
    assert StoreTimes(print).patience_left("s3://silent", history, 5.0, 6.0, settings) == seconds - 1


def test_throttling_lasts_from_the_last_response_to_others() -> None:
    times, settings = StoreTimes(print), ReadSettings(outage_seconds=480.0)
    times.answered["s3://b"] = 50.0
    left = [times.patience_left("s3://b", failed(StatusError(status)), 5.0, 55.0, settings) for status in (503, 500)]
    assert left == [475.0, 430.0]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("7", 7.0), ("", 0.0), ("soon", 0.0), ("-1", 0.0), ("nan", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_retry_after_is_a_number_or_a_date(text: str, seconds: float) -> None:
    assert retry_after(because(HTTPStatusError(503, "", {"retry-after": text}))) == seconds
    of_botocore = OSError()
    of_botocore.response = {"ResponseMetadata": {"HTTPHeaders": {"retry-after": text}}}  # type: ignore[attr-defined]
    assert retry_after(of_botocore) == seconds


def test_a_date_of_retry_after_is_waited_for() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    assert 80_000 < retry_after(HTTPStatusError(503, "", {"retry-after": later})) <= 86_400


def test_requests_of_a_thread_pause_for_as_long_as_retry_after_demands() -> None:
    def request() -> str:
        if len(pauses) < 3:
            raise HTTPStatusError(429, "slow down", {"retry-after": "5"})
        return "done"

    class Pauses(Scope):
        def pause(self, seconds: float) -> None:
            pauses.append(seconds)

    pauses, settings = list[float](), ReadSettings(outage_seconds=480.0)
    with cancellable(Pauses()):
        assert retried(Location("memory://retry-after/k"), request, settings) == "done"
    assert pauses == [5.0, 5.0, 5.0]


def test_transient_failures_are_tried_until_the_deadline_and_wrong_responses_a_few_times() -> None:
    assert allowed_tries(StatusError(503)) == allowed_tries(StatusError(503), opening=True) == 0
    assert allowed_tries(ConnectionResetError()) == 0
    assert allowed_tries(ConnectionResetError(), opening=True) == allowed_tries(ShortReadError("x")) == FEW_TRIES
    assert allowed_tries(StatusError(404)) == 1


def test_pauses_grow_to_an_end_and_differ() -> None:
    for failures in range(1, 12):
        drawn = [pause(failures) for _ in range(200)]
        assert 0 <= min(drawn) < max(drawn) <= min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1))
    assert max(drawn) > LONGEST_PAUSE / 2
    assert longest_pause(7) < longest_pause(8) == longest_pause(5_000) == LONGEST_PAUSE


def test_a_long_history_is_told_by_its_ends() -> None:
    history = failed(*[StatusError(503)] * 10)
    assert history.text(12.5).startswith("failed 10 times in 12.5 s: 1.0 s StatusError 503, 2.0 s StatusError 503, ")
    assert ", ... 4 more ..., 8.0 s " in history.text(12.5)
    error = given_up("s3://b/k", history, "range 0-9", 12.5)
    assert str(error).startswith("s3://b/k: StatusError: said no; range 0-9 failed 10 times")
    assert isinstance(error.__cause__, StatusError)


def test_a_history_tells_what_a_driver_hides() -> None:
    hidden = FileNotFoundError("http://host/k")
    hidden.__cause__ = ConnectionResetError("by peer")
    assert failed(hidden).text(2.0) == "failed once in 2.0 s: 1.0 s ConnectionResetError"


def test_one_failure_is_told_without_a_history() -> None:
    error = StorageError("s3://b/k: broken")
    assert given_up("s3://b/k", failed(error), "range 0-9", 1.0) is error


def test_a_store_that_never_answered_is_unreachable_at_the_deadline_and_one_that_did_is_not() -> None:
    failures: tuple[list[Exception], ...] = [], [StatusError(503)], [ConnectionRefusedError(111, "refused")]
    histories = [failed(*errors, opening=True) for errors in failures]
    kinds = [type(out_of_time("s3://b/k", "opening", history, 0.0, 5.0)) for history in histories]
    assert kinds == [UnreachableError, StorageError, UnreachableError]


def test_late_is_many_times_the_median_of_like_answers() -> None:
    lateness = HedgeTimer()
    assert not lateness.is_late("s3://b", 1000, lateness.unknown, 0.0)
    assert lateness.is_late("s3://b", 1000, lateness.unknown + 0.1, 0.0)
    assert not lateness.is_late("s3://b", 1000, lateness.unknown + 0.1, 1.0)
    for _ in range(64):
        lateness.note("s3://b", 1000, 0.03)
        lateness.note("s3://b", 8 << 20, 1.0)
        lateness.note("s3://far", 1000, 0.5)
    assert not lateness.is_late("s3://b", 200_000, lateness.floor, 9.0)
    assert lateness.is_late("s3://b", 200_000, lateness.floor + 0.01, 9.0)
    assert not lateness.is_late("s3://b", 7 << 20, 3.9, 9.0)
    assert not lateness.is_late("s3://far", 1000, 0.5 * LATE_TIMES - 0.1, 9.0)


def test_the_budget_is_a_share_of_the_answers() -> None:
    lateness = HedgeTimer()
    assert [lateness.take() for _ in range(3)] == [True, True, False]
    for _ in range(1000):
        lateness.note("s3://b", 1, 0.01)
    assert [lateness.take() for _ in range(17)] == [True] * int(LARGEST_BUDGET) + [False]
