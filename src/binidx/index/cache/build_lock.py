"""Who builds an index: one process of one node; the others wait for it, and nobody depends on it.

    load ─ there ───────────────────────────────────────────────────────────────► the arrays
      └ not there ─ first of its node? ─ no ── wait until that one has left ────► load
                          └ yes ─ takes the claim? ─ yes ── build, publish ─────► the arrays
                                       └ no ── watch it (one request a poll):
                                                 gone          load
                                                 failed        PeerError, with the traceback
                                                 unpublished   build for oneself
                                                 dead          one takes it over, and builds

What a builder publishes appears whole or not at all and is the same whoever builds, so two may build at once: after a
claim was lost, in a store without put-if-absent, without a lock. A store that cannot be written to has no claim, and
everybody builds for himself.

Price: while 1,000 nodes wait, 500 requests a second for one small object: see docs/many-nodes.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from binidx.errors import PeerError, StorageError
from binidx.index.cache.building import Arrays
from binidx.index.cache.lease import (
    BEAT_SECONDS,
    BUILDING,
    DEAD_SECONDS,
    FAILED,
    UNPUBLISHED,
    HeldLease,
    Lease,
    LeaseRecord,
    LeaseWatcher,
)
from binidx.index.cache.node_lock import NodeLock, acquire_node_lock
from binidx.storage.cache.layout import directory_of_index
from binidx.storage.settings import ReadSettings

FIRST_PAUSE, FIRST_PAUSE_LOCAL, LONGEST_PAUSE, LONGEST_OF_MANY = 0.2, 0.01, 2.0, 30.0


"""Between two looks at a claim. It grows with the time waited, to an eighth of it. A process that waits for n of them
looks at each n times less often, so that it asks for one every two seconds, up to the last of these. The first ones are
such that 1,000 nodes ask a store 5,000 times in their first second."""


SLICE_SECONDS = 0.1


logger = logging.getLogger(__name__)


Check = Callable[[], None]


Checks = tuple[tuple[Check, Check], ...]


"""Called by all that wait; an exception ends their wait. Of each pair the first is cheap and may know late; the second
knows what is so now, and is called before work is begun that another process may have failed at."""


Tell = Callable[[Mapping[str, Any]], None]


Built = tuple[Arrays, bool]


"""What was built, and whether others can have it."""


_waiting: list[object] = []


_said: set[str] = set()


def run_checks(checks: Checks) -> None:
    for check, _ in checks:
        check()


def ask_all(checks: Checks) -> None:
    for _, ask in checks:
        ask()


def called_away(checks: Checks) -> bool:
    """Whether a check ends the wait of a process: then its own work has not failed."""
    try:
        run_checks(checks)
    except Exception:
        return True
    return False


def load_else_build(
    uri: str,
    load: Callable[[], Arrays | None],
    build: Callable[[Tell], Built],
    storage_options: Mapping[str, Any] | None = None,
    ahead: Tell = lambda done: None,
    checks: Checks = (),
) -> Arrays:
    """The arrays, loaded, or built and published by one of all processes that ask for them now.

    Args:
        uri: of what makes them count when it appears, the manifest. The claim lies beside it.
        load: None where there is nothing to be loaded; may be asked often.
        build: builds and publishes the arrays; that they could not be published is no error, but has to be said. What
            it tells meanwhile, those that wait on other nodes are told: `ahead`.
        ahead: told, by another builder, what is done already; may be told the same often. Returns at once.
        checks: called while this process waits.

    Raises:
        PeerError: the process that was to build failed, and how.
    """
    run_checks(checks)
    found = load()
    return BuildLock(uri, load, build, storage_options, ahead, checks).arrays() if found is None else found


@dataclass(frozen=True)
class BuildLock:
    """The arrays under one URI, and how to come by them: see `load_else_build`."""

    uri: str
    load: Callable[[], Arrays | None]
    build: Callable[[Tell], Built]
    storage_options: Mapping[str, Any] | None = None
    ahead: Tell = lambda done: None
    checks: Checks = ()

    def arrays(self) -> Arrays:
        while True:
            found, alone = self._round()
            if found is not None:
                return found
            if alone:
                return self.build(lambda done: None)[0]

    def _round(self) -> tuple[Arrays | None, bool]:
        """What came of one turn of this node, and whether we are to build without the others."""
        with acquire_node_lock(lock_path(self.uri, self.storage_options), lambda: run_checks(self.checks)) as turn:
            if turn.first:
                found = self._first(turn)
                return found, found is None
        word = json.loads(turn.left or "{}")
        if "failed" in word:
            raise PeerError(word["failed"])
        return (None, True) if "alone" in word else (self.load(), False)

    def _first(self, turn: NodeLock) -> Arrays | None:
        """None: each is to build for himself, the others of this node as well."""
        try:
            ask_all(self.checks)  # who was first before us may have left since another rank failed
            found = self._by_claim(turn)
        except Exception as error:
            if not called_away(self.checks):  # the others of this node may be of another run
                turn.leave(json.dumps({"failed": self._told_of(error)}).encode())
            raise
        if found is None:
            leave_alone(turn)
        return found

    def _told_of(self, error: Exception) -> str:
        if isinstance(error, PeerError):
            return str(error)
        return failed_text(self.uri, f"process {os.getpid()} of this node", traceback.format_exception(error))

    def _by_claim(self, turn: NodeLock) -> Arrays | None:
        claim = Lease(f"{self.uri}-claim", self.storage_options)
        try:
            got: HeldLease | Arrays | None = claim.take(turn.node)
            if got is None:
                with _one_more_waits():
                    got = self._wait(claim, turn.node)
        except StorageError as error:
            _say_once(self.uri, f"no claim on the index, so each node builds its own: {error}")
            return None
        return self._build_held(got, turn) if isinstance(got, HeldLease) else got

    def _wait(self, claim: Lease, node: str) -> HeldLease | Arrays | None:
        """Until the arrays are there, or it is for us to build them: with the claim, or without (None).

        Raises:
            PeerError: the one who built failed.
            StorageError: the store does not let us write.
        """
        watch, passed, began = LeaseWatcher(claim), set[str](), time.monotonic()
        while True:
            word = watch.look()
            if word is not None and word.done:
                self.ahead(word.done)
            if word is None or watch.silent_seconds > 2 * BEAT_SECONDS:
                found = self.load()
                if found is not None:
                    return found
            got: HeldLease | None = None
            if word is None:
                got = claim.take(node)
            elif word.state == FAILED and watch.seen_at_work:
                raise PeerError(failed_text(self.uri, word.where, [word.error]))
            elif must_go_alone(word, watch, passed):
                claim.free_again(word)
                return None
            elif word.holder not in passed and has_ended(word, watch, node):
                passed.add(word.holder)
                ask_all(self.checks)
                got = claim.take_over(word, node)
                watch.begin_again()
            if got is not None:
                return got
            _sleep(lock_pause_seconds(time.monotonic() - began, len(_waiting), remote="://" in self.uri), self.checks)

    def _build_held(self, holding: HeldLease, turn: NodeLock) -> Arrays:
        with holding:
            # The one who held it before may have published since we looked.
            found = self.load()
            if found is None:
                found, holding.published = self.build(holding.tell)
                if not holding.published:
                    leave_alone(turn)
            return found


def has_ended(word: LeaseRecord, watch: LeaseWatcher, node: str) -> bool:
    """Whether nobody is at work under this word; `node` is the lock that is ours now, so its holder before is dead."""
    return word.state != BUILDING or (node != "" and word.node == node) or watch.silent_seconds > DEAD_SECONDS


def must_go_alone(word: LeaseRecord, watch: LeaseWatcher, passed: Collection[str]) -> bool:
    """Whether what is built comes to nobody else, or who took the claim over (from one in `passed`) is dead, too."""
    if word.state == UNPUBLISHED and watch.seen_at_work:
        return True
    return word.holder in passed and watch.silent_seconds > DEAD_SECONDS


def leave_alone(turn: NodeLock) -> None:
    """Tell the others of this node to build for themselves, all at the same time."""
    turn.leave(json.dumps({"alone": os.getpid()}).encode())


def lock_path(uri: str, storage_options: Mapping[str, Any] | None) -> str | None:
    """Of the lock of this node for a URI; local paths of all spellings have one."""
    found = directory_of_index(ReadSettings.of(storage_options))
    name = xxhash.xxh3_128_hexdigest((uri if "://" in uri else os.path.abspath(uri)).encode())
    return os.path.join(found[0], "turns", f"{name}.lock") if found else None


def lock_pause_seconds(waited_seconds: float, num_waits: int, *, remote: bool = True) -> float:
    """Until the next look at a claim: an eighth of the time waited, so that nobody waits much longer than needed."""
    longest = min(LONGEST_PAUSE * max(num_waits, 1), LONGEST_OF_MANY)
    first = FIRST_PAUSE if remote else FIRST_PAUSE_LOCAL
    return min(max(waited_seconds / 8, first), longest) * random.uniform(0.75, 1.25)


def failed_text(uri: str, where: str, trace: list[str]) -> str:
    return f"{uri}: {where} was to build it, and failed; what it raised:\n\n{''.join(trace).rstrip()}"


def _sleep(seconds: float, checks: Checks) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        run_checks(checks)
        time.sleep(min(left, SLICE_SECONDS))


@contextlib.contextmanager
def _one_more_waits() -> Iterator[None]:
    mine = object()
    _waiting.append(mine)
    try:
        yield
    finally:
        _waiting.remove(mine)


def _say_once(uri: str, text: str) -> None:
    directory = uri.rpartition("/")[0]
    with _lock:
        if directory in _said:
            return
        _said.add(directory)
    logger.warning("%s: %s", uri, text)


_lock = threading.Lock()
