"""Trainers that take batches through read-ahead windows, and threads that read groups from a store, in virtual time.

    Trainer ─ request ─► ReadAheadWindow ─ begin ─► Threads ─ read ─► Store: samples, an error, late, or never
            ◄── take ───                 ◄─ arrive ─

The orders are those of real samplers. A batch is checked against the oracle: a sample is a function of its number. What
`ReadAheadQueue` does in threads, `Trainer` does in events; windows, sizes and predictions are the real ones.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simulation.world import World

from binidx.errors import CancelledReadError
from binidx.loader.dataset_protocols import Batch
from binidx.loader.prediction import Prediction
from binidx.loader.readahead_window import BatchGroup, ReadAheadWindow, WindowSize
from binidx.loader.samplers import PretrainingSampler

GROUPS_IN_FLIGHT, SAMPLES_IN_GROUP, MIN_WINDOW, LOCAL_BATCHES = 4, 64, 2, 64
"""As the module says; not imported, so that another number there fails here."""

STOP_SECONDS = 0.1
"""Longest time from the collection of an iteration to the token's being carried out."""


@dataclass(frozen=True)
class Fault:
    """Time in which reads fail, hang, are late or come from memory, or in which the process is throttled or fills."""

    begin: float
    end: float
    kind: str  # "fail", "hang", "slow", "memory", "throttled", "filling"


@dataclass
class Store:
    """Samples, a function of their number, and the time and outcome of reads.

    Attributes:
        seconds: of a read, which vary by half.
        bad: samples whose reads always fail.
        sample_bytes: size of a sample, by its number.
    """

    world: World
    seconds: float = 0.03
    faults: Sequence[Fault] = ()
    bad: frozenset[int] = frozenset()
    sample_bytes: Callable[[int], int] = lambda number: 100
    fetches: int = 0

    def has(self, kind: str) -> bool:
        return any(fault.begin <= self.world.now < fault.end for fault in self.faults if fault.kind == kind)

    def latency(self) -> float | None:
        """Return how long a read that begins now takes; None: until it is cancelled, or the fault ends."""
        if self.has("hang"):
            return None
        if self.has("memory"):
            return 1e-5
        self.fetches += 1
        return self.seconds * (0.75 + self.world.random.random() / 2) * (20 if self.has("slow") else 1)

    def error(self, numbers: Sequence[int]) -> Exception | None:
        """Return the error of a read that ends now."""
        if bad := [number for number in numbers if number in self.bad]:
            return ValueError(f"sample {bad[0]} is bad")
        return OSError(f"samples {numbers[0]} to {numbers[-1]}: no answer") if self.has("fail") else None

    def samples(self, numbers: Sequence[int]) -> list[int]:
        return [3 * number + 1 for number in numbers]

    def num_bytes(self, batch: Batch) -> int:
        return sum(map(self.sample_bytes, batch))


class Group(BatchGroup):
    """Group in a queue, in its pause, being read, or read."""

    def __init__(self, threads: Threads, batches: Sequence[Batch], pause: float) -> None:
        super().__init__(batches)
        self.threads, self.batches, self.pause = threads, batches, pause
        self.state, self.is_cancelled, self.is_hurried, self.num_taken = "queued", False, False, 0
        self.waiter: Callable[[], object] | None = None

    def take(self) -> Any:
        self.num_taken += 1
        return super().take()

    def hurry(self) -> None:
        self.is_hurried = True
        self.threads.hurry(self)

    def cancel(self) -> None:
        assert not self.is_cancelled or self.threads.is_ended, "cancelled twice"
        self.is_cancelled = True
        self.threads.cancel(self)


