"""Every reader, every layer that is one over another, and every kind of store: what tests take products of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faulty_object import FaultyObject
from helpers.zstd_segments import compressed

from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.memory import ChunkCache, ChunkStore, ForwardCache
from binidx.storage.codecs.checksums import BlockSums, CheckedObject, format_sums_header
from binidx.storage.codecs.segments import SegmentedObject
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.stores.local import LocalFile
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.publish import create_object
from binidx.testing import MemoryObject

FAST = {"binidx": {"fast": True}}
SLOW = {"binidx": {"fast": False}}


@dataclass(frozen=True)
class Store:
    """Where objects can lie: `base(request, tmp_path)` is a URI there, `options` how they are read."""

    base: Callable[[Any, Path], str]
    options: dict[str, Any] | None = None
    mapped: bool = False


STORES = {
    "mapped": Store(lambda request, tmp_path: f"file://{tmp_path}", mapped=True),
    "file": Store(lambda request, tmp_path: f"file://{tmp_path}"),
    "memory": Store(lambda request, tmp_path: f"memory://{tmp_path}"),
    "s3": Store(lambda request, tmp_path: request.getfixturevalue("s3").fresh(), SLOW),
    "s3 fast": Store(lambda request, tmp_path: request.getfixturevalue("s3").fresh(), FAST),
    "gs": Store(lambda request, tmp_path: f"{request.getfixturevalue('gs')}{tmp_path}", SLOW),
    "gs fast": Store(lambda request, tmp_path: f"{request.getfixturevalue('gs')}{tmp_path}", FAST),
    "http": Store(lambda request, tmp_path: request.getfixturevalue("web").endpoint, SLOW),
    "http fast": Store(lambda request, tmp_path: request.getfixturevalue("web").endpoint, FAST),
}


class VersionedLazyReader(LazyReader):
    """Reader that opens its object at the first read, with the version of the object."""

    def __init__(self, reader: RangeReader) -> None:
        super().__init__(reader.uri, reader.size, lambda: reader)
        self.below, self.identity = reader, reader.identity

    def __reduce__(self) -> tuple[Any, ...]:
        return VersionedLazyReader, (self.below,)


@dataclass(frozen=True)
class Layer:
    """A reader over a reader: `wrap(reader, lower, directory)`, over one whose bytes are `lower = stored(data)`."""

    wrap: Callable[[RangeReader, bytes, Path], RangeReader]
    stored: Callable[[bytes], bytes] = lambda data: data


LAYERS = {
    "chunks": Layer(lambda reader, lower, directory: ChunkCache(reader)),
    "odd chunks": Layer(
        lambda reader, lower, directory: ChunkCache(reader, chunk_bytes=1000, store=ChunkStore(50_000))
    ),
    "no chunk kept": Layer(lambda reader, lower, directory: ChunkCache(reader, store=ChunkStore(0))),
    "forward": Layer(lambda reader, lower, directory: ForwardCache(reader, chunk_bytes=1000, num_ahead=3)),
    "disk": Layer(lambda reader, lower, directory: DiskCache(reader, directory)),
    "small disk": Layer(
        lambda reader, lower, directory: DiskCache(reader, directory, 70_000, chunk_bytes=1000, block_bytes=8000)
    ),
    "joined": Layer(
        lambda reader, lower, directory: JoinedReader(reader.uri, [reader], [reader.size], reader.identity)
    ),
    "lazy": Layer(lambda reader, lower, directory: VersionedLazyReader(reader)),
    "sums": Layer(lambda reader, lower, directory: CheckedObject(reader, MemoryObject(summed(lower)))),
    "segments": Layer(lambda reader, lower, directory: SegmentedObject(reader), compressed),
    "faults that never come": Layer(lambda reader, lower, directory: FaultyObject(reader, [None])),
}


def summed(data: bytes) -> bytes:
    """The checksum file of some bytes."""
    found: list[int] = []
    sums = BlockSums(lambda each: found.extend(each.tolist()))
    sums.feed(data)
    sums.finish()
    return format_sums_header(sums.size) + np.array(found, "<u8").tobytes()


class Shelf:
    """Puts objects into a store and opens them there."""

    def __init__(self, store: Store, request: pytest.FixtureRequest, directory: Path) -> None:
        self.store, self.directory = store, directory
        self.base = store.base(request, directory)
        self.web = request.getfixturevalue("web") if self.base.startswith("http") else None

    def put(self, data: bytes, name: str | None = None) -> str:
        """The URI of an object with this content."""
        name = name or str(len(data))
        if self.web is not None:
            self.web.objects[f"/{name}"] = data
        else:
            with create_object(Location.of(f"{self.base}/{name}")) as writer:
                writer.write(data)
        return f"{self.base}/{name}"

    def open(self, data: bytes) -> RangeReader:
        """Of an object with this content, without any layer."""
        uri = self.put(data)
        path = local_path(uri)
        return (
            LocalFile(path)
            if path is not None and self.store.mapped
            else RemoteObject(Location.of(uri, self.store.options))
        )
