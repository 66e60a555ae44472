"""A merge is Megatron's, byte for byte, whatever the stores; and what fails leaves what was there."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import AtEvent, build, names_beside, pair, unfinished_uploads
from helpers.oracle import megatron
from helpers.random_datasets import DTYPES, build_ours, random_documents
from servers.latency_proxy import latency_proxy

from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_datasets, merge_virtually
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectChangedError, ObjectExistsError
from binidx.format import idx
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder

MIB = 1 << 20


def merge_theirs(sources: list[str], target: Path, dtype: type, multimodal: bool = False) -> str:
    builder = megatron.indexed.IndexedDatasetBuilder(f"{target}.bin", dtype, multimodal)
    for source in sources:
        builder.add_index(source)
    builder.finalize(f"{target}.idx")
    return str(target)


def some(tmp_path: Path, dtype: type, multimodal: bool = False, counts: tuple[int, ...] = (5, 0, 9, 1)) -> list[str]:
    rng = np.random.default_rng(3)
    return [
        build_ours(tmp_path / f"part-{n}", random_documents(rng, dtype, count), dtype, multimodal)
        for n, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("dtype", "multimodal", "block"),
    [(np.uint16, False, 3), (np.int32, True, 3), *((dtype, dtype is np.int32, 1 << 18) for dtype in DTYPES)],
)
def test_the_bytes_are_megatrons(tmp_path: Path, dtype: type, multimodal: bool, block: int, monkeypatch) -> None:
    monkeypatch.setattr(idx, "BLOCK_VALUES", block)
    sources = some(tmp_path, dtype, multimodal)
    done = merge_datasets(sources, tmp_path / "ours")
    with_modes = [each for each in sources if not (multimodal and each.endswith("-1"))]  # Megatron: none of nothing
    assert pair(tmp_path / "ours") == pair(merge_theirs(with_modes, tmp_path / "theirs", dtype, multimodal))
    assert (done.num_documents, done.num_sources, done.how, done.moved_bytes) == (15, 4, "copy_file_range", 0)
    assert names_beside(f"{tmp_path}/ours") == ["ours.bin", "ours.idx"]


def test_of_nothing_but_empty_datasets(tmp_path: Path) -> None:
    sources = some(tmp_path, np.uint16, counts=(0, 0))
    merge_datasets(sources, tmp_path / "ours")
    assert pair(tmp_path / "ours") == pair(sources[0])


def test_one_may_be_named_twice_and_trailing_bytes_stay_behind(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 100)
    with Path(f"{source}.bin").open("ab") as file:
        file.write(b"bytes that no sequence covers")
    merge_datasets([source, source], tmp_path / "twice")
    once, twice = IndexedDataset(source), IndexedDataset(str(tmp_path / "twice"))
    assert np.array_equal(np.concatenate([*once[:], *once[:]]), np.concatenate(twice[:]))
    assert Path(f"{tmp_path}/twice.bin").stat().st_size == 400


@pytest.mark.parametrize("kind", ["s3", "gs", "memory"])
def test_in_a_store_and_from_there_to_a_disk(kind: str, s3: Bucket, gs: str, tmp_path: Path) -> None:
    bases = {"s3": s3.fresh(), "gs": f"{gs}/{uuid.uuid4().hex}", "memory": f"memory://{uuid.uuid4().hex}"}
    sizes = [3_000_000, 10, 3_500_000] if kind == "s3" else [30_000, 10, 3]
    sources = [build(tmp_path / f"en{n}", size, n) for n, size in enumerate(sizes)]
    theirs = pair(merge_theirs(sources, tmp_path / "theirs", np.uint16, True))
    there = [f"{bases[kind]}/en{n}" for n in range(3)]
    for source, copy in zip(sources, there, strict=True):
        convert_dataset(source, copy)
    for target in (f"{bases[kind]}/all", str(tmp_path / "back")):
        done = merge_datasets(there, target)
        assert pair(target) == theirs
        assert done.how == ("server" if target.startswith(("s3:", "gs:")) else "stream")
    assert names_beside(f"{bases[kind]}/all") == ["all.bin", "all.idx"]


def test_on_s3_only_the_index_passes_through_the_client(s3: Bucket, tmp_path: Path) -> None:
    base = s3.fresh()
    for number in range(3):
        convert_dataset(build(tmp_path / f"en{number}", 4_000_000, number), f"{base}/en{number}", verify="size")
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        before = proxy.counts()
        done = merge_datasets([f"{base}/en{number}" for number in range(3)], f"{base}/all")
        moved = proxy.counts() - before
    assert (done.how, done.moved_bytes, done.bin_bytes) == ("server", 0, 24_000_000)
    assert moved.bytes < 40_000


@pytest.mark.parametrize("virtually", [False, True])
def test_small_sources_cost_a_request_for_each_file(virtually: bool, s3: Bucket, tmp_path: Path) -> None:
    base = s3.fresh()
    fs, _ = fsspec.url_to_fs(base)
    sources = some(tmp_path, np.uint16, counts=(3,) * 40)
    names = [Path(source).name for source in sources]
    for end in ("bin", "idx"):
        fs.put([f"{source}.{end}" for source in sources], [f"{base}/{name}.{end}" for name in names])
    there = [f"{base}/{name}" for name in names]
    if virtually:
        merge_virtually(there, f"{base}/list")
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        merge_datasets([f"{base}/list"] if virtually else there, f"{base}/all")
        assert proxy.counts().requests <= 2 * 40 + 30  # which were 15 each
    merge_datasets(sources, tmp_path / "local")
    assert pair(f"{base}/all") == pair(tmp_path / "local")


def test_compressed_sources_are_joined_without_being_decompressed(s3: Bucket, tmp_path: Path) -> None:
    base = s3.fresh()
    sources = [build(tmp_path / f"en{n}", size, n) for n, size in enumerate([4_000_000, 0, 70_000, 3_000_000])]
    plain = merge_datasets(sources, tmp_path / "plain")
    for folder in (str(tmp_path / "packed"), base):
        packed = [f"{folder}/en{number}" for number in range(4)]
        for source, copy in zip(sources, packed, strict=True):
            convert_dataset(source, copy, way=StorageFormat("zstd"))
        done = merge_datasets(packed, f"{folder}/all")
        assert done.how == ("server" if folder == base else "copy_file_range")
        assert done.num_tokens == plain.num_tokens
        assert names_beside(f"{folder}/all") == ["all.bin.zst", "all.idx"]
        convert_dataset(f"{folder}/all", f"{folder}/back", way=StorageFormat("raw"))
        assert pair(f"{folder}/back") == pair(tmp_path / "plain")


def test_what_cannot_be_merged_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    en, other = build(tmp_path / "en", 100), build_ours(tmp_path / "wide", [], np.int32)
    text = some(tmp_path, np.uint16)[0]
    convert_dataset(en, tmp_path / "packed", way=StorageFormat("zstd"))
    cases = {
        "dtype int32, needed uint16 as in": (FormatError, [en, other]),
        "stored otherwise than": (ConfigError, [en, str(tmp_path / "packed")]),
        "no modes, .*en.idx has them": (FormatError, [en, text]),
        "0 datasets, needed": (ConfigError, []),
        "is read and written": (ConfigError, [en, f"{tmp_path}/all"]),
    }
    build(tmp_path / "all", 10)
    before = pair(tmp_path / "all")
    for message, (kind, sources) in cases.items():
        with pytest.raises(kind, match=message):
            merge_datasets(sources, tmp_path / "all", overwrite=True)
    with pytest.raises(ObjectExistsError, match=r"all: holds \.bin, \.idx"):
        merge_datasets([en], tmp_path / "all")
    assert pair(tmp_path / "all") == before
    merge_datasets([en, en], tmp_path / "all", overwrite=True)
    assert len(IndexedDataset(str(tmp_path / "all"))) == 2 * len(IndexedDataset(en))


@pytest.mark.parametrize("where", ["bin", "idx"])
def test_a_damaged_source_leaves_what_stands_at_the_target(where: str, tmp_path: Path) -> None:
    sources = [build(tmp_path / "a", 100), build(tmp_path / "b", 100, 1)]
    build(tmp_path / "all", 10)
    before = pair(tmp_path / "all")
    damaged = Path(f"{sources[1]}.{where}")
    data = bytearray(damaged.read_bytes())
    damaged.write_bytes(data[:-1] if where == "bin" else data[:60] + b"\xff" + data[61:])
    with pytest.raises(FormatError, match="b.bin: 199 bytes, its .idx needs 200" if where == "bin" else "b.idx"):
        merge_datasets(sources, tmp_path / "all", overwrite=True)
    assert pair(tmp_path / "all") == before
    assert names_beside(f"{tmp_path}/all") == ["all.bin", "all.idx"]


def test_a_source_replaced_meanwhile_is_noticed_and_leaves_nothing(s3: Bucket, tmp_path: Path) -> None:
    base = s3.fresh()
    source = build(tmp_path / "a", 3_000_000)
    new = build(tmp_path / "new", 3_000_000, 7)
    for folder in (base, str(tmp_path / "local")):
        convert_dataset(source, f"{folder}/a")
        watch = AtEvent("tokens", functools.partial(convert_dataset, new, f"{folder}/a", overwrite=True))
        with pytest.raises(BinidxError) as found:
            merge_datasets([f"{folder}/a"] * 2, f"{folder}/all", watch=watch)
        assert folder == base or isinstance(found.value, ObjectChangedError)
        assert names_beside(f"{folder}/all") == []
    assert unfinished_uploads(f"{base}/all") == []


def test_a_store_that_fails_leaves_nothing(s3: Bucket, tmp_path: Path) -> None:
    base = s3.fresh()
    for name in ("a", "b"):
        convert_dataset(build(tmp_path / name, 3_000_000), f"{base}/{name}")
    with pytest.raises(BinidxError):
        merge_datasets([f"{base}/a", f"{base}/b"], "s3://no-such-bucket-here/all")
    assert names_beside(f"{base}/all") == []


WHILE_UPLOADING = """
import os, signal, sys
from helpers.conversion import unfinished_uploads
from binidx.corpus.merge import merge_datasets
from binidx.jobs.progress import SilentWatcher
*sources, target, act = sys.argv[1:]
def ids():
    return {each["UploadId"] for each in unfinished_uploads(target)}