class Threads:
    """Threads of one window: each takes the next group, pauses, and reads it.

    Args:
        is_deaf: whether reads end in their time although they are cancelled.
    """

    def __init__(self, world: World, name: str, store: Store, *, is_deaf: bool) -> None:
        self.world, self.name, self.store, self.is_deaf = world, name, store, is_deaf
        self.queue, self.groups, self.num_busy, self.is_ended = deque[Group](), list[Group](), 0, False
        self.on_begin: Callable[[Group], object] = lambda group: None

    def begin(self, batches: Sequence[Batch], pause: float) -> Group:
        group = Group(self, [*batches], pause)
        assert not self.is_ended, "a group is begun for an iteration that is gone"
        self.groups.append(group)
        self.on_begin(group)
        self.queue.append(group)
        self.world.later(0.0, self.name, "thread", self.pump)
        return group

    def pump(self) -> str | None:
        if not self.queue or self.num_busy == GROUPS_IN_FLIGHT:
            return None
        group = self.queue.popleft()
        self.num_busy += 1
        group.state = "paused"
        self.world.later(0.0 if group.is_hurried else group.pause, self.name, "pause ends", self.start, group)
        return f"takes {group.batches}"

    def start(self, group: Group) -> str | None:
        if group.state != "paused":
            return None
        group.state = "reading"
        if group.is_cancelled:
            return self.finish(group)
        seconds = self.store.latency()
        if seconds is None:
            seconds = max(fault.end for fault in self.store.faults if fault.kind == "hang") - self.world.now + 0.001
        self.world.later(seconds, self.name, "answer", self.finish, group)
        return f"reads {group.batches}"

    def finish(self, group: Group) -> str | None:
        if group.state != "reading":
            return None
        group.state = "read"
        self.num_busy -= 1
        error = CancelledReadError("cancelled") if group.is_cancelled else self.store.error(group.samples)
        group.arrive(None if error else self.store.samples(group.samples), *filter(None, [error]))
        if group.waiter is not None:
            self.world.later(0.0, self.name, "wake", group.waiter)
        self.world.later(0.0, self.name, "thread", self.pump)
        return repr(error) if error else "samples"

    def hurry(self, group: Group) -> None:
        if group.state == "paused":
            self.world.later(0.0, self.name, "hurried", self.start, group)

    def cancel(self, group: Group) -> None:
        self.hurry(group)
        if group.state == "reading" and not self.is_deaf:
            self.world.later(0.0, self.name, "cancelled", self.finish, group)


@dataclass
class Pace:
    """How a trainer takes batches: seconds of a step, and what it does at random before one, by its share.

    Attributes:
        foreign, skip, interrupt: shares of steps before which it requests a batch of another order, leaves one out, or
            stops waiting for a batch and goes on at the next.
    """

    seconds: float = 0.005
    foreign: float = 0.0
    skip: float = 0.0
    interrupt: float = 0.0


