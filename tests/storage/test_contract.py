"""The contract of range readers, over every reader, every stack of two, and every kind of store; and over liars."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from servers.http_objects import http_objects

from binidx import testing
from binidx.storage.backends import open_object
from binidx.storage.chunk_cache import ChunkCache, ChunkStore
from binidx.storage.fsspec_object import FsspecObject
from binidx.storage.local_file import LocalFile
from binidx.storage.publish import create_object
from binidx.storage.ranges import Range, RangeReader
from binidx.testing import FaultyObject, MemoryObject, check_range_reader

Place = Callable[[bytes], str]
"""Puts bytes somewhere; the URI."""


@pytest.fixture(params=["local", "memory", "s3", "gs", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "http":
        with http_objects({}) as server:
            yield partial(serve, server)
        return
    bases: dict[str, Callable[[], str]] = {
        "local": lambda: f"file://{tmp_path}",
        "memory": lambda: f"memory://{tmp_path}",
        "s3": lambda: request.getfixturevalue("s3").fresh(),
        "gs": lambda: f"{request.getfixturevalue('gs')}/{uuid.uuid4().hex}",
    }
    yield partial(store, bases[request.param]())


def store(base: str, data: bytes) -> str:
    with create_object(f"{base}/{len(data)}") as writer:
        writer.write(data)
    return f"{base}/{len(data)}"


def serve(server: Any, data: bytes) -> str:
    server.objects[f"/{len(data)}"] = data
    return f"{server.endpoint}/{len(data)}"


STACKS: dict[str, Callable[[str], RangeReader]] = {
    "as opened": open_object,
    "no cache": partial(open_object, cache=False),
    "no mmap": partial(open_object, mmap=False),
    "cache of odd chunks": lambda uri: ChunkCache(FsspecObject(uri), chunk_bytes=1000, store=ChunkStore(50_000)),
    "cache over cache": lambda uri: ChunkCache(ChunkCache(open_object(uri, cache=False), chunk_bytes=4096)),
    "cache that keeps nothing": lambda uri: ChunkCache(FsspecObject(uri), store=ChunkStore(0)),
    "patched by no fault": lambda uri: FaultyObject(FsspecObject(uri), []),
}


@pytest.mark.parametrize("stack", STACKS)
def test_readers_keep_the_contract_over_every_store(place: Place, stack: str) -> None:
    check_range_reader(lambda data: STACKS[stack](place(data)))


@pytest.mark.parametrize(
    "make",
    [
        MemoryObject,
        lambda data: ChunkCache(MemoryObject(data), chunk_bytes=701),
        lambda data: ChunkCache(FaultyObject(MemoryObject(data), []), chunk_bytes=10**9),
        lambda data: FaultyObject(ChunkCache(MemoryObject(data)), [None]),
    ],
    ids=["memory", "cache over memory", "one chunk", "faulty over cache"],
)
def test_readers_keep_the_contract_over_memory(make: Callable[[bytes], RangeReader]) -> None:
    check_range_reader(make)


def test_a_chained_uri_keeps_the_contract(s3: Bucket, tmp_path: Path) -> None:
    base, options = s3.fresh(), {"simplecache": {"cache_storage": str(tmp_path)}}
    check_range_reader(lambda data: open_object(f"simplecache::{store(base, data)}", storage_options=options))


def test_a_path_without_a_protocol_is_a_mapped_file(tmp_path: Path) -> None:
    def make(data: bytes) -> RangeReader:
        path = tmp_path / str(len(data))
        path.write_bytes(data)
        reader = open_object(path)
        assert isinstance(reader, LocalFile)
        return reader

    check_range_reader(make)


class Liar(MemoryObject):
    """Breaks one promise."""

    def __init__(self, promise: str, data: bytes) -> None:
        super().__init__(data, f"liar about {promise}")
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
    ended = subprocess.run([sys.executable, "-O", "-c", GARBAGE], capture_output=True, text=True, timeout=60)
    last = ended.stderr.strip().splitlines()[-1]
    assert last == "AssertionError: range 0-1: 1 bytes that are not those of the object"
