"""Read plans beside the index caches: written by prepare-cache or the first start, and found by later starts."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from helpers.gpt_data import Tokenizer, assert_same_sample
from helpers.traceable_runs import write_source

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.dataset.planned import PlannedDataset
from binidx.errors import ConfigError, ObjectChangedError
from binidx.tools.prepare_cache import main


def join_writers() -> None:
    for thread in threading.enumerate():
        if thread.name == "binidx-read-plan":
            thread.join()


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    for number in range(2):
        write_source(tmp_path / f"p{number}", random.Random(number), False)
    return [f"{tmp_path}/p{number}" for number in range(2)]


def load(prefixes: Any, cache: str, **options: Any) -> Any:
    options = {"num_samples": 90, "random_seed": 5, "tokenizer": Tokenizer(pad=-5, eod=-6), "split": "8,1,1", **options}
    return binidx.load_dataset(prefixes, 16, path_to_cache=cache, **options)


def test_the_second_start_reads_the_plan_of_the_first(s3: Bucket, prefixes: list[str], requests: Any) -> None:
    uris = [f"{s3.uri}/p{number}" for number in range(2)]
    for prefix, uri in zip(prefixes, uris, strict=True):
        convert_dataset(prefix, uri, verify="size")
    options = {"read_plan": True}
    blend = dict(zip(uris, [0.7, 0.3], strict=True))
    first = load(blend, f"{s3.uri}/cache", **options)
    join_writers()
    requests()
    second = load(blend, f"{s3.uri}/cache", **options)
    assert isinstance(second.wrapped, PlannedDataset)
    assert len(second) == len(first)
    for number in range(len(first)):
        assert_same_sample(second[number], first[number])
    read = requests().keys()
    assert "readplan.json" in read
    assert not [name for name in read if name.endswith((".idx", ".npy"))]
    assert second.loader(2).state_dict() == first.loader(2).state_dict()


def test_prepare_cache_plans_each_split(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(prefixes, f"{tmp_path}/cache").config
    run = binidx.Run(config, [90, 10, 12], 2)
    run.save(f"{tmp_path}/run.json")
    assert main([f"{tmp_path}/run.json", "--read-plan", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 3
    built, planned = (
        binidx.BlendedMegatronDatasetBuilder(
            binidx.GPTDataset, run.sizes, lambda: True, replace(config, read_plan=read_plan)
        ).build()
        for read_plan in (False, True)
    )
    for whole, plan in zip(built, planned, strict=True):
        assert isinstance(plan, PlannedDataset)
        assert len(whole) == len(plan)
        for number in range(len(whole)):
            assert_same_sample(plan[number], whole[number])
    assert isinstance(binidx.Run(replace(config, read_plan=True), run.sizes, 2).build()[0], binidx.BlendedDataset)


@pytest.mark.parametrize("change", [{"random_seed": 6}, {"num_samples": 91}, {"split": "7,2,1"}, {"order": "best_fit"}])
def test_a_plan_of_other_options_is_not_read(change: dict[str, Any], prefixes: list[str], tmp_path: Path) -> None:
    load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    join_writers()
    assert isinstance(load(prefixes[0], f"{tmp_path}/cache", read_plan=True).wrapped, PlannedDataset)
    assert not isinstance(load(prefixes[0], f"{tmp_path}/cache", read_plan=True, **change).wrapped, PlannedDataset)
    join_writers()


def test_replaced_data_is_an_error_that_names_the_plan(prefixes: list[str], tmp_path: Path) -> None:
    load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    join_writers()
    write_source(tmp_path / "p0", random.Random(9), False)
    with pytest.raises(ObjectChangedError, match=r"the read plan .*-train-read-plan is of the data as it was"):
        load(prefixes[0], f"{tmp_path}/cache", read_plan=True)[0]


def test_a_plan_that_cannot_be_written_is_logged(
    prefixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    join_writers()
    next(tmp_path.glob("cache/*-read-plan/readplan.json")).unlink()
    write_source(tmp_path / "p0", random.Random(9), False)
    load(prefixes[0], f"{tmp_path}/cache", read_plan=True)
    join_writers()
    assert "or delete this one" in caplog.text


def test_a_plan_needs_a_place(prefixes: list[str]) -> None:
    with pytest.raises(ConfigError, match="read_plan: needs path_to_cache, found none"):
        binidx.load_dataset(prefixes[0], 16, read_plan=True)