class Trainer:
    """One iteration of a loader's worker: the batches that it requests, and its window.

    Args:
        start: sampler in its state before the first batch.
        batches: what the trainer requests; None: the batches of the sampler. A forked child goes on in the middle.
        budget_bytes, fixed, in_groups: as of `WindowSize` and `ReadAheadWindow`.
        num_batches: batches of all workers after which it ends.
    """

    def __init__(
        self,
        world: World,
        name: str,
        store: Store,
        start: PretrainingSampler,
        *,
        batches: Sequence[Batch] | None = None,
        worker: int = 0,
        num_workers: int = 1,
        pace: Pace | None = None,
        budget_bytes: int = 100_000,
        fixed: int | None = None,
        in_groups: bool = True,
        is_deaf: bool = False,
        num_batches: int = 400,
    ) -> None:
        self.world, self.name, self.store, self.pace = world, name, store, pace or Pace()
        own = [*itertools.islice(copy.copy(start), num_batches)][worker::num_workers] if batches is None else batches
        self.order, self.place, self.budget_bytes, self.fixed = own, 0, budget_bytes, fixed
        self.places = {tuple(batch): place for place, batch in enumerate(own)}
        self.threads = Threads(world, name, store, is_deaf=is_deaf)
        self.threads.on_begin = self.check_begin
        self.size = WindowSize(fixed, budget_bytes)
        self.conditions = (lambda: store.has("throttled")), (lambda: store.has("filling"))
        prediction = Prediction(start, worker, num_workers) if num_workers > 1 else Prediction(start)
        self.window = ReadAheadWindow(prediction, self.size, self.threads.begin, *self.conditions, in_groups=in_groups)
        self.in_groups, self.is_over, self.stopped_at = in_groups, False, float("inf")
        self.requested: Batch | None = None
        self.group: Group | None = None
        self.waits_since = float("inf")
        self.num_in_memory = 0
        self.in_order, self.is_child = 0, batches is not None  # requests in order since the last surprise
        self.largest = 0
        self.fetches = -1
        self.outcomes: list[tuple[Batch, str]] = []
        self.waits: list[float] = []
        self.served_at: list[float] = []
        world.invariants.append(self.check)
        world.later(world.random.random() * 0.01, name, "step", self.step)

    # What the trainer does

    def step(self) -> str | None:
        if self.is_over or self.requested is not None:
            return None
        draw = self.world.random.random()
        if draw < self.pace.foreign and self.order:  # a child that is forked after the last batch has none
            self.in_order = -1
            return self.request([number + 10**6 for number in self.order[0]])
        if draw < self.pace.foreign + self.pace.skip and self.place + 1 < len(self.order):
            self.place, self.in_order = self.place + 1, -1
        if self.place == len(self.order):
            self.is_over = True
            return "ends"
        self.place += 1
        return self.request(self.order[self.place - 1])

    def request(self, batch: Batch) -> str:
        self.requested, self.waits_since = batch, self.world.now
        self.num_in_memory = self.num_in_memory + 1 if self.fetches == self.store.fetches else 0
        self.fetches = self.store.fetches
        self.in_order += 1
        self.group = self.window.request(batch, self.store.fetches)
        if self.in_order >= 2 and not self.is_child:
            assert self.window.is_followed or self.threads.is_ended, f"{batch} follows, and is not read ahead"
        if self.group is None:
            is_local = self.num_in_memory >= LOCAL_BATCHES
            assert is_local or not self.window.is_followed, "not read ahead, after few batches from memory"
            self.read_alone()
        elif not self.group.is_read and not self.store.faults and self.place + self.size.batches < len(self.order):
            held = sum(group.num_batches for group in self.window.groups)
            assert self.size.batches - held < max(1, self.size.batches // 4), "the trainer waits, and there is room"
        if self.group is None:
            pass
        elif self.group.is_read:
            self.arrived()
        else:
            self.group.waiter = self.arrived
            if self.world.random.random() < self.pace.interrupt:
                self.world.later(self.store.seconds / 2, self.name, "interrupt", self.interrupt, self.group)
        return f"requests {batch}"

    def interrupt(self, group: Group) -> str | None:
        if self.requested is None or self.group is not group or group.is_read:
            return None
        group.waiter, self.requested, self.waits_since, self.in_order = None, None, float("inf"), -1
        self.world.later(self.pace.seconds, self.name, "step", self.step)
        return "waits no more"

    def read_alone(self) -> None:
        assert self.group is None or len(self.group.batches) > 1, "a batch is read again"
        seconds = self.store.latency()
        if seconds is None:
            seconds = max(fault.end for fault in self.store.faults if fault.kind == "hang") - self.world.now + 0.001
        assert self.requested is not None
        self.world.later(seconds, self.name, "read", self.read, self.requested)

    def read(self, batch: Batch) -> str | None:
        if self.requested != batch:
            return None
        error = self.store.error(batch)
        return self.deliver(batch, None if error else self.store.samples(batch), error)

    def arrived(self) -> str | None:
        if self.requested is None or self.group is None:
            return None
        batch, samples, error = self.requested, None, None
        try:
            samples = self.window.take()
        except Exception as caught:
            error = caught
            assert len(self.group.batches) == 1, "an error of a group is not that of a batch"
        if samples is None and error is None:
            self.read_alone()
            return "reads alone"
        return self.deliver(batch, samples, error)

    def deliver(self, batch: Batch, samples: Any, error: BaseException | None) -> str:
        assert self.requested == batch
        self.requested = None
        self.waits.append(self.world.now - self.waits_since)
        self.waits_since = float("inf")
        self.world.later(self.pace.seconds, self.name, "step", self.step)
        if error is not None:
            self.outcomes.append((batch, type(error).__name__))
            assert isinstance(error, CancelledReadError) or self.concerns(error, batch), f"{error} at {batch}"
            return f"error {error}"
        assert samples == self.store.samples(batch), f"{batch}: found {samples}"
        is_measured = self.group is None or self.group.next_batch is not None or self.size.is_fixed
        num_bytes = self.store.num_bytes(batch)
        self.largest = max(self.largest, 0 if is_measured else num_bytes)
        self.window.serve(batch, 0 if is_measured else num_bytes)
        self.outcomes.append((batch, "served"))
        self.served_at.append(self.world.now)
        return f"has {batch}"

    def concerns(self, error: BaseException, batch: Batch) -> bool:
        return str(error) == f"samples {batch[0]} to {batch[-1]}: no answer" or str(error) in {
            f"sample {number} is bad" for number in batch
        }

    def abandon(self, seconds: float = STOP_SECONDS) -> str:
        """The iterator is collected: a token is carried out within some time."""
        self.is_over, self.requested = True, None
        self.world.later(seconds * self.world.random.random(), self.name, "token", self.stop)
        return "is collected"

    def stop(self) -> str:
        """At the end of the process, or of the iterator."""
        self.window.stop()
        self.threads.is_ended, self.stopped_at = True, self.world.now
        return "stops"

    # What must hold

    def pending(self) -> list[Batch]:
        """Batches of the groups in the window that were not requested, in their order."""
        return [batch for group in self.window.groups for batch in group.batches[group.num_taken :]]

    def check_begin(self, group: Group) -> None:
        """Check a group that is begun."""
        others = [*self.window.groups]
        num_batches = sum(len(own.batches) for own in [*others, group])
        samples, size = sum(map(len, group.batches)), len(group.batches)
        assert size == 1 or (self.in_groups and samples <= SAMPLES_IN_GROUP), "too large a group"
        if self.store.has("throttled"):
            assert size == 1, "more than a batch while throttled"
            assert all(own.is_read for own in others), "two reads while throttled"
        if self.store.has("filling"):
            assert num_batches == 1, "more than a batch while a filling ends soon"
        if self.fixed is None:
            assert self.num_in_memory < LOCAL_BATCHES, "read ahead from memory"
        held = sum(self.store.num_bytes(batch) for own in [*others, group] for batch in own.batches)
        most = max(map(self.store.num_bytes, itertools.chain.from_iterable(own.batches for own in [*others, group])))
        known = max(self.largest, 1)
        allowed = max(self.budget_bytes, MIN_WINDOW * known) * max(known, most)  # known times as many
        is_within = held * known <= allowed or num_batches == 1
        assert num_batches <= self.fixed if self.fixed is not None else is_within, "budget"
        assert group.pause == 0.0 or all(own.is_read for own in others), "a pause while the trainer may wait"

    def check(self) -> None:
        """Check the iteration after an event."""
        threads, window = self.threads, self.window
        reading = [group for group in threads.groups if group.state == "reading"]
        assert threads.num_busy <= GROUPS_IN_FLIGHT, "too many reads"
        if self.requested is not None and self.group is not None and not self.group.is_read:
            assert window.groups[0] is self.group, "another group than the requested one is first"
            assert self.group.next_batch == self.requested, "another batch than the requested one is next"
            assert not self.group.is_cancelled or threads.is_ended, "the trainer waits for a cancelled read"
            assert self.group.is_hurried, "the trainer waits for a pause"
        for group in threads.groups if not threads.is_ended else ():
            if group not in window.groups:
                assert group.is_cancelled != (group.num_taken == len(group.batches)), "neither used nor dropped"
        if self.world.now > self.stopped_at and not threads.is_deaf:
            assert not reading, "reads for an iteration that is gone"
        if pending := self.pending():
            positions = [self.places[tuple(batch)] for batch in pending if tuple(batch) in self.places]
            assert positions == [*range(positions[0], positions[0] + len(positions))] if positions else True, "order"
        threads.groups = [group for group in threads.groups if group in window.groups or group.state != "read"]
