"""Each example, with its trainer: stopped and resumed it reads what it reads in one go, and learns the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket

import binidx

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "common")

# One process: to import a trainer takes longer than to run it three times.
RUN_THRICE = """
import importlib, sys
main = importlib.import_module(sys.argv[1]).main
common = [sys.argv[2], "--vocab-size", "500", "--eod", "0"]
for steps, save, *rest in [["6", "whole"], ["2", "parts"], ["6", "parts", "--resume"]]:
    main([*common, "--steps", steps, "--save", sys.argv[3] + "/" + save, *rest])
"""


@pytest.fixture(scope="module")
def corpus(s3: Bucket) -> str:
    prefix, rng = f"{s3.fresh()}/corpus", np.random.default_rng(7)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for length in rng.integers(10, 200, 100):
            builder.add_document([*rng.integers(1, 500, length), 0], [length + 1])
        builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture(scope="module")
def expected(corpus: str) -> list[str]:
    """What six steps read, by a loader that no trainer touches."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import common
    finally:
        sys.path.remove(str(EXAMPLES))
    options = common.arguments([corpus, "--vocab-size", "500", "--eod", "0", "--save", "none"])
    loader = common.train_loader(common.train_dataset(options))
    return [np.asarray(loader[step]["tokens"]).tobytes().hex() for step in range(6)]


def digest(tokens: str) -> str:
    import hashlib

    return hashlib.blake2b(bytes.fromhex(tokens), digest_size=8).hexdigest()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_stopped_and_resumed_example_reads_and_learns_what_the_unbroken_one_does(
    script: str, corpus: str, expected: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RUN_THRICE, script, corpus, str(tmp_path)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    assert [line["step"] for line in lines] == [*range(6), *range(2), *range(2, 6)]
    assert [line["read"] for line in lines[:6]] == [digest(tokens) for tokens in expected]
    assert lines[6:] == lines[:6]


RUN_ACCUMULATING = """
import functools, transformers
transformers.TrainingArguments = functools.partial(transformers.TrainingArguments, gradient_accumulation_steps=2)
""" + RUN_THRICE.replace('"6"', '"3"').replace('"2"', '"1"')


def test_a_trainer_that_accumulates_gradients_goes_on_at_its_next_sample(
    corpus: str, expected: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", RUN_ACCUMULATING, "hf_trainer", corpus, str(tmp_path)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    read = [json.loads(line)["read"] for line in done.stdout.splitlines() if line.startswith('{"step"')]
    assert read == 2 * [digest(tokens) for tokens in expected]


RUN_ON_TWO_RANKS = """
import lightning, sys
make = lightning.Trainer
def trainer(**options):
    return make(**options, devices=2, strategy="ddp")
lightning.Trainer = trainer
sys.path.insert(0, sys.argv[1])
import lightning_trainer
lightning_trainer.main(sys.argv[2:])
"""


def test_ranks_that_lightning_starts_itself_read_samples_of_their_own(
    corpus: str, expected: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "on_two_ranks.py"
    script.write_text(RUN_ON_TWO_RANKS)
    options = ["--vocab-size", "500", "--eod", "0", "--steps", "3", "--save", str(tmp_path / "saved")]
    command = [sys.executable, str(script), str(EXAMPLES), corpus, *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    read = re.findall(r'"read": "(\w+)"', done.stdout)  # the lines of two processes run together
    assert sorted(read) == sorted(digest(tokens) for tokens in expected)


def test_the_readme_names_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({script}.py)" in text for script in SCRIPTS)
    assert len(SCRIPTS) == 5
