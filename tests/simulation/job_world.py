"""Worlds of jobs in parts: drivers, their pools of workers, a store, and faults, all drawn from one seed.

    world = JobWorld(seed)
    world.play()                    # faults until FAULTS_SECONDS; then each command is given until it ends for good
    world.check_end()

A command is what a user gives, and gives again after a kill or a passing error: a whole job or a shard of it, two
calls at once, another job in the same folder. Each call is a driver process with a pool: `local` (one lost worker
breaks all of it), `cluster` (a worker is lost alone, and others come; its scheduler may be out) or `own` (as local, but
the caller's: it stays broken). The shells are those of `binidx.jobs`; `make`, `finish` and the pools are simulated.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from simulation.processes import Node, Objects, Process, Task
from simulation.world import World

from binidx import errors
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Shard, Workers
from binidx.jobs.progress import SilentWatcher
from binidx.jobs.stages import JobStage, finish_once_steps, run_stages_steps
from binidx.jobs.task_queue import ATTEMPTS, JobEngine, TaskFailure
from binidx.storage import effects
from binidx.storage.effects import (
    AtOnce,
    DeleteObject,
    Effect,
    PutIfAbsent,
    ReadObject,
    Sleep,
    Steps,
    WaitForFutures,
    WriteObject,
)
from binidx.storage.location import Location

FAULTS_SECONDS = 400.0
"""Time in which there are faults."""
GRACE_SECONDS = 5.0
"""Longest time for which a worker goes on when its driver is gone: `engines.GRACE_SECONDS`."""
NO_WORKER_SECONDS, LOST_SECONDS, POLL_SECONDS = 120.0, 30.0, 10.0
END_SECONDS = FAULTS_SECONDS + 600.0
"""Time at which each command must have ended: a call may wait for workers, and the next one makes all parts."""
OUTPUT = Location("s3://bucket/out")


@dataclass(frozen=True)
class Die(Effect[None]):
    """The worker of this shell is killed."""


@dataclass(frozen=True)
class Begin(Effect[None]):
    """A part is made from here on."""

    part: SimulatedPart


@dataclass(frozen=True)
class SimulatedPart:
    """Part of a stage of a job.

    Attributes:
        content: bytes of its object.
        fate: what its attempts end in, in their order: "kill", "transient" or "permanent"; then it is made.
        reads: objects of the stage before.
    """

    name: str
    content: bytes
    seconds: float
    fate: tuple[str, ...] = ()
    reads: tuple[Location, ...] = ()
    size: int = 1

    def __str__(self) -> str:
        return self.name


class Folder(JobFolder):
    """Folder whose parts have one object each."""

    def object(self, part: SimulatedPart) -> Location:
        return self.location / f"{part.name}.bin"

    def files(self, part: SimulatedPart) -> list[Location]:
        return [self.file(part), self.object(part)]


@dataclass(frozen=True)
class WorkersOfWorld(Workers):
    """Workers whose engine is simulated."""

    simulated: JobEngine | None = None

    def open(self, **options: Any) -> JobEngine:
        assert self.simulated is not None
        return self.simulated


class SimulatedJob:
    """Job of one or two stages, and the shell that is one call of it, as that of `preprocess`."""

    def __init__(self, name: str, parts: list[SimulatedPart], num_joined: int, world: JobWorld) -> None:
        self.name, self.first, self.num_joined, self.world = name, parts, num_joined, world
        options = {"replaceable": True} if world.is_replaceable else {}
        self.folder = Folder(OUTPUT + "-parts", {"job": name}, **options)
        self.manifest = f"manifest of {name}".encode()

    def second(self, results: dict[str, Any] | None = None) -> list[SimulatedPart]:
        """Return the parts of the second stage, each of which reads all of the first."""
        assert results is None or {*results} == {part.name for part in self.first}, "planned before its turn"
        digest = hashlib.blake2b(b"".join(part.content for part in self.first), digest_size=8).hexdigest()
        reads = tuple(map(self.folder.object, self.first))
        numbers = range(self.num_joined)
        return [SimulatedPart(f"{self.name}-2-{n}", f"{digest} {n};".encode(), 1.0, (), reads) for n in numbers]

    @property
    def parts(self) -> list[SimulatedPart]:
        return [*self.first, *self.second()]

    @property
    def last(self) -> list[SimulatedPart]:
        return self.second() or self.first

    @property
    def oracle(self) -> bytes:
        """Bytes of the finished job."""
        return b"".join(part.content for part in self.last)

    def make(self, part: SimulatedPart) -> Steps[dict[str, Any]]:
        """Make a part in a worker."""
        yield from Begin(part)
        fates = self.world.fates[part.name]
        fate = fates.popleft() if fates else ""
        if fate:
            fates.extend([fate] * (fate == part.fate[-1] and len(part.fate) >= ATTEMPTS))  # for ever
        yield from Sleep(part.seconds * 0.7)
        if fate == "kill":
            yield from Die()
        if fate == "permanent":
            raise errors.FormatError(f"{part}: bad line")
        if fate == "transient":
            error = errors.StorageError(f"{part}: 503 SlowDown")
            error.__cause__ = TimeoutError()
            raise error
        for data in (yield from AtOnce([ReadObject(location) for location in part.reads])):
            if data is None:
                raise errors.ObjectNotFoundError(f"{part}: a part of the stage before is gone")
        yield from WriteObject(self.folder.object(part), part.content, durable=True)
        return {"digest": hashlib.blake2b(part.content, digest_size=8).hexdigest()}

    def is_finished(self) -> Steps[bool]:
        return (yield from ReadObject(OUTPUT + ".manifest")) == self.manifest

    def check_free(self) -> Steps[None]:
        if (yield from ReadObject(OUTPUT + ".manifest")) is not None:
            raise errors.ObjectExistsError(f"{OUTPUT}: taken")

    def finish(self) -> Steps[None]:
        """Join the parts; the manifest is the last object."""
        found = yield from AtOnce([ReadObject(self.folder.object(part)) for part in self.last])
        if None in found:
            raise errors.ObjectNotFoundError(f"{OUTPUT}: a part is gone")
        if self.world.objects.is_faulty and self.world.now < FAULTS_SECONDS and self.world.num_events % 3 == 0:
            raise errors.ObjectChangedError(f"{OUTPUT}: a worker has written a part again, the same bytes")
        yield from WriteObject(OUTPUT + ".bin", b"".join(filter(None, found)), durable=True)
        yield from WriteObject(OUTPUT + ".manifest", self.manifest, durable=True)

    def remove_parts_of_finished(self) -> Steps[bool]:
        """Remove the parts if the job is finished; return whether it is."""
        is_finished = yield from self.is_finished()
        if is_finished and (yield from self.folder.holds_parts_steps()):
            yield from self.folder.remove_steps(self.parts)
        return is_finished

    def call(self, workers: Workers, overwrite: bool) -> Steps[str]:
        """Do the job, or this call's share of it, as far as it is not done."""
        if (yield from self.remove_parts_of_finished()):
            return "finished"
        try:
            yield from self.folder.claim_steps(overwrite=overwrite, parts=self.parts, check_free=self.check_free)
        except errors.ObjectExistsError:  # maybe another call of this job has finished it since
            if (yield from self.remove_parts_of_finished()):
                return "finished"
            raise
        stages = [JobStage("first", self.make, lambda _: self.first)]
        stages += [JobStage("second", self.make, self.second)] if self.num_joined else []
        results, missing = yield from run_stages_steps(stages, self.folder, workers, SilentWatcher())
        for stage, result in zip((self.first, self.second()), results, strict=False):
            assert {*result} <= {part.name for part in stage}, "a part of another stage"
        if not missing:
            ended = list[bool]()

            def finish() -> Steps[None]:
                yield from self.finish()
                ended.append(True)

            is_own = yield from finish_once_steps(finish, self.is_finished)
            assert is_own == bool(ended), "a call takes the work of another one for its own, or its own for another's"
        return "finished" if (yield from self.remove_parts_of_finished()) else "parts of others are missing"


