"""The disk cache: what it gives, what it asks of the reader below, and how threads and processes share it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marked import LoggedObject, MarkedObject, chunks_fetched, fetched
from servers.http_objects import http_objects

import binidx
from binidx.errors import CancelledReadError, ConfigError, ObjectChangedError
from binidx.storage import disk_cache
from binidx.storage.backends import open_object
from binidx.storage.cached_object import CachedObject, cached_object
from binidx.storage.cancel import Scope, cancellable
from binidx.storage.chunk_cache import ChunkCache, ChunkStore
from binidx.storage.disk_cache import DiskCache
from binidx.storage.fsspec_object import FsspecObject
from binidx.storage.publish import create_object
from binidx.storage.ranges import Range, RangeReader
from binidx.testing import FaultyObject, MemoryObject, check_range_reader, ended_well, forked

DATA = random.Random(1).randbytes(100_000)
small = partial(DiskCache, chunk_bytes=1000, block_bytes=8000)

ranges = st.tuples(st.integers(0, 100_000), st.integers(0, 20_000)).map(lambda each: (each[0], min(sum(each), 100_000)))


@pytest.mark.parametrize(
    ("chunk_bytes", "block_bytes"), [(64 << 10, None), (4096, 64 << 10), (1000, 3000), (701, 701), (1 << 20, None)]
)
def test_it_keeps_the_contract(tmp_path: Path, chunk_bytes: int, block_bytes: int | None) -> None:
    cached = partial(DiskCache, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
    check_range_reader(lambda data: cached(MarkedObject(data), tmp_path / "all"))
    check_range_reader(lambda data: cached(MarkedObject(data), tmp_path / "all"))  # from what is there
    check_range_reader(lambda data: cached(MarkedObject(data), tmp_path / "nothing", 0))
    check_range_reader(lambda data: cached(MarkedObject(data), tmp_path / "some", 70_000))


class Marked:
    """A reader with the mark of another one's content."""

    def __init__(self, reader: Any, data: bytes) -> None:
        self.reader, self.identity = reader, MarkedObject(data).identity
        self.uri, self.size, self.read = reader.uri, reader.size, reader.read

    def __reduce__(self) -> Any:
        return Marked, (self.reader, self.reader.read([(0, self.size)])[0].tobytes())


@pytest.mark.parametrize(
    "stack",
    [
        lambda data, d: ChunkCache(small(MarkedObject(data), d), chunk_bytes=999, store=ChunkStore(10_000)),
        lambda data, d: small(ChunkCache(MarkedObject(data), chunk_bytes=300), d),
        lambda data, d: small(small(MarkedObject(data), d / "one"), d / "two"),
        lambda data, d: FaultyObject(small(MarkedObject(data), d), [None]),
        lambda data, d: small(Marked(FaultyObject(MemoryObject(data), [None]), data), d),
    ],
    ids=["under chunks", "over chunks", "over itself", "under faulty", "over faulty"],
)
def test_stacks_keep_the_contract(tmp_path: Path, stack: Callable[[bytes, Path], RangeReader]) -> None:
    check_range_reader(lambda data: stack(data, tmp_path))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(ranges, max_size=6), max_size=5), st.sampled_from([None, 0, 9_000, 60_000]))
def test_any_reads_are_slices(tmp_path: Path, reads: list[list[Range]], limit: int | None) -> None:
    reader = small(MarkedObject(DATA), tmp_path / str(limit), limit)
    for asked in reads:
        assert [bytes(view) for view in reader.read(asked)] == [DATA[start:stop] for start, stop in asked]


def test_a_miss_fetches_whole_chunks_neighbours_together_and_only_once(tmp_path: Path) -> None:
    below = MarkedObject(DATA)
    reader = small(below, tmp_path)
    reader.read([(2100, 2200)])
    reader.read([(1100, 4200), (8005, 8006), (99_500, 100_000)])
    assert below.asked == [[(2000, 3000)], [(1000, 2000), (3000, 5000), (8000, 9000), (99_000, 100_000)]]
    assert (reader.stats.hits, reader.stats.misses) == (1, 6)
    for _ in range(3):
        reader.read([(2100, 2200), (1500, 4999)])
    assert len(below.asked) == 2
    assert (reader.stats.hits, reader.stats.misses) == (1 + 3 * 5, 6)
    assert (reader.stats.requests, reader.stats.bytes_moved) == (5, 6000)


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
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    told = pickle.dumps((reader, list(asked)))
    return (
        subprocess.run([sys.executable, "-c", code], input=told, env={**os.environ, "PYTHONPATH": path}).returncode == 0
    )


