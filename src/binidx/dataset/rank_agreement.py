"""Agreement of the ranks of a run: a build succeeds on all ranks, or raises on all.

Under torch.distributed, the ranks exchange these keys through the key-value store of the process group, which needs no
collective and no GPU, so that a rank can learn of an error at any time:

    outcome            "ok", set by the last rank that finishes; or the name and traceback of the first that fails
    entered            number of ranks that entered the build
    finished           number of ranks whose work succeeded
    informed           number of ranks that have read the outcome; a failed rank, and rank 0, whose process may hold the
                       store, wait for the others before they leave
    heartbeat/{rank}   changes while the rank is in the build; "left" afterwards

An error wins: every rank in the build raises, even if its own work succeeded. Each rank watches the heartbeat of the
next one, and reports it when it stops. A rank that never enters is not waited for. Without torch.distributed only the
build locks of the indices carry errors.

Cost: one request to the store per second and rank, and another every three seconds.

Source: ours. In Megatron Core rank 0 builds while the others wait in `torch.distributed.barrier()`; if one rank raises,
the others wait until the process group times out.
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

from binidx.dataset.torch_bridge import GroupStore, group_store
from binidx.errors import PeerError, trim_traceback
from binidx.index.cache.build_lock import Checks

POLL_SECONDS, HEARTBEAT_SECONDS = 1.0, 3.0

HEARTBEAT_TIMEOUT_SECONDS = 30.0
"""Time without a heartbeat after which a rank counts as failed: its process, its machine or its network."""

ABSENT_SECONDS = 10.0
"""Time for which finished ranks wait for ranks that never entered. Only errors of those ranks are lost."""

INFORM_SECONDS = 5.0
"""Time for which a rank waits until the others have read the outcome, since its process may hold the store."""

MAX_STORE_FAILURES = 3

FIRST_PAUSE_SECONDS, PAUSE_FRACTION = 0.002, 32
"""Pause between polls of the outcome: a 32nd of the time waited, at least 2 ms."""

MAX_POLLS_PER_SECOND = 20_000
"""Polls of the outcome by all ranks together: the store is one thread of one process."""

OK, LEFT = "ok", "left"

STORE_GONE = "the store of the process group does not answer: its process is dead, or has left"

logger = logging.getLogger(__name__)

_build_numbers = itertools.count()


@contextlib.contextmanager
def agree_on_outcome() -> Iterator[tuple[Checks, str]]:
    """Make the block succeed on all ranks, or raise on all; a plain block without torch.distributed.

    Every rank must enter, equally often. It is no barrier: a rank that enters late finds the outcome of the others.

    Yields:
        Checks, to be called while the block waits: they raise once another rank has failed. And the name under which
        the block may call `rank_comparison.compare_with_ranks`.

    Raises:
        PeerError: another rank failed or died.
    """
    name = f"build/{next(_build_numbers)}"
    group = group_store(f"binidx/{name}")
    if group is None:
        yield (), name
        return
    with Participant(*group).joined() as participant:
        yield (participant.check,), name


class Participant:
    """This rank in the agreement on one build.

    Args:
        store: key-value store for this build alone.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, store: GroupStore, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.outcome: str | None = None
        self._lock, self._left = threading.Lock(), threading.Event()
        self._neighbour, self._neighbour_changed = "", time.monotonic()
        self._thread = threading.Thread(target=self._run, name="binidx-ranks", daemon=True)

    @contextlib.contextmanager
    def joined(self) -> Iterator[Participant]:
        """Take part in the agreement during the block; raise PeerError if another rank fails.

        After the block, wait for the other ranks; if the block raises, report its error to them.
        """
        try:
            with store_errors():
                self.store.add("entered", 1)
                self._send_heartbeat()
            self.check(exact=True)
            self._thread.start()
            yield self
            with store_errors():
                self._agree()
        except BaseException as error:
            self._report(error)
            raise
        finally:
            self._left.set()
            if self._thread.is_alive():
                self._thread.join(POLL_SECONDS)
            with contextlib.suppress(Exception):
                self.store.set(f"heartbeat/{self.rank}", LEFT)

    def check(self, exact: bool) -> None:
        """Raise PeerError if another rank has failed.

        Args:
            exact: ask the process group's store now; else use the outcome that the background thread last read there.
        """
        if exact:
            with store_errors():
                self._poll()
        if self.outcome not in (None, OK):
            raise PeerError(self.outcome)

    def _poll(self) -> None:
        """Read the outcome from the store if there is one, unless this rank has read it already."""
        with self._lock:
            if self.outcome is None and self.store.check(["outcome"]):
                self.outcome = self.store.get("outcome").decode()
                self.store.add("informed", 1)

    def _agree(self) -> None:
        """Wait for the outcome; stop if all ranks that entered have finished, and the others do not enter in time."""
        if self.store.add("finished", 1) == self.size:
            self._set_outcome(OK)
        started = time.monotonic()
        self.check(exact=True)
        while self.outcome is None:
            waited = time.monotonic() - started
            if waited > ABSENT_SECONDS and self._finished_without_absent():
                return
            pause = max(waited / PAUSE_FRACTION, self.size / MAX_POLLS_PER_SECOND, FIRST_PAUSE_SECONDS)
            time.sleep(min(pause, POLL_SECONDS))
            self.check(exact=True)
        if self.rank == 0:
            self._wait_for_informed()

    def _wait_for_informed(self) -> None:
        deadline = time.monotonic() + INFORM_SECONDS
        while self.store.add("informed", 0) < self.store.add("entered", 0) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _finished_without_absent(self) -> bool:
        entered, finished = self.store.add("entered", 0), self.store.add("finished", 0)
        if finished < entered or entered == self.size:
            return False
        logger.warning(
            "%d of %d ranks have not entered build(); continuing without them, their errors will not be raised here. "
            "Call build() on every rank; is_built_on_rank selects the ranks that need datasets",
            self.size - entered,
            self.size,
        )
        return True

    def _report(self, error: BaseException) -> None:
        """Set the outcome to this error, unless there is an outcome already."""
        trim_traceback(error)
        trace = "".join(traceback.format_exception(error)).rstrip()
        summary = "".join(traceback.format_exception_only(error)).partition("\n")[0]
        with contextlib.suppress(Exception):
            self._set_outcome(f"{name_rank(self.rank)} failed: {summary}; its traceback:\n\n{trace}")
            self._poll()
            if isinstance(error, Exception):  # not after Ctrl-C
                self._wait_for_informed()

    def _set_outcome(self, outcome: str) -> bool:
        """Set the outcome unless there is one already; return whether the outcome is now the given one."""
        return self.store.compare_set("outcome", "", outcome).decode() == outcome

    # The thread

    def _run(self) -> None:
        last_heartbeat, failures = time.monotonic(), 0
        while not self._left.wait(POLL_SECONDS):
            try:
                self._poll()
                if time.monotonic() - last_heartbeat >= HEARTBEAT_SECONDS:
                    last_heartbeat = time.monotonic()
                    self._send_heartbeat()
                    self._watch_neighbour()
                failures = 0
            except Exception as error:
                failures += 1
                if failures == MAX_STORE_FAILURES:
                    self.outcome = self.outcome or f"{STORE_GONE}: {error}"
                    return

    def _send_heartbeat(self) -> None:
        self.store.set(f"heartbeat/{self.rank}", f"{time.monotonic_ns()} {name_rank(self.rank)}")

    def _watch_neighbour(self) -> None:
        """Report the next rank in the build as failed if its heartbeat has stopped."""
        heartbeat = next(self._heartbeats_of_others(), "")
        if heartbeat != self._neighbour:
            self._neighbour, self._neighbour_changed = heartbeat, time.monotonic()
        silent = time.monotonic() - self._neighbour_changed
        if heartbeat and silent > HEARTBEAT_TIMEOUT_SECONDS:
            name = heartbeat.partition(" ")[2]
            if self._set_outcome(f"{name}: no heartbeat for {silent:.0f} s; it was killed, or its machine is gone"):
                self.store.add("informed", 1)  # on its behalf

    def _heartbeats_of_others(self) -> Iterator[str]:
        """Yield the heartbeats of ranks in the build, from the next rank on."""
        for step in range(1, self.size):
            key = f"heartbeat/{(self.rank + step) % self.size}"
            heartbeat = self.store.get(key).decode() if self.store.check([key]) else LEFT
            if heartbeat != LEFT:
                yield heartbeat


def name_rank(rank: int) -> str:
    """Return the name of this process, which is a rank of the group, in messages."""
    return f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Convert errors of the process group's store in the block to PeerError."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"{STORE_GONE}: {error}") from error
