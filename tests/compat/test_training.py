"""A training script of Megatron's kind, as it is, over our datasets from S3, against its own over local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compat.running import DROP_IN, HERE, start
from conftest import Bucket
from helpers.gpt_data import write_with_megatron

from binidx.storage.location import Location
from binidx.storage.open import open_object, stream
from binidx.storage.writing.publish import create_object

SCRIPT = str(HERE / "pretrain_small.py")


def upload(source: str, target: str) -> str:
    for end in (".bin", ".idx"):
        with create_object(Location.of(target + end)) as writer:
            for part in stream(open_object(source + end)):
                writer.write(part)
    return target


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(1)
    return [write_with_megatron(folder / name, rng.integers(1, 60, 60).astype(np.int32), rng) for name in "ab"]


def batches(lines: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What was trained on, in the order of the run, without whose it was."""
    steps = [each for step in zip(*lines, strict=True) for each in step if "valid" not in each]
    return [{name: value for name, value in step.items() if name not in ("rank", "loss")} for step in steps]


def test_a_script_trains_from_s3_on_the_samples_it_had_from_a_disk(
    s3: Bucket, local: list[str], tmp_path: Path
) -> None:
    remote = [upload(prefix, f"{s3.fresh()}/{Path(prefix).name}") for prefix in local]
    cache, options = tmp_path / "megatrons-cache", ["--reset"]
    theirs = start(
        [SCRIPT, "--data-path", "0.6", local[0], "0.4", local[1], "--data-cache-path", str(cache), *options], 2
    )
    ours = start(
        [*DROP_IN, SCRIPT, "--data-path", "0.6", remote[0], "0.4", remote[1], "--compile-helpers", *options], 2
    )
    expected = theirs.lines()
    assert len(expected[0]) == 5  # four steps and one batch of validation
    assert expected[0][0]["tokens"] != expected[1][0]["tokens"]
    assert ours.lines() == expected  # the losses too

    # Half way on, with ours, from where Megatron was: on one rank, with the caches that it left.
    blend = ["--data-path", "0.6", local[0], "0.4", local[1], "--data-cache-path", str(cache)]
    go_on = ["--consumed-train-samples", "8", "--train-iters", "2"]
    resumed = start([*DROP_IN, "--trust-cache", SCRIPT, *blend, *go_on, *options])
    assert batches(resumed.lines()) == batches(expected)[4:]
    assert resumed.logs[0].count("taken as it is (trust_cache)") == 9  # of three splits, two datasets and the blend


@pytest.mark.slow
def test_made_up_data_of_a_script_that_asks_for_it_are_megatrons() -> None:
    options = ["--mock-data", "--dataloader-type", "cyclic", "--num-workers", "1", "--train-iters", "2"]
    theirs, ours = start([SCRIPT, *options]), start([*DROP_IN, SCRIPT, *options])
    assert ours.lines() == theirs.lines()
