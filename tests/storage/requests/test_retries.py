"""What passes, how long is waited for it, when something is late: no I/O here."""

from __future__ import annotations

import re
import ssl
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import aiohttp
import pytest

from binidx.errors import ShortReadError, StorageError, UnreachableError
from binidx.storage.requests import retries
from binidx.storage.requests.retries import (
    FEW_TRIES,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    History,
    allowed_tries,
    given_up,
    is_outage,
    is_transient,
    out_of_time,
    patience_of,
    pause,
    warn_of_outage,
)
from binidx.storage.requests.scheduler import HedgeTimer
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


def test_an_outage_is_logged_when_it_is_old_and_once_for_a_store(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "WARN_SECONDS", 1e6)
    now = time.monotonic()
    for age in (0.0, 1.1e6, 1.2e6):
        warn_of_outage("s3://logged", StatusError(500), now - age, 480.0)
    warn_of_outage("s3://busy", StatusError(503), now - 1.1e6, 480.0)
    assert [each.getMessage() for each in caplog.records] == [
        "s3://logged: out for 1100000 s (StatusError 500); requests are tried again for 480 s (outage_seconds)",
        "s3://busy: throttled for 1100000 s (StatusError 503); requests are tried again for 480 s after its last "
        "response (outage_seconds)",
    ]


@pytest.mark.parametrize(("opening", "seconds"), [(True, 60.0), (False, 480.0)])
def test_the_first_request_of_a_process_waits_for_a_store_from_its_own_beginning(opening: bool, seconds: float) -> None:
    history, settings = History(5.0, opening=opening), ReadSettings(deadline_seconds=60.0, outage_seconds=480.0)
    history.note(StatusError(500))
    assert patience_of("s3://silent", history, 5.0, settings) == (5.0, seconds)


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


def test_a_long_history_is_told_by_its_ends() -> None:
    history = History(time.monotonic())
    for _ in range(10):
        history.note(StatusError(503))
    assert re.match(r"failed 10 times in [\d.]+ s: [\d.]+ s StatusError 503, ", str(history))
    assert ", ... 4 more ..., " in str(history)
    error = given_up("s3://b/k", history, "range 0-9")
    assert str(error).startswith("s3://b/k: StatusError: said no; range 0-9 failed 10 times")
    assert isinstance(error.__cause__, StatusError)


def test_a_history_tells_what_a_driver_hides() -> None:
    hidden = FileNotFoundError("http://host/k")
    hidden.__cause__ = ConnectionResetError("by peer")
    history = History(time.monotonic())
    history.note(hidden)
    assert re.fullmatch(r"failed once in [\d.]+ s: [\d.]+ s ConnectionResetError", str(history))


def test_one_failure_is_told_without_a_history() -> None:
    history = History(time.monotonic())
    history.note(StorageError("s3://b/k: broken"))
    assert given_up("s3://b/k", history, "range 0-9") is history.failures[0][1]


def test_a_store_that_never_answered_is_unreachable_at_the_deadline_and_one_that_did_is_not() -> None:
    silent, answering, down = (History(time.monotonic(), opening=True) for _ in range(3))
    answering.note(StatusError(503))
    down.note(ConnectionRefusedError(111, "refused"))
    found = [type(out_of_time("s3://b/k", "opening", each, 5.0)) for each in (silent, answering, down)]
    assert found == [UnreachableError, StorageError, UnreachableError]


def test_late_is_many_times_the_median_of_like_answers() -> None:
    lateness = HedgeTimer()
    assert not lateness.is_late("s3://b", 1000, HedgeTimer.UNKNOWN, 0.0)
    assert lateness.is_late("s3://b", 1000, HedgeTimer.UNKNOWN + 0.1, 0.0)
    assert not lateness.is_late("s3://b", 1000, HedgeTimer.UNKNOWN + 0.1, 1.0)
    for _ in range(64):
        lateness.note("s3://b", 1000, 0.03)
        lateness.note("s3://b", 8 << 20, 1.0)
        lateness.note("s3://far", 1000, 0.5)
    assert not lateness.is_late("s3://b", 200_000, HedgeTimer.FLOOR, 9.0)
    assert lateness.is_late("s3://b", 200_000, HedgeTimer.FLOOR + 0.01, 9.0)
    assert not lateness.is_late("s3://b", 7 << 20, 3.9, 9.0)
    assert not lateness.is_late("s3://far", 1000, 1.9, 9.0)


def test_the_budget_is_a_share_of_the_answers() -> None:
    lateness = HedgeTimer()
    assert [lateness.take() for _ in range(3)] == [True, True, False]
    for _ in range(1000):
        lateness.note("s3://b", 1, 0.01)
    assert [lateness.take() for _ in range(17)] == [True] * 16 + [False]
