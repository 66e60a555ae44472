"""An estimate's interval holds the truth as often as it says, whatever the files are; and only the sample is read."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from conftest import Bucket
from demo.corpus import EOD
from helpers.preprocess_jobs import job_of, run, tokenizer_path
from hypothesis import given, settings
from hypothesis import strategies as st
from servers.latency_proxy import latency_proxy

from binidx import describe_tokenizer
from binidx.errors import ConfigError
from binidx.prepare.preprocess.estimate import (
    Estimate,
    Sample,
    draw_sample,
    estimate_tokens,
    estimate_total,
    plan_units,
    student_quantile,
)
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import read_slice
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object

SPEC = describe_tokenizer(tokenizer_path(), eod=EOD)


def wilson(count: int, claim: float) -> tuple[float, float]:
    """Within what share of `count` trials a claim should be seen, but for one case in a thousand."""
    margin = 3.3 * (claim * (1 - claim) / count) ** 0.5
    return claim - margin, claim + margin


def hidden_corpus(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Units of 40 files: each file has its own tokens a byte, rising from its head on, and its own noise."""
    sizes, counts = [], []
    for _ in range(40):
        length = int(rng.integers(5, 200))
        ratio = rng.uniform(0.15, 0.6) * np.linspace(0.8, 1.2, length)
        size = np.full(length, 1000.0)
        size[-1] = rng.integers(1, 1000)
        sizes.append(size)
        counts.append(size * ratio * rng.lognormal(0, rng.uniform(0.02, 0.3), length))
    return np.concatenate(sizes), np.concatenate(counts)


@pytest.mark.parametrize("count", [32, 200])
def test_intervals_hold_the_truth_about_as_often_as_they_claim(count: int) -> None:
    sizes, counts = hidden_corpus(np.random.default_rng(count))
    held, errors = 0, []
    for seed in range(1000):
        sample = draw_sample(sizes.astype(np.int64), count, seed)
        units = sample.units
        found = estimate_total(sample, sizes[units], counts[units], np.zeros(len(units)), int(sizes.sum()))
        held += found.low <= counts.sum() <= found.high
        errors.append(found.total / counts.sum() - 1)
    low, high = wilson(1000, 0.95)
    assert low - 0.015 < held / 1000 < high + 0.015
    assert abs(np.mean(errors)) < 0.005
    head = counts[:count].sum() / sizes[:count].sum() * sizes.sum() / counts.sum() - 1
    assert abs(head) > 2 * np.std(errors)


@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(1, 80), st.integers(0, 99))
def test_strata_tile_the_units_and_each_is_looked_at(sizes: list[int], count: int, seed: int) -> None:
    sample = draw_sample(np.array(sizes, np.int64), count, seed)
    bounds = np.cumsum([0, *sample.num_units]).tolist()
    assert bounds[-1] == len(sizes)
    for number, (first, stop) in enumerate(pairwise(bounds)):
        chosen = sample.units[sample.strata == number].tolist()
        assert len(set(chosen)) == min(2, stop - first)
        assert all(first <= unit < stop for unit in chosen)


def test_all_of_it_is_no_estimate() -> None:
    both = Sample(np.arange(2), np.zeros(2, np.int64), np.array([2]))
    found = estimate_total(both, np.array([3.0, 5.0]), np.array([1.0, 9.0]), np.zeros(2), 8)
    assert found == Estimate(10.0, 10.0, 10.0)
    none = np.empty(0)
    assert estimate_total(draw_sample(none.astype(np.int64), 32, 0), none, none, none, 0).total == 0


def test_students_t_is_that_of_the_tables() -> None:
    tables = {1: 12.706, 3: 3.182, 6: 2.447, 10: 2.228, 30: 2.042, 120: 1.980}
    assert {degrees: round(student_quantile(degrees), 3) for degrees in tables} == pytest.approx(tables, abs=5e-3)


def documents(count: int, seed: int) -> list[str]:
    """Of two kinds: words that are tokens, and digits that are many."""
    rng = np.random.default_rng(seed)
    kinds = ["the sea wrote tokens quietly in ", "9081726354 ", "雨🙂é "]
    return [kinds[seed % 3] * int(rng.integers(0, 40)) for _ in range(count)]


def write(path: Path, texts: list[str], form: str) -> None:
    if form == "parquet":
        parquet.write_table(pa.table({"text": texts}), path, row_group_size=50)
        return
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    pack: dict[str, Any] = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.ZstdCompressor().compress}
    path.write_bytes(pack[form](data))


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    """12 files of three kinds."""
    for number in range(12):
        write(tmp_path / f"{number:02}.jsonl", documents(40 + 10 * number, number), "jsonl")
    return [str(tmp_path / "*.jsonl")]


