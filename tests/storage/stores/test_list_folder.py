"""A folder is listed with sizes and times, whatever the store."""

from __future__ import annotations

import math
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from binidx.errors import ObjectNotFoundError
from binidx.storage.location import Location
from binidx.storage.stores.fsspec_store import StoredFile, list_stored_files
from binidx.storage.writing.publish import write_object

HOUR, YEAR_2001 = 3600.0, 1e9


@pytest.mark.parametrize("store", ["local", "s3", "gs", "abfs", "memory"])
def test_files_are_listed_with_their_sizes_and_times(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server: Any = None if store in ("local", "memory") else request.getfixturevalue(store)
    folders = {
        "local": lambda: str(tmp_path / "folder"),
        "memory": lambda: "memory://listed/folder",
        "s3": lambda: server.fresh(),
        "gs": lambda: f"{server}/listed",
        "abfs": lambda: f"{server.make_container(f'c{uuid.uuid4().hex}')}/listed",
    }
    folder = Location.of(folders[store]())
    for name, size in (("a.npy", 3), ("b.json", 5), ("below/c", 7)):
        write_object(folder / name, [bytes(size)])
    found = list_stored_files(folder.uri, folder.options or {})
    assert {name: file.num_bytes for name, file in found.items()} == {"a.npy": 3, "b.json": 5}
    assert all(math.isfinite(file.changed_at) for file in found.values())
    now = YEAR_2001 if store == "gs" else time.time()  # our server of GCS counts its writes from there on
    assert all(abs(file.changed_at - now) < HOUR for file in found.values())


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match="nowhere"):
        list_stored_files(f"{tmp_path}/nowhere", {})


def test_files_are_equal_if_size_and_time_are() -> None:
    assert StoredFile(1, 2.0) == StoredFile(1, 2.0) != StoredFile(1, 3.0)
