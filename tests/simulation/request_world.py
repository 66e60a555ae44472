"""Processes that read ranges from stores with faults: `RequestSchedule` and `RateLimiter`, without tasks and sockets.

    world = World(7)
    requests = RequestWorld(world, drawn_plan(random.Random(7)))
    world.run(requests.plan.settled_at)
    requests.check_idle()

A process is a carrier: it sends what the schedule returns, and the store ends it later. Callers submit reads of many
ranges, one after the other; some are interrupted, and scopes are cancelled, before a read arrives or at any time after.
A process may be stopped for a while: what happens meanwhile reaches it late.
"""

from __future__ import annotations

import math
import random
import ssl
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from simulation.fleet import Rates, Timer
from simulation.invariants import check_line
from simulation.stores import Fault, Store
from simulation.world import World

from binidx.errors import CancelledReadError, ObjectChangedError, ShortReadError, StorageError
from binidx.storage.location import Location
from binidx.storage.requests.rate_limiter import FirstLimits, RateLimiter
from binidx.storage.requests.request_schedule import (
    HEDGE_SHARE,
    SLOWEST,
    WATCH_SECONDS,
    HedgeTimer,
    Read,
    Request,
    RequestSchedule,
)
from binidx.storage.requests.retries import LONGEST_PAUSE, Failure, StoreTimes
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.driver_errors import DriverFaultError, FalseAbsenceError, HTTPStatusError

NEVER = 1e9
SETTLED_SECONDS = 30.0
"""Time after the last fault for a pause, a stalled request, and another pause, beside the requests themselves."""


def caused(error: Exception, cause: Exception) -> Exception:
    """Return an error with its cause."""
    error.__cause__ = cause
    return error


ERRORS: dict[str, Callable[[], Exception]] = {
    "refused": lambda: HTTPStatusError(503),
    "error": lambda: HTTPStatusError(500),
    "unreachable": lambda: ConnectionRefusedError("refused"),
    "reset": lambda: ConnectionResetError("reset"),
    "silent": lambda: TimeoutError("silent"),
    "short": lambda: ShortReadError("memory://b/k: short"),
    "false absence": lambda: FalseAbsenceError("404"),
    "absent": lambda: FileNotFoundError("no such key"),
    "fault": lambda: DriverFaultError("memory://b/k: a byte too many"),
    "hidden": lambda: caused(FileNotFoundError("by fsspec's http"), ConnectionResetError("by peer")),
    "wrapped": lambda: caused(StorageError("memory://b/k: lost"), ConnectionResetError("by peer")),
    "changed": lambda: ObjectChangedError("memory://b/k: changed"),
    "denied": lambda: HTTPStatusError(403),
    "certificate": lambda: ssl.SSLCertVerificationError("expired"),
    "defect": lambda: ValueError("of a driver"),
}
"""Kind of a fault -> error of a request in it. Other kinds: "stall", no response; "slow", a tenth of the speed."""

FINAL = {"absent", "changed", "denied", "fault", "certificate", "defect"}
"""Kinds after which a read fails at once."""


@dataclass(frozen=True)
class Plan:
    """A world before it begins: drawn from a seed, or written in a test.

    Args:
        faults: times in which a share of requests fails in a way, by `Fault.amount`.
        limit: requests in flight of a process.
        num_reads: reads of a caller, one after the other.
        num_ranges: most ranges of a read.
        size: most bytes of a range.
        speed: bytes a second of a request.
        interrupted: share of reads whose caller is interrupted or whose scope is cancelled.
        stops: times at which each process stands still, and for how long.
        retry_after: of refusals, in seconds.
    """

    store: Store = field(default_factory=Store)
    faults: tuple[Fault, ...] = ()
    num_nodes: int = 1
    num_processes: int = 1
    num_callers: int = 1
    num_reads: int = 1
    num_ranges: int = 1
    num_folders: int = 1
    limit: int = 4
    size: int = 10
    speed: float = 1e8
    settings: ReadSettings = ReadSettings(deadline_seconds=10.0, outage_seconds=20.0)  # noqa: RUF009 (frozen)
    opening: float = 0.0
    interrupted: float = 0.0
    stops: tuple[tuple[float, float], ...] = ()
    retry_after: float = 0.0

    @property
    def faults_end(self) -> float:
        return max([0.0, *(fault.end for fault in (*self.faults, *self.store.faults))])

    @property
    def settled_at(self) -> float:
        """Time at which all reads have ended: none begins after the faults; without faults, all of a caller do."""
        num_requests = self.num_callers * self.num_ranges * (1 if self.faults_end else self.num_reads)
        in_flight = num_requests * (self.store.round_trip + self.size / self.speed) / self.limit
        stalled = min(self.limit, num_requests) * self.size / SLOWEST
        rate = min(self.store.rate, 1e9) / 4  # a limit that was found among faults is low
        if any(fault.kind == "refused" for fault in self.faults):
            rate = min(rate, 2.0)  # among these a limit may fall as low, and grows by half in 10 s at most
        refused = self.num_nodes * self.num_processes * num_requests / rate
        return self.faults_end + SETTLED_SECONDS + stalled + 2 * in_flight + refused


