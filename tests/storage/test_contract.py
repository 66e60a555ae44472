"""The contracts of readers, over every reader, every stack of two layers and every store; and over wrong readers."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.faulty_object import FaultyObject
from helpers.reader_stacks import LAYERS, STORES, Layer, Shelf, VersionedLazyReader
from helpers.versioned_objects import MarkedObject

from binidx import storage, testing
from binidx.errors import ObjectChangedError
from binidx.storage.adapters import InMemory, LazyReader
from binidx.storage.cache.chunk_fetch import ChunkSource
from binidx.storage.cache.disk_cache import StoredChunks
from binidx.storage.interfaces import PendingRead, Piece, Range, RangeReader
from binidx.storage.open import open_object
from binidx.storage.ranges import check_ranges
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.stores.local import LocalFile
from binidx.testing import MemoryObject, check_range_reader

Make = Callable[[bytes], RangeReader]


def stacked(make: Make, directory: Path, *names: str) -> Make:
    """`make` with layers over it, the first of them lowest."""
    for number, name in enumerate(names):
        make = covered(make, LAYERS[name], directory / str(number))
    return make


def covered(make: Make, layer: Layer, directory: Path) -> Make:
    def made(data: bytes) -> RangeReader:
        lower = layer.stored(data)
        return layer.wrap(make(lower), lower, directory)

    return made


@pytest.mark.parametrize("layer", ["", "chunks", "disk", "sums", "segments"])
@pytest.mark.parametrize("store", STORES)
def test_readers_of_every_store_keep_the_contract_bare_and_under_a_layer(
    store: str, layer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    shelf = Shelf(STORES[store], request, tmp_path)
    check_range_reader(stacked(shelf.open, tmp_path / "layers", *filter(None, [layer])))


VARIANTS = {"odd chunks", "no chunk kept", "small disk", "faults that never come"}
"""Layers of a class that is there with other options: in the suite they are checked alone, in pairs in `make soak`."""

PAIRS = [
    pytest.param(lower, upper, marks=[pytest.mark.slow] if upper and VARIANTS & {lower, upper} else [])
    for lower in LAYERS
    for upper in ("", *LAYERS)
]


@pytest.mark.parametrize(("lower", "upper"), PAIRS)
def test_every_layer_over_every_layer_keeps_the_contract(lower: str, upper: str, tmp_path: Path) -> None:
    check_range_reader(stacked(MarkedObject, tmp_path, lower, *filter(None, [upper])))


@pytest.mark.parametrize(
    ("store", "mmap", "cache"),
    [
        *((store, True, cache) for store in STORES for cache in (None, False)),
        ("file", False, True),
        ("s3", False, True),
    ],
)
def test_what_is_opened_by_its_uri_keeps_the_contract(
    store: str, mmap: bool, cache: bool | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    shelf = Shelf(STORES[store], request, tmp_path)
    check_range_reader(
        lambda data: open_object(shelf.put(data), storage_options=shelf.store.options, mmap=mmap, cache=cache)
    )


def test_objects_in_memory_keep_the_contract() -> None:
    check_range_reader(MemoryObject)
    check_range_reader(lambda data: InMemory("in memory", data))
    check_range_reader(lambda data: LazyReader("lazy", len(data), partial(MemoryObject, data)))


def test_every_reader_of_the_package_is_checked_here(tmp_path: Path) -> None:
    names = [each.name for each in pkgutil.walk_packages(storage.__path__, "binidx.storage.")]
    classes = {kind for name in names for _, kind in inspect.getmembers(importlib.import_module(name), inspect.isclass)}
    ours = [kind for kind in classes if kind.__module__ in names and hasattr(kind, "read")]
    reads = {kind for kind in ours if [*inspect.signature(kind.read).parameters] == ["self", "ranges"]}
    stacks = (stacked(MarkedObject, tmp_path, name)(b"data") for name in LAYERS)
    reads -= {RangeReader, ChunkSource, StoredChunks}
    assert reads == {
        RemoteObject,
        LocalFile,
        InMemory,
        LazyReader,
        *map(type, stacks),
    } - {
        FaultyObject,
        VersionedLazyReader,
    }


def test_a_path_without_a_protocol_is_a_mapped_file(tmp_path: Path) -> None:
    def make(data: bytes) -> RangeReader:
        path = tmp_path / str(len(data))
        path.write_bytes(data)
        reader = open_object(path)
        assert isinstance(reader, LocalFile)
        return reader

    check_range_reader(make)


class Liar(MemoryObject):
    """Reader that breaks one promise."""

    def __init__(self, promise: str, data: bytes) -> None:
        super().__init__(data, f"breaks {promise}")
        self.promise = promise
        if promise == "size":
            self.size += 1

    def read(self, ranges: Sequence[Range]) -> list[Any]:
        if self.promise == "bounds":
            return [memoryview(self.data)[max(start, 0) : stop] for start, stop in ranges]
        views = super().read(ranges)
        lies: dict[str, Callable[[], list[Any]]] = {
            "length": lambda: [view[:-1] for view in views],
            "order": lambda: [view for _, view in sorted(zip(ranges, views, strict=True), key=lambda each: each[0])],
            "values": lambda: [OSError("as a value") for _ in views],
            "views": lambda: [bytes(view) for view in views],
            "read only": lambda: [memoryview(bytearray(view)) for view in views],
            "count": lambda: views[:-1],
        }
        return lies.get(self.promise, lambda: views)()


@pytest.mark.parametrize("promise", ["size", "bounds", "length", "order", "values", "views", "read only", "count"])
def test_the_contract_catches_a_reader_that_breaks_a_promise(promise: str) -> None:
    with pytest.raises(AssertionError):
        check_range_reader(partial(Liar, promise))


class CapableLiar(MemoryObject):
    """Reader of every capability; it breaks one promise."""

    def __init__(self, promise: str, data: bytes) -> None:
        super().__init__(data, f"breaks {promise}")
        self.promise, self.codec, self.stored_bytes = promise, "none", len(data)
        self.block_bytes, self.num_blocks = 0 if promise == "block size" else 1, len(data)

        self.digests = 0

    def digest(self) -> str:
        self.digests += self.promise == "digest"
        return f"digest {self.digests}"

    def check_unchanged(self) -> None:
        if self.promise == "version":
            raise ObjectChangedError("changed")

    def is_complete(self) -> bool:
        return True

    def read_into(self, gather: Callable[[Any], int]) -> bool:
        return self.promise != "read_into"

    def split(self, ranges: Sequence[Range]) -> tuple[list[list[Piece]], list[tuple[RangeReader, Sequence[Range]]]]:
        if self.promise != "split bounds":
            check_ranges(self.uri, self.size, ranges)
        places = [0] * len(ranges) if self.promise == "places" else range(len(ranges))
        return [[(0, place)] for place in places], [(MemoryObject(bytes(self.data)), ranges)]

    def component_readers(self) -> Sequence[Any]:
        return ["reader"] if self.promise == "components" else []

    @contextlib.contextmanager
    def _begun(self, ranges: Sequence[Range]) -> Iterator[PendingRead]:
        if self.promise != "begin bounds":
            check_ranges(self.uri, self.size, ranges)
        views = [memoryview(self.data)[start:stop] for start, stop in ranges]
        outcome = Future[None]()
        if self.promise != "outcome":
            outcome.set_result(None)
        yield cast(
            PendingRead,
            SimpleNamespace(outcome=outcome, result=lambda: views[: -1 if self.promise == "result" else None]),
        )

    def begin(self, ranges: Sequence[Range]) -> contextlib.AbstractContextManager[PendingRead] | None:
        return self._begun(ranges)

    def __reduce__(self) -> tuple[Any, ...]:
        return CapableLiar, (self.promise, bytes(self.data))


CAPABILITY_PROMISES = [
    *("version", "block size", "read_into", "split bounds", "places"),
    *("components", "begin bounds", "outcome", "result", "digest"),
]


@pytest.mark.parametrize("promise", CAPABILITY_PROMISES)
def test_the_contract_catches_a_capability_that_breaks_a_promise(promise: str) -> None:
    with pytest.raises((AssertionError, ObjectChangedError)):
        check_range_reader(partial(CapableLiar, promise))


def test_the_contract_accepts_a_reader_of_every_capability() -> None:
    check_range_reader(partial(CapableLiar, "nothing"))


class OneProcess(MemoryObject):
    """Reads nothing in a fork."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.pid = os.getpid()

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        return super().read(ranges) if os.getpid() == self.pid else []


def test_the_contract_catches_a_reader_that_does_not_survive_a_fork(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="forked child"):
        check_range_reader(OneProcess)


GARBAGE = """
from binidx.testing import MemoryObject, check_range_reader

class Garbage(MemoryObject):
    def read(self, ranges):
        return [memoryview(bytes(len(view))) for view in super().read(ranges)]

check_range_reader(Garbage)
"""


def test_the_contract_holds_under_python_o_too() -> None:
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(inspect.getsource(testing))))
    ended = subprocess.run([sys.executable, "-O", "-c", GARBAGE], capture_output=True, text=True, timeout=1200)
    last = ended.stderr.strip().splitlines()[-1]
    assert last == "AssertionError: range 0-1: 1 bytes that are not those of the object"
