"""A shuffle gives documents sorted by their keys, whatever the memory, the stores, the codec; and leaves no half."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import AtEvent, build, names_beside, pair, unfinished_uploads
from helpers.pickling_executor import PicklingExecutor
from helpers.random_datasets import DTYPES, Document, build_ours, random_documents
from helpers.shuffle_oracle import new_order, read_documents, small_buckets
from hypothesis import given, settings
from hypothesis import strategies as st

from binidx.corpus import exchange, shuffle
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.shuffle import shuffle_datasets
from binidx.errors import BinidxError, ConfigError, ObjectChangedError, ObjectExistsError
from binidx.jobs.parts import Shard, Workers

MIB = 1 << 20


def some(folder: Path, dtype: Any = np.uint16, multimodal: bool = False, counts: tuple[int, ...] = (90, 0, 7)) -> list:
    rng = np.random.default_rng(3)
    return [
        build_ours(folder / f"part-{n}", random_documents(rng, dtype, count), dtype, multimodal)
        for n, count in enumerate(counts)
    ]


def in_memory(sources: list[Any], seed: int) -> list[Any]:
    documents = [each for source in sources for each in read_documents(source)]
    return [documents[number] for number in new_order(seed, len(documents))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_buckets", [1, 5])
def test_documents_stand_in_the_order_of_their_keys(dtype: type, num_buckets: int, tmp_path: Path, monkeypatch) -> None:
    small_buckets(monkeypatch, num_buckets, round_bytes=64)
    sources = some(tmp_path, dtype, dtype is np.int32)
    done = shuffle_datasets(sources, tmp_path / "new", seed=7)
    assert read_documents(tmp_path / "new") == in_memory(sources, 7)
    assert (done.num_documents, done.num_buckets, done.lineage) == (97, num_buckets, False)
    assert names_beside(f"{tmp_path}/new") == ["new.bin", "new.idx"]


@settings(max_examples=25)
@given(st.integers(0, 60), st.integers(0, 2**70), st.integers(1, 9), st.integers(1, 300), st.integers(1, 400))
def test_neither_buckets_nor_rounds_nor_memory_change_a_byte(
    tmp_path_factory: Any, count: int, seed: int, num_buckets: int, round_bytes: int, bucket_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = build_ours(folder / "en", random_documents(np.random.default_rng(seed), np.uint16, count), np.uint16)
    shuffle_datasets([source], folder / "one", seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        small_buckets(patch, num_buckets, round_bytes, bucket_bytes, chunk_bytes=53, extent_bytes=33)
        shuffle_datasets([source], folder / "other", seed=seed)
    assert pair(folder / "other") == pair(folder / "one")
    assert read_documents(folder / "one") == in_memory([source], seed)


def test_a_document_that_no_memory_holds_is_left_on_the_disk(tmp_path: Path, monkeypatch) -> None:
    rng = np.random.default_rng(1)
    lengths = [3, 70_000, 5, 0, 2, 30_000]
    documents = [Document(rng.integers(0, 99, n, dtype=np.uint16), [n // 2, n - n // 2], [0, 0]) for n in lengths]
    documents.append(Document(rng.integers(0, 99, 1000, dtype=np.uint16), [1] * 1000, [0] * 1000))
    source = build_ours(tmp_path / "en", documents, np.uint16)
    small_buckets(monkeypatch, 3, round_bytes=1000, bucket_bytes=5000, chunk_bytes=701)
    shuffle_datasets([source, source], tmp_path / "new", seed=2)
    assert read_documents(tmp_path / "new") == in_memory([source, source], 2)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(0, 2**40), st.integers(40, 900), st.booleans())
def test_workers_write_the_same_bytes(
    tmp_path_factory: Any, counts: list[int], seed: int, size: int, multimodal: bool
) -> None:
    folder, rng = tmp_path_factory.mktemp("any"), np.random.default_rng(seed)
    sources = [
        build_ours(folder / f"s{n}", random_documents(rng, np.uint16, count), np.uint16, multimodal)
        for n, count in enumerate(counts)
    ]
    shuffle_datasets(sources, folder / "one", seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BUCKET_BYTES", "HELD_BYTES", "PIECE_BYTES"):
            patch.setattr(shuffle, name, size)
        patch.setattr(exchange, "ROUND_BYTES", size)
        patch.setattr(exchange, "HELD_BYTES", 2 * size)
        with PicklingExecutor(2) as executor:
            shuffle_datasets(sources, folder / "other", seed=seed, workers=Workers(executor=executor))
        shards = [Workers(count=1, shard=Shard(number, 2)) for number in range(2)]
        calls = [shuffle_datasets(sources, folder / "shards", seed=seed, workers=shards[n % 2]) for n in range(4)]
    assert pair(folder / "other") == pair(folder / "shards") == pair(folder / "one")
    assert calls[-1].parts_missing == 0
    assert not list(folder.glob("*-parts"))


def test_parts_of_another_shuffle_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = build(tmp_path / "en", 10_000)
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 2_000)
    half = Workers(count=1, shard=Shard(1, 2))
    assert shuffle_datasets([source], tmp_path / "new", seed=1, workers=half).parts_missing
    with pytest.raises(ObjectExistsError, match=r"new-parts/job.json: parts of another job"):
        shuffle_datasets([source], tmp_path / "new", seed=2, workers=half)
    with pytest.raises(ConfigError, match="shard, overwrite: shards do not know of each other"):
        shuffle_datasets([source], tmp_path / "new", seed=1, workers=half, overwrite=True)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_from_s3_to_s3_and_to_a_disk(codec: str, s3: Bucket, tmp_path: Path) -> None:
    base, source = s3.fresh(), build(tmp_path / "en", 3_000_000)
    convert_dataset(source, f"{base}/en", way=StorageFormat(codec))
    for target in (f"{base}/new", str(tmp_path / "new")):
        shuffle_datasets([f"{base}/en", f"{base}/en"], target, seed=4)
        assert read_documents(target) == in_memory([source, source], 4)
        assert names_beside(target) == [f"new.bin{'.zst' if codec == 'zstd' else ''}", "new.idx"]


def test_what_cannot_be_shuffled_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    en, wide = build(tmp_path / "en", 100), build_ours(tmp_path / "wide", [], np.int32)
    build(tmp_path / "new", 10)
    before = pair(tmp_path / "new")
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (BinidxError, "dtype int32, needed uint16", {"sources": [en, wide]}),
        (ConfigError, "need at least 512 MB", {"memory_bytes": 1000}),
        (ConfigError, "is read and written", {"sources": [en, tmp_path / "new"]}),
        (ConfigError, "no/such .No such file", {"scratch": str(tmp_path / "no/such")}),
    ]
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            shuffle_datasets(target=tmp_path / "new", seed=1, overwrite=True, **{"sources": [en], **options})
    with pytest.raises(ObjectExistsError, match=r"new: holds \.bin, \.idx"):
        shuffle_datasets([en], tmp_path / "new", seed=1)
    assert pair(tmp_path / "new") == before
    shuffle_datasets([en], tmp_path / "new", seed=1, overwrite=True)
    assert read_documents(tmp_path / "new") == in_memory([en], 1)


def test_a_source_replaced_meanwhile_is_noticed_and_leaves_nothing(s3: Bucket, tmp_path: Path) -> None:
    source, new, base = build(tmp_path / "a", 300_000), build(tmp_path / "b", 300_000, 7), s3.fresh()
    for folder in (base, str(tmp_path / "local")):
        convert_dataset(source, f"{folder}/a")
        watch = AtEvent("in order", functools.partial(convert_dataset, new, f"{folder}/a", overwrite=True))
        with pytest.raises(ObjectChangedError):
            shuffle_datasets([f"{folder}/a"], f"{folder}/new", seed=1, watch=watch)
        assert names_beside(f"{folder}/new") == []
    assert unfinished_uploads(f"{base}/new") == []


DYING = """
import os, signal, sys
from binidx.corpus.shuffle import shuffle_datasets
from binidx.jobs.progress import SilentWatcher
class Dying(SilentWatcher):
    def begin(self, what, *counts): self.what = what
    def advance(self, count):
        if self.what == sys.argv[1]: os.kill(os.getpid(), signal.SIGKILL)