def drawn_plan(draw: random.Random) -> Plan:
    """Return a plan with up to four faults in the first 20 s."""
    faults = []
    for _ in range(draw.randrange(5)):
        begin, kind = draw.uniform(0, 15), draw.choice([*ERRORS, "stall", "slow", "refused", "refused"])
        amount = draw.choice([0.02, 0.2]) if kind in FINAL else draw.choice([0.1, 0.5, 1.0])
        faults.append(Fault(begin, begin + draw.choice([0.5, 3.0, 8.0]), kind, amount))
    return Plan(
        store=Store(
            draw.choice([math.inf, math.inf, 60.0, 200.0]),
            random_share=draw.choice([0.0, 0.0, 0.05]),
            round_trip=draw.choice([0.005, 0.03, 0.3]),
            partition_of=draw.choice((lambda folder: folder, lambda folder: "")),
        ),
        faults=tuple(faults),
        num_nodes=draw.choice([1, 1, 2]),
        num_processes=draw.choice([1, 2]),
        num_callers=draw.choice([1, 3, 6]),
        num_reads=draw.choice([2, 6]),
        num_ranges=draw.choice([1, 5, 40]),
        num_folders=draw.choice([1, 3]),
        limit=draw.choice([1, 4, 16, 64]),
        size=draw.choice([10, 10_000, 1 << 20]),
        settings=ReadSettings(
            deadline_seconds=draw.choice([3.0, 10.0]),
            outage_seconds=draw.choice([0.5, 5.0, 30.0]),
            hedge=draw.random() < 0.8,
        ),
        opening=draw.choice([0.0, 0.3]),
        interrupted=draw.choice([0.0, 0.2]),
        stops=tuple((draw.uniform(0, 20), draw.choice([0.15, 0.6, 3.0])) for _ in range(draw.randrange(3))),
        retry_after=draw.choice([0.0, 0.0, 2.0]),
    )


class SimulatedRead(Read):
    """A read, and what the world knows of it."""

    def __init__(self, caller: Caller, ranges: list[tuple[int, int]], settings: ReadSettings, opening: bool) -> None:
        folder = caller.process.world.random.randrange(caller.process.plan.num_folders)
        self.location = Location(f"memory://b/f{folder}/k")
        super().__init__(self.location.uri, self.location.place, ranges, settings, opening, True)
        self.caller, self.folder = caller, f"f{folder}"
        self.num_ends, self.num_responses, self.progress_at = 0, 0, math.inf
        self.error: BaseException | None = None
        self.not_before: dict[int, float] = {}
        self.sent_at = defaultdict[int, list[float]](list)


def response_of(read: Read, index: int) -> bytes:
    """Return the only right response to a request."""
    return f"{read.uri} {read.ranges[index]}".encode()


