"""The bound of a disk cache: who leaves, who stays, and that many processes may enforce it at once."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.versioned_objects import MarkedObject

from binidx.errors import ObjectNotFoundError
from binidx.storage.cache import block_files, cached_object, quota_files
from binidx.storage.cache.block_files import open_beside, remove_unlocked, try_lock
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.eviction import BlockFile, CacheQuota, Reservation, evict
from binidx.storage.cache.maintenance import cached_contents, prune
from binidx.storage.cache.object_files import ObjectFiles
from binidx.storage.cache.quota_files import EVICTOR, QuotaDirectory
from binidx.storage.effects import run
from binidx.testing import ended_well, forked

BLOCK = 64 << 10
TABLE = 4096
DATA = random.Random(5).randbytes(10 * BLOCK)
small = partial(DiskCache, chunk_bytes=4096, block_bytes=BLOCK)


def blocks(directory: Path) -> list[int]:
    """Numbers of the blocks that lie there."""
    return sorted(int(path.stem) for path in directory.glob("objects/*/*.block"))


def read_blocks(reader: DiskCache, *numbers: int) -> None:
    for number in numbers:
        assert bytes(reader.read([(number * BLOCK, (number + 1) * BLOCK)])[0]) == DATA[number * BLOCK :][:BLOCK]


def set_used(directory: Path, number: int, seconds_ago: float) -> None:
    (path,) = directory.glob(f"objects/*/{number:08d}.block")
    os.utime(path, (time.time() - seconds_ago,) * 2)


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.glob("objects/*/*.block"))


def open_quota(directory: Path, limit: int | None, **options: float) -> CacheQuota:
    return CacheQuota(QuotaDirectory(str(directory)), limit, **options)


def used(quota: CacheQuota) -> int:
    return quota.files.read()[0].used


@contextlib.contextmanager
def reserved(quota: CacheQuota, count: int) -> Iterator[Reservation | None]:
    """Reserve bytes for the block."""
    reservation = run(quota.reserve(count))
    yield reservation
    if reservation is not None:
        run(quota.end(reservation))


def test_one_thread_at_a_time_opens_the_quota_of_a_directory(tmp_path: Path) -> None:
    """Two quotas of one process would not exclude each other: the kernel's locks are of processes."""
    read_blocks(reader := small(MarkedObject(DATA), tmp_path), 0)
    is_free = list[bool]()

    def try_lock() -> None:
        lock: Any = cached_object._lock()
        if lock.acquire(blocking=False):
            lock.release()
            is_free.append(True)
        else:
            is_free.append(False)

    def open_watched(limit: int | None) -> CacheQuota:
        with ThreadPoolExecutor(1) as other:
            other.submit(try_lock).result()
        return cached_object.get_quota(str(tmp_path), limit)

    cached = cached_object.CachedObject(ObjectFiles(str(tmp_path), reader.content), None, open_watched)
    assert is_free == []  # all that is read may be cached
    assert cached.quota is reader.cached.quota
    assert is_free == [False]


@pytest.mark.parametrize("opens", ["another limit", "pruning"])
def test_an_eviction_stays_locked_whatever_else_its_process_does_in_the_directory(tmp_path: Path, opens: str) -> None:
    """The kernel drops the record locks of a process with the first descriptor of the file that it closes."""
    read_blocks(small(MarkedObject(DATA), tmp_path), 0)
    quota = cached_object.get_quota(str(tmp_path), BLOCK)
    assert quota.files.begin_eviction()
    if opens == "pruning":
        prune(str(tmp_path))
    else:
        assert cached_object.get_quota(str(tmp_path), 2 * BLOCK).files is quota.files
    gc.collect()

    def try_as_another_process() -> None:
        descriptor = os.open(tmp_path / "usage", os.O_RDWR)
        assert not try_lock(descriptor, fcntl.LOCK_EX, (EVICTOR, EVICTOR + 1))

    assert ended_well(forked(try_as_another_process))
    quota.files.end_eviction()


def test_a_limit_that_changes_while_an_object_is_stored_leaves_nothing_reserved(tmp_path: Path) -> None:
    cached = small(MarkedObject(DATA), tmp_path, 100 * BLOCK).cached
    before, steps = cached.quota, cached.store_whole(memoryview(DATA))
    call = next(steps)
    while not before.reservations:
        call = steps.send(call.perform())
    cached.change_limit(200 * BLOCK)
    with contextlib.suppress(StopIteration):
        while True:
            call = steps.send(call.perform())
    assert not before.reservations