before = ids()
class Watch(SilentWatcher):
    def advance(self, count):
        global act
        if act and ids() - before:
            if act == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            act = ""
            print("paused", flush=True)
            sys.stdin.readline()
merge_datasets(sources, target, watch=Watch())
"""


@pytest.mark.parametrize("how", ["server", "stream"])
def test_killed_merges_leave_no_upload_to_the_next_and_take_none_of_a_living_one(
    how: str, s3: Bucket, tmp_path: Path
) -> None:
    base, source = s3.fresh(), build(tmp_path / "en", 3_000_000)
    if how == "server":
        convert_dataset(source, f"{base}/en")
        source = f"{base}/en"
    sources, target = [source] * 4, f"{base}/all"

    def command(act: str) -> list[str]:
        return [sys.executable, "-c", WHILE_UPLOADING, *sources, target, act]

    for _ in range(2):
        done = subprocess.run(command("die"), check=False)
        assert done.returncode == -signal.SIGKILL
        assert len(unfinished_uploads(target)) == 1
    with subprocess.Popen(command("wait"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None
        assert living.stdout.readline() == "paused\n"
        [upload] = unfinished_uploads(target)
        assert merge_datasets(sources, target).how == how
        assert unfinished_uploads(target) == [upload]
        living.communicate("go on\n")
    assert living.returncode == 0
    assert unfinished_uploads(target) == []
    assert names_beside(target) == ["all.bin", "all.idx"]
    assert len(IndexedDataset(target)) == 4 * len(IndexedDataset(source))


def test_checksums_are_not_carried_along_and_old_ones_go(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 100)
    for name in ("sums", "all"):
        convert_dataset(source, tmp_path / name, way=StorageFormat(checksums=True))
    assert merge_datasets([tmp_path / "sums"], tmp_path / "all", overwrite=True).dropped_sums
    assert names_beside(f"{tmp_path}/all") == ["all.bin", "all.idx"]
    assert not merge_datasets([source], tmp_path / "other").dropped_sums


def test_many_blocks_take_little_memory(tmp_path: Path) -> None:
    from tests.bench.table import peak_bytes

    lengths = np.ones(1_000_000, np.int32)
    with IndexedDatasetBuilder(tmp_path / "en.bin", np.uint16) as builder:
        builder._bin.write(bytes(2_000_000))
        builder._columns.lengths.extend(lengths)
        builder._columns.add_bounds(np.arange(1, 1_000_001), plus=0)
        builder.finalize(tmp_path / "en.idx")
    assert peak_bytes(lambda: merge_datasets([tmp_path / "en"] * 2, tmp_path / "all")) < 40 * MIB
