"""gs:// through real gcsfs: a dataset written there is read there, and a replaced one is not."""

from __future__ import annotations

import time
import uuid

import numpy as np
import pytest

from binidx.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import object_exists


def write(prefix: str, first: int, num_documents: int = 3) -> None:
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for number in range(first, first + num_documents):
            builder.add_document([number] * 5, [2, 3])
        builder.finalize(f"{prefix}.idx")


def test_a_dataset_written_to_gs_is_read_from_gs(gs: str) -> None:
    prefix = f"{gs}/{uuid.uuid4().hex}/en v1#2"
    assert not IndexedDataset.exists(prefix)
    write(prefix, 7)
    assert IndexedDataset.exists(prefix)
    dataset = IndexedDataset(prefix)
    assert [each.tolist() for each in dataset[0:6]] == [[n] * k for n in (7, 8, 9) for k in (2, 3)]


def test_a_dataset_replaced_on_gs_is_an_error(gs: str) -> None:
    prefix = f"{gs}/{uuid.uuid4().hex}/en"
    write(prefix, 7)
    reader = open_object(f"{prefix}.bin", cache=False)
    write(prefix, 8)
    with pytest.raises(ObjectChangedError, match="generation"):
        reader.read([(0, 2)])


def test_what_is_not_on_gs_is_not_found(gs: str) -> None:
    assert not object_exists(Location.of(f"{gs}/no/such/object"))
    with pytest.raises(ObjectNotFoundError, match=f"^{gs}/no/such/object: no such object"):
        open_object(f"{gs}/no/such/object")


def test_a_directory_on_gs_is_no_object(gs: str) -> None:
    prefix = f"{gs}/{uuid.uuid4().hex}"
    write(f"{prefix}/en", 7)
    with pytest.raises(ObjectNotFoundError, match=f"^{prefix}: found a directory, needed an object"):
        open_object(prefix)
    assert not object_exists(Location.of(prefix))


@pytest.mark.parametrize("name", ["en.bin", "en.bin.zst"])
def test_nobody_at_the_endpoint_is_told_soon(name: str) -> None:
    """gcsfs asks six times, half a minute long, and we gave each up as one that stands still."""
    options = {"endpoint_url": "http://127.0.0.1:9", "token": "anon"}
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"Cannot connect to host 127\.0\.0\.1:9.*; opening failed 4 times in"):
        open_object(f"gs://bucket/{name}", storage_options=options)
    assert time.monotonic() - began < 300, "the deadline is at 600"
