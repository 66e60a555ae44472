"""What the plan of a run reads of a dataset is what its arrays say."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours

from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.errors import FormatError, ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.run.plan.inventory import count_tokens_before, open_files
from binidx.storage.location import Location


def build(prefix: Path, seed: int, count: int = 50) -> str:
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        lengths = rng.integers(0, 30, rng.integers(0, 4)).tolist()
        documents.append(Document(rng.integers(0, 999, sum(lengths), dtype=np.uint16), lengths, [0] * len(lengths)))
    return build_ours(prefix, documents, np.uint16, multimodal=False)


def check(prefix: str, options: dict[str, Any] | None = None) -> None:
    location, dataset = Location.of(prefix, options), IndexedDataset(prefix, storage_options=options)
    found = open_files(location, None)
    assert (len(found.index), found.index.num_tokens) == (len(dataset), dataset.index.num_tokens)
    bounds = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])
    ends = range(len(dataset) + 1)
    assert count_tokens_before(found, {*ends}) == dict(zip(ends, bounds.tolist(), strict=True))


def test_tokens_before_any_sequence_are_the_sum_of_lengths(tmp_path: Path) -> None:
    for seed in range(5):
        check(build(tmp_path / f"d{seed}", seed))
    check(build(tmp_path / "empty", 0, count=0))


def test_compressed_checked_and_virtual_ones_too(tmp_path: Path, s3: Bucket) -> None:
    plain, base = build(tmp_path / "plain", 1), s3.fresh()
    convert_dataset(plain, f"{base}/zst", way=StorageFormat(codec="zstd"))
    convert_dataset(plain, f"{base}/checked", way=StorageFormat(checksums=True))
    merge_virtually([f"{base}/zst", f"{base}/checked", plain], f"{base}/all")
    options = {"binidx": {"parts_from": "file://"}}
    for name in ("zst", "checked", "all"):
        check(f"{base}/{name}", options)
    zst, checked, virtual = (
        open_files(Location.of(f"{base}/{name}", options), None) for name in ("zst", "checked", "all")
    )
    assert (zst.compressed, zst.checked, checked.compressed, checked.checked) == (True, False, False, True)
    assert zst.stored_bytes < zst.index.num_bytes
    assert (virtual.num_parts, virtual.index.num_tokens) == (3, 3 * zst.index.num_tokens)
    assert (virtual.compressed, virtual.mixed, virtual.checked) == (True, True, False)
    assert virtual.stored_bytes == zst.stored_bytes + checked.stored_bytes + zst.index.num_bytes
    assert virtual.block_bytes == 1 << 16, "the largest usual one"
    assert virtual.opened["bin"]["size"] == virtual.stored_bytes


def test_what_is_not_there_or_broken_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"none\.bin: no such file"):
        open_files(Location.of(f"{tmp_path}/none"), None)
    prefix = build(tmp_path / "en", 2)
    whole = Path(f"{prefix}.idx").read_bytes()
    Path(f"{prefix}.idx").write_bytes(b"X" + whole[1:])
    with pytest.raises(FormatError, match="starts with"):
        open_files(Location.of(prefix), None)
    count = len(IndexedDataset(build(tmp_path / "en", 2)))
    at = 34 + 4 * count + 8 * 3
    Path(f"{prefix}.idx").write_bytes(whole[:at] + struct.pack("<q", 1 << 40) + whole[at + 8 :])
    with pytest.raises(FormatError, match="leave"):
        count_tokens_before(open_files(Location.of(prefix), None), {3})
    Path(f"{prefix}.idx").write_bytes(whole)
    Path(f"{prefix}.bin").write_bytes(b"ab")
    with pytest.raises(FormatError, match=r"its \.idx needs"):
        open_files(Location.of(prefix), None)
