"""Which reader a URI gets."""

from __future__ import annotations

from pathlib import Path

import fsspec

from binidx.storage.adapters import ReadableFile
from binidx.storage.cache.memory import STORE, ChunkCache
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject
from binidx.testing import MemoryObject


def test_only_objects_that_stay_in_the_cache_are_cached_unless_asked() -> None:
    for name, size in (("small", STORE.largest), ("large", STORE.largest + 1)):
        with fsspec.open(f"memory://kept/{name}", "wb") as out:
            out.write(bytes(size))
    assert isinstance(open_object("memory://kept/small"), ChunkCache)
    assert isinstance(open_object("memory://kept/large"), RemoteObject)
    assert isinstance(open_object("memory://kept/large", cache=True), ChunkCache)
    fsspec.filesystem("memory").rm("/kept", recursive=True)


def test_a_file_that_is_read_by_ranges_keeps_its_settings(tmp_path: Path) -> None:
    (tmp_path / "en.bin").write_bytes(bytes(100))
    location = Location(f"{tmp_path}/en.bin", {"binidx": {"deadline_seconds": 1.5, "max_gap": 7}})
    reader = open_object(location, mmap=False)
    assert isinstance(reader, RemoteObject)
    assert (reader.location.settings.deadline_seconds, reader.location.settings.max_gap) == (1.5, 7)
    assert bytes(reader.read([(10, 20)])[0]) == bytes(10)


def test_reading_at_the_end_of_a_file_or_beyond_it_returns_nothing() -> None:
    file = ReadableFile(MemoryObject(b"abc", "a"))
    assert (file.read(2), file.read(), file.read(), file.read(5)) == (b"ab", b"c", b"", b"")
    file.seek(10)
    assert (file.read(), file.read(1), file.tell()) == (b"", b"", 10)
