"""binidx prepare: what it builds is what training opens, ours and Megatron Core's."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from helpers.oracle import megatron

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.tools import main

COUNTS = (12_000, 9_000)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("prepare")
    rng = np.random.default_rng(5)
    return [
        write_with_megatron(directory / name, rng.integers(1, 40, count).astype(np.int32), rng)
        for name, count in zip(("en", "code"), COUNTS, strict=True)
    ]


def save(prefixes: list[str], directory: Path, cache: Any, **changes: Any) -> Path:
    fields = {
        "random_seed": 2, "sequence_length": 8, "split": "90,9,1", "blend": (prefixes, [0.7, 0.3]),
        "tokenizer": TOKENIZER, "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
        "path_to_cache": None if cache is None else str(cache),
    }  # fmt: skip
    config = binidx.GPTDatasetConfig(**{**fields, **changes})
    path = directory / "run.json"
    binidx.Run(config, [100_000, 64, 64], 4, 2, global_batch_size=16).save(str(path))
    return path


def call(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> Any:
    assert main(["prepare", "index", *map(str, arguments)]) == status
    return capsys.readouterr().out


def prepared(capsys: pytest.CaptureFixture[str], *arguments: Any, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call(capsys, *arguments, "--json", status=status))
    return found


def ways(found: dict[str, Any]) -> list[str]:
    return [row["how"] for row in found["indices"]]


def files(directory: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def test_training_finds_all_that_was_built_and_builds_nothing(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(prefixes, tmp_path, tmp_path / "cache")
    first = prepared(capsys, path)
    assert ways(first).count("built") == 5  # train: both and the blend; of valid and test the blends
    heard: list[Any] = []
    train, valid, test = binidx.Run.load(str(path)).build(on_outcome=heard.append)
    assert sorted(outcome.how for outcome in heard) == ["found"] * 5 + ["not kept"] * 4
    rows = first["indices"]
    assert [row["samples"] for row in rows] == [
        len(each)
        for split in (train, valid, test)
        for each in (split, *split.datasets)  # type: ignore[union-attr]
    ]
    for row in rows:
        for name in row["files"]:
            assert (Path(row["directory"]) / name).is_file()
        if row["files"]:
            assert row["num_bytes"] == sum((Path(row["directory"]) / name).stat().st_size for name in row["files"])
    assert [row["documents"] for row in rows[:3]] == [None, 10_800, 8_100]
    before = files(tmp_path / "cache")
    assert set(ways(prepared(capsys, path))) == {"found", "not kept"}
    assert files(tmp_path / "cache") == before


def test_megatron_core_opens_all_of_it_and_writes_nothing(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(prefixes, tmp_path, tmp_path / "cache")
    arguments = ["--train-iters", 500, "--eval-interval", 100, "--eval-iters", 2, "--for-megatron"]
    found = prepared(capsys, path, *arguments)
    assert set(ways(found)) == {"built"}
    assert len(ways(found)) == 9
    assert found["sizes"] == [8000, 6 * 2 * 16, 2 * 16]
    before = files(tmp_path / "cache")
    monkeypatch.setattr(megatron.gpt, "_build_document_index", None)
    monkeypatch.setattr(megatron.helpers, "build_blending_indices", None)
    config = megatron.gpt.GPTDatasetConfig(
        random_seed=2, sequence_length=8, split="90,9,1", blend=(prefixes, [0.7, 0.3]), tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        path_to_cache=str(tmp_path / "cache"),
    )  # fmt: skip
    theirs = megatron.builder.BlendedMegatronDatasetBuilder(
        megatron.gpt.GPTDataset, found["sizes"], lambda: True, config
    ).build()
    assert files(tmp_path / "cache") == before
    run = binidx.Run(binidx.Run.load(str(path)).config, found["sizes"], 4, 2)
    for mine, yours in zip(run.build(), theirs, strict=True):
        for number in (0, 1, len(yours) - 1):
            assert_same_sample(mine[number], yours[number])  # type: ignore[index]


def test_a_world_and_a_batch_size_decide_the_names(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(prefixes, tmp_path, tmp_path / "cache")
    given = ["--train-iters", 100, "--eval-iters", 1, "--world", 8, "--micro-batch-size", 2, "--global-batch-size", 64]
    assert prepared(capsys, path, *given)["sizes"] == [6400, 64, 64]
    # Without a global batch size it is one micro-batch of each rank, which RUN's own 16 is not.
    assert prepared(capsys, path, "--train-samples", 7000, "--eval-iters", 1, "--eval-interval", 200)["sizes"] == [
        7000, 3 * 16, 16,
    ]  # fmt: skip


def test_several_at_once_build_each_index_once(s3: Bucket, prefixes: list[str], tmp_path: Path) -> None:
    base = s3.fresh()
    for prefix in prefixes:
        convert_dataset(prefix, f"{base}/{Path(prefix).name}", verify="size")
    remote = [f"{base}/{Path(prefix).name}" for prefix in prefixes]
    path = save(remote, tmp_path, f"{base}/cache")
    command = [Path(sys.executable).parent / "binidx", "prepare", "index", path, "--json"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = [json.loads(each.communicate()[0]) for each in started]
    assert all(each.returncode == 0 for each in started)
    hows = [*zip(*map(ways, found), strict=True)]
    # A small index may be built again by who came before the others: 100 us are over before a claim is seen.
    assert all(set(how) == {"not kept"} or set(how) <= {"built", "found"} for how in hows)
    assert [how.count("built") for how in hows][1:3] == [1, 1]
    assert [row["files"] for row in found[0]["indices"]] == [row["files"] for row in found[1]["indices"]]


def test_an_index_that_cannot_be_kept_is_told_and_no_success(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    path = save(prefixes, tmp_path, tmp_path / "file" / "cache")
    with caplog.at_level(logging.ERROR):
        found = prepared(capsys, path, status=1)
    assert ways(found)[1] == "not written"
    assert found["indices"][1]["files"] == []


@pytest.mark.parametrize("columns", [60, 160])
def test_a_person_sees_numbers_names_and_sums(
    columns: int, prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    path = save(prefixes, tmp_path, tmp_path / "cache")
    out = call(capsys, path)
    assert re.search(r"10,800 +\d+,\d{3} +\d +[\d,.]+ [KM]iB +\d\.\d s +built$", out, re.MULTILINE)
    assert re.search(r"^  [0-9a-f]{32}-\*  train blend of 2$", out, re.MULTILINE)
    assert re.search(r"^9 indices: 5 built, 4 not kept; \d\.\d MiB kept; what is not kept", out, re.MULTILINE)
    assert all(len(line) <= columns for line in out.splitlines()[:10])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eval-iters", "3"], "need --train-iters or --train-samples"),
        (["--micro-batch-size", "5"], "needs a multiple of 10"),
        (["--world", "0"], "--world: found 0"),
    ],
)
def test_a_call_that_cannot_be_is_an_error(
    arguments: list[str], message: str, prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(prefixes, tmp_path, tmp_path / "cache")
    assert main(["prepare", "index", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cache", "arguments", "message"),
    [
        (None, [], "run.json: needs path_to_cache, and neither stages nor phases; or give --to DIR"),
        ("cache", ["--steps", "0:8"], "--steps, --engine, --shard: need --to DIR; in path_to_cache lie whole splits"),
    ],
)
def test_a_plan_of_splits_needs_a_cache_and_whole_splits(
    cache: str | None, arguments: list[str], message: str, prefixes: list[str], tmp_path: Path, capsys: Any
) -> None:
    path = save(prefixes, tmp_path, cache)
    assert main(["prepare", "read-plan", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_read_plan_has_the_length_of_the_options(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(prefixes, tmp_path, tmp_path / "cache")
    given = ["--train-iters", "100", "--eval-iters", "1", "--to", f"{tmp_path}/plan", "--json"]
    assert main(["prepare", "read-plan", str(path), *given]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 100 * 16


@pytest.mark.parametrize("order", ["best_fit", "first_fit", "view", "rebuild"])
def test_the_index_of_every_order_is_built_and_described(
    order: str, prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drop.txt").write_text("3\n7\n")
    views = {"view": binidx.View(f"{tmp_path}/drop.txt"), "rebuild": binidx.View(f"{tmp_path}/drop.txt", "rebuild")}
    path = save(
        prefixes[:1],
        tmp_path,
        tmp_path / "cache",
        blend=(prefixes[:1], None),
        order=views.get(order, order),
        cache_small_indices=True,
    )
    row = prepared(capsys, path)["indices"][0]
    assert (row["how"], row["documents"]) == ("built", 10_800 - 2 * (order == "rebuild"))
    assert row["num_bytes"] == sum((tmp_path / "cache" / name).stat().st_size for name in row["files"]) > 100_000