def test_an_eviction_counts_what_other_threads_are_about_to_write(tmp_path: Path) -> None:
    read_blocks(small(MarkedObject(DATA), tmp_path), 0, 1, 2)
    gc.collect()
    quota = open_quota(tmp_path, 4 * BLOCK)
    with reserved(quota, BLOCK) as first, reserved(quota, BLOCK) as second:
        assert first is not None
        assert second is not None
        assert len(blocks(tmp_path)) == 1
        assert used(quota) == disk_bytes(tmp_path) + 2 * BLOCK
    assert used(quota) == disk_bytes(tmp_path)  # nothing was written


def test_bytes_count_once_while_their_neighbours_are_still_to_be_written(tmp_path: Path) -> None:
    cached = small(MarkedObject(DATA), tmp_path, 10 * BLOCK).cached
    with reserved(cached.quota, 2 * BLOCK) as reservation:
        run(cached.store(0, memoryview(DATA)[:BLOCK], reservation))
        run(cached.quota.recount())
        assert used(cached.quota) == disk_bytes(tmp_path) + BLOCK
    assert used(cached.quota) == disk_bytes(tmp_path)


def test_an_eviction_does_not_fail_for_what_others_reserve_meanwhile(tmp_path: Path) -> None:
    read_blocks(small(MarkedObject(DATA), tmp_path), 0, 1, 2)
    gc.collect()
    quota = open_quota(tmp_path, disk_bytes(tmp_path))

    def reserve(count: int) -> bool:
        with reserved(quota, count) as reservation:
            return reservation is not None

    def needs(path: str) -> bool:
        """Need no block; another thread reserves bytes meanwhile."""
        if not others:
            before = used(quota)
            others.append(threads.submit(reserve, 2 * BLOCK))
            while used(quota) == before:
                time.sleep(0.001)
        return False

    others: list[Future[bool]] = []
    quota.keepers.append(needs)
    with ThreadPoolExecutor(1) as threads:
        assert reserve(BLOCK)
        assert others[0].result()


def test_a_forked_child_evicts_what_fillings_of_its_parent_needed(tmp_path: Path) -> None:
    def reserve() -> None:
        with reserved(quota, BLOCK) as reservation:
            assert reservation is not None

    read_blocks(small(MarkedObject(DATA), tmp_path), 0, 1, 2)
    gc.collect()
    quota = cached_object.get_quota(str(tmp_path), disk_bytes(tmp_path))
    quota.keepers.append(lambda path: True)
    assert ended_well(forked(reserve))


def test_the_least_recently_used_leave_first_and_a_few_more_than_must(tmp_path: Path) -> None:
    read_blocks(small(MarkedObject(DATA), tmp_path), *range(8))
    gc.collect()
    for number, seconds in enumerate([50, 80, 10, 70, 20, 60, 30, 40]):
        set_used(tmp_path, number, seconds)
    reader = small(MarkedObject(DATA), tmp_path, 8 * (BLOCK + TABLE))
    read_blocks(reader, 9)
    assert blocks(tmp_path) == [0, 2, 4, 5, 6, 7, 9]


def test_a_stream_through_a_small_cache_pushes_out_its_own_past(tmp_path: Path) -> None:
    below = MarkedObject(DATA)
    reader = small(below, tmp_path, 4 * (BLOCK + TABLE))
    for _ in range(3):
        read_blocks(reader, *range(10))
        assert disk_bytes(tmp_path) <= 4 * (BLOCK + TABLE) + 2 * TABLE
        assert len(blocks(tmp_path)) >= 3
    assert blocks(tmp_path)[-1] == 9


def test_threads_that_push_each_other_out_come_to_an_end(tmp_path: Path) -> None:
    below = MarkedObject(DATA)
    reader = small(below, tmp_path, 2 * (BLOCK + TABLE))
    reader.cached.quota.pause_seconds = 0.0

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(15):
            starts = [choose.randrange(len(DATA) - 20_000) for _ in range(4)]
            found = reader.read([(start, start + 20_000) for start in starts])
            assert [bytes(view) for view in found] == [DATA[start : start + 20_000] for start in starts]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    moved = sum(stop - start for asked in below.asked for start, stop in asked)
    assert moved < 3 * 6 * 15 * 4 * 20_000


