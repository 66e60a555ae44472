"""Row i of the lineage stays document i, through merge, cut and shuffle; and verify says where it does not."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from conftest import Bucket
from helpers.conversion import build, names_beside
from helpers.lineage_data import END, build_with_lineage, read_lineage
from helpers.preprocess_jobs import texts, write_lines
from helpers.shuffle_oracle import new_order, small_buckets
from hypothesis import given, settings
from hypothesis import strategies as st

from binidx.corpus.convert import convert_dataset
from binidx.corpus.cut import cut_dataset
from binidx.corpus.lineage import lineage_writer
from binidx.corpus.merge import merge_datasets, merge_virtually
from binidx.corpus.random_numbers import uniform_hash
from binidx.corpus.shuffle import shuffle_datasets
from binidx.corpus.verify import verify_dataset
from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.format.sidecars import lineage
from binidx.storage.location import Location


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((lineage, "BATCH_ROWS"), (lineage_writer, "GROUP_ROWS")):
        monkeypatch.setattr(module, name, 40)


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    return [build_with_lineage(tmp_path / f"part-{n}", count, n) for n, count in enumerate((100, 0, 37))]


def rows_of(sources: list[str]) -> list[dict[str, Any]]:
    return [row for source in sources for row in read_lineage(source)]


def test_merge_carries_it_along(sources: list[str], tmp_path: Path) -> None:
    assert merge_datasets(sources, tmp_path / "all").lineage
    assert read_lineage(tmp_path / "all") == rows_of(sources)
    assert verify_dataset(tmp_path / "all", lineage=True).lineage == 137
    assert not merge_datasets(sources, tmp_path / "bare", lineage=False).lineage
    assert names_beside(f"{tmp_path}/bare") == ["bare.bin", "bare.idx"]


def test_documents_of_a_dataset_without_any_are_told_by_prefix_and_number(sources: list[str], tmp_path: Path) -> None:
    bare = build(tmp_path / "bare", 1000)
    convert_dataset(sources[2], tmp_path / "raw")  # without modes, as the others
    Path(f"{tmp_path}/raw{END}").unlink()
    merge_datasets([sources[0], tmp_path / "raw"], tmp_path / "all")
    found = read_lineage(tmp_path / "all")
    assert found[:100] == rows_of(sources[:1])
    nulls = {"byte": None, "id": None, "hash": None}
    assert found[100:] == [{"source": f"{tmp_path}/raw", "row": row, **nulls} for row in range(37)]
    assert verify_dataset(tmp_path / "all", lineage=True).lineage == 100
    assert not merge_datasets([bare], tmp_path / "none").lineage


def test_head_sample_and_split_take_the_rows_of_their_documents(sources: list[str], tmp_path: Path) -> None:
    rows, where = rows_of(sources[:1]), uniform_hash(5, 0, 100)
    cut_dataset(sources[0], [tmp_path / "head"], num_documents=63)
    cut_dataset(sources[0], [tmp_path / "a", tmp_path / "b"], [0.5, 0.25], seed=5)
    assert read_lineage(tmp_path / "head") == rows[:63]
    assert read_lineage(tmp_path / "a") == [row for row, place in zip(rows, where, strict=True) if place < 0.5]
    assert read_lineage(tmp_path / "b") == [row for row, place in zip(rows, where, strict=True) if 0.5 <= place < 0.75]
    for name in ("head", "a", "b"):
        verify_dataset(tmp_path / name, lineage=True)


@settings(max_examples=10)
@given(st.integers(1, 6), st.integers(100, 4000), st.integers(30, 5000), st.integers(0, 2**64))
def test_shuffle_brings_rows_where_it_brings_documents(
    tmp_path_factory: Any, num_buckets: int, round_bytes: int, bucket_bytes: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("lineage")
    sources = [build_with_lineage(folder / f"part-{n}", count, n) for n, count in enumerate((61, 0, 20))]
    Path(sources[2] + END).unlink()
    expected = [*rows_of(sources[:2]), *lineage_of_none(sources[2], 20)]
    with pytest.MonkeyPatch.context() as patch:
        small_buckets(patch, num_buckets, round_bytes, bucket_bytes, chunk_bytes=300)
        shuffle_datasets(sources, folder / "new", seed=seed)
    assert read_lineage(folder / "new") == [expected[number] for number in new_order(seed, 81)]
    assert verify_dataset(folder / "new", lineage=True).lineage == 61


def lineage_of_none(prefix: str, count: int) -> list[dict[str, Any]]:
    return [{"source": prefix, "row": row, "byte": None, "id": None, "hash": None} for row in range(count)]


def test_on_s3_as_on_a_disk(sources: list[str], s3: Bucket) -> None:
    base = s3.fresh()
    for source in sources:
        convert_dataset(source, f"{base}/{Path(source).name}")
    there = [f"{base}/{Path(source).name}" for source in sources]
    merge_datasets(there, f"{base}/all")
    shuffle_datasets([f"{base}/all"], f"{base}/new", seed=1)
    cut_dataset(f"{base}/new", [f"{base}/head"], num_documents=50)
    rows = rows_of(sources)
    assert read_lineage(f"{base}/head") == [rows[number] for number in new_order(1, 137)[:50]]
    assert verify_dataset(f"{base}/head", lineage=True).lineage == 50


def test_what_tells_of_an_older_dataset_goes(sources: list[str], tmp_path: Path) -> None:
    bare = build(tmp_path / "bare", 100)
    for name in ("merged", "cut", "shuffled"):
        merge_datasets(sources, tmp_path / name)
        Path(f"{tmp_path}/{name}.manifest.json").write_text("{}")
    merge_datasets([bare], tmp_path / "merged", overwrite=True)
    cut_dataset(bare, [tmp_path / "cut"], num_documents=3, overwrite=True)
    shuffle_datasets([bare], tmp_path / "shuffled", seed=1, overwrite=True)
    for name in ("merged", "cut", "shuffled"):
        assert names_beside(f"{tmp_path}/{name}") == [f"{name}.bin", f"{name}.idx"]


def test_a_lineage_whose_sources_are_no_text_is_refused(tmp_path: Path) -> None:
    columns = {"source": [b"a"], "row": [0], "byte": [0], "id": ["x"], "hash": pa.array([0], pa.uint64())}
    parquet.write_table(pa.table(columns), tmp_path / f"a{END}")
    with pytest.raises(FormatError, match=r"lineage.parquet: is no lineage \("):
        lineage.documents_at(Location.of(tmp_path / "a"), "a", 0)


def test_a_sidecar_that_is_not_the_datasets_leaves_nothing(sources: list[str], tmp_path: Path) -> None:
    other, broken = Path(sources[2] + END).read_bytes(), Path(sources[0] + END).read_bytes()[:-1]
    for data, message in (
        (other, "lineage.parquet: 37 rows, needed 100"),
        (broken, "lineage.parquet: not a Parquet file, or damaged "),
    ):
        Path(sources[0] + END).write_bytes(data)
        for act in (merge_datasets, lambda each, to: shuffle_datasets(each, to, seed=1)):
            with pytest.raises(FormatError, match=message):
                act([sources[0]], tmp_path / "all")
        assert names_beside(f"{tmp_path}/all") == []


def test_verify_names_the_row_that_is_of_another_document(sources: list[str], tmp_path: Path) -> None:
    table = parquet.read_table(sources[0] + END)
    parquet.write_table(table.take([*range(70), 71, 70, *range(72, 100)]), sources[0] + END)
    with pytest.raises(FormatError, match=r"lineage.parquet: row 7[01] is of another document than .*part-0 has there"):
        verify_dataset(sources[0], lineage=True)
    assert verify_dataset(sources[0]).lineage is None
    with pytest.raises(ObjectNotFoundError, match=r"bare.lineage.parquet: not found; binidx preprocess writes it"):
        verify_dataset(build(tmp_path / "bare", 100), lineage=True)
    with pytest.raises(ConfigError, match="lineage, quick: found both"):
        verify_dataset(sources[0], lineage=True, quick=True)


def test_verify_compares_the_counts_of_the_manifest(tmp_path: Path) -> None:
    source = build(tmp_path / "en", 1000)
    told = '{"binidx_manifest": 1, "dataset": {"documents": 10, "sequences": 10, "tokens": %d}}'
    assert not verify_dataset(source).manifest
    Path(f"{source}.manifest.json").write_text(told % 1000)
    assert verify_dataset(source, quick=True).manifest
    Path(f"{source}.manifest.json").write_text(told % 999)
    with pytest.raises(FormatError, match=r"manifest.json: 999 tokens, .*en.idx has 1000"):
        verify_dataset(source, quick=True)


def test_manifests_of_two_tokenizers_are_not_merged(tmp_path: Path) -> None:
    sources = [build(tmp_path / name, 10) for name in "abc"]
    for source, digest in zip(sources[:2], ("1" * 64, "2" * 64), strict=True):
        job = {"tokenizer": {"uri": f"tokenizer-{digest[0]}.json", "digest": digest}}
        Path(f"{source}.manifest.json").write_text(json.dumps({"binidx_manifest": 1, "job": job}))
    merge_virtually([sources[2], sources[1]], tmp_path / "list")
    for tool in (merge_datasets, merge_virtually, functools.partial(shuffle_datasets, seed=1)):
        with pytest.raises(
            FormatError, match=r"b.manifest.json: made by the tokenizer tokenizer-2.json \(222222222222\)"
        ):
            tool(sources, tmp_path / "all")
    with pytest.raises(FormatError, match=r"b.manifest.json: made by"):
        merge_datasets([sources[0], tmp_path / "list"], tmp_path / "all")
    assert merge_datasets([sources[0], sources[2]], tmp_path / "all").num_documents == 20


def test_a_long_document_is_hashed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binidx.corpus.whole_dataset.HASH_BYTES", 5)
    source = build_with_lineage(tmp_path / "en", 200, 9, np.int32)
    assert verify_dataset(source, lineage=True).lineage == 200


def test_a_virtual_merge_has_the_rows_of_all(sources: list[str], tmp_path: Path) -> None:
    merge_virtually(sources, str(tmp_path / "list"))
    assert read_lineage(tmp_path / "list") == rows_of(sources)
    merge_virtually([build(tmp_path / "bare", 10)], str(tmp_path / "list"), overwrite=True)
    assert names_beside(f"{tmp_path}/list") == ["list.parts.json"]


def test_convert_copies_what_tells_of_the_documents_and_removes_what_told_of_others(
    sources: list[str], s3: Bucket, tmp_path: Path
) -> None:
    Path(f"{sources[0]}.manifest.json").write_text("{}")
    for target in (f"{s3.fresh()}/en", str(tmp_path / "en")):
        convert_dataset(sources[0], target)
        assert read_lineage(target) == read_lineage(sources[0])
        assert names_beside(target) == ["en.bin", "en.idx", "en.lineage.parquet", "en.manifest.json"]
        convert_dataset(build(tmp_path / "bare", 10), target, overwrite=True)
        assert names_beside(target) == ["en.bin", "en.idx"]


def test_a_job_with_lineage_imports_no_pandas(tmp_path: Path) -> None:
    # 0.3 s and 40 MB of each worker, where it is installed, and pyarrow would.
    program = """if True:
        import sys
        from concurrent.futures import ThreadPoolExecutor
        from helpers.preprocess_jobs import job_of
        from binidx.prepare.preprocess.preprocess import preprocess
        with ThreadPoolExecutor(1) as here:
            preprocess(job_of([sys.argv[1]], sys.argv[2]), executor=here)
        print("pandas" in sys.modules)
    """
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(50)])
    command = [sys.executable, "-c", program, source, str(tmp_path / "out")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert told.strip() == "False"
    assert Path(f"{tmp_path}/out_text_document.lineage.parquet").exists()
