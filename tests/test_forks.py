"""Locks and cached properties of a process whose thread is at work while the process forks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from binidx.forks import ProcessLock, cached_property
from binidx.order.ranged_order import LazySource
from binidx.storage.adapters import InMemory, LazyReader
from binidx.testing import ended_well, forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
PARENT = os.getpid()


class Slow:
    """Its answer waits in the parent, and not in a child."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    def answer(self) -> int:
        if os.getpid() == PARENT:
            self.asked.set()
            assert self.go.wait(600)
        return 7

    @cached_property
    def cached(self) -> int:
        return self.answer()

    @contextmanager
    def in_thread(self, work: Callable[[], object]) -> Iterator[None]:
        """A thread waits within `work`."""
        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert self.asked.wait(600)
            yield
        finally:
            self.go.set()
            thread.join()


def check(found: object) -> None:
    assert found == 7


def test_a_child_computes_the_cached_property_of_which_a_thread_of_its_parent_computes_another() -> None:
    slow, other = Slow(), Slow()
    with slow.in_thread(lambda: slow.cached):
        assert ended_well(forked(lambda: check(other.cached)))
        assert ended_well(forked(lambda: check(slow.cached)))


def test_a_child_opens_the_source_that_a_thread_of_its_parent_opens() -> None:
    slow = Slow()
    source = LazySource("en", "en", slow.answer)  # type: ignore[arg-type]
    with slow.in_thread(lambda: source.order):
        assert ended_well(forked(lambda: check(source.order)))


def test_a_lock_excludes_the_threads_of_a_process_and_not_its_child() -> None:
    lock, slow, entered = ProcessLock(), Slow(), threading.Event()

    def hold() -> None:
        with lock(), lock():
            slow.answer()

    def enter() -> None:
        with lock():
            entered.set()

    with slow.in_thread(hold):
        assert ended_well(forked(enter))
        second = threading.Thread(target=enter)
        second.start()
        assert not entered.wait(0.05)
    second.join()
    assert entered.is_set()


def test_a_cached_property_is_that_of_functools_but_for_the_lock() -> None:
    class Base:
        @cached_property
        def value(self) -> list[str]:
            """A new list."""
            return ["base"]

    class Override(Base):
        @cached_property
        def value(self) -> list[str]:
            return [*super().value, "more"]

    class Plain(Base):
        @property
        def value(self) -> list[str]:  # type: ignore[override]
            return super().value

    base, override, plain = Base(), Override(), Plain()
    assert base.value is base.value
    assert override.value == ["base", "more"]
    assert override.value is override.value
    assert plain.value is plain.value
    assert Base.value.__doc__ == "A new list."


def test_threads_open_a_lazy_reader_once() -> None:
    opened, barrier, found = list[InMemory](), threading.Barrier(8), list[bytes]()

    def open_reader() -> InMemory:
        opened.append(InMemory("memory://a", b"abc"))
        return opened[-1]

    def read() -> None:
        barrier.wait(600)
        found.append(bytes(reader.read([(1, 3)])[0]))

    reader = LazyReader("memory://a", 3, open_reader)
    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"bc"] * 8
    assert len(opened) == 1