shuffle_datasets([sys.argv[2]], sys.argv[3], seed=1, scratch=sys.argv[4], overwrite=True, watch=Dying())
"""


@pytest.mark.parametrize("stage", ["into buckets", "in order"])
def test_killed_in_either_pass_it_leaves_no_dataset_and_no_scratch(stage: str, s3: Bucket, tmp_path: Path) -> None:
    source, scratch = build(tmp_path / "en", 100_000), tmp_path / "scratch"
    scratch.mkdir()
    for target in (f"{s3.fresh()}/new", str(tmp_path / "new")):
        before = build(tmp_path / "before", 10)
        convert_dataset(before, target)
        ended = subprocess.run([sys.executable, "-c", DYING, stage, source, target, scratch], check=False)
        assert ended.returncode == -9
        assert list(scratch.iterdir()) == []
        assert pair(target) == pair(before)
        shuffle_datasets([source], target, seed=1, scratch=str(scratch), overwrite=True)
        assert read_documents(target) == in_memory([source], 1)


FULL = """
import resource, sys
from binidx.errors import StorageError
from binidx.corpus.shuffle import shuffle_datasets
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
try:
    shuffle_datasets([sys.argv[2]], sys.argv[3], seed=1, scratch=sys.argv[4])
except StorageError as error:
    print(error)
