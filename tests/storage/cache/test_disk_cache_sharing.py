"""Threads, processes and nodes share a disk cache: each chunk is fetched once, and nobody waits for one who died."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.versioned_objects import LoggedObject, MarkedObject, chunks_fetched, fetched

from binidx.errors import CancelledReadError
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.interfaces import Range
from binidx.storage.requests.cancellation import Scope, cancellable
from binidx.testing import ended_well, forked

DATA = random.Random(1).randbytes(100_000)
small = partial(DiskCache, chunk_bytes=1000, block_bytes=8000)


def test_the_next_process_asks_nothing_of_the_store(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    reader = small(LoggedObject(100_000, log), tmp_path / "cache")
    assert run_elsewhere(reader, [(0, 100_000)])
    os.unlink(log)
    assert run_elsewhere(reader, [(0, 100_000)])
    assert fetched(log) == []


def run_elsewhere(reader: DiskCache, asked: Sequence[Range]) -> bool:
    """Whether a process with no memory of this one reads what the object has."""
    code = "import pickle, sys; reader, asked = pickle.load(sys.stdin.buffer); views = reader.read(asked)\n"
    code += "sys.exit([bytes(each) for each in views] != [reader.reader.data[a:b] for a, b in asked])"
    told = pickle.dumps((reader, list(asked)))
    return subprocess.run([sys.executable, "-c", code], input=told).returncode == 0


def test_threads_fetch_a_chunk_once(tmp_path: Path) -> None:
    log, scope = str(tmp_path / "log"), Scope()

    class Awaited(LoggedObject):
        def read(self, ranges: Sequence[Range]) -> list[memoryview]:
            until(lambda: bool(scope._watchers))  # another thread waits for this one
            return super().read(ranges)

    reader = small(Awaited(100_000, log), tmp_path / "cache")
    data = reader.reader.data  # type: ignore[attr-defined]

    def work(number: int) -> None:
        asked = [(1000 * (number % 3), 20_000), (50_500, 51_500)]
        with cancellable(scope):
            assert [bytes(each) for each in reader.read(asked)] == [data[start:stop] for start, stop in asked]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    assert chunks_fetched(log, 1000) == [*range(20), 50, 51]
    assert reader.stats.waits > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_fetch_a_chunk_once(tmp_path: Path, method: str) -> None:
    log = str(tmp_path / "log")
    reader = small(LoggedObject(100_000, log, delay=0.1), tmp_path / "cache")
    context: Any = multiprocessing.get_context(method)
    ready = context.Barrier(4)
    processes = [context.Process(target=read_overlapping, args=(reader, number, ready)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * 4
    assert chunks_fetched(log, 1000) == [*range(70)]


def read_overlapping(reader: DiskCache, number: int, ready: Any) -> None:
    ready.wait(600)
    data = reader.reader.data  # type: ignore[attr-defined]
    asked = [(start, start + 10_000) for start in range(0, 70_000, 10_000)]
    for each in asked[number:] + asked[:number]:
        assert bytes(reader.read([each])[0]) == data[each[0] : each[1]]


def test_two_nodes_with_the_same_mount_share_what_they_fetch(tmp_path: Path) -> None:
    """Two processes that inherit nothing from each other."""
    log = str(tmp_path / "log")
    reader = small(LoggedObject(100_000, log, delay=0.02), tmp_path / "cache")
    with ThreadPoolExecutor(2) as pool:
        asked = [(start, start + 5000) for start in range(0, 100_000, 5000)]
        assert all(pool.map(partial(run_elsewhere, reader), [asked, asked[::-1]]))
    assert chunks_fetched(log, 1000) == [*range(100)]


def test_when_a_fetcher_is_killed_another_process_takes_over(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    victim = forked(lambda: small(LoggedObject(100_000, log, delay=6000), tmp_path / "cache").read([(0, 3000)]))  # type: ignore[arg-type]
    until(lambda: fetched(log) != [])
    reader, scope = small(LoggedObject(100_000, log), tmp_path / "cache"), Scope()

    def read_in_scope() -> bytes:
        with cancellable(scope):
            return bytes(reader.read([(1000, 2000)])[0])

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read_in_scope)
        until(lambda: bool(scope._watchers))
        assert not waiting.done()
        os.kill(victim, signal.SIGKILL)
        assert waiting.result() == reader.reader.data[1000:2000]  # type: ignore[attr-defined]
    os.waitpid(victim, 0)
    assert fetched(log) == [(0, 3000), (1000, 2000)]
    assert reader.stats.waits == 1


class Impatient(DiskCache):
    wait_seconds, least_wait_seconds = 1.0, 0.01


def test_a_fetcher_that_takes_too_long_is_not_waited_for(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    victim = forked(lambda: small(LoggedObject(100_000, log, delay=6000), tmp_path / "cache").read([(0, 3000)]))  # type: ignore[arg-type]
    until(lambda: fetched(log) != [])
    reader = Impatient(LoggedObject(100_000, log), tmp_path / "cache", **small.keywords)
    began = time.monotonic()
    for _ in range(300):  # and only once for so long
        assert bytes(reader.read([(1500, 1600)])[0]) == reader.reader.data[1500:1600]  # type: ignore[attr-defined]
    assert time.monotonic() - began < 250
    assert fetched(log) == [(0, 3000), *[(1500, 1600)] * 300]
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)


def test_who_waits_for_a_fetch_that_fails_fetches_himself(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    class Failing(MarkedObject):
        def read(self, ranges: Sequence[Range]) -> list[memoryview]:
            if not inside.is_set():
                inside.set()
                assert go.wait(600)
                raise OSError("gone")
            return super().read(ranges)

    reader = small(Failing(DATA), tmp_path)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reader.read, [(0, 1500)])
        assert inside.wait(600)
        second = pool.submit(reader.read, [(900, 2500)])
        time.sleep(0.05)
        go.set()
        with pytest.raises(OSError, match="gone"):
            first.result(300)
        assert bytes(second.result(300)[0]) == DATA[900:2500]


def test_who_waits_for_another_process_can_be_cancelled(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    victim = forked(lambda: small(LoggedObject(100_000, log, delay=6000), tmp_path / "cache").read([(0, 3000)]))  # type: ignore[arg-type]
    until(lambda: fetched(log) != [])
    reader, scope = small(LoggedObject(100_000, log), tmp_path / "cache"), Scope()

    def read_in_scope() -> None:
        with cancellable(scope):
            reader.read([(0, 10)])

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read_in_scope)
        until(lambda: bool(scope._watchers))
        scope.cancel()
        with pytest.raises(CancelledReadError):
            waiting.result()
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)


def test_a_fork_in_the_middle_of_a_fetch_does_not_hang(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    reader = small(LoggedObject(100_000, log, delay=0.3), tmp_path / "cache")
    data = reader.reader.data  # type: ignore[attr-defined]

    def child() -> None:
        assert bytes(reader.read([(10, 2_000)])[0]) == data[10:2_000]

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(reader.read, [(0, 3000)])
        until(lambda: fetched(log) != [])
        assert ended_well(forked(child))
        assert bytes(first.result(300)[0]) == data[:3000]
    assert chunks_fetched(log, 1000) == [0, 1, 2]


def until(true: Callable[[], bool]) -> None:
    late = time.monotonic() + 300
    while not true():
        assert time.monotonic() < late
        time.sleep(0.005)