def test_views_are_of_the_mapped_files_and_a_range_in_a_block_is_not_copied(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path)
    reader.read([(0, 100_000)])
    one, across = reader.read([(100, 7_900), (7_900, 8_100)])
    block = reader.cached.maps.data[0]
    assert block is not None
    assert np.shares_memory(np.frombuffer(one, np.uint8), np.frombuffer(block, np.uint8))
    assert not np.shares_memory(np.frombuffer(across, np.uint8), np.frombuffer(block, np.uint8))


def test_pieces_are_what_read_gives_once_it_was_read(tmp_path: Path) -> None:
    below = MarkedObject(DATA)
    reader = small(below, tmp_path)
    wanted = [(8_000, 8_100), (8_050, 8_060), (0, 1), (6_500, 7_900), (99_999, 100_000), (31_000, 33_000 - 1000)]
    asked = np.array(wanted, np.int64)
    assert reader.pieces(asked) is None
    reader.read(wanted)
    pieces = reader.pieces(asked)
    assert pieces is not None
    found = [ctypes.string_at(int(start), int(stop - start)) for start, stop in pieces.ranges]
    assert found == [DATA[start:stop] for start, stop in wanted]
    assert reader.stats.hits == 1 + 7  # one chunk is wanted twice
    for elsewhere in (
        [(7_900, 8_100)],
        [(5_500, 7_500)],
        [(50_000, 50_001)],
        [(-1, 5)],
        [(5, 100_001)],
        [(7, 3)],
    ):
        assert reader.pieces(np.array(elsewhere, np.int64)) is None
    assert len(below.asked) == 1


# Threads and processes


def test_threads_fetch_a_chunk_once(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    reader = small(LoggedObject(100_000, log, delay=0.05), tmp_path / "cache")
    data = reader.reader.data  # type: ignore[attr-defined]

    def work(number: int) -> None:
        asked = [(1000 * (number % 3), 20_000), (50_500, 51_500)]
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
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert chunks_fetched(log, 1000) == [*range(70)]


def read_overlapping(reader: DiskCache, number: int, ready: Any) -> None:
    ready.wait(60)
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
    victim = forked(lambda: small(LoggedObject(100_000, log, delay=60), tmp_path / "cache").read([(0, 3000)]))  # type: ignore[arg-type]
    until(lambda: fetched(log) != [])
    reader = small(LoggedObject(100_000, log), tmp_path / "cache")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.read, [(1000, 2000)])
        time.sleep(0.1)
        assert not waiting.done()
        os.kill(victim, signal.SIGKILL)
        assert bytes(waiting.result(10)[0]) == reader.reader.data[1000:2000]  # type: ignore[attr-defined]
    os.waitpid(victim, 0)
    assert fetched(log) == [(0, 3000), (1000, 2000)]
    assert reader.stats.waits == 1


def test_a_fetcher_that_takes_too_long_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = str(tmp_path / "log")
    victim = forked(lambda: small(LoggedObject(100_000, log, delay=60), tmp_path / "cache").read([(0, 3000)]))  # type: ignore[arg-type]
    until(lambda: fetched(log) != [])
    monkeypatch.setattr(disk_cache, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(disk_cache, "LEAST_PATIENCE_SECONDS", 0.01)
    reader = small(LoggedObject(100_000, log), tmp_path / "cache")
    began = time.monotonic()
    for _ in range(50):  # and only once for so long
        assert bytes(reader.read([(1500, 1600)])[0]) == reader.reader.data[1500:1600]  # type: ignore[attr-defined]
    assert time.monotonic() - began < 20
    assert fetched(log) == [(0, 3000), *[(1500, 1600)] * 50]
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)


