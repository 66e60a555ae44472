"""Packed files and indexed datasets, turned into each other."""

from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.pickling_executor import PicklingExecutor
from helpers.seeds import seeds

from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.jobs.parts import Shard, Workers
from binidx.packed.packed_convert import indexed_to_packed, packed_to_indexed
from binidx.packed.packed_files import PackedDatasetBuilder, PackedFiles

SEP = 3


def random_documents(rng: np.random.Generator) -> list[np.ndarray]:
    """Tokens without the separator, which each ends with."""
    return [np.append(rng.integers(4, 60_000, rng.integers(0, 40)), SEP) for _ in range(int(rng.integers(1, 30)))]


def pack(directory: Path, documents: list[np.ndarray], chunk_size: int) -> list[str]:
    builder = PackedDatasetBuilder(str(directory), "t", chunk_size, SEP, np.uint16)
    for document in documents:
        builder.add_array(document)
    builder.write_reminder()
    return builder.filenames


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_documents_come_back_whatever_the_files_and_reads(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("binidx.packed.packed_convert.CONVERTED_BYTES", 2 * int(rng.integers(1, 60)))
    documents = random_documents(rng)
    while len(documents[-1]) == 1 and len(documents) > 1:
        documents.pop()  # what looks like filler at the end is filler
    files = PackedFiles(pack(tmp_path, documents, int(rng.integers(1, 80))), 1)
    assert packed_to_indexed(files, f"{tmp_path}/d", SEP) == len(documents)
    dataset = IndexedDataset(f"{tmp_path}/d")
    assert [sequence.tolist() for sequence in dataset[:]] == [document.tolist() for document in documents]
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
    names = indexed_to_packed(dataset, f"{tmp_path}/again", "t", files.header.chunk_size, SEP)
    assert [Path(name).read_bytes() for name in names] == [Path(name).read_bytes() for name in files.uris]


def test_documents_of_several_sequences_are_packed_as_one(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(f"{tmp_path}/d.bin", np.int32) as builder:
        builder.add_document([5, 6, 7], [2, 1])
        builder.add_document([], [])
        builder.add_document([8], [1])
        builder.finalize(f"{tmp_path}/d.idx")
    names = indexed_to_packed(IndexedDataset(f"{tmp_path}/d"), f"{tmp_path}/p", "t", 8, SEP, add_separator=True)
    assert PackedFiles(names, 8).read([0], [0])[0].tolist() == [5, 6, 7, SEP, SEP, 8, SEP, SEP]


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_whoever_writes_a_file_it_is_that_of_the_stream(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model adds one document after the other, of no sequence or several, some empty."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("binidx.packed.packed_convert.CONVERTED_BYTES", 2 * int(rng.integers(1, 60)))
    chunk_size, separator = int(rng.integers(1, 80)), bool(seed % 2)
    model = PackedDatasetBuilder(f"{tmp_path}/model", "t", chunk_size, SEP, np.uint16)
    with IndexedDatasetBuilder(f"{tmp_path}/d.bin", np.uint16) as builder:
        for _ in range(int(rng.integers(0, 30))):
            lengths = rng.choice([0, 1, 7, 40], rng.integers(0, 4)).tolist()
            document = rng.integers(4, 60_000, sum(lengths)).astype(np.uint16)
            builder.add_document(document, lengths)
            model.add_array(document)
            if separator:
                model.add_array(np.array([SEP]))
        builder.finalize(f"{tmp_path}/d.idx")
    model.write_reminder()
    needed = [Path(name).read_bytes() for name in model.filenames]
    dataset = IndexedDataset(f"{tmp_path}/d")
    with PicklingExecutor(2) as pickling:
        ways = [Workers(count=3)], [Workers(executor=pickling, shard=Shard(number, 2)) for number in (1, 0)]
        for number, calls in enumerate(ways):
            for workers in calls:
                into, told = f"{tmp_path}/{number}", list[int]()
                arguments = dataset, into, "t", chunk_size, SEP
                names = indexed_to_packed(*arguments, add_separator=separator, workers=workers, watch=told.append)
            assert [Path(name).read_bytes() for name in names] == needed
            assert len(told) == len(calls[-1].select(names))


def test_a_text_without_separator_is_one_document(tmp_path: Path) -> None:
    files = PackedFiles(pack(tmp_path, [np.arange(10, 25)], 5), 5)
    assert packed_to_indexed(files, f"{tmp_path}/d", SEP) == 1
    assert IndexedDataset(f"{tmp_path}/d")[0].tolist() == list(range(10, 25))


def test_from_bucket_to_bucket(s3: Bucket) -> None:
    where, documents = s3.fresh(), random_documents(np.random.default_rng(1))
    builder = PackedDatasetBuilder(where, "t", 50, SEP, np.uint16)
    for document in documents:
        builder.add_array(document)
    builder.write_reminder()
    told: list[int] = []
    packed_to_indexed(PackedFiles(builder.filenames, 5), f"{where}/d", SEP, watch=told.append)
    assert sum(told) == sum(map(len, documents))
    assert len(IndexedDataset(f"{where}/d")) == len(documents)


def test_a_dataset_without_documents_comes_back_without_documents(tmp_path: Path) -> None:
    IndexedDatasetBuilder(f"{tmp_path}/d.bin", np.uint16).finalize(f"{tmp_path}/d.idx")
    files = PackedFiles(indexed_to_packed(IndexedDataset(f"{tmp_path}/d"), f"{tmp_path}/p", "t", 8, SEP), 8)
    assert packed_to_indexed(files, f"{tmp_path}/back", SEP) == 0
