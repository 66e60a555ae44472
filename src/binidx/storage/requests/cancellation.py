"""Cancellation of reads by another thread.

    with cancellable() as scope:            # this thread, and those that read for it in `read_many`
        reader.read(ranges)                 # CancelledReadError after scope.cancel()

    with cancellable(scope):                # another thread enters the same scope
        reader.read(ranges)

Cancelling drops the requests in flight and in the queue. Cancelling a scope cancels those inside it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from queue import Empty, SimpleQueue

from binidx.errors import CancelledReadError


class Scope:
    """Reads that are cancelled together, once and for good. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.cancelled = False
        self._watchers: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count()

    def cancel(self) -> None:
        """Let every read in the scope, and every later one, raise CancelledReadError."""
        self.cancelled = True
        while self._watchers:
            # No lock: each dict operation is one step, and a watcher that is added meanwhile checks `cancelled`.
            try:
                _, watcher = self._watchers.popitem()
            except KeyError:
                return
            watcher()

    def check(self) -> None:
        if self.cancelled:
            raise self.error()

    def pause(self, seconds: float) -> None:
        """Sleep; another thread's `cancel` ends that at once.

        Raises:
            CancelledReadError: the scope was cancelled.
        """
        ended = SimpleQueue[None]()  # unlike an Event, it may be put into by a signal handler of this very thread
        with self.watched_by(lambda: ended.put(None)), contextlib.suppress(Empty):
            ended.get(timeout=seconds)
        self.check()

    def error(self) -> CancelledReadError:
        """Return the error of reads in a cancelled scope."""
        return CancelledReadError("read cancelled: its scope was")

    @contextlib.contextmanager
    def watched_by(self, watcher: Callable[[], object]) -> Iterator[None]:
        """Call `watcher` when the scope is cancelled during the block, perhaps from another thread, perhaps twice.

        Raises:
            CancelledReadError: the scope is cancelled already.
        """
        number = next(self._numbers)
        self._watchers[number] = watcher
        try:
            self.check()
            yield
        finally:
            self._watchers.pop(number, None)


@contextlib.contextmanager
def cancellable(scope: Scope | None = None) -> Iterator[Scope]:
    """Make the reads inside a `with` block cancellable by `Scope.cancel`; yield the scope.

    Args:
        scope: scope to enter, which other threads may share; None: a new one.
    """
    scope = scope or Scope()
    outer = _current.get()
    with outer.watched_by(scope.cancel) if outer and outer is not scope else contextlib.nullcontext():
        token = _current.set(scope)
        try:
            yield scope
        finally:
            _current.reset(token)


_current: ContextVar[Scope | None] = ContextVar("binidx_read_scope", default=None)
current_scope = _current.get
"""Return the innermost scope of this thread, or None."""
