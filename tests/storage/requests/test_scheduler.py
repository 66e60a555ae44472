"""Requests under one bound: what is sent when, with fetches that answer as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from binidx.errors import BinidxError, CancelledReadError, ObjectNotFoundError, StorageError, UnreachableError
from binidx.storage.location import Location
from binidx.storage.requests.cancellation import cancellable
from binidx.storage.requests.node_rates import NodeRates
from binidx.storage.requests.request_rate import RequestRate
from binidx.storage.requests.request_schedule import HEDGE_SHARE, HedgeTimer
from binidx.storage.requests.scheduler import STORE_TIMES, ReadRequests, Scheduler
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.driver_errors import HTTPStatusError

NEVER = 1e6
"""Seconds that no test lasts."""


def patient_timer() -> HedgeTimer:
    """No request is late, however slow the machine is."""
    return HedgeTimer(floor=NEVER, unknown=NEVER, stalled=NEVER)


class Store:
    """Answers a range by its bounds, after some seconds.

    `script` has an item for each of the first requests: seconds, an exception, or a coroutine function to await.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.script: list[Any] = []
        self.asked: list[int] = []
        self.now = self.most = self.dropped = 0

    async def fetch(self, start: int, stop: int) -> bytes:
        fate = self.script.pop(0) if self.script else None
        self.asked.append(start)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await (fate() if callable(fate) else asyncio.sleep(fate if isinstance(fate, float) else self.seconds))
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        finally:
            self.now -= 1
        if isinstance(fate, Exception):
            raise fate
        return answer(start, stop)

    def read(self, *starts: int, opening: bool = False, **settings: Any) -> ReadRequests:
        ranges = [(start, start + 10) for start in starts]
        found = ReadSettings(**{"deadline_seconds": NEVER, **settings})
        return ReadRequests(Location("memory://b/k"), self.fetch, ranges, found, opening=opening)


def answer(start: int, stop: int) -> bytes:
    return f"{start:>10}"[: stop - start].encode()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def patient(loop: asyncio.AbstractEventLoop) -> Scheduler:
    return Scheduler(loop, 4, patient_timer())


@pytest.fixture
def hedging(loop: asyncio.AbstractEventLoop) -> Scheduler:
    return Scheduler(loop, 4, HedgeTimer(floor=0.1, unknown=0.2, enough=4, stalled=NEVER))


def test_answers_stand_where_they_were_asked(patient: Scheduler) -> None:
    store = Store()
    assert patient.run(store.read(*range(100))) == [answer(start, start + 10) for start in range(100)]
    assert store.asked == list(range(100))