def test_against_what_preprocess_makes(corpus: list[str], tmp_path: Path) -> None:
    made = run(job_of(corpus, tmp_path / "out")).manifests["text"]["dataset"]
    held, errors, looked = [], [], []
    for seed in range(60):
        found = estimate_tokens(corpus, SPEC, append_eod=True, sample_bytes=150_000, unit_bytes=4000, seed=seed)
        held.append(found.tokens.low <= made["tokens"] <= found.tokens.high)
        errors.append(found.tokens.total / made["tokens"] - 1)
        looked.append(found.sampled_bytes / found.stored_bytes)
    assert wilson(60, 0.95)[0] - 0.03 < np.mean(held)
    assert abs(np.mean(errors)) < 0.02
    assert 0.1 < np.mean(looked) < 0.5
    exact = estimate_tokens(corpus, SPEC, append_eod=True, sample_bytes=1 << 30)
    assert (exact.tokens.total, exact.tokens.error) == (made["tokens"], 0.0)
    assert exact.documents.total == made["documents"]
    assert exact.cost.bytes_out == made["tokens"] * 2 + made["documents"] * 20


@pytest.mark.parametrize("form", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_other_formats_and_units_of_which_only_a_share_is_tokenized(form: str, tmp_path: Path) -> None:
    for number in range(6):
        write(tmp_path / f"{number}.{form}", documents(150, number), form)
    inputs = [f"{tmp_path}/*.{form}"]
    exact = estimate_tokens(inputs, SPEC)
    assert exact.tokens.error == 0.0
    sizes = {"sample_bytes": exact.stored_bytes // 3, "unit_bytes": 10, "batch_bytes": 2000}
    held = []
    for seed in range(20):
        found = estimate_tokens(inputs, SPEC, **sizes, seed=seed)
        assert found.sampled_texts < exact.sampled_texts
        # A row group shares out its bytes by rows: 0.01 % off in the mean, more than these intervals are wide.
        held.append(
            found.tokens.low <= exact.tokens.total * (1 + 5e-4 * (form == "parquet"))
            and found.tokens.high >= exact.tokens.total * (1 - 5e-4 * (form == "parquet"))
        )
    assert np.mean(held) > 0.8


@settings(max_examples=12)
@given(st.lists(st.text("ab\n🙂", max_size=30), min_size=1, max_size=20), st.integers(1, 50))
def test_units_hold_each_row_once(tmp_path_factory: Any, texts: list[str], unit_bytes: int) -> None:
    folder = tmp_path_factory.mktemp("units")
    write(folder / "a.jsonl", texts, "jsonl")
    write(folder / "b.parquet", texts, "parquet")
    found = plan_units(find_inputs([str(folder / "a.jsonl"), str(folder / "b.parquet")]), unit_bytes)
    read = [batch.text(n) for unit in found for (batch,) in read_slice(unit) for n in range(len(batch.rows))]
    assert read == texts * 2


def test_rows_that_are_no_documents_are_told_and_nothing_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "the sea"}\n{"text": null}\nnonsense\n')
    (tmp_path / "empty.jsonl").write_bytes(b"")
    found = estimate_tokens([tmp_path / "a.jsonl"], SPEC)
    assert (found.documents.total, found.problems) == (1, 2)
    nothing = estimate_tokens([tmp_path / "empty.jsonl"], SPEC)
    assert (nothing.tokens.total, nothing.cost.parts, nothing.cost.cpu_hours) == (0, 0, 0)
    (tmp_path / "a.text").write_bytes(b"the sea")
    with pytest.raises(ConfigError, match="unknown format"):
        estimate_tokens([tmp_path / "a.text"], SPEC)


def test_from_a_store_only_the_sample_is_read(s3: Bucket) -> None:
    base, line = s3.fresh(), json.dumps({"text": "the sea wrote tokens " * 50}).encode() + b"\n"
    for number in range(2):
        with create_object(Location.of(f"{base}/{number}.jsonl")) as out:
            out.write(line * 20_000)
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        before = proxy.counts()
        found = estimate_tokens([f"{base}/"], SPEC, sample_bytes=2 << 20)
        moved = (proxy.counts() - before).bytes
    assert found.stored_bytes == 2 * 20_000 * len(line)
    assert found.sampled_bytes < found.stored_bytes / 3
    assert moved < found.sampled_bytes * 1.4
    assert found.tokens.error < 0.01
    assert found.cost.dollars == pytest.approx(found.cost.reads * 4e-7 + found.cost.writes * 5e-6)
