"""One fetch at a time of each thing: who comes second waits, and fetches himself if the first came back without it.

    thread 1   claims a b      fetches a b ──────────► lands            a b
    thread 2   claims c        fetches c ──► lands, then waits for b ─► b c

A thread waits only when it holds no claim, so two that want each other's things cannot wait for each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

from binidx.storage.cancel import current_scope

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Claim(Generic[Key, Value]):
    """Things that one thread fetches: `keys`. Others wait for `landed`."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._landed: Future[Mapping[Key, Value]] = Future()

    def land(self, found: Mapping[Key, Value]) -> None:
        """What there is to hand on; the first call counts."""
        if not self._landed.done():
            self._landed.set_result(found)

    def wait(self, seconds: float | None = None) -> Mapping[Key, Value]:
        """What landed; empty when it failed, or has not come in time.

        Raises:
            CancelledReadError: the waiting thread's scope was cancelled.
        """
        scope, woken = current_scope(), threading.Event()
        self._landed.add_done_callback(lambda _: woken.set())
        with scope.watched_by(woken.set) if scope else contextlib.nullcontext():
            woken.wait(seconds)
        if scope:
            scope.check()
        return self._landed.result() if self._landed.done() else {}


class Flights(Generic[Key, Value]):
    """What the threads of a process are fetching. Make a new one after a fork: the fetchers are not in the child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[Key, Claim[Key, Value]] = {}

    @contextlib.contextmanager
    def claimed(self, keys: Iterable[Key]) -> Iterator[tuple[Claim[Key, Value], dict[Key, Claim[Key, Value]]]]:
        """Those of the keys that nobody fetches, until the end of the block, and the claims that hold the others.

        Look once more whether what was claimed is there: it may have landed after the caller looked.
        """
        ours: Claim[Key, Value] = Claim()
        theirs: dict[Key, Claim[Key, Value]] = {}
        with self._lock:
            for key in keys:
                holder = self._claims.setdefault(key, ours)
                if holder is ours:
                    ours.keys.append(key)
                else:
                    theirs[key] = holder
        try:
            yield ours, theirs
        finally:
            with self._lock:
                for key in ours.keys:
                    del self._claims[key]
            ours.land({})