@dataclass
class Call:
    """A call of a command: its driver, and what its tasks did.

    Attributes:
        begun: number of attempts of each part.
        own: failures of each part that nothing else has caused.
        losses: pools that were lost while a task ran.
        windows: most running tasks after each count of workers; the last one may be on its way to the driver.
        submitted: names of the parts that this pool has got.
        spared: tasks that the window had room for when the driver last waited for some; 0 after a pool was lost.
    """

    driver: Process
    pool: Pool | None = None
    begun: Counter[str] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    windows: list[int] = field(default_factory=list)
    submitted: set[str] = field(default_factory=set)
    spared: int = 0
    num_refused: int = 0
    has_ended: bool = False

    def waits(self, effect: Effect[Any], task: Task) -> None:
        """Note how much of the window is used while the driver waits for tasks."""
        if isinstance(effect, WaitForFutures) and self.pool is not None and self.pool.futures & {*effect.futures}:
            self.spared = 0 if self.losses or self.num_refused else min(self.windows[-2:]) - len(effect.futures)


class Pool:
    """Executor of a call: a queue, and workers that each carry out one task at a time."""

    def __init__(self, world: JobWorld, call: Call, kind: str, size: int) -> None:
        self.world, self.call, self.kind, self.size = world, call, kind, size
        self.is_broken = self.is_closed = False
        self.queue = deque[tuple[Any, SimulatedPart, Future[Any]]]()
        self.busy = dict[Process, tuple[SimulatedPart, Future[Any]]]()
        self.idle = deque[Process]()
        self.futures = set[Future[Any]]()
        for _ in range(size):
            self._hire()

    @property
    def workers(self) -> list[Process]:
        return [*self.busy, *self.idle]

    def submit(self, function: Any, registrations: Any, work: Any, part: SimulatedPart) -> Future[Any]:
        if self.is_broken:
            self.call.num_refused += 1
            raise BrokenExecutor("broken")
        outstanding = len(self.busy) + len(self.queue)
        assert outstanding < max(self.call.windows[-2:]), f"{outstanding} tasks are submitted and not done"
        if part.name not in self.call.submitted:
            assert self.call.spared <= 0, f"{part} waits, and {self.call.spared} more tasks could run"
        self.call.submitted.add(part.name)
        future = Future[Any]()
        self.futures.add(future)
        work = replace(work, folder=copy.copy(work.folder))  # as pickle does
        assert not work.folder.identity, "workers get the identity of the job"
        self.queue.append((work, part, future))
        self._assign()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert cancel_futures
        assert wait or self.is_broken, "the workers of a pool are not waited for, and it is not lost"
        self.is_closed = True
        self.queue.clear()
        for worker in self.workers:
            self.world.later(self.world.random.uniform(0, GRACE_SECONDS), worker.name, "grace is over", worker.kill)

    def kill(self, worker: Process, own: bool) -> None:
        """Kill a worker; `own`: its task does."""
        if not worker.is_alive or self.is_closed:
            return worker.kill()
        part, future = self.busy.get(worker, (None, None))
        if self.kind != "cluster" and len(self.busy) == 1 and not self.queue:
            # The driver learns that the pool was lost while one task ran, not which worker was: it may have been idle.
            [(part, _)], own = self.busy.values(), True
        if part is not None:
            self.call.own[part.name] += own or self.kind == "cluster"
        if self.kind != "cluster":
            return self._break()
        worker.kill()
        self.busy.pop(worker, None)
        if worker in self.idle:
            self.idle.remove(worker)
        if future is not None:
            self._fail(future, RuntimeError("the worker crashed"))
        seconds = self.world.random.uniform(1, 60)
        if self.world.now < FAULTS_SECONDS and self.world.random.random() < 0.3:
            seconds = FAULTS_SECONDS - self.world.now
        self.world.later(seconds, self.call.driver.name, "a worker joins", self._hire)
        return None

    def _break(self) -> None:
        """Lose all workers and tasks, which the driver learns one after the other."""
        self.is_broken = True
        running = [(part, future) for _, part, future in self.queue] + [*self.busy.values()]
        for part, future in running:
            self.call.losses[part.name] += 1
            self._fail(future, BrokenExecutor("a process was terminated abruptly"))
        for worker in self.workers:
            worker.kill()
        self.queue.clear()
        self.busy.clear()
        self.idle.clear()

    def _fail(self, future: Future[Any], error: Exception) -> None:
        seconds = self.world.random.choice([0.0, 0.05]) * self.world.random.random()
        self.world.later(seconds, self.call.driver.name, "a task is lost", self._set_error, future, error)

    def _set_error(self, future: Future[Any], error: Exception) -> None:
        """Let a task fail, unless the driver has cancelled it in the queue: executors of Python skip such a future."""
        if not future.cancelled():
            future.set_exception(error)

    def _hire(self) -> None:
        if self.is_closed or self.is_broken or not self.call.driver.is_alive:
            return
        self.world.num_workers += 1
        worker = self.world.process(f"worker {self.world.num_workers}")
        worker.performers[Die] = lambda effect, task: self.kill(worker, own=True)
        worker.performers[Begin] = lambda effect, task: self._begin(worker, effect.part, task)
        self.idle.append(worker)
        self._assign()

    def _assign(self) -> None:
        while self.idle and self.queue:
            work, part, future = self.queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            worker = self.idle.popleft()
            self.busy[worker] = part, future
            self.call.begun[part.name] += 1
            most = ATTEMPTS + self.call.losses[part.name]
            assert self.call.begun[part.name] <= most, f"{part} is attempted more than {most} times"
            self.world.recorded[worker] = self.world.record_of(part) in self.world.objects.data
            task = worker.start(work.steps(part), part.name)
            task.ended.waiting.append(lambda w=worker, t=task: self._end(w, t))

    def _end(self, worker: Process, task: Task) -> None:
        part, future = self.busy.pop(worker)
        assert task.error is None, f"{part}: {task.error!r} is not a TaskFailure"
        if isinstance(task.result, TaskFailure):
            self.call.own[part.name] += 1
        self.idle.append(worker)
        future.set_result(task.result)
        if not self.is_closed:
            self._assign()

    def _begin(self, worker: Process, part: SimulatedPart, task: Task) -> None:
        has_record = self.world.record_of(part) in self.world.objects.data
        assert not (has_record and self.world.recorded[worker]), f"{part} has a record, and is made again"
        worker.answer(task, None)