"""


def test_a_full_disk_is_one_error_and_nothing_is_left(tmp_path: Path) -> None:
    source, target = build(tmp_path / "en", 500_000), str(tmp_path / "new")
    command = [sys.executable, "-c", FULL, "300000", source, target, str(tmp_path)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "File too large" in told
    assert "needed room for all that is shuffled; --scratch names another directory" in told
    assert names_beside(target) == []


MEASURED = """
import sys
from binidx.corpus.shuffle import shuffle_datasets
done = shuffle_datasets([sys.argv[1]], sys.argv[2], seed=1, memory_bytes=512 << 20)
with open("/proc/self/status") as file:
    print(done.num_buckets, next(line.split()[1] for line in file if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_the_process_stays_within_its_memory(s3: Bucket, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 4000, 65_000)
    documents = (Document(np.full(n, n, np.uint16), [n], [0]) for n in lengths.tolist())
    source = build_ours(tmp_path / "en", documents, np.uint16)  # type: ignore[arg-type]
    assert os.path.getsize(f"{source}.bin") > 240 * MIB
    there, base = tmp_path / "new", s3.fresh()
    convert_dataset(source, f"{base}/en", verify="size")
    # 192 MiB of the 512 are for what a disk does not need: s3fs, uploads, pyarrow.
    for of, to, most in ((source, str(there), 320 * MIB), (f"{base}/en", f"{base}/new", 512 * MIB)):
        command = [sys.executable, "-c", MEASURED, of, to]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        num_buckets, peak = map(int, told.split())
        assert num_buckets > 2
        assert peak * 1024 < most


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_the_mapping_of_a_long_document_stays_within_the_memory(tmp_path: Path) -> None:
    num_tokens = 190 * MIB
    document = Document(np.ones(num_tokens, np.uint16), [num_tokens], [0])
    source = build_ours(tmp_path / "en", [document], np.uint16)
    command = [sys.executable, "-c", MEASURED, source, str(tmp_path / "new")]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert int(told.split()[1]) * 1024 < 320 * MIB
    assert os.path.getsize(tmp_path / "new.bin") == 2 * num_tokens


LONG_IDS = """
import sys
import numpy as np
import pyarrow as pa
from binidx.corpus.lineage.lineage_transfer import shuffle_lineage
from binidx.corpus.lineage.lineage_writer import build_lineage_table

def tables():
    yield build_lineage_table(["a"], np.zeros(8192, np.int32), np.arange(8192), None, None, None)
    for number in range(1, 80):
        rows = np.arange(8192) + 8192 * number
        ids = pa.array([f"{row:0600}" for row in rows.tolist()])
        yield build_lineage_table(["b"], np.zeros(8192, np.int32), rows, None, ids, None)

count = 0
for table in shuffle_lineage(tables(), 80 * 8192, 1, 512 << 20, sys.argv[1]):
    count += len(table)
    for row, name in zip(table["row"][:9].to_pylist(), table["id"][:9].to_pylist(), strict=True):
        assert name == (f"{row:0600}" if row >= 8192 else None)
assert count == 80 * 8192
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_lineage_with_long_ids_stays_within_the_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LONG_IDS, str(tmp_path)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert int(told) * 1024 < 512 * MIB
