"""Many objects in one go, and what it cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import Bucket
from helpers.faulty_object import FaultyObject
from servers.http_objects import Server, http_objects
from servers.latency_proxy import latency_proxy

from binidx.errors import CancelledReadError, ObjectChangedError, ObjectNotFoundError, ShortReadError
from binidx.storage import stats
from binidx.storage.cache.memory import ChunkCache
from binidx.storage.interfaces import Range
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.ranges import read_many
from binidx.storage.requests.cancellation import Scope, cancellable, current_scope
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.stores.local import LocalFile
from binidx.storage.threads import WAITING_THREADS
from binidx.storage.writing.publish import create_object
from binidx.testing import MemoryObject, ended_well, forked


class Slow(MemoryObject):
    """Takes a tenth of a second; remembers its thread."""

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        time.sleep(0.1)
        self.thread = threading.current_thread()
        return super().read(ranges)


class Met(MemoryObject):
    """Answers once as many reads as the barrier counts are under way."""

    def __init__(self, data: bytes, barrier: threading.Barrier) -> None:
        super().__init__(data)
        self.barrier = barrier

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        self.barrier.wait()
        return super().read(ranges)


def test_answers_come_in_the_order_of_the_requests(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"local file")
    local, one, two = LocalFile(tmp_path / "a"), MemoryObject(b"first"), MemoryObject(b"second")
    found = read_many([(two, [(0, 2), (4, 6)]), (local, [(0, 5)]), (one, []), (one, [(1, 2)]), (two, [(0, 6)])])
    assert [[bytes(view) for view in views] for views in found] == [[b"se", b"nd"], [b"local"], [], [b"i"], [b"second"]]
    assert read_many([]) == []


def test_remote_readers_wait_together() -> None:
    barrier = threading.Barrier(10, timeout=300)
    readers = [Met(b"abc", barrier) for _ in range(10)]
    assert [bytes(views[0]) for views in read_many([(each, [(0, 3)]) for each in readers])] == [b"abc"] * 10


def test_one_remote_reader_is_read_in_this_thread() -> None:
    reader = Slow(b"abc")
    read_many([(reader, [(0, 1)])])
    assert reader.thread is threading.current_thread()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_waits_for_the_others_and_is_raised(bad: int) -> None:
    readers: list[MemoryObject | FaultyObject] = [Slow(b"abc") for _ in range(3)]
    readers[bad] = FaultyObject(MemoryObject(b"abc"), [OSError("gone")])
    with pytest.raises(OSError, match="gone"):
        read_many([(each, [(0, 1)]) for each in readers])
    assert all(len(each.asked) == 1 for each in readers if isinstance(each, Slow))


def test_a_fork_has_its_own_threads() -> None:
    def work() -> None:
        found = read_many([(MemoryObject(b"abc"), [(0, 3)]) for _ in range(5)])
        assert [bytes(views[0]) for views in found] == [b"abc"] * 5

    work()
    assert ended_well(forked(work))


def test_a_blend_of_shards_in_s3_costs_one_round_trip(s3: Bucket) -> None:
    base = s3.fresh()
    for shard in range(8):
        with create_object(Location.of(f"{base}/{shard}")) as writer:
            writer.write(bytes([shard]) * 1000)
    with latency_proxy(s3.server.endpoint, delay_ms=0) as proxy:
        options = {"endpoint_url": proxy.endpoint}
        readers = [open_object(f"{base}/{shard}", storage_options=options, cache=False) for shard in range(8)]
        read_many([(each, [(0, 1)]) for each in readers])  # connects
        proxy.become(delay_ms=1500)
        proxy.reset()
        found = read_many([(each, [(1, 3)]) for each in readers])
        moved = proxy.counts()
    assert [bytes(views[0]) for views in found] == [bytes([shard]) * 2 for shard in range(8)]
    assert (moved.requests, moved.bytes) == (8, 16)
    assert moved.most_at_once == 8


@pytest.fixture
def objects() -> Iterator[tuple[Server, list[RemoteObject]]]:
    """Sixty of a server of this process; the object of number n holds 1000 times the byte n."""
    with http_objects({f"/b/{each}": bytes([each]) * 1000 for each in range(60)}) as server:
        yield server, [RemoteObject(Location.of(f"{server.endpoint}/b/{each}")) for each in range(60)]


def test_objects_are_asked_for_all_at_once_without_a_thread_for_each(
    objects: tuple[Server, list[RemoteObject]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = objects
    with latency_proxy(server.endpoint, delay_ms=0) as proxy:
        readers = [RemoteObject(Location.of(f"{proxy.endpoint}/b/{each}", {})) for each in range(60)]
        proxy.become(delay_ms=3000)
        monkeypatch.setattr("binidx.storage.ranges.READS", None)
        found = read_many([(each, [(1, 3), (0, 0), (990, 1000)]) for each in readers])
        assert proxy.counts().most_at_once == 60 > WAITING_THREADS
    assert [list(map(bytes, views)) for views in found] == [
        [bytes([each]) * 2, b"", bytes([each]) * 10] for each in range(60)
    ]
    assert {(each.stats.requests, each.stats.bytes_asked, each.stats.bytes_moved) for each in readers} == {(1, 12, 999)}
    assert all(2.9 < each.stats.seconds < 100 for each in readers), "each of its own request"


def test_objects_and_layers_over_them_are_read_together(objects: tuple[Server, list[RemoteObject]]) -> None:
    bare = objects[1]
    mixed = [ChunkCache(each) if place % 3 else each for place, each in enumerate(bare)]
    found = read_many([(each, [(5, 7)] if place % 7 else [(3, 3)]) for place, each in enumerate(mixed)])
    assert [bytes(views[0]) for views in found] == [bytes([each]) * (2 if each % 7 else 0) for each in range(60)]


def test_the_first_error_of_many_objects_is_raised_after_all_have_ended(
    objects: tuple[Server, list[RemoteObject]],
) -> None:
    server, readers = objects
    server.objects["/b/7"] = b"another"
    del server.objects["/b/9"]
    with pytest.raises(ObjectChangedError, match=r"/b/7: changed since it was opened"):
        read_many([(each, [(1, 3)]) for each in readers])
    with pytest.raises(ObjectNotFoundError, match=r"/b/9: no such object"):
        read_many([(each, [(1, 3)]) for each in readers[8:]])
    # What was read all the same is counted, what failed is not.
    assert [each.stats.bytes_asked for each in readers[:11]] == [2] * 7 + [0, 4, 0, 4]


def test_a_range_outside_of_one_object_leaves_nothing_of_the_others(
    objects: tuple[Server, list[RemoteObject]],
) -> None:
    readers = objects[1]
    with cancellable() as scope:
        with pytest.raises(ShortReadError, match=r"/b/2: bytes 0-1001 requested"):
            read_many([(each, [(0, 1001 if place == 2 else 10)]) for place, each in enumerate(readers)])
        assert not scope._watchers
        scope.cancel()
        with pytest.raises(CancelledReadError):
            read_many([(each, [(0, 10)]) for each in readers])
    assert bytes(read_many([(readers[0], [(0, 10)])])[0][0]) == bytes(10)


def test_the_total_counts_each_byte_once(tmp_path: Path, s3: Bucket) -> None:
    uri = s3.fresh()
    with create_object(Location.of(uri)) as writer:
        writer.write(bytes(1000))
    (tmp_path / "a").write_bytes(bytes(1000))
    before = stats.usage()
    cache = ChunkCache(RemoteObject(Location.of(uri)), chunk_bytes=100)
    cache.read([(0, 10), (500, 510)])
    cache.read([(0, 10), (500, 510)])
    LocalFile(tmp_path / "a").read([(0, 50)])
    moved = stats.usage_since(before)
    # The two chunks lie close enough for one request.
    for reach, counts in {"remote": (1, 200, 600), "local": (1, 50, 50)}.items():
        assert tuple(moved[f"{reach} {name}"] for name in ("requests", "bytes_asked", "bytes_moved")) == counts
    assert moved["remote seconds"] > 0


def test_a_scope_holds_in_the_threads_that_read() -> None:
    scopes: list[Scope | None] = []

    class Remembers(MemoryObject):
        def read(self, ranges: Sequence[Range]) -> list[memoryview]:
            scopes.append(current_scope())
            return super().read(ranges)

    with cancellable() as scope:
        read_many([(Remembers(b"abc"), [(0, 1)]) for _ in range(3)])
    assert scopes == [scope] * 3
