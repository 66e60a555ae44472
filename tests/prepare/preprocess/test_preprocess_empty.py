"""preprocess --empty: what becomes of a document of no tokens, byte for byte as one of Megatron's tools has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from helpers.preprocess_jobs import files_of, job_of, run, theirs, write_lines

from binidx.errors import ConfigError
from binidx.format.indexed_dataset import IndexedDataset

ROWS: list[dict[str, Any]] = [
    {"text": "", "title": "one"},
    {"text": "the sea", "title": ""},
    {"text": "", "title": ""},
    {"text": [], "title": ["", ""]},
    {"text": ["", "wrote", "", "tokens"], "title": []},
    {"text": "", "title": ["two"]},
]


def counts_of(report: Any) -> tuple[int, int, dict[str, int]]:
    told = report.manifests["text"]["counts"]
    return told["num_documents"], told["num_empty"], told["dropped"]


def made(tmp_path: Path, empty: str, **options: Any) -> Any:
    inputs = [write_lines(tmp_path / "in.jsonl", ROWS)]
    return run(job_of(inputs, tmp_path / "en", keys=("text", "title"), part_bytes=60, empty=empty, **options))


@pytest.mark.parametrize("empty", ["zero-seq", "eod"])
def test_each_is_a_document_of_no_sequence_or_of_an_eod_as_one_of_megatrons_tools_has_it(
    tmp_path: Path, empty: str
) -> None:
    assert counts_of(made(tmp_path, empty)) == (6, 2, {})
    for key in ("text", "title"):
        needed = theirs([f"{tmp_path}/in.jsonl"], tmp_path / f"theirs_{key}", key, fast=empty == "eod")
        assert files_of(tmp_path / f"en_{key}_document") == needed
    dataset = IndexedDataset(str(tmp_path / "en_text_document"))
    assert len(dataset) == (3 if empty == "zero-seq" else 7)
    assert len(dataset.document_indices) - 1 == 6


def test_one_that_has_no_token_in_any_key_is_dropped_and_counted(tmp_path: Path) -> None:
    assert counts_of(made(tmp_path, "drop", min_tokens=0)) == (4, 0, {"empty": 2})
    full = [write_lines(tmp_path / "full.jsonl", [row for row in ROWS if row not in ROWS[2:4]])]
    for key in ("text", "title"):
        assert files_of(tmp_path / f"en_{key}_document") == theirs(full, tmp_path / f"theirs_{key}", key)
        lineage = parquet.read_table(tmp_path / f"en_{key}_document.lineage.parquet")
        assert lineage["row"].to_pylist() == [0, 1, 4, 5]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eod needs append_eod"):
        made(tmp_path, "eod", append_eod=False)
    with pytest.raises(ConfigError, match=r"empty: unknown .found none, need one of zero-seq, eod, drop"):
        made(tmp_path, "none")


def test_each_is_another_job(tmp_path: Path) -> None:
    recipes = [str(job_of(["x.jsonl"], tmp_path / "en", empty=empty).recipe) for empty in ("zero-seq", "eod", "drop")]
    assert len(set(recipes)) == 3