class Process:
    """The carrier of a schedule in virtual time; checks each call of the schedule.

    Attributes:
        sent: requests in flight.
        num_responses, num_hedges: responses that came in time, and hedges that were sent.
        lines: of the log.
    """

    def __init__(self, world: World, plan: Plan, name: str, rates: Rates) -> None:
        self.world, self.plan, self.name, self.rates = world, plan, name, rates
        self.times = StoreTimes(lambda text: self.warnings.append((world.now, text)))
        self.hedges = HedgeTimer()
        self.schedule = RequestSchedule(plan.limit, self, self.times, self.draw, self.hedges)
        self.limiters: dict[str, RateLimiter] = {}
        self.sent: dict[int, Request] = {}
        self.wakes_at, self.stopped_until = math.inf, 0.0
        self.num_responses = self.num_hedges = self.num_logged = 0
        self.warnings = list[tuple[float, str]]()
        self.callers = [Caller(self, number) for number in range(plan.num_callers)]
        self.is_touched = True
        for begin, seconds in plan.stops:
            world.later(begin, name, "stop", self.stop, seconds)

    def stop(self, seconds: float) -> str:
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)
        return f"{seconds:g} s"

    def later(self, seconds: float, event: str, function: Callable[..., Any], *arguments: Any) -> None:
        self.world.later(seconds, self.name, event, self.arrive, event, function, arguments)

    def arrive(self, event: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call a function in this process, once it is not stopped; then send what may be sent."""
        if self.world.now < self.stopped_until:
            self.later(self.stopped_until - self.world.now, event, function, *arguments)
            return "late"
        self.is_touched = True
        before = len(self.sent)
        action = function(*arguments)
        while (request := self.schedule.next(self.world.now)) is not None:
            self.send(request)
        if self.schedule.wake_at < self.wakes_at:
            self.wakes_at = max(self.world.now, self.schedule.wake_at)
            self.later(self.wakes_at - self.world.now, "wake", self.wake, self.wakes_at)
        return f"{action or ''} {before} to {len(self.sent)} in flight"

    def wake(self, due: float) -> None:
        if due == self.wakes_at:
            self.wakes_at = math.inf
            self.schedule.pass_time(self.world.now)

    def limiter(self, location: Location) -> RateLimiter:
        limiter: RateLimiter | None = None
        for name in reversed(location.partitions):
            if name not in self.limiters:
                own = name, FirstLimits(), self.rates, self.limiter_later, self.schedule.admit, self.plan.limit
                is_above = name != location.partitions[0]
                self.limiters[name] = RateLimiter(*own, bucket=limiter, is_above=is_above)
            limiter = self.limiters[name]
        assert limiter is not None
        return limiter

    def limiter_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer()
        self.later(seconds, "limiter", lambda: None if timer.is_cancelled else callback())
        return timer

    def draw(self, low: float, high: float) -> float:
        """Return a pause."""
        assert 0.0 <= low <= high, f"a pause of {low} to {high} s"
        return self.world.random.uniform(low, high)

    def submit(self, read: SimulatedRead) -> str:
        self.schedule.submit(read, self.limiter(read.location), self.world.now)
        return f"{len(read.ranges)} ranges"

    def drop(self, read: SimulatedRead, error: BaseException) -> str:
        self.schedule.drop(read, error, self.world.now)
        return type(error).__name__

    def send(self, request: Request) -> None:
        number, read, index, sent = request
        now, draw = self.world.now, self.world.random
        assert sent == now
        assert not read.over, "a request was sent for a read that is over"
        assert read.responses[index] is None, "a request was sent that has its response"
        assert read.not_before.get(index, 0.0) <= now, "a request was sent before its Retry-After"
        twins = [other for other in self.sent.values() if other[1] is read and other[2] == index]
        assert len(twins) < 2, "a request has two hedges"
        assert twins or len(self.sent) < self.plan.limit, "more requests than the limit are in flight"
        assert not twins or not read.limiter.is_throttling, "a hedge was sent while requests wait for a rate"
        self.num_hedges += bool(twins)
        read.progress_at = min(read.progress_at, now)
        self.sent[number] = request
        read.sent_at[index].append(now)
        seconds, outcome = self.outcome(read, index, draw)
        if seconds < NEVER:
            self.later(seconds, f"end {number}", self.ended, number, outcome)

    def outcome(self, read: SimulatedRead, index: int, draw: random.Random) -> tuple[float, Exception | None]:
        """Return when a request ends that is sent now, and its error if it fails."""
        store, speed, now = self.plan.store, self.plan.speed, self.world.now
        seconds = 2 * store.delay(draw)
        for fault in self.plan.faults:
            if fault.begin <= now < fault.end and draw.random() < fault.amount:
                if fault.kind == "stall":
                    return NEVER, None
                if fault.kind != "slow":
                    return seconds * draw.random(), ERRORS[fault.kind]()
                speed /= 10
        if not store.grants(read.folder, now, draw):
            return seconds, ERRORS["refused"]()
        return seconds + read.size(index) / speed, None

    def ended(self, number: int, error: Exception | None) -> str:
        if number not in self.sent:
            return "cancelled"
        _, read, index, _ = self.sent.pop(number)
        now = self.world.now
        if error is None:
            self.num_responses += 1
            read.num_responses += 1
            read.progress_at = now
            self.schedule.answered(number, response_of(read, index), now)
            return "ok"
        failure = Failure(error, self.plan.retry_after if isinstance(error, HTTPStatusError) else 0.0)
        self.schedule.failed(number, failure, now)
        is_paused = any(entry[2] is read and entry[3] == index for entry in self.schedule._paused)
        if is_paused and failure.retry_after and not read.limiter.is_limited:
            history = read.histories[index]
            began = history.outage_began
            if failure.is_refusal:
                began = max(history.refusals_began, self.times.answered.get(read.store, 0.0))
            patience = min(read.settings.patience_seconds, read.settings.deadline_seconds if read.opening else math.inf)
            read.not_before[index] = min(now + failure.retry_after, began + patience)
        return failure.name

    def cancel(self, number: int) -> None:
        del self.sent[number]

    def end(self, read: Any, error: BaseException | None) -> None:
        assert read.over
        assert read.ended == self.world.now
        read.num_ends += 1
        assert read.num_ends == 1, "a read ended twice"
        read.error = error
        if "not done within" in str(error):
            assert str(error).startswith((f"{read.uri}: opening not", f"{read.uri}: range "))
        if error is None:
            assert read.responses == [response_of(read, index) for index in range(len(read.ranges))]
            assert read.num_responses == len(read.ranges)
        read.caller.process.later(0.0, "return", read.caller.returned, read)

    def log(self, read: Any, index: int, num_tries: int, seconds: float, status: str, response: Any) -> None:
        self.num_logged += 1
        assert self.world.now - seconds in [pytest.approx(sent) for sent in read.sent_at[index]]
        assert (response is None) == (status != "ok")
        failures = read.histories[index].failures if index in read.histories else []
        assert num_tries == 1 + len(failures)


class Caller:
    """A thread that reads, and waits for each of its reads."""

    def __init__(self, process: Process, number: int) -> None:
        self.process, self.name, self.left = process, f"{process.name} caller {number}", process.plan.num_reads
        self.reads = list[SimulatedRead]()
        process.world.later(process.world.random.random() * 0.2, self.name, "begin", self.read)

    def read(self) -> str | None:
        plan, draw = self.process.plan, self.process.world.random
        if not self.left or self.process.world.now > plan.faults_end > 0:
            return None
        self.left -= 1
        starts = [draw.randrange(1_000_000) for _ in range(draw.randint(1, plan.num_ranges))]
        ranges = [(start, start + draw.randint(1, plan.size)) for start in starts]
        is_opening = draw.random() < plan.opening
        read = SimulatedRead(self, ranges[:1] if is_opening else ranges, plan.settings, is_opening)
        self.reads.append(read)
        if draw.random() < plan.interrupted:
            error = draw.choice([InterruptedError(), CancelledReadError("cancelled")])
            seconds = draw.choice([0.0, 0.01, draw.expovariate(1.0)])
            if draw.random() < 0.2:
                self.process.later(0.0, "drop", self.process.drop, read, error)  # before it is submitted
            else:
                self.process.later(seconds, "drop", self.process.drop, read, error)
        self.process.later(0.0, "submit", self.process.submit, read)
        return None

    def returned(self, read: SimulatedRead) -> str:
        assert read is self.reads[-1], "a caller got the outcome of another read"
        self.process.world.later(self.process.world.random.random() * 2, self.name, "next", self.read)
        return "ok" if read.error is None else f"{type(read.error).__name__}"


class RequestWorld:
    """Processes of nodes in a world, and the invariants of their schedules after each event."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, replace(plan, store=replace(plan.store, buckets={}))
        self.processes = list[Process]()
        for node in range(plan.num_nodes):
            rates = Rates(world, busy_share=0.05)
            for rank in range(plan.num_processes):
                self.processes.append(Process(world, self.plan, f"node {node} rank {rank}", rates))
        world.invariants.append(self.check_touched)

    @property
    def reads(self) -> list[SimulatedRead]:
        return [read for process in self.processes for caller in process.callers for read in caller.reads]

    def check_touched(self) -> None:
        for process in self.processes:
            if process.is_touched:
                process.is_touched = False
                check_schedule(process)

    def check_idle(self) -> None:
        """Check that all reads have ended, and that nothing is left of them."""
        for process in self.processes:
            schedule = process.schedule
            assert not schedule.reads, [(read.uri, read.sent) for read in schedule.reads]
            assert not schedule.in_flight
            assert schedule.wake_at == math.inf
            assert process.num_logged >= process.num_responses, "a response was not logged"
            assert not any(limiter.in_flight for limiter in process.limiters.values())
        assert all(read.num_ends == 1 for read in self.reads)


def check_schedule(process: Process) -> None:
    """Check a schedule after an event.

    Raises:
        AssertionError: a claim does not hold.
    """
    schedule, now = process.schedule, process.world.now
    assert schedule.in_flight.keys() == process.sent.keys(), "the schedule and its carrier differ on what is in flight"
    assert process.num_hedges <= 2 + HEDGE_SHARE * process.num_responses + 1e-9, "more hedges than their budget"
    assert process.hedges.budget >= -1e-9
    assert not schedule.reads or schedule.wake_at < math.inf, "nothing wakes the schedule"
    assert process.wakes_at <= schedule.wake_at or process.wakes_at <= now
    waiting = Counter[tuple[int, int]]()
    held = Counter[Any]()
    for read, index in (*schedule._admitted, *schedule._hedged):
        held[read.limiter] += 1
        waiting[id(read), index] += 1
    for _, read, index, _ in schedule.in_flight.values():
        assert not read.over, "a request of a read that is over is in flight"
        held[read.limiter] += 1
        waiting[id(read), index] += 1
    for limiter in process.limiters.values():
        assert limiter.in_flight == held[limiter], "a limiter counts others than those in flight"
    for read, index in schedule._again:
        waiting[id(read), index] += 1
    for _, _, read, index in schedule._paused:
        waiting[id(read), index] += 1
    for limiter in process.limiters.values():
        check_line(limiter)
        for _, index, read in limiter._line:
            waiting[id(read), index] += 1
    for read in schedule.reads:
        check_read(process, read, waiting)


def check_read(process: Process, read: Any, waiting: Counter[tuple[int, int]]) -> None:
    """Check a read that is not over: each request is unsent, or answered, or waits once somewhere."""
    assert not read.over
    assert read.num_ends == 0
    unanswered = [index for index in range(len(read.ranges)) if read.responses[index] is None]
    assert len(unanswered) == read.num_unanswered > 0
    for index in unanswered:
        history = read.histories.get(index)
        num_hedges = history.num_hedges if history else 0
        expected = 0 if index >= read.next_index else 1 + num_hedges
        assert waiting[id(read), index] == expected, f"request {index} of {len(read.ranges)} is lost or doubled"
    settings, stopped = read.settings, sum(seconds for _, seconds in process.plan.stops)
    if not read.limiter.is_limited and read.progress_at < math.inf:
        in_all = sum(map(read.size, range(len(read.ranges)))) / SLOWEST
        bound = settings.deadline_seconds + settings.patience_seconds + LONGEST_PAUSE + in_all + 2 * WATCH_SECONDS
        answered = process.times.answered.get(read.store, 0.0) if read.refused else 0.0
        age = process.world.now - max(read.progress_at, answered)
        assert age <= bound + stopped, f"a read has waited for {age:.1f} s"


class OpenLimiter:
    """Limiter that admits all; its attributes are what a test sets."""

    def __init__(self) -> None:
        self.is_holding, self.num_ends = False, 0
        self.in_flight, self.answered_at, self.is_limited, self.is_throttling = 0, -math.inf, False, False

    def admits(self, read: Any, index: int) -> bool:
        self.in_flight += 1
        return True

    def holds(self, read: Any) -> bool:
        return self.is_holding

    def note_response(self, now: float) -> None:
        self.in_flight -= 1

    def note_refusal(self) -> None:
        self.in_flight -= 1

    def note_end(self) -> None:
        self.in_flight -= 1
        self.num_ends += 1


class BareSchedule:
    """Schedule of one read whose time and failures a test chooses; pauses are as long as they may be.

    Attributes:
        ended, errors, cancelled: reads that ended, their errors, and numbers of requests that were cancelled.
    """

    def __init__(self, settings: ReadSettings, *, limit: int = 64, num_ranges: int = 1, opening: bool = False) -> None:
        self.ended, self.cancelled, self.limiter = list[Any](), list[int](), OpenLimiter()
        self.errors = list[BaseException | None]()
        self.times, self.now = StoreTimes(print), 0.0
        self.schedule = RequestSchedule(limit, self, self.times, lambda low, high: high, HedgeTimer())
        ranges = [(1 << 30, (1 << 30) + 10)] * num_ranges
        self.read = Read("memory://b/k", "memory://b", ranges, settings, opening, False)
        self.schedule.submit(self.read, self.limiter, 0.0)

    def send(self) -> list[int]:
        """Return the numbers of the requests that may be sent now."""
        return [request[0] for request in iter(lambda: self.schedule.next(self.now), None)]

    def wait(self) -> list[int]:
        """Let time pass until a request is sent; return the numbers of those that are sent then."""
        while not (numbers := self.send()):
            self.now = self.schedule.wake_at
            self.schedule.pass_time(self.now)
        return numbers

    def fail(self, number: int, error: Exception, retry_after: float = 0.0) -> None:
        self.schedule.failed(number, Failure(error, retry_after), self.now)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def end(self, read: Any, error: BaseException | None) -> None:
        self.ended.append(read)
        self.errors.append(error)

    def log(self, read: Any, index: int, num_tries: int, seconds: float, status: str, response: Any) -> None:
        raise AssertionError("this read is not logged")