def test_the_bound_is_over_all_objects(tmp_path: Path) -> None:
    limit = 5 * (BLOCK + TABLE)
    for number in range(6):
        data = random.Random(number).randbytes(3 * BLOCK)
        reader = small(MarkedObject(data, f"object-{number}"), tmp_path, limit)
        assert bytes(reader.read([(0, len(data))])[0]) == data
        del reader
        gc.collect()
        assert disk_bytes(tmp_path) <= limit + TABLE


def test_what_another_process_reads_is_not_taken_and_other_blocks_are(tmp_path: Path) -> None:
    limit = 4 * (BLOCK + TABLE)
    reader = small(MarkedObject(DATA), tmp_path, limit)
    read_blocks(reader, 0, 1)
    set_used(tmp_path, 0, 1000)  # whatever its time says
    set_used(tmp_path, 1, 1000)

    def child() -> None:
        # A cache that inherits nothing: the mappings of the parent's are not this one's to let go of.
        cached_object._objects.clear()
        own = small(MarkedObject(DATA), tmp_path, limit)
        for _ in range(3):
            read_blocks(own, *range(2, 10))

    assert ended_well(forked(child))
    assert {0, 1} <= set(blocks(tmp_path))
    assert disk_bytes(tmp_path) <= limit + TABLE
    read_blocks(reader, 0, 1)
    assert reader.stats.misses == 32


@pytest.mark.parametrize("hold", ["reader", "view"])
def test_a_block_is_held_by_readers_and_by_views_alone(tmp_path: Path, hold: str) -> None:
    reader = small(MarkedObject(DATA), tmp_path)
    read_blocks(reader, 0)
    ways: dict[str, Callable[[DiskCache], object]] = {
        "reader": lambda reader: reader,
        "view": lambda reader: reader.read([(5, 10)]),
    }
    held = ways[hold](reader)
    del reader
    gc.collect()
    (path,) = map(str, tmp_path.glob("objects/*/*.block"))
    assert not remove_unlocked(path)
    del held
    gc.collect()
    assert remove_unlocked(path)
    assert remove_unlocked(path)  # gone is gone


def test_views_outlive_the_eviction_of_their_block(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path)
    read_blocks(reader, 0)
    view = reader.read([(100, 5000)])[0]
    (path,) = tmp_path.glob("objects/*/*.block")
    path.unlink()
    del reader
    gc.collect()
    assert view == DATA[100:5000]


def test_a_forked_child_holds_what_its_parent_held_when_that_is_gone(tmp_path: Path) -> None:
    def parent() -> None:
        reader = small(MarkedObject(DATA), tmp_path)
        read_blocks(reader, 0)
        read_end, write_end = os.pipe()
        if os.fork():
            os.read(read_end, 1)  # the child has begun
            os._exit(0)
        os.write(write_end, b"x")
        while not (tmp_path / "checked").exists():
            time.sleep(0.01)
        read_blocks(reader, 0)
        os._exit(0)

    assert ended_well(forked(parent))
    (path,) = map(str, tmp_path.glob("objects/*/*.block"))
    assert not remove_unlocked(path)
    (tmp_path / "checked").touch()
    until = time.monotonic() + 300
    while not remove_unlocked(path):
        assert time.monotonic() < until, "the child's hold outlived it"
        time.sleep(0.01)


def test_idle_blocks_are_unmapped_and_used_ones_marked(tmp_path: Path) -> None:
    clock = [time.monotonic()]
    reader = small(MarkedObject(DATA), tmp_path)
    reader.cached.clock = lambda: clock[0]
    read_blocks(reader, 0, 1, 2)
    for _ in range(3):
        clock[0] += 61
        read_blocks(reader, 1)
        for number in (0, 1, 2):
            set_used(tmp_path, number, 1000)
    clock[0] += 61
    read_blocks(reader, 1)
    assert reader.cached.maps.mapped() == [1]
    now = time.time()
    used = {int(Path(block.path).stem): now - block.used_at > 500 for block in quota_files.block_files(str(tmp_path))}
    assert used == {0: True, 1: False, 2: True}
    read_blocks(reader, 0, 2)
    assert reader.stats.misses == 48