class PartObjects(Objects):
    """Store that checks what happens to the objects of parts."""

    world: JobWorld
    is_faulty = False

    def apply(self, effect: Effect[Any]) -> Any:
        world = self.world
        if not isinstance(effect, effects.ListObjects):
            uri: str = effect.location.uri  # type: ignore[attr-defined]
            part = world.part_at.get(uri)
            if part is not None and isinstance(effect, WriteObject | PutIfAbsent):
                world.check_write(uri, part)
            if part is not None and isinstance(effect, DeleteObject):
                world.check_delete(uri, part)
        result = super().apply(effect)
        world.num_requests += 1
        for command in world.commands:
            command.request_arrived()
        return result


class Command:
    """Command of a user, who gives it again after a kill or a passing error.

    Attributes:
        outcome: result or error of its last call, if that is for good.
        end: time at which it is not given any more; for a user who gives up.
    """

    def __init__(
        self, world: JobWorld, job: SimulatedJob, kind: str, begin: float, shard: Shard | None = None, **options: Any
    ) -> None:
        self.world, self.job, self.kind, self.shard = world, job, kind, shard
        self.overwrite, self.end = options.get("overwrite", False), options.get("end", END_SECONDS)
        self.name = f"{job.name} {shard.index if shard else ''}".strip()
        self.outcome: str | BaseException | None = None
        self.call: Call | None = None
        self.num_calls, self.kill_at = 0, 0
        world.later(begin, self.name, "begin", self.begin)

    def begin(self) -> str | None:
        """Give the command."""
        world = self.world
        if world.now >= self.end:
            self.outcome = "given up"
            return None
        self.num_calls += 1
        call = self.call = Call(world.process(f"driver {self.name}", f"call {self.num_calls}"))
        engine = JobEngine(
            lambda: self.open(call),  # type: ignore[return-value, arg-type]
            lambda pool: self.count(call, pool),  # type: ignore[arg-type, return-value]
            owned=self.kind != "own",
            central=world.is_central,
            poll_seconds=POLL_SECONDS,
            no_worker_seconds=NO_WORKER_SECONDS,
            lost_seconds=LOST_SECONDS,
            pause=lambda failures: world.random.uniform(0, 0.1 * 2**failures),
        )
        workers = WorkersOfWorld(shard=self.shard, simulated=engine)
        task = call.driver.start(self.job.call(workers, self.overwrite), "call")
        task.ended.waiting.append(lambda: self.ended(call, task))
        call.driver.on_kill.append(lambda: self.killed(call))
        call.driver.on_effect.append(call.waits)
        if world.now < FAULTS_SECONDS and world.random.random() < world.kill_share:
            if world.random.random() < 0.5:
                self.kill_at = world.num_requests + world.random.randrange(1, 60)
            else:
                seconds = world.random.uniform(0, world.random.choice([1.0, 30.0]))
                world.later(seconds, self.name, "kill the driver", call.driver.kill)
        return None

    def request_arrived(self) -> None:
        """Kill the driver around a certain request."""
        if self.kill_at and self.world.num_requests >= self.kill_at and self.call is not None:
            self.kill_at = 0
            self.world.later(0.0, self.name, "kill the driver", self.call.driver.kill)

    def open(self, call: Call) -> Pool:
        """Return a pool; that of the caller stays the same."""
        if self.world.is_unreachable:
            raise errors.UnreachableError("the scheduler is gone")
        call.spared = 0
        if self.kind != "own" or call.pool is None:
            call.pool = Pool(self.world, call, self.kind, self.world.pool_size)
        return call.pool

    def count(self, call: Call, pool: Pool) -> Steps[int]:
        """Return the number of workers; the scheduler of a cluster may not answer."""
        yield from Sleep(0.02 * self.world.random.random())
        if self.kind == "cluster" and self.world.is_unreachable:
            if self.world.random.random() < 0.5 or not call.begun:
                raise errors.UnreachableError("the scheduler is gone")
            yield from Sleep(FAULTS_SECONDS + 1.0 - self.world.now)
        count = pool.size if self.kind != "cluster" else len(pool.workers)
        if count or not call.windows:
            call.windows.append(2 * max(1, count))
        return count

    def ended(self, call: Call, task: Task) -> None:
        """Note the outcome of a call, or give the command again."""
        world, error, call.has_ended = self.world, task.error, True
        if isinstance(error, errors.WorkerError) and f"failed {ATTEMPTS} times" in str(error):
            part = str(error).split("; ")[-1].split()[0]
            assert call.own[part] >= ATTEMPTS, f"{part} is blamed for losses of others: {call.own}"
        if isinstance(error, errors.UnreachableError):
            assert world.outages, f"{error!r}, and the scheduler was always there"
        if self.kind == "own" and call.pool is not None:
            assert all(future.cancelled() for *_, future in call.pool.queue), "the caller's executor goes on with tasks"
            call.pool.shutdown(cancel_futures=True)
        fates = {fate for part in self.job.parts for fate in part.fate}
        is_bad = any(len(part.fate) >= ATTEMPTS or "permanent" in part.fate for part in self.job.parts)
        if error is not None:
            assert isinstance(error, errors.BinidxError), repr(error)
            is_lost = world.objects.is_faulty or fates or self.kind == "cluster" or world.num_killed
            assert is_lost or world.scene != "alone", f"{error!r}, without a fault"
        is_final = isinstance(error, errors.FormatError | errors.ObjectExistsError) or (
            isinstance(error, errors.WorkerError | errors.StorageError) and is_bad and world.now > FAULTS_SECONDS
        )
        is_final = is_final and not got_no_response(error)
        if error is not None and not is_final:
            latest = FAULTS_SECONDS + NO_WORKER_SECONDS + LOST_SECONDS + POLL_SECONDS
            assert world.now < latest, f"{self.name}: {error!r}"
            return world.later(world.random.uniform(1, 20), self.name, "again", self.begin)
        if task.result == "parts of others are missing":
            assert self.shard is not None, task.result
            if world.now < END_SECONDS - 60:
                return world.later(world.random.uniform(10, 30), self.name, "again", self.begin)
        self.outcome = task.result if error is None else error
        return None

    def killed(self, call: Call) -> None:
        """Let the workers of a killed driver end in their time, and give the command again."""
        world = self.world
        if call.has_ended:
            return
        if call.pool is not None:
            call.pool.is_closed = True
            call.pool.queue.clear()
            for worker in call.pool.workers:
                world.later(world.random.uniform(0, GRACE_SECONDS), worker.name, "its driver is gone", worker.kill)
        world.later(world.random.choice([0.01, 1.0, 10.0]), self.name, "again", self.begin)


