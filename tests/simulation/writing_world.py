"""Recorders of losses in processes that end in any way, the thread that writes for them, and a store, in virtual time.

    Trainer ─ record, close ─► LossRecorder ─ add ─► TaskSchedule ─► thread ─ WriteObject ─► Objects
            ─ collected, full ─────────────── token ──►

Recorder, schedule and files are the real ones; `Thread` does in effects what `Background` does in a thread. Each loss
is a number of its own, so a file shows whose rows it has, and the result which of several losses counts.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from simulation.processes import Node, Objects, Process, Signal, Task
from simulation.world import World

from binidx.errors import StorageError
from binidx.format.arrow import pa, parquet
from binidx.loader import losses
from binidx.loader.losses import LossRecorder, read_losses
from binidx.storage.effects import Effect, Sleep, Steps, WaitForSignal, WriteObject
from binidx.storage.task_schedule import TaskSchedule

EXIT_SECONDS = 10.0
"""As the module says; not imported, so that another number there fails here."""
FOLDER = "s3://run/losses"
SAMPLES = 2
"""Samples of a call of `record`."""


@dataclass(frozen=True)
class NextToken(Effect["Callable[[], object] | None"]):
    """Wait for a token at most for some seconds."""

    thread: Any
    seconds: float


@dataclass(frozen=True)
class Acquire(Effect[None]):
    """Wait for a lock."""

    lock: Any


@dataclass
class Lock:
    """Lock of the rows of a recorder, between the threads of a process."""

    is_held: bool = False
    waiting: deque[Callable[[], None]] = field(default_factory=deque)

    def release(self) -> None:
        self.is_held = bool(self.waiting)
        if self.waiting:
            self.waiting.popleft()()


@dataclass(eq=False)
class Row:
    """Recorded row: its process, position and time, the time of its token, and whether it may be missing."""

    value: float
    process: Writer
    position: int
    at: float
    hurried_at: float = inf
    is_excused: bool = False


class Tokens:
    """Queue of a thread's tokens."""

    def __init__(self) -> None:
        self.tokens, self.signal = deque[Callable[[], object]](), Signal()

    def put(self, token: Callable[[], object]) -> None:
        self.tokens.append(token)
        self.signal.set()


class Thread:
    """Thread of a process, as `Background` has it."""

    def __init__(self, process: Writer) -> None:
        self.process, self.tokens, self.schedule = process, Tokens(), TaskSchedule()
        self.keys = dict[int, Any]()
        self.sleeps_until = -1.0
        process.start(self.work(), "thread")

    def add(self, owner: object, task: Callable[[], object], seconds: float) -> None:
        key = self.keys[id(owner)] = functools.partial(bool)
        self.schedule.add(key, task, seconds, self.process.world.now)
        self.tokens.put(bool)

    def work(self) -> Steps[None]:
        world, schedule = self.process.world, self.schedule
        while True:
            token = yield from NextToken(self, schedule.wait(world.now))
            if token is not None:
                schedule.receive(token, world.now)
            if (scheduled := schedule.next(world.now)) is None:
                continue
            try:
                yield from self.process.call(scheduled.task)
            except StorageError:
                schedule.fail(scheduled, world.now)
                self.process.check_failures()


