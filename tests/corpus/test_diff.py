"""Against a multiset of Python tuples: what was added, removed, repeated; and the order."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from helpers.conversion import build
from helpers.pickling_executor import PicklingExecutor
from helpers.random_datasets import Document, build_ours
from hypothesis import given, settings
from hypothesis import strategies as st

from binidx.corpus import diff as module
from binidx.corpus import whole_dataset
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.diff import diff_datasets, hash_documents, match_documents
from binidx.corpus.token_parts import PinnedDataset
from binidx.corpus.whole_dataset import WholeDataset
from binidx.errors import ConfigError, FormatError
from binidx.format import idx
from binidx.jobs.parts import Shard, Workers
from binidx.storage.location import Location


def dataset(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> str:
    return build_ours(prefix, [Document(np.array(each, dtype), [len(each)], [0]) for each in documents], dtype)


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
def test_matching_is_that_of_a_multiset(left: list[int], right: list[int]) -> None:
    # Equal first halves and equal second halves of different hashes, in several buckets.
    hashes = [[((n % 3) << 60) + n % 2, n] for n in range(10)]
    a, b = (np.array([hashes[n] for n in each], np.uint64).reshape(-1, 2) for each in (left, right))
    found, distinct = match_documents(a, b)
    common = Counter(left) & Counter(right)
    assert common.total() == (found >= 0).sum()
    assert distinct == (len(set(left)), len(set(right)))
    matched = [(n, int(place)) for n, place in enumerate(found) if place >= 0]
    assert all(left[n] == right[place] for n, place in matched)
    assert len({place for _, place in matched}) == len(matched)
    for token in set(left):  # copies are matched in order
        places = [place for n, place in matched if left[n] == token]
        assert places == [n for n, each in enumerate(right) if each == token][: len(places)]


def test_a_negative_number_of_documents_to_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="few: found -1, need 0 or more"):
        diff_datasets(tmp_path / "a", tmp_path / "b", few=-1)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 12), max_size=30), st.lists(st.integers(0, 12), max_size=30), st.integers(0, 4))
def test_differences_are_those_of_two_lists(left: list[int], right: list[int], few: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BUCKET_DOCUMENTS", 4)
        patch.setattr(module, "TASK_BYTES", 10)
        a, b = (dataset(Path(folder, name), [[n] * n for n in each]) for name, each in (("a", left), ("b", right)))
        found = diff_datasets(a, b, few=few)
    places = {n: deque(place for place, each in enumerate(right) if each == n) for n in left}
    numbers = [places[n].popleft() if places[n] else -1 for n in left]
    matched = [(n, place) for n, place in enumerate(numbers) if place >= 0]
    breaks = [n for (_, before), (n, place) in itertools.pairwise(matched) if place < before]
    removed, added = [n for n, place in enumerate(numbers) if place < 0], sorted({*range(len(right))} - {*numbers})
    assert (found.num_common, found.num_removed, found.num_added) == (len(matched), len(removed), len(added))
    assert (found.removed, found.added, found.order_breaks) == (removed[:few], added[:few], breaks[:few])
    assert found.num_duplicates == (len(left) - len({*left}), len(right) - len({*right}))
    assert found.num_order_breaks == len(breaks)
    assert found.same == (left == right)


def test_shards_and_a_restart_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_DOCUMENTS", 30)
    monkeypatch.setattr(module, "TASK_BYTES", 40)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 9, n % 4).tolist() for n in range(100)]
    a = dataset(tmp_path / "a", documents)
    b = dataset(tmp_path / "b", [documents[n] for n in rng.permutation(100)[:90]])
    needed = replace(diff_datasets(a, b), seconds=0)
    with pytest.raises(ConfigError, match="records: workers of other machines need a folder"):
        diff_datasets(a, b, workers=Workers(shard=Shard(0, 2)))
    shards = [Workers(count=1, shard=Shard(number, 2)) for number in range(2)]
    calls = [diff_datasets(a, b, workers=shards[n % 2], records=f"{tmp_path}/records") for n in range(4)]
    assert calls[0].parts_missing
    assert not calls[0].same
    assert replace(calls[-1], seconds=0) == needed
    assert not Path(f"{tmp_path}/records").exists()
    with PicklingExecutor(3) as executor:
        again = diff_datasets(a, b, workers=Workers(executor=executor), records=f"{tmp_path}/records")
    assert replace(again, seconds=0) == needed


@pytest.mark.parametrize("batch", [1, 3, 1 << 21])
def test_the_hash_is_xxh3_128_of_the_tokens_as_int64(tmp_path: Path, batch: int, monkeypatch) -> None:
    monkeypatch.setattr(whole_dataset, "HASH_BYTES", 8 * batch)
    monkeypatch.setattr(idx, "BLOCK_VALUES", max(batch, 2))
    documents = [[], [1, 2, 3, 4, 5, 6], [7], [], [], [8, 9], [1, 2]]
    expected = [xxhash.xxh3_128_digest(np.array(each, "<i8").tobytes()) for each in documents]
    for dtype in (np.uint16, np.int32, np.int64, np.int8):
        source = dataset(tmp_path / np.dtype(dtype).name, documents, dtype)
        pinned = PinnedDataset.of(WholeDataset(Location.of(source)))
        found = np.concatenate([*hash_documents(pinned, range(len(documents)))])
        assert found.astype(">u8").tobytes() == b"".join(expected)


def test_added_removed_repeated_and_reordered(tmp_path: Path) -> None:
    a = dataset(tmp_path / "a", [[1], [2, 2], [1], [3], [4], [5]])
    b = dataset(tmp_path / "b", [[4], [1], [3], [6], [2, 2], [6], [6]], np.int32)
    found = diff_datasets(a, b, few=2)
    assert not found.same
    assert (found.num_common, found.num_removed, found.num_added) == (4, 2, 3)
    assert (found.removed, found.added) == ([2, 5], [3, 5])
    assert found.num_duplicates == (1, 2)
    assert (found.num_order_breaks, found.order_breaks) == (2, [3, 4])
    assert (found.num_documents, found.num_tokens) == ((6, 7), (7, 8))


def test_compression_and_dtype_make_no_difference(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 50_000)
    convert_dataset(source, tmp_path / "packed", way=StorageFormat("zstd"))
    assert diff_datasets(source, tmp_path / "packed").same
    wide = dataset(tmp_path / "wide", [[65535, 1], []], np.int32)
    assert diff_datasets(dataset(tmp_path / "thin", [[65535, 1], []]), wide).same


def test_what_is_no_dataset_or_no_integers_is_refused(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 100)
    with pytest.raises(ConfigError, match="documents are compared as integers"):
        diff_datasets(source, build_ours(tmp_path / "f", [], np.float32))
    Path(f"{source}.bin").write_bytes(bytes(199))
    with pytest.raises(FormatError, match=r"en\.bin: 199 bytes, its \.idx needs 200"):
        diff_datasets(source, source)
