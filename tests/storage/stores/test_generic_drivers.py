"""Drivers of fsspec without a class here: one that returns a byte too many or too few is named, and not retried."""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from helpers.build_race import CarelessFileSystem
from servers.oss import oss_server

from binidx.errors import ObjectChangedError, ShortReadError
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.stores.fsspec_store import open_fsspec_store

DATA = bytes(range(250)) * 400


class Blocking(MemoryFileSystem):  # type: ignore[misc]
    """A driver that takes another end for a range, `shift` bytes beyond the one that is asked for."""

    protocol, store, pseudo_dirs, cachable = "blockingoff", {}, [""], False
    shift, calls = 1, 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        type(self).calls += 1
        return bytes(super().cat_file(path, start, None if end is None else end + self.shift))


class Coroutines(AsyncFileSystem):  # type: ignore[misc]
    protocol, cachable = "coroutinesoff", False
    data, shift, calls = DATA, 1, 0

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.data), "type": "file"}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        type(self).calls += 1
        return self.data[start : None if end is None else end + self.shift]


@pytest.fixture(params=[Blocking, Coroutines], ids=lambda driver: driver.__name__)
def driver(request: pytest.FixtureRequest) -> Any:
    """A class of the test's own, so that it can set what the driver does."""
    own = type(request.param.__name__, (request.param,), {})
    fsspec.register_implementation(own.protocol, own, clobber=True)
    return own


def stored(driver: Any) -> RemoteObject:
    uri = f"{driver.protocol}://bucket/{uuid.uuid4().hex}"
    if issubclass(driver, Blocking):
        Blocking().pipe_file(uri, DATA)
    return RemoteObject(Location(uri))


@pytest.mark.parametrize("shift", [1, -1])
def test_one_byte_too_many_or_too_few_is_the_fault_of_the_driver_and_not_retried(driver: Any, shift: int) -> None:
    driver.shift = shift
    reader = stored(driver)
    with pytest.raises(ShortReadError) as caught:
        reader.read([(10, 65_546)])
    assert str(caught.value) == (
        f"{reader.uri}: its driver, {__name__}.{driver.__name__} unknown, takes another end for a range "
        f"(found {65_536 + shift:,} bytes for range 10-65546, need 65,536); install another release of the driver"
    )
    assert driver.calls == 1


def test_more_than_a_byte_is_a_bad_moment_and_is_tried_four_times(driver: Any) -> None:
    driver.shift = -2
    with pytest.raises(ShortReadError, match=r"failed 4 times"):
        stored(driver).read([(10, 65_546)])
    assert driver.calls == 4


def test_an_object_that_has_lost_a_byte_is_named_as_changed(driver: Any) -> None:
    driver.shift = 0
    reader = stored(driver)
    if issubclass(driver, Blocking):
        Blocking().pipe_file(reader.uri, DATA[:-1])
    else:
        driver.data = DATA[:-1]
    with pytest.raises(ObjectChangedError):
        reader.read([(10, len(DATA))])


def test_a_file_that_was_replaced_and_opened_again_is_read_and_the_first_reader_is_refused(tmp_path: Path) -> None:
    location, path = Location(f"{CarelessFileSystem.protocol}://{tmp_path}/object"), tmp_path / "object"
    path.write_bytes(b"first")
    first = RemoteObject(location)
    assert first.read([(0, 5)]) == [b"first"]
    (tmp_path / "new").write_bytes(b"other")
    os.replace(tmp_path / "new", path)
    again = RemoteObject(location)  # of the same store
    assert again.read([(0, 5)]) == [b"other"]
    with pytest.raises(ObjectChangedError):
        first.read([(0, 5)])
    assert again.read([(0, 5)]) == [b"other"]


def test_ossfs_is_named_with_its_release() -> None:
    with warnings.catch_warnings(action="ignore"):  # invalid escapes in oss2, where it was not compiled before
        pytest.importorskip("ossfs", reason="needs ossfs; pip install 'binidx[oss]'")
    with oss_server() as server:
        server.add("corpus/en.bin", DATA)
        store = open_fsspec_store("oss://corpus/en.bin", server.options)
        info = store.head_now("oss://corpus/en.bin")
        with pytest.raises(
            ShortReadError, match=r"its driver, ossfs\.core\.OSSFileSystem 20\d\d\.[\d.]+, takes another"
        ):
            store.fetch_now(info, [(0, 65_536)])