def test_many_processes_evict_at_once_and_nobody_reads_a_wrong_byte(tmp_path: Path) -> None:
    limit = 4 * (BLOCK + TABLE)

    def child(seed: int) -> None:
        choose = random.Random(seed)
        reader = small(MarkedObject(DATA), tmp_path, limit)
        for _ in range(150):
            start = choose.randrange(len(DATA) - 9000)
            assert bytes(reader.read([(start, start + 9000)])[0]) == DATA[start : start + 9000]
            if choose.random() < 0.1:
                reader.cached.release()
                reader.cached.quota.paused_until = 0.0

    children = [forked(partial(child, seed)) for seed in range(6)]
    assert all(map(ended_well, children))
    # What others were about to write when the files were counted is over the bound until the next eviction.
    assert disk_bytes(tmp_path) <= limit + 6 * 4 * 4096


def test_where_files_cannot_be_locked_blocks_are_kept_and_never_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre without -o flock."""
    monkeypatch.setattr(block_files, "try_lock", lambda descriptor, kind, where=None: None)
    limit = 3 * (BLOCK + TABLE)
    reader = small(MarkedObject(DATA), tmp_path, limit)
    reader.cached.quota.pause_seconds = 0.0
    for _ in range(2):
        read_blocks(reader, *range(10))
    gc.collect()
    assert blocks(tmp_path) == [0, 1, 2]
    assert not remove_unlocked(str(next(tmp_path.glob("objects/*/*.block"))))


def test_the_count_of_bytes_is_corrected_by_an_eviction(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path, 4 * (BLOCK + TABLE))
    read_blocks(reader, 0)
    quota = reader.cached.quota
    quota.files.update(lambda usage, now: usage.plus(10**9))  # as a process would that is killed before it writes
    read_blocks(reader, 1)
    assert abs(used(quota) - disk_bytes(tmp_path)) <= BLOCK + TABLE
    assert blocks(tmp_path) in ([0, 1], [1])


def test_when_one_process_finds_all_in_use_the_others_do_not_look_again(tmp_path: Path) -> None:
    limit = 2 * (BLOCK + TABLE)
    reader = small(MarkedObject(DATA), tmp_path, limit)
    held = [reader.read([(number * BLOCK, (number + 1) * BLOCK)]) for number in range(2)]
    read_blocks(reader, 5)
    assert blocks(tmp_path) == [0, 1]

    def child() -> None:
        quota_files.block_files = None  # type: ignore[assignment]  # whoever looks fails
        cached_object._objects.clear()
        cached_object._quotas.clear()
        read_blocks(small(MarkedObject(DATA), tmp_path, limit), 6)

    assert ended_well(forked(child))
    assert [bytes(view) for views in held for view in views] == [DATA[:BLOCK], DATA[BLOCK : 2 * BLOCK]]
    del held
    prune(str(tmp_path))  # counts anew: there may be room
    read_blocks(small(MarkedObject(DATA), tmp_path, limit), 7)


def test_a_process_that_is_stopped_with_the_lock_does_not_stop_the_others(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path, 10**9)
    reader.cached._quota = CacheQuota(QuotaDirectory(str(tmp_path), count_wait_seconds=0.05), 10**9)

    def stop() -> None:
        descriptor = open_beside(str(tmp_path / "usage"), os.O_RDWR)
        assert quota_files.lock_byte(descriptor, quota_files.COUNTER, 1.0)
        (tmp_path / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    child = forked(stop)
    while not (tmp_path / "stopped").exists():
        time.sleep(0.01)
    read_blocks(reader, 0, 1)
    assert blocks(tmp_path) == [0, 1]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_an_old_count_is_not_believed(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path, 10**9)
    read_blocks(reader, 0)
    with reserved(open_quota(tmp_path, 10**9, count_again_seconds=-1.0), 5):
        assert used(reader.cached.quota) == disk_bytes(tmp_path) + 5


def test_the_least_recently_used_go_first_until_there_is_room(tmp_path: Path) -> None:
    files = [BlockFile(f"{tmp_path}/{name}", 1, used_at) for name, used_at in (("b", 5.0), ("a", 5.0), ("c", 2.0))]

    def leaving(excess: int) -> list[tuple[str, bool]]:
        return [(block.path[-1], removed) for block, removed in run(evict(files, excess, remove_unlocked))]

    assert leaving(9) == [("c", True), ("a", True), ("b", True)]
    assert leaving(2) == [("c", True), ("a", True)]
    assert leaving(0) == []


# prune


def warm(directory: Path, count: int = 3) -> None:
    for number in range(count):
        data = random.Random(number).randbytes(2 * BLOCK)
        small(MarkedObject(data, f"s3://b/{number}.bin"), directory).read([(0, len(data))])
    gc.collect()


def uris(directory: Path) -> list[str]:
    return sorted(kept.content.uri for kept in cached_contents(str(directory)) if kept.content and kept.blocks)


def test_prune_by_uri_by_age_and_to_a_size(tmp_path: Path) -> None:
    warm(tmp_path, 4)
    whole = disk_bytes(tmp_path)
    assert prune(str(tmp_path), chosen=lambda uri: uri == "s3://b/1.bin").num_bytes == whole // 4
    assert uris(tmp_path) == ["s3://b/0.bin", "s3://b/2.bin", "s3://b/3.bin"]
    for kept in cached_contents(str(tmp_path)):
        if kept.content and kept.content.uri == "s3://b/3.bin":
            for block in kept.blocks:
                os.utime(block.path, (time.time() - 500,) * 2)
    assert prune(str(tmp_path), older_than=100).num_bytes == whole // 4
    assert uris(tmp_path) == ["s3://b/0.bin", "s3://b/2.bin"]
    assert prune(str(tmp_path), limit=whole // 4).num_bytes == whole // 4
    assert len(uris(tmp_path)) == 1
    assert used(open_quota(tmp_path, None)) == disk_bytes(tmp_path) == whole // 4


def test_prune_leaves_what_is_in_use_and_says_so(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path)
    read_blocks(reader, 0, 1)
    done = prune(str(tmp_path), limit=0)
    assert (done.num_bytes, done.in_use_bytes) == (0, disk_bytes(tmp_path))
    read_blocks(reader, 0, 1)
    assert reader.stats.misses == 32


def test_prune_removes_litter_and_nothing_that_is_new(tmp_path: Path) -> None:
    warm(tmp_path, 2)
    one, two = sorted(tmp_path.glob("objects/*"))
    (one / "meta.json").unlink()
    (two / "meta.json.x.tmp").touch()
    (two / "meta.json.y.tmp").touch()
    os.utime(two / "meta.json.x.tmp", (0, 0))
    done = prune(str(tmp_path))
    assert done.num_litter == 1
    assert sorted(path.name for path in two.iterdir()) == [
        "00000000.block", "00000001.block", "locks", "meta.json", "meta.json.y.tmp",
    ]  # fmt: skip
    assert [path.name for path in one.iterdir()] == ["locks"]
    os.utime(one, (0, 0))
    assert prune(str(tmp_path)).num_litter == 1
    assert not one.exists()


def test_a_directory_without_a_cache_is_none(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match="no disk cache of binidx"):
        prune(str(tmp_path))


def lock_evictor(path: Path) -> None:
    """Lock the byte of the evicting process, and hold it until this process is killed."""
    with open(path / "usage", "a+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, quota_files.EVICTOR)
        (path / "locked").touch()
        signal.pause()


def test_an_interrupt_while_another_process_evicts_leaves_no_lock(tmp_path: Path) -> None:
    files = QuotaDirectory(str(tmp_path), eviction_wait_seconds=1e6)
    other = forked(partial(lock_evictor, tmp_path))
    while not (tmp_path / "locked").exists():
        time.sleep(0.01)

    def interrupt() -> None:
        while not files._evicting.locked():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        files.begin_eviction()
    thread.join()
    assert not files._evicting.locked()
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert files.begin_eviction()
    files.end_eviction()


def test_an_interrupt_while_chunks_are_locked_leaves_none_locked(tmp_path: Path) -> None:
    cached = small(MarkedObject(DATA), str(tmp_path), None).cached

    class Interrupted(type(cached.files)):  # type: ignore[misc]
        def _lock_run(self, run: tuple[int, int], locked: list[tuple[int, int]]) -> None:
            if run[0] > 2:
                raise KeyboardInterrupt
            super()._lock_run(run, locked)

    cached.files.prepare_to_write()
    cached.files.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        cached.files.lock_chunks([0, 2, 4])

    def others_can_lock() -> None:
        with open(Path(cached.path) / "locks", "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 8, 0)

    assert ended_well(forked(others_can_lock))