def test_no_more_than_the_limit_is_in_flight_over_all_threads(patient: Scheduler) -> None:
    store = Store(0.01)
    threads = [threading.Thread(target=patient.run, args=(store.read(*range(20)),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(store.asked), store.most) == (120, 4)


def test_reads_are_served_in_the_order_in_which_they_came(patient: Scheduler) -> None:
    store = Store(0.01)
    first = threading.Thread(target=patient.run, args=(store.read(*range(20)),))
    first.start()
    while not store.asked:
        time.sleep(0.001)
    patient.run(store.read(*range(100, 110)))
    first.join()
    assert store.asked == [*range(20), *range(100, 110)]


def test_what_fails_is_asked_again_before_what_was_never_asked(patient: Scheduler) -> None:
    store = Store()
    store.script = [ConnectionResetError("gone"), TimeoutError()]
    read = store.read(1, 2, 3)
    assert patient.run(read) == [answer(start, start + 10) for start in (1, 2, 3)]
    assert (read.sent, read.retries, read.hedges) == (5, 2, 0)


def test_the_first_of_two_answers_wins_and_the_other_is_dropped(hedging: Scheduler) -> None:
    store = Store()
    store.script = [NEVER]
    read = store.read(1)
    began = time.monotonic()
    assert hedging.run(read) == [answer(1, 11)]
    assert time.monotonic() - began > 0.2
    assert (read.sent, read.hedges) == (2, 1)
    assert eventually(lambda: store.dropped == 1)


def test_a_hedge_that_fails_leaves_the_first_alone(hedging: Scheduler) -> None:
    store = Store()

    async def until_the_hedge_failed() -> None:
        while len(store.asked) < 2 or store.now > 1:
            await asyncio.sleep(0.01)

    store.script = [until_the_hedge_failed, ConnectionResetError("gone")]
    read = store.read(1)
    assert hedging.run(read) == [answer(1, 11)]
    assert (read.sent, read.retries, read.hedges) == (2, 0, 1)


def test_a_first_that_fails_leaves_its_hedge_alone(hedging: Scheduler) -> None:
    store = Store()

    async def fail_once_hedged() -> None:
        while len(store.asked) < 2:
            await asyncio.sleep(0.01)
        raise ConnectionResetError("gone")

    async def until_the_first_failed() -> None:
        while store.now > 1:
            await asyncio.sleep(0.01)

    store.script = [fail_once_hedged, until_the_first_failed]
    read = store.read(1)
    assert hedging.run(read) == [answer(1, 11)]
    assert (read.sent, read.retries, read.hedges) == (2, 0, 1)


def test_what_stands_still_is_given_up_and_asked_again(loop: asyncio.AbstractEventLoop) -> None:
    store = Store()
    store.script = [NEVER]
    read = store.read(1, hedge=False)
    assert Scheduler(loop, 4, HedgeTimer(floor=0.1, unknown=NEVER, stalled=0.4)).run(read) == [answer(1, 11)]
    assert read.retries >= 1, "once, unless this machine stood still, too"
    assert (read.sent, read.hedges) == (1 + read.retries, 0)


def test_a_slow_store_is_not_asked_twice_as_much(loop: asyncio.AbstractEventLoop) -> None:
    store, hedges = Store(0.25), HedgeTimer(floor=0.1, unknown=0.2, enough=4, stalled=NEVER)
    read = store.read(*range(40))
    for _ in range(40):
        hedges.note(read.store, read.size(0), 0.001)
    Scheduler(loop, 4, hedges).run(read)
    assert 1 <= read.hedges <= HedgeTimer().budget + 80 * HEDGE_SHARE


def test_the_first_error_for_good_ends_the_read_and_drops_the_rest(patient: Scheduler) -> None:
    store = Store()
    store.script = [NEVER, NEVER, NEVER, FileNotFoundError("no such key")]
    with pytest.raises(ObjectNotFoundError, match=r"^memory://b/k: no such object"):
        patient.run(store.read(*range(20), hedge=False))
    assert eventually(lambda: store.now == 0)


def test_a_deadline_ends_the_read_and_frees_its_places(patient: Scheduler) -> None:
    store = Store(NEVER)
    with pytest.raises(
        StorageError, match=r"^memory://b/k: range 0-10 not done within \d+ s; no answer came; deadline_seconds"
    ):
        patient.run(store.read(*range(8), deadline_seconds=0.2, hedge=False))
    assert eventually(lambda: store.now == 0)
    assert patient.run(Store().read(1)) == [answer(1, 11)]


def test_a_long_read_is_not_waited_for_where_nothing_comes(patient: Scheduler) -> None:
    """Its 400 MB would be given 400 s, if they came."""
    store = Store()
    store.script = [0.0] * 20 + [NEVER] * 80
    ranges = [(start, start + 10) for start in range(99)] + [(1000, 400_000_000)]
    read = ReadRequests(Location("memory://b/k"), store.fetch, ranges, ReadSettings(deadline_seconds=2.0, hedge=False))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"^memory://b/k: range 20-30 not done within \d+ s"):
        patient.run(read)
    assert 2.0 < time.monotonic() - began < 300
    assert read.num_unanswered == 80


def test_a_cancelled_scope_ends_the_read_and_frees_its_places(patient: Scheduler) -> None:
    store = Store(NEVER)
    with cancellable() as scope:
        threading.Timer(0.1, scope.cancel).start()
        with pytest.raises(CancelledReadError):
            patient.run(store.read(*range(8), hedge=False))
        with pytest.raises(CancelledReadError):
            patient.run(store.read(1))
    assert eventually(lambda: store.now == 0)
    assert patient.run(Store().read(1)) == [answer(1, 11)]


def test_opening_gives_up_soon_on_a_store_that_never_answered(patient: Scheduler) -> None:
    store = Store()
    store.script = [ConnectionRefusedError("nobody there")] * 9
    said = r"nobody there; check the endpoint and the network; opening failed 4 times in [\d.]+ s: [\d.]+ s Conn"
    with pytest.raises(StorageError, match=said):
        patient.run(store.read(1, opening=True))
    assert len(store.asked) == 4


def test_an_outage_is_outlasted_beyond_the_deadline(patient: Scheduler) -> None:
    def outlasted(deadline: float) -> bool:
        store, began = Store(), time.monotonic()

        async def out() -> None:
            if time.monotonic() < began + 1.5 * deadline:
                raise HTTPStatusError(503)

        store.script = [out] * 1000
        try:
            return patient.run(store.read(1, deadline_seconds=deadline)) == [answer(1, 11)]
        except StorageError:
            return False

    assert any(map(outlasted, (0.4, 4.0, 40.0))), "the later ones are for a slow machine"


def test_silence_after_an_outage_has_the_deadline(patient: Scheduler) -> None:
    store = Store()
    store.script = [HTTPStatusError(503), NEVER]
    with pytest.raises(StorageError, match=r" not done within .*; failed once .* 503, .*; deadline_seconds of "):
        patient.run(store.read(1, deadline_seconds=0.2, outage_seconds=NEVER, hedge=False))


def test_an_outage_that_lasts_too_long_ends_the_read(patient: Scheduler) -> None:
    store = Store()
    store.script = [ConnectionRefusedError("nobody there")] * 1000
    with pytest.raises(UnreachableError, match=r"failed \d+ times in .*nobody there; outage_seconds of "):
        patient.run(store.read(1, outage_seconds=0.3))
    assert len(store.asked) > 1


@pytest.mark.parametrize(("status", "is_waited_for"), [(503, True), (429, True), (500, False)])
def test_a_store_that_refuses_some_and_answers_others_is_throttled_and_not_out(
    patient: Scheduler, status: int, is_waited_for: bool
) -> None:
    def outlasted(patience: float) -> bool:
        store, others, began = Store(), Store(), time.monotonic()
        seconds = 2 * patience if is_waited_for else NEVER

        async def refused() -> None:
            if time.monotonic() < began + seconds:
                await asyncio.get_running_loop().run_in_executor(None, patient.run, others.read(2))
                raise HTTPStatusError(status)

        store.script = [refused] * 1000
        try:
            return patient.run(store.read(1, outage_seconds=patience)) == [answer(1, 11)]
        except StorageError:
            return False

    patiences = (0.4, 4.0, 40.0) if is_waited_for else (0.4,)
    assert any(map(outlasted, patiences)) is is_waited_for, "the later ones are for a slow machine"


def test_a_lost_connection_after_long_refusals_begins_an_outage_of_its_own(patient: Scheduler) -> None:
    """The store answers others: it was throttled until then, not out."""

    def outlasted(patience: float) -> bool:
        store, others, began = Store(), Store(), time.monotonic()

        async def refused() -> None:
            await asyncio.get_running_loop().run_in_executor(None, patient.run, others.read(2))
            if time.monotonic() < began + 2 * patience:
                raise HTTPStatusError(503)
            store.script = [None]
            raise ConnectionResetError("gone")

        store.script = [refused] * 1000
        try:
            return patient.run(store.read(1, outage_seconds=patience)) == [answer(1, 11)]
        except StorageError:
            return False

    assert any(map(outlasted, (0.4, 4.0, 40.0))), "the later ones are for a slow machine"


@pytest.mark.parametrize(("demanded", "patience"), [("0.4", NEVER), ("1000", 0.4)])
def test_no_request_is_sent_before_retry_after_or_the_end_of_patience(
    patient: Scheduler, demanded: str, patience: float
) -> None:
    store, began = Store(), time.monotonic()
    store.script = [HTTPStatusError(429, "", {"retry-after": demanded})]
    assert patient.run(store.read(1, outage_seconds=patience)) == [answer(1, 11)]
    assert time.monotonic() - began >= 0.4
    assert len(store.asked) == 2


def test_a_store_that_never_answered_is_not_waited_for_and_one_that_did_is(patient: Scheduler) -> None:
    store = Store()
    store.script = [HTTPStatusError(500)] * 1000
    with pytest.raises(StorageError, match=r" 500, .*; deadline_seconds of "):
        patient.run(store.read(1, opening=True, deadline_seconds=0.3, outage_seconds=NEVER))
    store.script = [HTTPStatusError(503)] * 1000  # a refusal is an answer: the store exists
    with pytest.raises(StorageError, match=r" 503, .*; outage_seconds of "):
        patient.run(store.read(1, opening=True, deadline_seconds=NEVER, outage_seconds=0.3))
    STORE_TIMES.answered["memory://b"] = 0.0
    store.script = [ConnectionRefusedError("nobody there")] * 5
    assert patient.run(store.read(1, opening=True)) == [answer(1, 11)]


def test_a_read_on_the_loop_itself_is_an_error_and_no_deadlock(patient: Scheduler) -> None:
    async def read() -> None:
        patient.run(Store().read(1))

    with pytest.raises(StorageError, match=r"^memory://b/k: read on the event loop"):
        asyncio.run_coroutine_threadsafe(read(), patient.loop).result()


# Errors of the scheduler itself: each read that is handed over ends


class UnreadableError(OSError):
    """An error of a driver that has no text."""

    def __str__(self) -> str:
        raise AttributeError("no text")


class FailingRates(NodeRates):
    """Rates that cannot be changed while `is_broken`."""

    is_broken = True

    def change(self, *arguments: Any) -> Any:
        if self.is_broken:
            raise BufferError("the rates are gone")
        return super().change(*arguments)


def outcome(scheduler: Scheduler, read: ReadRequests) -> BaseException | list[Any]:
    """Return what becomes of a read within a minute."""
    with scheduler.sending(read):
        return read.outcome.exception(60) or read.outcome.result()


def test_an_error_of_a_driver_whose_text_raises_ends_its_read_and_no_other(patient: Scheduler) -> None:
    store, others = Store(), Store(0.2)
    store.script = [UnreadableError()]
    other = others.read(1)
    with patient.sending(other):
        assert "UnreadableError, whose text is unreadable: AttributeError" in str(outcome(patient, store.read(1)))
        assert other.outcome.result(60) == [answer(1, 11)]


def test_a_read_of_a_store_that_cannot_be_opened_ends_with_that_error(patient: Scheduler) -> None:
    read = ReadRequests(Location("nosuch://b/k"), Store().fetch, [(0, 10)], ReadSettings())
    assert isinstance(outcome(patient, read), BinidxError)
    assert outcome(patient, Store().read(1)) == [answer(1, 11)]


def test_a_request_that_is_cancelled_late_is_none_of_a_schedule_that_began_anew(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Its driver has the whole response already, and returns it for all that."""
    scheduler, released, started = Scheduler(loop, 4, patient_timer(), NodeRates(None)), asyncio.Event(), []

    async def stubborn(start: int, stop: int) -> bytes:
        started.append(asyncio.current_task())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(NEVER)
        await released.wait()
        return b"of the first read"

    first = ReadRequests(Location("memory://b/k"), stubborn, [(0, 10)], ReadSettings())
    with scheduler.sending(first):
        assert eventually(lambda: bool(started))
        loop.call_soon_threadsafe(scheduler._break, BufferError("a defect"))
        assert "a defect" in str(first.outcome.exception(60))
        store = Store(NEVER)
        second = store.read(1)
        with scheduler.sending(second):
            assert eventually(lambda: store.now == 1)
            loop.call_soon_threadsafe(released.set)
            assert eventually(started[0].done)
            assert not second.over
            assert len(scheduler._tasks) == 1


def test_an_error_within_the_scheduler_ends_all_its_reads_and_none_of_the_later_ones(
    loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    rates = FailingRates(None)
    scheduler, store, slow = Scheduler(loop, 4, patient_timer(), rates), Store(), Store(NEVER)
    beside = slow.read(1)
    with scheduler.sending(beside):
        for read in (store.read(*range(40)), beside):  # outcomes are shared after 16 responses
            error = outcome(scheduler, read) if read is not beside else beside.outcome.exception(60)
            assert str(error).startswith("memory://b/k: its requests were stopped by BufferError: the rates are gone; ")
    assert "the scheduler of requests begins anew" in caplog.text
    assert eventually(lambda: slow.now == 0)
    rates.is_broken = False
    starts = range(40)
    assert outcome(scheduler, store.read(*starts)) == [answer(start, start + 10) for start in starts]


def test_an_error_in_a_timer_of_a_limiter_ends_the_reads_that_wait_for_it(loop: asyncio.AbstractEventLoop) -> None:
    rates = FailingRates(None)
    rates.is_broken = False
    rates.change("memory://b", lambda: RequestRate(limit=1.0), lambda rate, now, wall: rate.take(now, 1))
    scheduler, store = Scheduler(loop, 4, patient_timer(), rates), Store()
    store.script = [HTTPStatusError(503)] * 1000
    read = store.read(1, outage_seconds=NEVER)
    with scheduler.sending(read):
        assert eventually(lambda: read.refused > 0)
        rates.is_broken = True
        assert "its requests were stopped by BufferError" in str(read.outcome.exception(60))


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + 300
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()
