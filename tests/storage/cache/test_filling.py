"""Filling of a disk cache: which extents are chosen, who fetches them, and what a failure leaves."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.versioned_objects import LoggedObject, MarkedObject, chunks_fetched, fetched

from binidx.errors import ObjectChangedError
from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.fill_plan import (
    PAYING_SHARE,
    ExtentUses,
    FillSizes,
    Throughput,
    choose_extents,
    paying_share,
)
from binidx.storage.cache.filling import CacheFilling
from binidx.storage.cache.memory import Flight
from binidx.storage.interfaces import Range, RangeReader
from binidx.testing import ended_well, forked

EXTENT, COUNT = 64 << 10, 5
DATA = random.Random(7).randbytes(COUNT * EXTENT)
small = partial(DiskCache, chunk_bytes=4096, block_bytes=EXTENT, fill="auto")


SIZES = FillSizes(EXTENT, choose_seconds=0.01)


def filling_of(reader: RangeReader, last: Sequence[int] = (9,) * COUNT) -> CacheFilling:
    """Filling of an object whose extents are read whole, first at steps 0, 1, 2, ..., last at steps `last`."""
    sizes, numbers = np.full(COUNT, EXTENT), np.arange(COUNT)
    uses = ExtentUses(np.zeros(COUNT, np.int64), numbers, sizes, sizes.astype(float), numbers, np.array(last))
    return CacheFilling([reader], lambda: uses, is_expected=True, sizes=SIZES)


def fill(reader: RangeReader) -> None:
    """Fill to the end."""
    begun = filling_of(reader)
    begun.advance()
    begun.thread.join(600)
    assert not begun.thread.is_alive()


def blocks(directory: Path) -> list[int]:
    """Numbers of the blocks that lie there; an extent is a block."""
    return sorted(int(path.stem) for path in directory.glob("objects/*/*.block"))


def until(true: Callable[[], bool]) -> None:
    late = time.monotonic() + 300
    while not true():
        assert time.monotonic() < late
        time.sleep(0.005)


def uses(*rows: tuple[float, int, int]) -> ExtentUses:
    """Extents of 100 bytes of one object, each with (bytes read, first step, last step)."""
    used, first, last = (np.array(column) for column in zip(*rows, strict=True))
    count = len(rows)
    return ExtentUses(np.zeros(count, np.int64), np.arange(count), np.full(count, 100), used.astype(float), first, last)


def test_extents_that_pay_are_chosen_in_the_order_of_their_first_need() -> None:
    read = uses((50, 7, 9), (0.5, 0, 9), (20, 3, 9), (0, 10**9, -1), (300, 5, 9))
    assert choose_extents(read, 0.01, 1e9, step=0).tolist() == [2, 4, 0]
    assert choose_extents(read, 0.4, 1e9, step=0).tolist() == [4, 0]
    assert choose_extents(read, 0.0, 1e9, step=0).tolist() == [1, 2, 4, 0]


def test_the_most_used_extents_get_the_room() -> None:
    read = uses((50, 1, 9), (20, 2, 9), (80, 3, 9))
    assert choose_extents(read, 0.01, 200, step=0).tolist() == [0, 2]
    assert choose_extents(read, 0.01, 99, step=0).tolist() == []


def test_extents_without_a_later_step_give_their_room_to_others() -> None:
    read = uses((90, 0, 4), (80, 0, 9), (10, 6, 9))
    assert choose_extents(read, 0.01, 200, step=4).tolist() == [0, 1]
    assert choose_extents(read, 0.01, 200, step=5).tolist() == [1, 2]


@pytest.mark.parametrize(("ranges", "extents", "share"), [(0, 5, PAYING_SHARE), (5, 0, PAYING_SHARE), (2.6, 260, 0.01)])
def test_an_extent_pays_above_the_ratio_of_the_rates(ranges: float, extents: float, share: float) -> None:
    assert paying_share(ranges, extents) == share


def test_reads_have_a_rate_while_others_run() -> None:
    reads = Throughput()
    reads.begin(10.0)
    assert reads.rate(11.0) == 0
    reads.begin(11.0)
    reads.end(11.0, 1000, 12.0)
    assert (reads.rate(12.0), reads.rate(14.0), reads.seconds) == (500.0, 250.0, 1.0)
    reads.end(10.0, 0, 15.0)
    assert (reads.rate(99.0), reads.seconds) == (200.0, 1.0)  # that of the read that brought bytes


def test_a_lazy_reader_is_filled_and_one_that_splits_nothing_into_nothing_is_left_alone(tmp_path: Path) -> None:
    cache = small(MarkedObject(DATA), tmp_path)
    lazy = LazyReader("memory://b/lazy", len(DATA), lambda: cache)
    joined = JoinedReader("memory://b/joined", [cache], [len(DATA)])
    assert joined.split([]) == ([], [])
    assert filling_of(lazy).cache_of(0) is cache
    assert filling_of(joined).cache_of(0) is None


def test_each_byte_is_fetched_once_and_a_second_filling_fetches_nothing(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    reader = small(LoggedObject(COUNT * EXTENT, log), tmp_path / "cache")
    fill(reader)
    fill(small(LoggedObject(COUNT * EXTENT, log), tmp_path / "cache"))
    assert sorted(fetched(log)) == [(number * EXTENT, (number + 1) * EXTENT) for number in range(COUNT)]
    assert bytes(reader.read([(10, COUNT * EXTENT)])[0]) == reader.reader.data[10:]  # type: ignore[attr-defined]
    assert len(fetched(log)) == COUNT


def test_what_misses_meanwhile_is_read_by_ranges_and_later_in_chunks_again(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    reader = small(LoggedObject(COUNT * EXTENT, log), tmp_path / "cache")
    begun = filling_of(reader)
    assert bytes(reader.read([(5000, 5010)])[0]) == reader.reader.data[5000:5010]  # type: ignore[attr-defined]
    begun.stop()
    reader.read([(5000, 5010)])
    assert fetched(log) == [(5000, 5010), (4096, 8192)]


def test_a_trainer_that_only_waits_gets_extents_instead_of_ranges(tmp_path: Path) -> None:
    reads, go, waits = list[Range](), threading.Event(), threading.Event()

    class Held(MarkedObject):
        def read(self, ranges: Sequence[Range]) -> list[memoryview]:
            reads.extend(ranges)
            go.wait()
            return super().read(ranges)

    def wait(flight: Flight[int, None], seconds: float) -> object:
        waits.set()
        return flight.wait(seconds)

    reader = small(Held(DATA), tmp_path)
    begun = filling_of(reader)
    begun.progress._wait = wait
    with begun.progress.trainer_waiting(), ThreadPoolExecutor(1) as threads:
        begun.advance()
        until(lambda: bool(reads))
        sample = threads.submit(reader.read, [(5000, 5010)])
        waits.wait()
        go.set()
        assert bytes(sample.result()[0]) == DATA[5000:5010]
    begun.thread.join(600)
    assert sorted(reads) == [(number * EXTENT, (number + 1) * EXTENT) for number in range(COUNT)]


def test_a_forked_child_does_not_wait_for_extents_of_its_parent(tmp_path: Path) -> None:
    go, parent = threading.Event(), os.getpid()

    class Held(MarkedObject):
        def read(self, ranges: Sequence[Range]) -> list[memoryview]:
            if os.getpid() == parent:
                go.wait()
            return super().read(ranges)

    reader = small(Held(DATA), tmp_path)
    reader.wait_seconds = 1.0  # for the chunk that another process fetches, as the parent is one
    begun = filling_of(reader)

    def read() -> None:
        assert reader.cached.filling is None
        assert bytes(reader.read([(5000, 5010)])[0]) == DATA[5000:5010]

    begun.advance()
    until(lambda: reader.cached.filling is begun.progress)
    assert ended_well(forked(read))
    go.set()
    begun.thread.join(600)


def test_of_two_processes_one_fills_and_the_other_goes_on_when_it_is_killed(tmp_path: Path) -> None:
    log, size = str(tmp_path / "log"), COUNT * EXTENT
    victim = forked(lambda: fill(small(LoggedObject(size, log, delay=6000), tmp_path / "cache")))
    until(lambda: len(fetched(log)) == COUNT)
    reader = small(LoggedObject(size, log), tmp_path / "cache")
    begun = filling_of(reader)
    begun.advance()
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    begun.thread.join(600)
    assert chunks_fetched(log, EXTENT) == sorted([*range(COUNT)] * 2)
    assert reader.cached.absent(range(reader.content.num_chunks)) == []
    assert ended_well(forked(lambda: fill(small(LoggedObject(size, log), tmp_path / "cache"))))
    assert len(fetched(log)) == 2 * COUNT


def test_extents_that_no_later_step_needs_leave_first_and_needed_ones_stay(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path, int(3.6 * EXTENT))
    begun = filling_of(reader, last=[1, 9, 1, 9, 9])
    begun.advance()
    until(lambda: blocks(tmp_path) == [0, 1, 2])
    begun.advance(2)
    until(lambda: blocks(tmp_path) == [1, 3, 4])
    begun.thread.join(600)
    assert bytes(reader.read([(0, len(DATA))])[0]) == DATA


def test_a_step_that_ends_between_unmapping_and_choosing_does_not_stop_caching(tmp_path: Path) -> None:
    def capacity() -> int:
        if blocks(tmp_path) == [0, 1, 2] and not begun.plan.step:
            begun.advance(2)
        return measured()

    reader = small(MarkedObject(DATA), tmp_path, int(3.6 * EXTENT))
    begun = filling_of(reader, last=[1, 9, 1, 9, 9])
    measured, reader.cached.quota.capacity = reader.cached.quota.capacity, capacity  # type: ignore[method-assign]
    begun.advance()
    until(lambda: blocks(tmp_path) == [1, 3, 4])
    begun.thread.join(600)
    assert reader.cached.quota.pause_reason == ""


def test_on_a_full_disk_no_byte_is_wrong(tmp_path: Path) -> None:
    def child() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (EXTENT // 2, EXTENT // 2))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        reader = small(MarkedObject(DATA), tmp_path)
        begun = filling_of(reader)
        begun.advance()
        until(lambda: reader.cached.quota.pause_reason != "")
        assert bytes(reader.read([(0, len(DATA))])[0]) == DATA
        begun.stop()
        begun.thread.join(600)

    assert ended_well(forked(child))
    reader = small(MarkedObject(DATA), tmp_path)
    fill(reader)
    assert bytes(reader.read([(0, len(DATA))])[0]) == DATA


def test_a_replaced_object_ends_it_and_the_next_read_raises(tmp_path: Path) -> None:
    class Replaced(MarkedObject):
        def read(self, ranges: Sequence[Range]) -> list[memoryview]:
            raise ObjectChangedError("replaced")

    reader = small(Replaced(DATA), tmp_path)
    fill(reader)
    assert reader.cached.filling is None
    with pytest.raises(ObjectChangedError, match="replaced"):
        reader.read([(0, 10)])


@pytest.mark.parametrize("error", [ValueError("odd"), MemoryError("none left"), AssertionError("wrong"), KeyError("x")])
@pytest.mark.parametrize("place", ["uses", "read"])
def test_any_error_ends_it_with_one_line_of_log_and_reads_go_on(
    error: Exception, place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    class Failing(MarkedObject):
        def read(self, ranges: Sequence[Range]) -> list[memoryview]:
            if place == "read" and threading.current_thread().name == "binidx-fill":
                raise error
            return super().read(ranges)

    def fail() -> ExtentUses:
        raise error

    reader = small(Failing(DATA, str(tmp_path)), tmp_path)
    begun = filling_of(reader) if place == "read" else CacheFilling([reader], fail, is_expected=True, sizes=SIZES)
    begun.advance()
    begun.thread.join(600)
    (record,) = caplog.records
    assert f"not filled any more, reads go on: {error!r}" in record.getMessage()
    assert not died
    assert reader.cached.filling is None
    assert bytes(reader.read([(0, len(DATA))])[0]) == DATA
