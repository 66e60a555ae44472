"""Agreement of the ranks of a run: a build succeeds on all ranks, or raises on all.

    enter ─ an error is the outcome already ─────────────────────────────────────────────► raise
      └ work ─ raises ─ its error is the outcome, unless there is one ───────────────────► raise
          └ finished; as the last of all ranks ─ "ok" is the outcome, unless there is one
              └ wait ─ the outcome is "ok" ──────────────────────────────────────────────► succeed
                    ├ the outcome is an error ───────────────────────────────────────────► raise
                    └ 10 s, all that entered have finished, and some have never entered ─► succeed, without outcome

Under torch.distributed, the ranks exchange these keys through the key-value store of the process group, which needs no
collective and no GPU, so that a rank can learn of an error at any time:

    outcome            "ok"; or the name and traceback of the first rank that fails. It never changes
    entered            number of ranks that entered the build
    finished           number of ranks whose work succeeded
    informed           number of ranks that have read the outcome, or left without it; a failed rank, and rank 0, whose
                       process may hold the store, wait for the others before they leave
    heartbeat/{rank}   changes from before the rank enters the build; "left" afterwards

An error wins: every rank in the build raises, even if its own work succeeded. A rank that raises since another process
failed hands on the error as it is, without a name and a traceback of its own. A rank that never enters is not waited
for. Without torch.distributed only the build locks of the indices carry errors.

Beside the work a thread polls the outcome. With every third poll it sends a heartbeat, and looks at that of the next
rank in the build, which counts as dead when it has stayed the same for 30 s. Of a pause in which the watching rank did
not run itself, or waited for the store, 6 s count: when all ranks are stopped and go on, none is dead.

Cost: two requests to the store a second and rank; two more every three seconds for each rank between this one and the
next in the build. Waiting ranks send 20,000 a second together.

Source: ours. In Megatron Core rank 0 builds while the others wait in `torch.distributed.barrier()`; if one rank raises,
the others wait until the process group times out.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from binidx.dataset.torch_bridge import GroupStore, group_store
from binidx.errors import PeerError, trim_traceback
from binidx.index.cache.build_lock import Checks
from binidx.storage import effects
from binidx.storage.effects import Call, Now, Steps, run

POLL_SECONDS, POLLS_PER_HEARTBEAT = 1.0, 3

HEARTBEAT_TIMEOUT_SECONDS = 30.0
"""Time without a heartbeat after which a rank counts as failed: its process, its machine or its network."""

ABSENT_SECONDS = 10.0
"""Time for which finished ranks wait for ranks that never entered. Only errors of those ranks are lost."""

MAX_STORE_FAILURES = 3
"""Failures of the store in a row after which it is gone: a single one may be a moment of its network."""

INFORM_SECONDS = 5.0
"""Time for which a rank waits until the others have read the outcome, since its process may hold the store."""

FIRST_PAUSE_SECONDS, PAUSE_FRACTION = 0.002, 32
"""Pause between polls of a waiting rank: a 32nd of the time waited, at least 2 ms."""

MAX_POLLS_PER_SECOND = 20_000
"""Polls by all waiting ranks together: the store is one thread of one process."""

OK, LEFT = "ok", "left"

SILENCE = "killed, or does not run: a hung file system?"
"""Reasons of a silent rank: a page fault on a mount that does not respond stops all threads if it holds the GIL."""

STORE_GONE = "the store of the process group does not answer: its process is dead, or has left"

ABSENT_WARNING = (
    "{} of {} ranks have not entered build(); continuing without them, their errors will not be raised here. Call "
    "build() on every rank; is_built_on_rank selects the ranks that need datasets"
)

Result = TypeVar("Result")

_build_numbers = itertools.count()


def agree_on_outcome(work: Callable[[Checks, str], Result]) -> Result:
    """Call a function that succeeds on all ranks, or raises on all; just call it without torch.distributed.

    Every rank must enter, equally often. It is no barrier: a rank that enters late finds the outcome of the others.

    Args:
        work: called with checks, to be called while it waits: they raise once another rank has failed. And with the
            name under which it may call `rank_comparison.compare_with_ranks`.

    Raises:
        PeerError: another rank failed or died.
    """
    name = f"build/{next(_build_numbers)}"
    group = group_store(f"binidx/{name}")
    if group is None:
        return work((), name)
    participant = Participant(*group, name_rank(group[1]))
    return run(participant.agree(lambda: work((lambda exact: run(participant.check(exact)),), name)))


class Agreement:
    """State of a build as one rank knows it, and the decisions that follow from it: a machine, without a clock.

    Args:
        size: number of ranks.

    Attributes:
        outcome: of the build, once this rank knows it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.outcome: str | None = None
        self._neighbour, self._looked, self._silent_seconds = LEFT, 0.0, 0.0

    def check(self) -> None:
        """Raise PeerError if the outcome is an error."""
        if self.outcome not in (None, OK):
            raise PeerError(self.outcome)

    def look(self, heartbeat: str, now: float) -> str | None:
        """Return why the next rank counts as failed, if it does, given its heartbeat, or "left" without one."""
        # Not the whole time: this rank may have been stopped with the other one, or have waited for the store.
        seconds = min(now - self._looked, 2 * POLLS_PER_HEARTBEAT * POLL_SECONDS)
        self._silent_seconds = self._silent_seconds + seconds if heartbeat == self._neighbour else 0.0
        self._neighbour, self._looked = heartbeat, now
        if heartbeat == LEFT or self._silent_seconds <= HEARTBEAT_TIMEOUT_SECONDS:
            return None
        silent = f"no heartbeat for {self._silent_seconds:.0f} s"
        return f"{heartbeat.partition(' ')[2]}: {silent}; {SILENCE}"

    def is_over_without_absent(self, entered: int, finished: int) -> bool:
        """Return whether only ranks that have not entered have not finished."""
        return entered <= finished and entered < self.size

    def must_inform(self, rank: int, waited: float) -> bool:
        """Return whether a rank that has waited for some seconds waits on until the others have read the outcome."""
        return self.outcome is not None and (rank == 0 or self.outcome != OK) and waited <= INFORM_SECONDS

    def pause_seconds(self, waited: float) -> float:
        """Return the pause before the next poll of a rank that has waited for some seconds."""
        return min(max(waited / PAUSE_FRACTION, self.size / MAX_POLLS_PER_SECOND, FIRST_PAUSE_SECONDS), POLL_SECONDS)