def test_who_waits_for_a_fetch_that_fails_fetches_himself(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    class Failing(MarkedObject):
        def read(self, ranges: Sequence[Range]) -> list[memoryview]:
            if not inside.is_set():
                inside.set()
                assert go.wait(20)
                raise OSError("gone")
            return super().read(ranges)

    reader = small(Failing(DATA), tmp_path)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reader.read, [(0, 1500)])
        assert inside.wait(10)
        second = pool.submit(reader.read, [(900, 2500)])
        time.sleep(0.05)
        go.set()
        with pytest.raises(OSError, match="gone"):
            first.result(10)
        assert bytes(second.result(10)[0]) == DATA[900:2500]


def test_who_waits_for_another_process_can_be_cancelled(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    victim = forked(lambda: small(LoggedObject(100_000, log, delay=60), tmp_path / "cache").read([(0, 3000)]))  # type: ignore[arg-type]
    until(lambda: fetched(log) != [])
    reader, scope = small(LoggedObject(100_000, log), tmp_path / "cache"), Scope()

    def read_in_scope() -> None:
        with cancellable(scope):
            reader.read([(0, 10)])

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read_in_scope)
        time.sleep(0.05)
        scope.cancel()
        with pytest.raises(CancelledReadError):
            waiting.result(10)
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
        assert bytes(first.result(10)[0]) == data[:3000]
    assert chunks_fetched(log, 1000) == [0, 1, 2]


def until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("waited 10 s")


# What cannot be kept


def test_a_content_without_a_mark_is_not_cached(tmp_path: Path) -> None:
    unmarked = MemoryObject(DATA)
    with pytest.raises(ConfigError, match="memory-object: not cached, the store gives neither ETag"):
        DiskCache(unmarked, tmp_path)
    with pytest.raises(ConfigError, match="a chain reads a copy of its own"):
        DiskCache(MarkedObject(DATA, "simplecache::s3://b/k"), tmp_path)


@pytest.mark.parametrize(("sizes", "found"), [((0, None), "chunks of 0"), ((1000, 1500), "blocks of 1500")])
def test_sizes_that_make_no_sense_are_refused(tmp_path: Path, sizes: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        DiskCache(MarkedObject(DATA), tmp_path, chunk_bytes=sizes[0], block_bytes=sizes[1])
    with pytest.raises(ConfigError, match="a cache of -1 bytes"):
        DiskCache(MarkedObject(DATA), tmp_path, -1)


def test_another_content_under_the_same_name_has_another_directory(tmp_path: Path) -> None:
    one, two = MarkedObject(b"1" * 5000), MarkedObject(b"2" * 5000)
    for _ in range(2):
        assert bytes(small(one, tmp_path).read([(10, 20)])[0]) == b"1" * 10
        assert bytes(small(two, tmp_path).read([(10, 20)])[0]) == b"2" * 10
    plain = small(one, tmp_path).content
    assert len({plain.key, *(each.key for each in variants(plain))}) == 7


def variants(plain: Any) -> Iterator[Any]:
    from dataclasses import replace

    yield replace(plain, uri="other")
    yield replace(plain, size=4999)
    yield replace(plain, identity={**plain.identity, "etag": "x"})
    yield replace(plain, codec="zstd")
    yield replace(plain, chunk_bytes=500)
    yield replace(plain, block_bytes=16_000)


def test_without_room_exactly_what_is_asked_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    below = MarkedObject(DATA)
    reader = small(below, tmp_path / "full", 3500)
    reader.read([(0, 3000)])
    for start in (5_000, 6_000):
        assert bytes(reader.read([(start, start + 10), (2_500, 2_600)])[0]) == DATA[start : start + 10]
    assert below.asked == [[(0, 3000)], [(5_000, 5_010)], [(6_000, 6_010)]]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/full: everything in it is in use (bound: 3500 bytes); what it has not is read without being kept"
    ]


def test_a_file_size_limit_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    assert ended_well(forked(partial(read_under_limit, tmp_path)))