class Writer(Process):
    """Process of a rank that records losses, step by step, and closes, collects and makes recorders."""

    def __init__(self, writing: Writing, rank: int, step: int, seconds: float) -> None:
        number = next(writing.numbers)
        super().__init__(writing.world, Node(f"{number}"), writing.objects)
        self.writing, self.number, self.rank, self.step, self.seconds = writing, number, rank, step, seconds
        self.offset = 0.0
        self.thread: Thread | None = None
        self.locks, self.rows = dict[int, Lock](), list[Row]()
        self.failed_at, self.paused, self.is_leaving, self.num_tasks = -1.0, 0.0, False, 0
        self.begun_at, self.num_failed, self.num_hurried = self.world.now, 0, 0
        self.performers |= {NextToken: self._next_token, Acquire: self._acquire, WriteObject: self._write}
        self.on_effect.append(self._check)
        self.recorder = self.new_recorder()
        writing.processes.append(self)
        writing.alive.append(self)

    def own(self, recorder: Any) -> LossRecorder:
        recorder._process, recorder._background = (lambda: self.number), self._background
        recorder._clock = lambda: (
            10**18 + int((self.world.now + self.offset) * 1e9) // self.writing.tick * self.writing.tick
        )
        return recorder

    def new_recorder(self) -> LossRecorder:
        self.num_tasks += 1
        label = self.rank + self.world.random.choice([0, 10])
        return self.own(LossRecorder(FOLDER, label, self.writing.most_rows, self.seconds))

    def _background(self, name: str, *, is_early: bool) -> Thread:
        self.thread = self.thread or Thread(self)
        return self.thread

    def fork(self) -> Writer:
        """Return a child, which has a copy of the recorder and its rows."""
        child = Writer(self.writing, self.rank, self.step + 1000, self.seconds)
        copied: Any = object.__new__(LossRecorder)
        copied.__dict__.update(self.recorder.__dict__)
        copied.rank = child.rank = self.rank + 20 * child.number  # no two writers of a time have one number
        copied._rows = [*getattr(self.recorder, "_rows", [])]
        if hasattr(copied, "_write"):
            folder, rank, _, lock = copied._write.args
            copied._write = functools.partial(losses._write, folder, rank, copied._rows, lock)
        child.recorder = child.own(copied)
        return child

    # What the trainer does

    def record(self) -> None:
        position = self.step * 8 + self.rank % 10 * SAMPLES
        values = [float(next(self.writing.values)) for _ in range(SAMPLES)]
        for place, value in enumerate(values):
            row = self.writing.rows[value] = Row(value, self, position + place, self.world.now)
            self.writing.pending.append(row)
            self.rows.append(row)
        self.recorder.record(position, values)
        if self.recorder._num_samples % self.writing.most_rows < SAMPLES:
            self.hurry()
        self.step += 1

    def hurry(self) -> None:
        """Let all rows be due, since the recorder's file is full, or its finalizer left a token."""
        self.num_hurried += 1
        for row in self.writing.pending:
            if row.process is self:
                row.hurried_at = min(row.hurried_at, self.world.now)

    def close(self) -> Steps[None]:
        if self.recorder._pid != self.number:
            self.recorder.close()
            return
        own, task = [*self.rows], self.recorder._write
        try:
            yield from self.call(task)
        except StorageError:
            return
        if self.writing.is_alone(self):
            assert all(self.writing.is_stored(row) for row in own), "close returns before the rows are written"

    def collect(self) -> None:
        """Collect the recorder; its finalizer leaves a token. The next one replays some steps."""
        if self.thread is not None and (key := self.thread.keys.pop(id(self.recorder), None)) is not None:
            self.thread.tokens.put(key)
            self.hurry()
        self.writing.graveyard.append(self.recorder)  # its id is not used again
        self.recorder = self.new_recorder()
        self.step = max(0, self.step - self.world.random.randrange(6))

    def flood(self, until: float) -> None:
        """Let a token come again as soon as it was carried out."""

        def again() -> Steps[None]:
            yield from Sleep(0.05)
            if self.world.now < until and self.thread is not None:
                self.thread.tokens.put(again)

        self._background("", is_early=True).tokens.put(again)

    def leave(self) -> Steps[None]:
        """End the process, as the interpreter does: twice all tasks, with a last row between."""
        self.is_leaving, began = True, self.world.now
        busy, stopped = self.writing.busy_seconds(self), max(0.0, self.stopped_until - began)
        for last in (False, True):
            if self.thread is not None:
                schedule, done = self.thread.schedule, Signal()
                self.thread.tokens.put(functools.partial(self._exit, schedule, done))
                seconds = schedule.exit_wait(self.world.now)
                is_done = yield from WaitForSignal(done, seconds)
                waited = self.world.now - began
                assert waited <= EXIT_SECONDS + stopped + 0.1, f"an exit waits {waited} s"
                if not is_done:
                    assert waited >= EXIT_SECONDS - 0.1, "an exit waits less than it may"
                    hangs = self.writing.is_hanging(began - 60, self.world.now)
                    assert hangs or busy >= EXIT_SECONDS, "an exit waits for tasks that are done"
                if not is_done or self.failed_at >= began:
                    self.excuse(0.0)
                    continue
                kept = [task for task in schedule.tasks.values() if task.seconds < inf]
                assert len(kept) <= 1, "tasks of recorders that are gone stay"
                lost = [row.value for row in self.rows if row.at < began and not self.writing.is_stored(row)]
                assert not lost, f"an exit loses {lost}"
            if not last and self.world.random.random() < 0.5:
                self.record()
        yield from self.vanish(self.kill)

    def vanish(self, end: Callable[[], object]) -> Steps[None]:
        """End the process in an event of its own."""
        self.world.later(0.0, self.name, "ends", end)
        yield from Sleep(1e9)

    def _exit(self, schedule: TaskSchedule, done: Signal) -> None:
        schedule.exit(done.set, self.world.now)

    def check_failures(self) -> None:
        """Check that a task that fails is carried out again only in its time, or for a token."""
        self.num_failed += 1
        rounds = (self.world.now - self.begun_at) / self.seconds + 3
        assert self.num_failed <= self.num_tasks * rounds + 2 * self.num_hurried, "a failing task runs all the time"

    def excuse(self, since: float) -> None:
        """Let rows that were recorded since a time be missing."""
        for row in self.rows:
            row.is_excused |= row.at >= since and not self.writing.is_stored(row)

    def die(self) -> str:
        """Kill the process: the rows of the stated time may be missing."""
        if self.is_alive:
            self.writing.check()
            self.excuse(0.0 if self.is_leaving else self.safe_until())
            self.kill()
        return "is killed"

    def safe_until(self) -> float:
        """Return the time before which all recorded rows must be stored."""
        late = self.seconds + self.writing.busy_seconds(self) + self.paused
        last_failure = self.failed_at if self.failed_at >= 0 else -1.0
        if last_failure >= self.world.now - late or self.writing.is_hanging(self.world.now - late - 30, self.world.now):
            return 0.0
        return self.world.now - late

    # How effects are carried out

    def call(self, task: Any) -> Steps[None]:
        """Carry out a task of the thread, or of the trainer."""
        if not (isinstance(task, functools.partial) and task.func is losses._write):
            result = task()
            if isinstance(result, Generator):
                yield from result
            return
        lock = self.locks.setdefault(id(task.args[2]), Lock())
        yield from Acquire(lock)
        try:
            yield from losses._write.__wrapped__(*task.args)  # type: ignore[attr-defined]
        except StorageError:
            self.failed_at = self.world.now
            raise
        finally:
            lock.release()

    def _next_token(self, effect: NextToken, task: Task) -> None:
        queue, thread = effect.thread.tokens, effect.thread

        def take(_: bool = False) -> Any:
            thread.sleeps_until = -1.0
            return queue.tokens.popleft() if queue.tokens else None

        if queue.tokens or effect.seconds == 0.0:
            return self.answer(task, take())
        queue.signal = Signal()
        thread.sleeps_until = self.world.now + effect.seconds
        return self._wait(queue.signal, effect.seconds, task, take)

    def _acquire(self, effect: Acquire, task: Task) -> None:
        if effect.lock.is_held:
            effect.lock.waiting.append(lambda: self.answer(task, None))
        else:
            effect.lock.is_held = True
            self.answer(task, None)

    def _write(self, effect: WriteObject, task: Task) -> None:
        hangs = [end for begin, end in self.writing.hangs if begin <= self.world.now < end]
        seconds = hangs[0] - self.world.now if hangs else 0.0
        self.world.later(seconds, self.name, "sends", self._request, effect, task)

    def _check(self, effect: Effect[Any], task: Task) -> None:
        """Check what a file has: rows of this process, each once."""
        if isinstance(effect, WriteObject):
            values = self.writing.values_of(effect.data)
            assert values, "a file without rows"
            assert len({*values}) == len(values), "a row is in a file twice"
            assert all(self.writing.rows[value].process is self for value in values), "a row of another process"


