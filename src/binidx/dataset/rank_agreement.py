"""The ranks of a build agree: all of them have what they asked for, or all of them raise.

Under torch.distributed, by the key-value store that its process group was made with: it is there whatever the backend
is, needs no GPU and no collective, so a rank can be told of an error wherever it is.

    over          "ok" by the last one that is done; or, by the first one that fails, who it is and its traceback
    entered       ranks that came
    done          ranks that have what they asked for
    told          ranks that know that it is over; who failed waits for them, and rank 0, with which the store may die
    beat/{rank}   grows while the rank is in here, and is "left" afterwards

An error wins: whoever is in here raises, even where his own work was done. Each rank watches the beat of the next one
that is in here: one that is killed says nothing, and is reported by the one before it. One that never comes is not
waited for. Nothing but this depends on it; without torch.distributed the claims of the indices carry errors alone.

Price: a request a second and rank to the store, and one more in three seconds.

Source: ours. In Megatron Core rank 0 builds and the rest wait in `torch.distributed.barrier()`; where one rank raises,
the others stay there until the process group times out.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator

from binidx.dataset.torch_bridge import Store, group_store
from binidx.errors import PeerError
from binidx.index.cache.build_lock import Checks

LOOK_SECONDS, BEAT_SECONDS = 1.0, 3.0


SILENT_SECONDS = 30.0


"""A rank that gave no sign for so long is dead: its process, its machine or its network."""


LATE_SECONDS = 10.0


"""So long those that are done wait for ranks that never came. All that is lost is that their errors stay unknown."""


TOLD_SECONDS = 5.0


"""So long one stays for the others to be told, since the store may live in its process."""


STORE_TRIES = 3


FIRST_PAUSE, PAUSE_PART = 0.002, 32


"""Between two questions whether it is over; it grows with the time waited, to a 32nd of it."""


ASKED_A_SECOND = 20_000


"""By all ranks together, of a store that is one thread of one process."""


OK, LEFT = "ok", "left"


STORE_GONE = "the store of the process group does not answer; the process that has it is dead, or has left"


logger = logging.getLogger(__name__)


_builds = itertools.count()


@contextlib.contextmanager
def agree_on_outcome() -> Iterator[Checks]:
    """The work of all ranks in the block succeeds on all, or raises on all; a plain block where there are no others.

    Every rank is to come here, as often as the others. It is no barrier: who comes late finds what is there.

    Yields:
        Checks for the work to call while it waits: they raise once another rank has failed.

    Raises:
        PeerError: another rank failed or died.
    """
    group = group_store(f"binidx/build/{next(_builds)}")
    if group is None:
        yield ()
        return
    with Company(*group).joined() as company:
        yield ((company.check, company.ask),)


class Company:
    """This rank among the others.

    Args:
        store: for this block alone.
        rank: of this process.
        size: ranks there are.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.failure: str | None = None
        self._over, self._left = False, threading.Event()
        self._beats = 0
        self._neighbour, self._neighbour_changed = "", time.monotonic()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="binidx-ranks", daemon=True)

    @contextlib.contextmanager
    def joined(self) -> Iterator[Company]:
        """Be one of them for the block, unless one has failed already; at its end wait for the others, or tell them
        what this one raised."""
        try:
            self._enter()
            yield self
            self._agree()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._leave()

    def check(self) -> None:
        """Raise PeerError if another rank failed, as far as the thread knows."""
        if self.failure is not None:
            raise PeerError(self.failure)

    def ask(self) -> None:
        """Raise PeerError if another rank has failed by now; a request."""
        with asking_the_store():
            self.look()
        self.check()

    def look(self) -> None:
        """See whether it is over, and how."""
        with self._lock:
            if self._over or not self.store.check(["over"]):
                return
            said = self.store.get("over").decode()
            self.failure = None if said == OK else said
            self._over = True
            self.store.add("told", 1)

    def _enter(self) -> None:
        with asking_the_store():
            self.store.add("entered", 1)
            self._beat()
        self.ask()
        self._thread.start()

    def _agree(self) -> None:
        with asking_the_store():
            if self.store.add("done", 1) == self.size:
                self._end(OK)
            self._wait()
            if self._over and self.rank == 0:
                self._wait_for_told()

    def _wait(self) -> None:
        """Until it is over, or those that are here are done and the rest does not come."""
        began = time.monotonic()
        while True:
            self.ask()
            waited = time.monotonic() - began
            if self._over or (waited > LATE_SECONDS and self._over_without_the_late()):
                return
            time.sleep(agreement_pause_seconds(waited, self.size))

    def _wait_for_told(self) -> None:
        began = time.monotonic()
        while self.store.add("told", 0) < self.store.add("entered", 0) and time.monotonic() - began < TOLD_SECONDS:
            time.sleep(0.02)

    def _over_without_the_late(self) -> bool:
        entered, done = self.store.add("entered", 0), self.store.add("done", 0)
        if done < entered or entered == self.size:
            return False
        logger.warning(
            "%d of %d ranks have not come to build their datasets; not waited for: an error of theirs will not be "
            "known here. Call build() on every rank; is_built_on_rank says who needs datasets",
            self.size - entered,
            self.size,
        )
        return True

    def _fail(self, error: BaseException) -> None:
        """Tell the others, unless they told us."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        what = "".join(traceback.format_exception_only(error)).partition("\n")[0]
        with contextlib.suppress(Exception):
            self._end(f"{self._name()} failed: {what}; what it raised:\n\n{trace}")
            self.look()
            if isinstance(error, Exception):  # somebody who presses ctrl-C waits for nobody
                self._wait_for_told()

    def _end(self, how: str) -> bool:
        """The first one that ends it says how; whether that is this one."""
        return self.store.compare_set("over", "", how).decode() == how

    def _leave(self) -> None:
        self._left.set()
        if self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)
        with contextlib.suppress(Exception):
            self.store.set(f"beat/{self.rank}", LEFT)

    def _name(self) -> str:
        return f"rank {self.rank} ({socket.gethostname()}, process {os.getpid()})"

    # The thread

    def _run(self) -> None:
        beaten, failed = time.monotonic(), 0
        while not self._left.wait(LOOK_SECONDS):
            try:
                self.look()
                if time.monotonic() - beaten >= BEAT_SECONDS:
                    beaten = time.monotonic()
                    self._beat()
                    self._watch_neighbour()
                failed = 0
            except Exception as error:
                failed += 1
                if failed == STORE_TRIES:
                    self.failure = f"{STORE_GONE}: {error}"
                    return

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(f"beat/{self.rank}", f"{self._beats} {self._name()}")

    def _watch_neighbour(self) -> None:
        """Report the next rank that is in here, when it is silent."""
        beat = next(self._beats_of_others(), "")
        if beat != self._neighbour:
            self._neighbour, self._neighbour_changed = beat, time.monotonic()
        silent = time.monotonic() - self._neighbour_changed
        if beat and silent > SILENT_SECONDS:
            name = beat.partition(" ")[2]
            if self._end(f"{name} has not been heard of for {silent:.0f} s: killed, or its machine is gone"):
                self.store.add("told", 1)  # in its place

    def _beats_of_others(self) -> Iterator[str]:
        """Those that are in here, from the next one on."""
        for step in range(1, self.size):
            key = f"beat/{(self.rank + step) % self.size}"
            beat = self.store.get(key).decode() if self.store.check([key]) else LEFT
            if beat != LEFT:
                yield beat


def agreement_pause_seconds(waited_seconds: float, size: int) -> float:
    """Until the next question whether it is over, of a rank that has waited so long, one of so many."""
    return min(max(waited_seconds / PAUSE_PART, size / ASKED_A_SECOND, FIRST_PAUSE), LOOK_SECONDS)


@contextlib.contextmanager
def asking_the_store() -> Iterator[None]:
    """What the store of the group raises in the block, as what it means to a rank."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"{STORE_GONE}: {error}") from error