def read_under_limit(directory: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
    reader = small(MarkedObject(DATA), directory / "cache")
    for _ in range(2):
        assert bytes(reader.read([(500, 60_000)])[0]) == DATA[500:60_000]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs a right to mount")
    yield place
    gc.collect()
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up_costs_the_cache_and_nothing_else(tiny_disk: Path, caplog: Any) -> None:
    data = random.Random(2).randbytes(3 << 20)
    reader = DiskCache(MarkedObject(data), tiny_disk, 1 << 30, chunk_bytes=16 << 10, block_bytes=128 << 10)
    for _ in range(2):
        for start in range(0, len(data), 100_000):
            assert bytes(reader.read([(start, start + 40_000)])[0]) == data[start : start + 40_000]
    assert sum("cannot be written to: No space left" in record.message for record in caplog.records) == 1
    twin = pickle.loads(pickle.dumps(reader))
    assert bytes(twin.read([(0, len(data))])[0]) == data


def test_a_tenth_of_the_disk_stays_free(tiny_disk: Path) -> None:
    data = random.Random(2).randbytes(3 << 20)
    reader = DiskCache(MarkedObject(data), tiny_disk, chunk_bytes=16 << 10, block_bytes=64 << 10)
    for start in range(0, len(data), 50_000):
        reader.read([(start, start + 20_000)])
        stat = os.statvfs(tiny_disk)
        assert stat.f_bavail * stat.f_frsize >= 0.1 * (1 << 20) - 4 * 4096  # tables are not reserved
    assert stat.f_bavail * stat.f_frsize < 0.3 * (1 << 20)  # and no more than that


def test_a_directory_that_cannot_be_written_to_serves_what_it_has() -> None:
    # Not below tmp_path: nobody but its owner may look into that.
    with tempfile.TemporaryDirectory() as name:
        directory, log = Path(name), Path(name, "log")
        os.chmod(directory, 0o755)
        log.touch()
        os.chmod(log, 0o666)
        small(LoggedObject(100_000, str(log)), directory / "cache").read([(0, 3000)])
        gc.collect()
        assert ended_well(forked(partial(read_as_a_guest, str(log), directory / "cache")))
        assert fetched(log) == [(0, 3000), (5_100, 5_200)]
        for folder, _, _ in os.walk(directory):
            os.chmod(folder, 0o755)


def read_as_a_guest(log: str, directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        os.chmod(folder, 0o555)
        for file in files:
            os.chmod(os.path.join(folder, file), 0o444)
    if os.getuid() == 0:
        os.setuid(65534)
    reader = small(LoggedObject(100_000, log), directory)
    found = reader.read([(100, 200), (5_100, 5_200)])
    data = reader.reader.data  # type: ignore[attr-defined]
    assert [bytes(view) for view in found] == [data[100:200], data[5_100:5_200]]


def test_a_directory_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = MarkedObject(DATA)
    assert bytes(small(below, tmp_path / "file" / "cache").read([(100, 200)])[0]) == DATA[100:200]
    assert below.asked == [[(100, 200)]]


def test_objects_of_a_process_are_shared_and_go_with_their_readers(tmp_path: Path) -> None:
    one, two = small(MarkedObject(DATA), tmp_path), small(MarkedObject(DATA), tmp_path)
    assert one.cached is two.cached is cached_object(one.directory, one.content, None)
    held = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    one.read([(0, 100_000)])
    del one, two
    gc.collect()
    assert not any(type(each) is CachedObject and each.path.startswith(str(tmp_path)) for each in gc.get_objects())
    if held:
        assert len(os.listdir("/proc/self/fd")) <= held


# Through open_object


def test_remote_objects_are_kept_where_a_cache_dir_is_set(s3: Bucket, tmp_path: Path) -> None:
    uri = f"{s3.fresh()}/en.bin"
    with create_object(uri) as out:
        out.write(DATA)
    options = {"binidx": {"cache_dir": str(tmp_path), "cache_bytes": 10**6, "cache_chunk_bytes": 4096}}
    for cache in (None, True, "disk"):
        reader = open_object(uri, storage_options=options, cache=cache)
        assert isinstance(reader, DiskCache)
        assert (reader.limit, reader.content.chunk_bytes) == (10**6, 4096)
        assert bytes(reader.read([(5_000, 90_000)])[0]) == DATA[5_000:90_000]
    assert isinstance(reader.reader, FsspecObject)
    assert reader.reader.stats.bytes_moved == 0
    with create_object(uri) as out:
        out.write(DATA[::-1])
    assert bytes(open_object(uri, storage_options=options).read([(5_000, 90_000)])[0]) == DATA[::-1][5_000:90_000]


def test_the_arrays_of_an_index_are_views_of_the_cache(s3: Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    """12 bytes a sequence for each process of a node would be its memory."""
    prefix = f"{s3.fresh()}/en"
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        builder.add_document(np.zeros(50_000, np.uint16), [1] * 50_000)
        builder.finalize(f"{prefix}.idx")
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        dataset = binidx.IndexedDataset(prefix)
        assert dataset.sequence_lengths.sum() == 50_000
        assert mapped_file(dataset.sequence_lengths.ctypes.data).endswith("00000000.block")
        assert mapped_file(dataset.index.sequence_pointers.ctypes.data + 8 * 49_999).endswith("00000000.block")
    assert pickle.loads(pickle.dumps(dataset))[49_999].tolist() == [0]


def mapped_file(address: int) -> str:
    """What this process has mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[-1]
    return ""


@pytest.mark.parametrize(
    ("etag", "looks"),
    [(lambda data: f'"{hash(data)}"', 0), (lambda data: f'W/"{hash(data)}"', 1)],
    ids=["strong", "weak"],
)
def test_bytes_of_a_new_object_are_never_kept_under_the_name_of_the_old(tmp_path: Path, etag: Any, looks: int) -> None:
    with http_objects({"/en.bin": DATA}) as server:
        server.etag = etag
        reader = open_object(f"{server.endpoint}/en.bin", storage_options={"binidx": {"cache_dir": str(tmp_path)}})
        before = len(server.requests)
        assert bytes(reader.read([(10, 20)])[0]) == DATA[10:20]
        assert sum(method == "HEAD" or not asked for method, _, asked in server.requests[before:]) == looks
        server.objects["/en.bin"] = DATA[::-1]
        with pytest.raises(ObjectChangedError, match=r"en\.bin: changed since it was opened"):
            reader.read([(70_000, 70_010)])
        server.objects["/en.bin"] = DATA  # the old one is back, with its mark
        assert bytes(reader.read([(70_000, 70_010)])[0]) == DATA[70_000:70_010]


def test_what_must_come_from_the_store_does(s3: Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    uri = f"{s3.fresh()}/en.bin"
    with create_object(uri) as out:
        out.write(DATA)
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path))
    assert isinstance(open_object(uri, cache=False), FsspecObject)
    assert isinstance(open_object(uri, cache="disk"), DiskCache)
    assert isinstance(open_object(uri, cache=True), DiskCache)
    monkeypatch.delenv("BINIDX_CACHE_DIR")
    assert isinstance(open_object(uri, cache="disk"), FsspecObject)
    assert isinstance(open_object(uri, cache=True), ChunkCache)


def test_over_s3_it_keeps_the_contract(s3: Bucket, tmp_path: Path) -> None:
    def make(data: bytes) -> RangeReader:
        uri = f"{s3.fresh()}/{len(data)}"
        with create_object(uri) as out:
            out.write(data)
        return open_object(uri, storage_options={"binidx": {"cache_dir": str(tmp_path)}})

    check_range_reader(make)


def test_local_files_are_not_kept_and_a_uri_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "file").write_bytes(DATA)
    assert not isinstance(open_object(tmp_path / "file"), DiskCache)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("BINIDX_CACHE_DIR", "s3://bucket/cache")
    with create_object("memory://disk-cache/file") as out:
        out.write(DATA)
    with pytest.raises(ConfigError, match="cache_dir: found s3://bucket/cache, needs a directory of this machine"):
        open_object("memory://disk-cache/file")
