"""One rule of restart: what this job would have written is completed or left alone, another job's target is refused."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import AtEvent
from helpers.lineage_data import build_with_lineage
from helpers.random_datasets import Document, build_ours

from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.cut import cut_dataset
from binidx.corpus.merge import merge_datasets, merge_virtually
from binidx.corpus.shuffle import shuffle_datasets
from binidx.errors import ObjectExistsError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.packed.packed_convert import indexed_to_packed, packed_to_indexed
from binidx.packed.packed_files import PackedFiles
from binidx.prepare.text.line_shuffle import shuffle_lines

Write = Callable[..., Any]
MERGE: Write = lambda source, out, **options: merge_datasets([source, source], f"{out}/all", **options)  # noqa: E731
DATASETS: dict[str, Write] = {
    "merge": MERGE,
    "head": lambda source, out, **options: cut_dataset(source, [f"{out}/all"], num_documents=30, **options),
    "split": lambda source, out, **options: cut_dataset(source, [f"{out}/all"], [0.7], seed=1, **options),
    "shuffle": lambda source, out, **options: shuffle_datasets([source], f"{out}/all", seed=1, **options),
}


def contents(folder: str) -> dict[str, bytes]:
    """Name of each object -> its bytes."""
    fs, path = fsspec.url_to_fs(folder)
    fs.invalidate_cache()
    return {name.rsplit("/", 1)[1]: fs.cat_file(name) for name in fs.find(path)}


def source_of(at: Path, codec: str | None = None) -> str:
    source = build_with_lineage(at / "en", 60, 1)
    if codec:
        convert_dataset(source, at / "stored", way=StorageFormat(codec))
    return str(at / "stored") if codec else source


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("where", ["disk", "s3"])
def test_what_the_same_job_published_is_completed_or_left_alone(
    where: str, name: str, codec: str | None, tmp_path: Path, s3: Bucket
) -> None:
    source, out, write = source_of(tmp_path, codec), s3.fresh() if where == "s3" else f"{tmp_path}/out", DATASETS[name]
    write(source, out)
    needed, (fs, path) = contents(out), fsspec.url_to_fs(out)
    before = {each: fs.info(each) for each in fs.find(path)}
    watch = AtEvent("", None)
    write(source, out, watch=watch)
    assert watch.events[-1] == f"{out}/all: holds this dataset already, compared byte for byte"
    fs.invalidate_cache()
    assert {each: fs.info(each) for each in fs.find(path)} == before
    for ends in ([".idx"], [".lineage.parquet"], [".idx", ".lineage.parquet"]):
        for end in ends:
            fs.rm(f"{path}/all{end}")
        write(source, out)
        assert contents(out) == needed


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("alone", [False, True], ids=["whole", "only the .bin"])
def test_a_target_of_another_job_is_refused_even_if_only_one_token_differs(
    name: str, alone: bool, tmp_path: Path
) -> None:
    source, out = source_of(tmp_path), tmp_path / "out"
    DATASETS[name](source, out)
    tokens = out / "all.bin"
    data = tokens.read_bytes()
    tokens.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
    if alone:
        (out / "all.idx").unlink()
    before = contents(str(out))
    with pytest.raises(ObjectExistsError, match=r"all: holds \.bin.*; --overwrite replaces it \(all.bin differs from"):
        DATASETS[name](source, out)
    for changed in (data + b"..", data[:-2]):
        tokens.write_bytes(changed)
        with pytest.raises(ObjectExistsError, match=r"all.bin differs from"):
            DATASETS[name](source, out)
    tokens.write_bytes(before["all.bin"])
    assert contents(str(out)) == before
    DATASETS[name](source, out, overwrite=True)
    assert tokens.read_bytes() == data


def test_equal_tokens_in_other_documents_are_another_job(tmp_path: Path) -> None:
    tokens = np.arange(20, dtype=np.uint16)

    def source(split: int) -> str:
        documents = [Document(part, [len(part)], []) for part in (tokens[:split], tokens[split:])]
        return build_ours(tmp_path / f"{split}", documents, np.uint16)

    sources = [source(8), source(12)]
    for name, write in DATASETS.items():
        if name in ("merge", "head"):
            write(sources[0], tmp_path / name)
            with pytest.raises(ObjectExistsError, match=r"all.idx differs from what this job writes, from byte 0 on"):
                write(sources[1], tmp_path / name)


def test_another_dataset_is_refused_before_its_sources_are_read(tmp_path: Path) -> None:
    source, other = source_of(tmp_path), build_with_lineage(tmp_path / "other", 50, 2)
    for name in ("merge", "shuffle"):
        DATASETS[name](source, tmp_path / name)
        watch = AtEvent("", None)
        with pytest.raises(ObjectExistsError, match=r"all: holds \.bin, \.idx, needed a free name"):
            DATASETS[name](other, tmp_path / name, watch=watch)
        assert watch.events == []


def test_a_split_that_was_killed_between_its_targets_writes_the_others(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    targets = [tmp_path / "out" / name for name in "ab"]
    cut_dataset(source, targets, [0.6, 0.4], seed=1)
    needed = contents(f"{tmp_path}/out")
    for end in (".bin", ".idx", ".lineage.parquet"):
        Path(f"{targets[1]}{end}").unlink()
    done = cut_dataset(source, targets, [0.6, 0.4], seed=1)
    assert contents(f"{tmp_path}/out") == needed
    assert sum(each.num_documents for each in done.shares) == 60


def written(path: Path) -> tuple[int, ...]:
    """Return what a write or a replacement of a file changes; a read may change its atime."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def test_a_list_of_the_same_datasets_is_left_alone(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    merge_virtually([source], tmp_path / "list")
    before = written(tmp_path / "list.parts.json")
    assert merge_virtually([source], tmp_path / "list").num_documents == 60
    assert written(tmp_path / "list.parts.json") == before
    with pytest.raises(ObjectExistsError, match=r"list.parts.json: exists"):
        merge_virtually([source, source], tmp_path / "list")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_shuffled_lines_are_compared(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{number}\n" for number in range(100)))
    target = tmp_path / f"out.jsonl{suffix}"
    for seed in (1, 1):
        shuffle_lines([tmp_path / "in.txt"], target, seed=seed, memory_bytes=1 << 30)
    before = written(target)
    with pytest.raises(ObjectExistsError, match=r"out.jsonl.*: exists; give another name, or --overwrite"):
        shuffle_lines([tmp_path / "in.txt"], target, seed=2, memory_bytes=1 << 30)
    assert written(target) == before


@pytest.mark.parametrize("where", ["disk", "s3"])
def test_packed_files_and_what_comes_back_are_compared(where: str, tmp_path: Path, s3: Bucket) -> None:
    base = s3.fresh() if where == "s3" else f"{tmp_path}/{uuid.uuid4().hex}"
    dataset = IndexedDataset(source_of(tmp_path))
    names = indexed_to_packed(dataset, base, "t", 100, 0)
    needed, (fs, path) = contents(base), fsspec.url_to_fs(base)
    fs.rm(f"{path}/{names[-1].rsplit('/', 1)[1]}")
    assert indexed_to_packed(dataset, base, "t", 100, 0) == names
    assert contents(base) == needed
    for how in ({"chunk_size": 90, "sep_token": 0}, {"chunk_size": 100, "sep_token": 0, "add_separator": True}):
        with pytest.raises(ObjectExistsError, match=r"t_00000[0-9]+.bin: exists, needed a free name; --overwrite"):
            indexed_to_packed(dataset, base, "t", **how)
    fewer = cut_dataset(source_of(tmp_path), [tmp_path / "fewer"], num_documents=59).shares[0].target
    assert contents(base) == needed
    written = indexed_to_packed(IndexedDataset(fewer), base, "t", 50, 0, overwrite=True)
    assert ["t.packed.json", *(uri.rsplit("/", 1)[1] for uri in written)] == sorted(contents(base))

    files = PackedFiles(written, 1)
    back = f"{tmp_path}/back" if where == "disk" else f"{base}-back/d"
    for _ in range(2):
        packed_to_indexed(files, back, 0)
    with pytest.raises(ObjectExistsError, match=r"holds \.bin, \.idx, needed a free name"):
        packed_to_indexed(files, back, 5)
    packed_to_indexed(files, back, 5, overwrite=True)


def test_more_packed_files_than_a_dataset_gives_are_of_another_job(tmp_path: Path) -> None:
    dataset = IndexedDataset(source_of(tmp_path))
    first = indexed_to_packed(dataset, f"{tmp_path}/out", "t", 100, 0)
    extra = tmp_path / "out" / f"t_{len(first):010d}.bin"
    extra.write_bytes(Path(first[0]).read_bytes())
    with pytest.raises(ObjectExistsError, match=f"{extra.name}: exists"):
        indexed_to_packed(dataset, f"{tmp_path}/out", "t", 100, 0)
    assert indexed_to_packed(dataset, f"{tmp_path}/out", "t", 100, 0, overwrite=True) == first
    assert not extra.exists()
