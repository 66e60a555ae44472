"""Exported orders against what real loaders served, sample by sample."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.traceable_runs import random_run

from binidx import RunOrder
from binidx.errors import ObjectExistsError
from binidx.format.arrow import parquet
from binidx.jobs.parts import Workers
from binidx.loader.torch_loader import build_pretraining_data_loader
from binidx.packed.packed_order import AtEnd, PackedSet
from binidx.packed.packed_run import PackedReading, PackedRunOrder
from binidx.run.global_order import GlobalOrder
from binidx.run.provenance.export import export, plan_by_rank, plan_by_steps
from binidx.run.schedule import BatchSchedule


def order_of(directory: Path, seed: int, ranks: int, micro: int = 1, accumulate: int = 2) -> tuple[RunOrder, Any]:
    dataset = random_run(directory, seed)
    reading = GlobalOrder(BatchSchedule(micro * ranks * accumulate, micro, ranks), len(dataset))
    return RunOrder.of_dataset(dataset, reading), dataset


def served(order: RunOrder, run: Any, rank: int, consumed: int = 0) -> list[list[int]]:
    """The tokens that a loader of this rank serves, S of each sample."""
    schedule = order.reading.schedule
    loader = build_pretraining_data_loader(run, consumed, schedule.micro_batch_size, rank, schedule.data_parallel_size)
    assert loader is not None
    return [row for batch in loader for row in batch["tokens"].tolist()]


@pytest.mark.parametrize(("seed", "ranks", "micro"), [(1, 1, 1), (2, 2, 2), (3, 3, 1), (5, 4, 2)])
def test_every_rank_was_served_what_its_file_says(seed: int, ranks: int, micro: int, tmp_path: Path) -> None:
    order, run = order_of(tmp_path, seed, ranks, micro)
    steps = range(order.num_steps() or 0)
    assert export(order, f"{tmp_path}/out", plan_by_rank(ranks, steps), tokens=True, workers=Workers(count=2)) == ranks
    for rank in range(ranks):
        rows = parquet.read_table(f"{tmp_path}/out/worker_{rank}-of-{ranks}_ordered_dataset.parquet").to_pylist()
        needed = served(order, run, rank)[: len(rows)]
        assert [row["input_ids"][:-1] for row in rows] == needed
        assert len(rows) == len(steps) * micro * 2
        resumed = order.reading.schedule.samples_before(1)
        if len(steps) > 1:
            assert [row["input_ids"][:-1] for row in rows if row["step"] >= 1] == served(order, run, rank, resumed)[
                : len(rows) - micro * 2
            ]


def test_a_row_names_its_documents(tmp_path: Path) -> None:
    order, _run = order_of(tmp_path, 2, 2)
    for row in order.table(range(order.num_steps() or 0), docs="spans", tokens=True).to_pylist():
        told = [doc["doc"] * 1000 + doc["start"] + place for doc in row["spans"] for place in range(doc["len"])]
        assert row["input_ids"][: len(told)] == told
        assert row["source"] in order.prefixes


@pytest.mark.parametrize("seed", range(12))
def test_ends_are_those_of_the_spans(seed: int, tmp_path: Path) -> None:
    order, _run = order_of(tmp_path, seed, 1)
    steps = range(order.num_steps() or 0)
    rows = zip(order.table(steps).to_pylist(), order.table(steps, docs="spans").to_pylist(), strict=True)
    for ends, spans in rows:
        first, last = spans["spans"][0], spans["spans"][-1]
        assert ends["docs"] == [each["doc"] for each in spans["spans"]]
        assert (ends["start"], ends["stop"]) == (first["start"], last["start"] + last["len"])


def test_duckdb_finds_who_saw_a_document(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    order, _run = order_of(tmp_path, 2, 2)
    steps = range(order.num_steps() or 0)
    export(order, f"{tmp_path}/out", plan_by_rank(2, steps))
    readings, _ = order.where(0, [3], steps.stop)
    found = duckdb.sql(
        f"select step, rank, slot from '{tmp_path}/out/*.parquet' where source = '{order.prefixes[0]}' "
        "and list_contains(docs, 3) and not (docs[-1] = 3 and stop = 0) order by all"
    ).fetchall()
    assert found == sorted(zip(*(each.tolist() for each in readings[:3]), strict=True))


def test_files_by_steps_tile_the_run(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    order, _run = order_of(tmp_path, 2, 2)
    count = order.num_steps() or 0
    parts = plan_by_steps(range(1, count), 3)
    assert [step for part in parts for step in part.steps] == list(range(1, count))
    export(order, f"{tmp_path}/out", parts)
    found = duckdb.sql(f"select step, rank, slot, sample from '{tmp_path}/out/*.parquet' order by step, rank, slot")
    readings = order.reading.readings(range(1, count))
    columns = (readings.step, readings.rank, readings.slot, readings.sample)
    assert found.fetchall() == list(zip(*(column.tolist() for column in columns), strict=True))


def test_an_export_goes_on_where_it_broke_off(s3: Bucket, tmp_path: Path) -> None:
    (order, _run), where = order_of(tmp_path, 3, 3), s3.fresh()
    parts, told = plan_by_rank(3, range(order.num_steps() or 0)), []
    assert export(order, where, parts[:2]) == 2
    assert export(order, where, parts, watch=told.append) == 1
    assert sum(told) == len(order.table(parts[0].steps))
    other = replace(order, reading=replace(order.reading, num_samples=order.reading.num_samples - 1))
    with pytest.raises(ObjectExistsError, match="is of another order"):
        export(other, where, parts)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / parts[0].name).write_bytes(b"no parquet")
    with pytest.raises(ObjectExistsError, match="is of another order"):
        export(order, f"{tmp_path}/out", parts)


def test_the_documents_may_be_left_out(tmp_path: Path) -> None:
    for seed in range(6):
        order, _run = order_of(tmp_path / str(seed), seed, 1)
        steps = range(order.num_steps() or 0)
        assert order.table(steps, docs=None) == order.table(steps).drop(["docs", "start", "stop"])


def test_row_groups_are_whole_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binidx.run.provenance.export.EXPORTED_GROUP_ROWS", 7)
    order, _run = order_of(tmp_path, 2, 2)
    part = plan_by_steps(range(order.num_steps() or 0), 1000)
    export(order, f"{tmp_path}/out", part)
    file = parquet.ParquetFile(f"{tmp_path}/out/{part[0].name}")
    steps = [file.read_row_group(number)["step"].to_pylist() for number in range(file.num_row_groups)]
    assert file.num_row_groups > 2
    assert all(not set(a) & set(b) for a, b in pairwise(steps))
    assert json.loads(file.schema_arrow.metadata[b"binidx"])["fingerprint"] == order.fingerprint


READ_BY_DATASETS = """
import json, sys
from datasets import load_dataset
rows = load_dataset("parquet", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])
print(json.dumps([row["input_ids"] for row in rows]))
"""


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
def test_datasets_load_it(tmp_path: Path) -> None:
    order, run = order_of(tmp_path, 2, 2)
    export(order, f"{tmp_path}/out", plan_by_rank(2, range(order.num_steps() or 0)), tokens=True)
    # In a process of its own: the Hub's library keeps these variables as they are when it is imported.
    alone = {**os.environ, "HF_HOME": f"{tmp_path}/hf", "HF_HUB_OFFLINE": "1"}
    child = [sys.executable, "-c", READ_BY_DATASETS, f"{tmp_path}/out/worker_1-of-2*", f"{tmp_path}/hf"]
    rows = json.loads(subprocess.run(child, env=alone, check=True, stdout=subprocess.PIPE).stdout)
    assert [row[:-1] for row in rows] == served(order, run, 1)[: len(rows)]
    assert rows


def test_an_empty_stretch_is_an_empty_file(tmp_path: Path) -> None:
    order, _run = order_of(tmp_path, 2, 2)
    export(order, f"{tmp_path}/out", plan_by_rank(2, range(0)))
    assert parquet.read_table(f"{tmp_path}/out/worker_0-of-2_ordered_dataset.parquet").num_rows == 0
    assert np.dtype(order.token_dtype) == np.int32


def test_columns_are_as_wide_as_the_file_needs(tmp_path: Path) -> None:
    sets = [PackedSet(2, 3, 1, 5, at_end=AtEnd.repeat)]
    order = PackedRunOrder(PackedReading(sets, ["web"], micro_batch_size=3))
    for steps, kind in ((range(4), "int16"), (range(65_536, 65_540), "int32"), (range(65_532, 65_538), "int32")):
        export(order, f"{tmp_path}/{steps.start}", plan_by_steps(steps, 100), docs=True)
        (file,) = Path(f"{tmp_path}/{steps.start}").iterdir()
        table = parquet.read_table(file)
        assert {str(table.schema.field(name).type) for name in ("rank", "slot")} == {"int16"}
        assert str(table.schema.field("epoch").type) == kind
        assert table["epoch"].to_pylist() == [step // 2 for step in steps for _ in range(3)]
