"""Two versions of binidx with other algorithms on one path_to_cache: neither replaces the index of the other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import Bucket
from golden import make_state as golden

import binidx

THIS, NEXT = 3, 4


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the golden state, as the working directory."""
    found = shutil.copytree(golden.STATE / "local", tmp_path / "local")
    golden.same_times(found)
    monkeypatch.chdir(found)
    return found


def start(algorithm: int, changed: str, run: str) -> dict[str, Any]:
    """Start of a run with these algorithms, which make the array `changed` otherwise."""
    command = [sys.executable, "-m", "helpers.version_process", str(algorithm), changed, run]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("changed", ["", "shuffle_index"])
def test_versions_that_start_in_turn_build_once_each(changed: str, state: Path) -> None:
    before = contents(state / "cache")
    this = start(THIS, "", "runs/run.json")
    assert this["built"] == 0
    first = start(NEXT, changed, "runs/run.json")
    assert first["built"] > 0
    assert (first["digests"] == this["digests"]) is (changed == "")
    for _ in range(2):
        assert start(THIS, "", "runs/run.json") == this
        assert start(NEXT, changed, "runs/run.json") == {**first, "built": 0}
    after = contents(state / "cache")
    assert {name: after[name] for name in before} == before
    assert all("-4-" in name for name in after.keys() - before.keys())


def test_the_version_that_comes_first_is_left_alone_by_the_earlier_one(state: Path) -> None:
    shutil.rmtree(state / "cache")
    first = start(NEXT, "shuffle_index", "runs/run.json")
    assert all("-4-" in name for name in contents(state / "cache"))
    this = start(THIS, "", "runs/run.json")
    assert this["built"] == first["built"] > 0
    assert this["digests"] != first["digests"]
    assert start(NEXT, "shuffle_index", "runs/run.json") == {**first, "built": 0}
    assert start(THIS, "", "runs/run.json") == {**this, "built": 0}


def test_an_array_that_is_lost_is_built_again_by_its_version_alone(state: Path) -> None:
    this = start(THIS, "", "runs/run.json")
    first = start(NEXT, "", "runs/run.json")
    for path in (state / "cache").glob("*-GPTDataset-train-sample_index.npy"):
        os.unlink(path)
    assert start(NEXT, "", "runs/run.json") == {**first, "built": 0}
    again = start(THIS, "", "runs/run.json")
    assert again["built"] > 0
    assert again["digests"] == this["digests"]
    assert start(THIS, "", "runs/run.json") == this


def test_versions_have_indices_of_their_own_in_a_store(
    state: Path, s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = f"{s3.fresh()}/cache"
    run = binidx.Run.load("runs/run.json")
    replace(run, config=replace(run.config, path_to_cache=cache)).save("runs/stored.json")
    this = start(THIS, "", "runs/stored.json")
    assert this["built"] > 0
    first = start(NEXT, "", "runs/stored.json")
    monkeypatch.setenv("BINIDX_INDEX_DIR", f"{tmp_path}/another-node")
    assert start(THIS, "", "runs/stored.json") == {**this, "built": 0}
    assert start(NEXT, "", "runs/stored.json") == {**first, "built": 0}
    fs = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=s3.server.endpoint)
    names = {path.rpartition("/")[2] for path in fs.find(cache)}
    unnumbered = {name for name in names if "-binidx-" not in name and "-4-" not in name}
    assert {name.replace("-4-", "-") for name in names - unnumbered if "-binidx-" not in name} == unnumbered
