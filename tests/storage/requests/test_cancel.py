"""Scopes of reads that can be stopped."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from binidx.errors import CancelledReadError, StorageError
from binidx.storage.location import Location
from binidx.storage.requests.cancellation import Scope, cancellable, current_scope
from binidx.storage.requests.scheduler import retried
from binidx.storage.stores.driver_errors import HTTPStatusError
from binidx.storage.threads import map_in_flight


def test_a_scope_is_that_of_its_block_only() -> None:
    assert current_scope() is None
    with cancellable() as outer:
        with cancellable() as inner:
            assert current_scope() is inner
        assert current_scope() is outer
    assert current_scope() is None


def test_a_cancelled_scope_refuses_what_comes_later() -> None:
    with cancellable() as scope:
        scope.check()
        scope.cancel()
        scope.cancel()
        assert scope.cancelled
        with pytest.raises(CancelledReadError):
            scope.check()
        with pytest.raises(StorageError), scope.watched_by(lambda: None):
            raise AssertionError("never entered")


def test_watchers_hear_of_it_while_they_watch() -> None:
    scope = Scope()
    heard: list[str] = []
    with scope.watched_by(lambda: heard.append("early")):
        pass
    with scope.watched_by(lambda: heard.append("one")), scope.watched_by(lambda: heard.append("two")):
        threading.Thread(target=scope.cancel).start()
        while len(heard) < 2:
            pass
    assert sorted(heard) == ["one", "two"]


def test_an_error_of_a_watcher_is_not_lost() -> None:
    def watcher() -> None:
        raise KeyError("of the watcher")

    scope = Scope()
    with scope.watched_by(watcher), pytest.raises(KeyError, match="of the watcher"):
        scope.cancel()
    scope.cancel()


def test_a_scope_ends_with_the_one_around_it_and_not_the_other_way() -> None:
    with cancellable() as outer:
        with cancellable() as first:
            first.cancel()
        assert not outer.cancelled
        with cancellable() as second:
            outer.cancel()
            assert second.cancelled


def test_another_thread_enters_the_same_scope() -> None:
    found: list[Scope | None] = []
    with cancellable() as scope:

        def work() -> None:
            found.append(current_scope())
            with cancellable(scope):
                found.append(current_scope())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [None, scope]


def test_a_cancelled_scope_ends_the_pause_between_two_tries() -> None:
    """Without that, the second try would follow after Retry-After, and succeed."""

    def request() -> None:
        if not is_asked.is_set():
            is_asked.set()
            raise HTTPStatusError(503, "out", {"retry-after": "60"})

    def read() -> None:
        with cancellable(scope):
            retried(Location("memory://pauses/k"), request)

    is_asked, scope = threading.Event(), Scope()
    with ThreadPoolExecutor(1) as thread:
        ending = thread.submit(read)
        is_asked.wait()
        scope.cancel()
        with pytest.raises(CancelledReadError):
            ending.result()


def test_work_in_flight_is_in_the_scope_of_its_caller() -> None:
    with cancellable() as scope:
        assert [*map_in_flight(lambda item: current_scope(), range(3), 2)] == [scope] * 3


def test_work_in_flight_is_stopped_before_it_is_waited_for() -> None:
    """Without that, the other call would go on after a minute."""

    def work(item: int) -> None:
        if item == 0:
            is_begun.wait()
            raise ValueError("refused")
        is_begun.set()
        scope.pause(60)
        ended.append(item)

    is_begun, ended = threading.Event(), list[int]()
    with cancellable() as scope, pytest.raises(ValueError, match="refused"):
        [*map_in_flight(work, range(2), 2, scope.cancel)]
    assert ended == []