class JobWorld(World):
    """World of one seed.

    Attributes:
        fates: name of a part -> what its next attempts end in.
        outages: (begin, end) in which the scheduler of clusters is gone.
        common: parts of both jobs.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        draw = self.random
        self.objects = PartObjects(
            self, lost_share=draw.choice([0.0, 0.0, 0.02, 0.08]), slow_share=draw.choice([0.0, 0.0, 0.05])
        )
        self.objects.is_conditional = draw.random() < 0.85
        self.objects.outages = [self._span() for _ in range(draw.choice([0, 0, 1, 2]))]
        self.objects.is_faulty = bool(self.objects.lost_share or self.objects.outages)
        self.outages = [self._span() for _ in range(draw.choice([0, 1, 2]))]
        self.kill_share, self.pool_size = draw.choice([0.0, 0.5, 0.9]), draw.randrange(1, 5)
        self.is_central, self.is_replaceable = draw.random() < 0.5, draw.random() < 0.5
        self.late = set[str]()  # objects that a job wrote after it was replaced, which knows no names of them
        self.num_workers = self.num_requests = self.num_killed = 0
        self.fates, self.job_of = defaultdict[str, deque[str]](deque), dict[str, SimulatedJob]()
        self.part_at = dict[str, SimulatedPart]()
        self.recorded, self.processes = dict[Process, bool](), list[Process]()
        self.kind = draw.choice(["local", "cluster", "own"])
        self.jobs = [self._draw_job("a")]
        self.common: list[SimulatedPart] = []
        self.scene = draw.choice(["alone", "alone", "shards", "twice", "another", "overwrite"])
        self.commands = self._draw_commands()
        for _ in range(draw.choice([0, 1, 5, 20])):
            self.later(draw.uniform(0, FAULTS_SECONDS), "world", "kill a worker", self._kill_worker)

    def process(self, node: str, name: str = "process") -> Process:
        """Return a new process of a node."""
        self.processes.append(Process(self, Node(node), self.objects, name))
        return self.processes[-1]

    @property
    def is_unreachable(self) -> bool:
        return self.kind == "cluster" and any(begin <= self.now < end for begin, end in self.outages)

    @property
    def finished(self) -> list[Command]:
        return [command for command in self.commands if command.outcome == "finished"]

    def play(self) -> None:
        """Let faults happen, then all commands end; at last the first one is given once more."""
        self.later(FAULTS_SECONDS, "world", "faults end", self._end_faults)
        self.run(END_SECONDS)
        for command in self.commands:
            assert command.outcome is not None, f"{command.name} has not ended"
        self.run(END_SECONDS + 2 * GRACE_SECONDS)
        for command in self.finished[-1:]:
            again = Command(self, command.job, command.kind, 0.0, end=self.now + 1)
            self.run(self.now + 60.0)
            assert again.outcome == "finished", f"the same command again: {again.outcome!r}"

    def close(self) -> None:
        """End all processes: shells of Python that still yield when they are collected complain."""
        for process in self.processes:
            process.kill()

    def check_end(self) -> None:
        """Check what is left in the store at the end."""
        data = self.objects.data
        jobs = {command.job.name: command.job for command in self.finished}
        assert len(jobs) <= 1 + (self.scene == "overwrite"), f"several jobs have finished: {[*jobs]}"
        is_replaced = self.scene == "overwrite" and "b" not in jobs  # the other job has begun, and failed
        for job in [] if is_replaced else [*jobs.values()][-1:]:
            assert data[f"{OUTPUT}.bin"] == job.oracle, "other bytes than the oracle's"
            left = [uri for uri in data if uri.startswith(f"{OUTPUT}-parts/") and uri not in self.late]
            assert not left, f"parts are left: {left}"
        for command in self.commands:
            fates = [fate for part in command.job.parts for fate in part.fate[-1:] if len(part.fate) >= ATTEMPTS]
            if isinstance(command.outcome, errors.ObjectExistsError):
                assert self.scene == "another", command.outcome
            elif command.outcome not in ("finished", "given up"):
                assert fates or any("permanent" in part.fate for part in command.job.parts), repr(command.outcome)
                if command.outcome == "parts of others are missing" or got_no_response(command.outcome):
                    continue
                if command.kind == "own" and "BrokenExecutor" in str(command.outcome):
                    continue  # the caller's pool was broken by another part
                kinds = {"kill": errors.WorkerError, "transient": errors.StorageError}
                bad = any("permanent" in part.fate for part in command.job.parts)  # parts of the replaced job, too
                is_right = any(isinstance(command.outcome, kinds.get(fate, errors.FormatError)) for fate in fates)
                assert is_right or (bad and isinstance(command.outcome, errors.FormatError)), repr(command.outcome)

    def record_of(self, part: SimulatedPart) -> str:
        """Return the URI of a part's record."""
        return self.job_of[part.name].folder.file(part).uri

    def check_write(self, uri: str, part: SimulatedPart) -> None:
        """Check a write of an object of a part: its record is the last one, and its job has the folder."""
        job = self.job_of[part.name]
        if uri == self.record_of(part) and not self._is_late(job):
            assert job.folder.object(part).uri in self.objects.data, f"{part} has a record, and no object"
        self._check_folder(part, "written")
        if self.objects.data.get(job.folder.job_file.uri, job.folder.content) != job.folder.content:
            self.late.add(uri)

    def check_delete(self, uri: str, part: SimulatedPart) -> None:
        """Check a delete of an object of a part: its record is the first one."""
        job = self.job_of[part.name]
        if part in self.common:
            assert f"{OUTPUT}.manifest" in self.objects.data, f"{part} is of both jobs, and is removed"
        if uri == job.folder.object(part).uri and not self._is_late(job):
            assert self.record_of(part) not in self.objects.data, f"{part} has a record, and no object any more"
        self._check_folder(part, "removed")

    def _is_late(self, job: SimulatedJob) -> bool:
        """Return whether a job is finished: a second call may go on while the first one removes the parts."""
        return self.objects.data.get(f"{OUTPUT}.manifest") == job.manifest and self.scene in ("twice", "shards")

    def _check_folder(self, part: SimulatedPart, verb: str) -> None:
        """Check that the folder is not that of another job, or that this one may be replaced."""
        folder = self.job_of[part.name].folder
        owner = self.objects.data.get(folder.job_file.uri, folder.content)
        is_strict = self.scene == "another" and self.objects.is_conditional
        assert owner == folder.content or not is_strict, f"{part} is {verb}, and the folder is of {owner!r}"

    def _span(self) -> tuple[float, float]:
        begin = self.random.uniform(0, FAULTS_SECONDS)
        return begin, min(FAULTS_SECONDS, begin + self.random.choice([1.0, 20.0, 100.0]))

    def _draw_job(self, name: str, common: Sequence[SimulatedPart] = ()) -> SimulatedJob:
        draw = self.random
        parts = [*common]
        fate = draw.choice([(), (), (), ("kill",) * ATTEMPTS, ("transient",) * ATTEMPTS, ("permanent",)])
        bad = draw.randrange(40) if fate else -1
        for number in range(len(parts), len(parts) + draw.randrange(1, 9)):
            passing = draw.choice([(), (), (), ("transient",), ("transient",) * 3, ("kill",), ("kill", "transient")])
            content = f"{name} {number};".encode()
            own = fate if number == bad else passing
            parts.append(SimulatedPart(f"{name}-1-{number}", content, draw.choice([0.1, 1.0, 10.0]), own))
        job = SimulatedJob(name, parts, draw.choice([0, 0, 1, 3]), self)
        for part in job.parts:
            self.fates[part.name] = deque(part.fate)
            self.job_of[part.name] = job
            self.part_at |= {file.uri: part for file in job.folder.files(part)}
        return job

    def _draw_commands(self) -> list[Command]:
        draw, [job] = self.random, self.jobs
        begin = draw.uniform(0, 10)
        if self.scene == "shards":
            count = draw.randrange(2, 4)
            return [Command(self, job, self.kind, draw.uniform(0, 30), Shard(n, count)) for n in range(count)]
        if self.scene == "alone":
            return [Command(self, job, self.kind, begin)]
        if self.scene == "twice":
            return [Command(self, job, self.kind, begin), Command(self, job, self.kind, begin + draw.uniform(0, 20))]
        self.common = job.first[: draw.randrange(3)] if self.scene == "overwrite" else []
        self.jobs.append(other := self._draw_job("b", self.common))
        if self.scene == "another":
            self.is_replaceable = False
            for own in self.jobs:
                own.folder = Folder(own.folder.location, own.folder.identity)
            return [Command(self, job, self.kind, begin), Command(self, other, self.kind, draw.uniform(0, 200))]
        end = draw.uniform(5, 100)
        later = end + 200.0
        return [
            Command(self, job, self.kind, begin, end=end),
            Command(self, other, self.kind, later, overwrite=True),
        ]

    def _kill_worker(self) -> str | None:
        calls = [command.call for command in self.commands if command.call and command.call.driver.is_alive]
        pools = [call.pool for call in calls if call.pool and not call.pool.is_closed]
        workers = [(pool, worker) for pool in pools for worker in pool.workers]
        if not workers:
            return None
        pool, worker = self.random.choice(workers)
        self.num_killed += 1
        pool.kill(worker, own=False)
        return worker.name

    def _end_faults(self) -> None:
        self.objects.lost_share = self.objects.slow_share = 0.0


def got_no_response(error: object) -> bool:
    """Return whether an error is that of a request among faults, which got no response; then its command may end."""
    return isinstance(error, errors.StorageError) and any(
        text in str(error) for text in ("no response", "is lost", "no answer of the cluster")
    )


def play(seed: int) -> JobWorld:
    """Play the world of a seed, and check it."""
    world = JobWorld(seed)
    try:
        world.play()
        world.check_end()
    except AssertionError as error:
        error.add_note(f"seed {seed}: {world.scene}, {world.kind}")
        raise
    finally:
        world.close()
    return world