class Writing:
    """World of a seed: processes of one or two ranks and their children, and a store with faults."""

    def __init__(self, seed: int, seconds: float = 100.0) -> None:
        self.world = world = World(seed)
        draw = self.draw = world.random
        self.objects = Objects(world, slow_share=draw.choice([0.0, 0.0, 0.3, 1.0]))
        self.objects.lost_share = draw.choice([0.0, 0.0, 0.1])
        self.most_rows = draw.choice([4, 16, 1 << 16])
        self.tick = draw.choice([1, 10**9])
        self.numbers, self.values = itertools.count(1), itertools.count(1)
        self.pending = list[Row]()
        self.rows, self.files = dict[float, Row](), dict[bytes, list[float]]()
        self.alive = list[Writer]()
        self.processes, self.graveyard = list[Writer](), list[Any]()
        self.hangs: list[tuple[float, float]] = []
        for _ in range(draw.randrange(4)):
            begin = draw.uniform(0, seconds)
            window = (begin, begin + draw.uniform(2, 30))
            draw.choice([self.objects.outages, self.hangs]).append(window)
        if draw.random() < 0.1:
            world.later(draw.uniform(0, seconds), "store", "refuses for good", self.refuse)
        self.until, self.pace = seconds, draw.choice([0.3, 2.0, 10.0])
        for rank in range(draw.choice([1, 2])):
            self.begin(rank, 0)
        world.invariants.append(self.check_sleep)
        world.later(5.0, "world", "check", self.check_later)
        world.run(until=seconds + 60.0)
        for process in self.processes:
            assert not process.is_alive, f"{process.name} does not end"

    def refuse(self) -> None:
        self.objects.can_write = False

    def begin(self, rank: int, step: int) -> None:
        process = Writer(self, rank, step, self.draw.choice([0.5, 5.0, 20.0]))
        process.start(self.train(process), "trainer")

    def train(self, process: Writer) -> Steps[None]:
        """Let a trainer record until it ends, is killed, or its time is over; then the run is resumed."""
        draw, world = self.draw, self.world
        ends = min(self.until, world.now + draw.uniform(5, 100)) if draw.random() < 0.6 else self.until
        if draw.random() < 0.4:
            world.later(ends - world.now - 0.5, process.name, "SIGKILL", self.kill, process)
        while world.now < ends:
            yield from Sleep(self.pace * draw.uniform(0.1, 1.9))
            process.record()
            chance = draw.random()
            if chance < 0.06:
                yield from process.close()
            elif chance < 0.12:
                process.collect()
                yield from Sleep(2.0)
            elif chance < 0.15:
                child = process.fork()
                child.start(self.live(child), "child")
            elif chance < 0.17:
                process.flood(world.now + draw.uniform(1, 40))
            elif chance < 0.20:
                process.offset = -draw.random()  # a clock that is set back by a second at most
            elif chance < 0.26:
                process.step = max(0, process.step - draw.randrange(6))
            elif chance < 0.28:
                seconds = draw.uniform(0.1, 8)
                process.paused += seconds
                process.stop(seconds)
        self.resume_later(process)
        yield from process.leave()

    def live(self, child: Writer) -> Steps[None]:
        """Let a forked child close, record, collect and end."""
        for _ in range(self.draw.randrange(5)):
            yield from Sleep(self.draw.uniform(0, 3))
            if (chance := self.draw.random()) < 0.3:
                yield from child.close()
            elif chance < 0.7:
                child.record()
            elif chance < 0.8:
                child.collect()
                yield from Sleep(2.0)
        if self.draw.random() < 0.3:
            yield from child.vanish(child.die)
        yield from child.leave()

    def kill(self, process: Writer) -> str | None:
        if not process.is_alive or process.is_leaving:
            return None
        self.resume_later(process)
        return process.die()

    def resume_later(self, process: Writer) -> None:
        if self.world.now + 30 < self.until:
            step = max(0, process.step - self.draw.randrange(20))
            self.world.later(self.draw.uniform(15, 20), "launcher", "resumes", self.begin, process.rank, step)

    # What holds

    def is_hanging(self, begin: float, end: float) -> bool:
        return any(start < end and begin < stop for start, stop in self.hangs)

    def is_alone(self, process: Writer) -> bool:
        return process.num_tasks == 1 and process.failed_at < 0

    def busy_seconds(self, process: Writer) -> float:
        """Return an upper bound of the seconds in which the thread of a process carries out what is due."""
        write = self.objects.round_trip * 1.2 * (100.0 if self.objects.slow_share else 1.0) + 0.1
        return 2.0 * (process.num_tasks + 1) * write + 1.0

    def values_of(self, data: Any) -> list[float]:
        key = bytes(data)
        if key not in self.files:
            self.files[key] = (
                parquet.ParquetFile(pa.BufferReader(key)).read(["loss"], use_threads=False)["loss"].to_pylist()
            )
        return self.files[key]

    def stored(self) -> set[float]:
        if getattr(self, "_seen", None) != len(self.objects.data):
            self._seen = len(self.objects.data)
            self._stored = {value for data in self.objects.data.values() for value in self.values_of(data)}
        return self._stored

    def is_stored(self, row: Row) -> bool:
        return row.value in self.stored()

    def check_sleep(self) -> None:
        self.alive = [process for process in self.alive if process.is_alive]
        for process in self.alive:
            thread = process.thread
            if thread is not None and thread.sleeps_until > 0 and not thread.tokens.tokens:
                due = self.world.now + thread.schedule.wait(self.world.now)
                assert thread.sleeps_until <= due + 1e-6, "the thread sleeps while a task is due"

    def check_later(self) -> None:
        self.check()
        if self.world.now < self.until:
            self.world.later(5.0, "world", "check", self.check_later)

    def check(self) -> None:
        """Check that the rows of the processes that live are stored in time."""
        stored, safe = self.stored(), dict[Writer, float]()
        self.pending = [row for row in self.pending if row.value not in stored and row.process.is_alive]
        for row in self.pending:
            process = row.process
            if not process.is_leaving:
                safe[process] = safe[process] if process in safe else process.safe_until()
                assert row.at >= safe[process], f"{row.value} of {row.at} is not written"
                late = safe[process] + process.seconds
                assert not safe[process] or row.hurried_at >= late, f"{row.value} of {row.at} is not written at once"

    def check_result(self, folder: Path) -> None:
        """Check the result that a reader of the folder gets."""
        stored = self.stored()
        for value, row in self.rows.items():
            assert value in stored or row.is_excused, f"{value} of {row.at} by {row.process.name} is lost"
        for uri, data in self.objects.data.items():
            (folder / uri.rpartition("/")[2]).write_bytes(data)
        newest = {self.rows[value].position: value for value in sorted(stored)}
        if newest:
            positions, values = read_losses(folder)
            assert dict(zip(positions.tolist(), values.tolist(), strict=True)) == newest, "a stale file counts"


def play(seed: int, folder: Path) -> Writing:
    """Run the world of a seed."""
    writing = Writing(seed)
    try:
        writing.check_result(folder)
    except AssertionError as error:
        error.add_note("\n".join([f"seed {seed}", *writing.world.trace]))
        raise
    return writing