class Participant:
    """This rank in the agreement on one build: the shell of `Agreement`.

    Args:
        store: key-value store for this build alone, which carries out the requests of a process one after another.
        rank: of this process.
        size: number of ranks.
        name: of this rank in messages.
    """

    def __init__(self, store: GroupStore, rank: int, size: int, name: str) -> None:
        self.store, self.rank, self.name, self.agreement, self._num_entered = store, rank, name, Agreement(size), 0

    def agree(self, work: Callable[[], Result]) -> Steps[Result]:
        """Do the work and wait for the other ranks; return its result, or report its error to them."""
        left = yield from effects.NewSignal()
        seconds, thread = POLL_SECONDS + INFORM_SECONDS, None
        try:
            thread = yield from effects.Start(self._accompany(left), "binidx-ranks")
            with store_errors(self.name):
                yield from self._send_heartbeat()
                self._num_entered = 1
                yield from Call(self.store.add, ("entered", 1))
            yield from self.check(exact=True)
            result = yield from Call(work)
            self.agreement.check()  # the store may have gone since its outcome was read
            with store_errors(self.name):
                yield from self._await_outcome()
            self.agreement.check()
            return result
        except BaseException as error:
            seconds = seconds if isinstance(error, Exception) else 0.0  # after Ctrl-C
            yield from self._report(error)
            raise
        finally:
            yield from effects.SetSignal(left)
            if thread is not None:  # else it ends by the signal
                yield from effects.WaitForTask(thread, seconds)

    def check(self, exact: bool) -> Steps[None]:
        """Raise PeerError if another rank has failed.

        Args:
            exact: ask the process group's store now; else use the outcome that the thread last read there.
        """
        if exact:
            with store_errors(self.name):
                yield from self._poll()
        self.agreement.check()

    def _poll(self) -> Steps[None]:
        """Read the outcome from the store if there is one, unless this rank has read it already."""
        if self.agreement.outcome is None and (yield from Call(self.store.check, (["outcome"],))):
            self.agreement.outcome = (yield from Call(self.store.get, ("outcome",))).decode()

    def _set_outcome(self, outcome: str) -> Steps[None]:
        """Set the outcome, unless there is one already."""
        self.agreement.outcome = (yield from Call(self.store.compare_set, ("outcome", "", outcome))).decode()

    def _await_outcome(self) -> Steps[None]:
        """Wait for the outcome; stop if all ranks that entered have finished, and the others do not enter in time."""
        add, size = self.store.add, self.agreement.size
        if (yield from Call(add, ("finished", 1))) == size:
            yield from self._set_outcome(OK)
        started = yield from Now()
        while self.agreement.outcome is None:
            waited = (yield from Now()) - started
            if waited > ABSENT_SECONDS:
                # In this order: all that had entered by the second count had finished by the first one. The other way
                # round, a rank that enters and finishes in between (this one was stopped) would stand for one at work.
                finished, entered = (yield from Call(add, ("finished", 0))), (yield from Call(add, ("entered", 0)))
                if self.agreement.is_over_without_absent(entered, finished):
                    yield from effects.Log(__name__, 30, ABSENT_WARNING.format(size - entered, size))  # a warning
                    return
            yield from effects.Sleep(self.agreement.pause_seconds(waited))
            yield from self._poll()

    def _report(self, error: BaseException) -> Steps[None]:
        """Set the outcome to this error, unless there is an outcome already."""
        trim_traceback(error)
        trace = "".join(traceback.format_exception(error)).rstrip()
        summary = "".join(traceback.format_exception_only(error)).partition("\n")[0]
        failure = f"{self.name} failed: {summary}; its traceback:\n\n{trace}"
        with contextlib.suppress(Exception):
            yield from self._set_outcome(str(error) if isinstance(error, PeerError) else failure)

    # The thread

    def _accompany(self, left: Any) -> Steps[None]:
        """Poll the outcome, and watch the next rank, until this one leaves; then wait for the others if necessary."""
        try:
            add, numbers, num_failures = self.store.add, itertools.count(1), 0
            while self.agreement.outcome is None and not (yield from effects.WaitForSignal(left, POLL_SECONDS)):
                try:
                    yield from self._poll()
                    if next(numbers) % POLLS_PER_HEARTBEAT == 0:
                        yield from self._send_heartbeat()
                        yield from self._watch()
                    num_failures = 0
                except Exception:
                    num_failures += 1
                    if num_failures == MAX_STORE_FAILURES:
                        raise
            yield from Call(add, ("informed", self._num_entered))  # 0: interrupted before, so no rank waits for it
            yield from Call(self.store.set, (f"heartbeat/{self.rank}", LEFT))
            started, waited = (yield from Now()), 0.0
            while self.agreement.must_inform(self.rank, waited):
                # In this order: a rank that enters late, and is informed at once, stands for none that is at work.
                if (yield from Call(add, ("informed", 0))) >= (yield from Call(add, ("entered", 0))):
                    break
                yield from effects.Sleep(self.agreement.pause_seconds(waited))
                waited = (yield from Now()) - started
        except Exception as error:
            self.agreement.outcome = self.agreement.outcome or f"{self.name}: {STORE_GONE}: {error}"

    def _send_heartbeat(self) -> Steps[None]:
        yield from Call(self.store.set, (f"heartbeat/{self.rank}", f"{(yield from Now())} {self.name}"))

    def _watch(self) -> Steps[None]:
        """Report the next rank in the build as failed if its heartbeat has stopped."""
        heartbeat, size = LEFT, self.agreement.size
        for step in range(1, size):
            key = f"heartbeat/{(self.rank + step) % size}"
            if (yield from Call(self.store.check, ([key],))):
                heartbeat = (yield from Call(self.store.get, (key,))).decode()
                if heartbeat != LEFT:
                    break
        if (death := self.agreement.look(heartbeat, (yield from Now()))) is not None:
            yield from self._set_outcome(death)


def name_rank(rank: int) -> str:
    """Return the name of this process, which is a rank of the group, in messages."""
    return f"rank {rank} ({effects.ProcessName().perform()})"


@contextlib.contextmanager
def store_errors(name: str) -> Iterator[None]:
    """Convert errors of the process group's store in the block to PeerError, with the name of this rank."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"{name}: {STORE_GONE}: {error}") from error
