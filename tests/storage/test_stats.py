"""Counters of readers, and their sums by store and by kind of cache."""

from __future__ import annotations

import pickle
import signal
from collections.abc import ItemsView
from pathlib import Path

import fsspec

from binidx.storage import stats, usage_report
from binidx.storage.cache.memory import ChunkCache
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject
from binidx.testing import ended_well, forked


def test_each_store_is_counted_apart(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    with fsspec.open("memory://stats/a", "wb") as out:
        out.write(bytes(1000))
    readers = {"local": open_object(tmp_path / "a"), "remote": open_object("memory://stats/a", cache=False)}
    before = stats.usage()
    for count, reader in enumerate(readers.values(), 1):
        reader.read([(0, 100 * count)])
    found = stats.usage_since(before)
    for count, store in enumerate(readers, 1):
        assert (found[f"{store} requests"], found[f"{store} bytes_asked"]) == (1, 100 * count)


def test_a_reader_that_was_pickled_counts_in_its_store() -> None:
    with fsspec.open("memory://stats/b", "wb") as out:
        out.write(bytes(1000))
    reader = pickle.loads(pickle.dumps(RemoteObject(Location.of("memory://stats/b"))))
    before = stats.usage()
    reader.read([(0, 10)])
    assert stats.usage_since(before)["remote requests"] == 1
    assert reader.stats.requests == 1


def test_chunks_found_and_missed_are_summed_over_caches() -> None:
    with fsspec.open("memory://stats/c", "wb") as out:
        out.write(bytes(1000))
    before = stats.usage()
    for _ in range(2):
        cache = ChunkCache(RemoteObject(Location.of("memory://stats/c")))
        for _ in range(3):
            cache.read([(0, 10)])
    found = stats.usage_since(before)
    assert (found["memory hits"], found["memory misses"]) == (4, 2)


def test_garbage_that_logs_a_report_may_be_collected_while_counts_are_added() -> None:
    """As an iterator of a loader does that is part of a cycle."""

    class Collecting(dict[str, float]):
        def items(self) -> ItemsView[str, float]:  # type: ignore[override]
            usage_report.log_report(stats.usage_since(stats.usage()))
            return super().items()

    def child() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        stats.add_usage(Collecting(tokens=0.0))

    assert ended_well(forked(child))
