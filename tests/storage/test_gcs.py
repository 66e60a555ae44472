"""gs:// through real gcsfs: a dataset written there is read there, and a replaced one is not."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from binidx.errors import ObjectChangedError, ObjectNotFoundError
from binidx.format.builder import IndexedDatasetBuilder
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.backends import open_object
from binidx.storage.publish import object_exists


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
    assert not object_exists(f"{gs}/no/such/object")
    with pytest.raises(ObjectNotFoundError, match=f"^{gs}/no/such/object: no such object"):
        open_object(f"{gs}/no/such/object")
