"""Read plans, a pinned file, a history and states of an earlier commit are found, and give the samples of their writer.

`golden/make_plans.py` says what they are; `expected.json` names the commit that wrote them.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from golden import make_plans, make_state

import binidx
from binidx.errors import ObjectChangedError
from binidx.tools import main

EXPECTED = json.loads((make_plans.PLANS / "expected.json").read_text())
STORE = make_plans.STORE


@pytest.fixture(scope="module")
def store(s3: Bucket) -> Any:
    """The filesystem of a bucket with a copy of the stored objects."""
    s3.server.make_bucket(make_plans.BUCKET)
    make_plans.upload()
    return make_state.bucket()


def times(store: Any) -> dict[str, Any]:
    """When each object of the bucket was written."""
    return {name: about["LastModified"] for name, about in store.find(STORE, detail=True).items()}


@pytest.mark.parametrize("name", make_plans.OPTIONS)
def test_a_read_plan_is_found_and_serves_the_samples_of_its_writer(name: str, store: Any) -> None:
    before = times(store)
    found = make_plans.planned(make_plans.OPTIONS[name])
    assert {split: make_plans.describe(dataset) for split, dataset in found.items()} == EXPECTED["plans"][name]
    for split, dataset in found.items():
        for kind, recorded in EXPECTED["plans"][name][split]["loader"].items():
            assert make_state.resumed(dataset, kind, recorded["state"]) == recorded["next"]
    assert times(store) == before


def test_a_read_plan_that_broke_off_goes_on(store: Any) -> None:
    written = {path.name: path.read_bytes() for path in make_state.files_below(make_plans.PLANS / "s3/plan")}
    for name in written.keys() - {"draft.json"}:
        store.rm(f"{STORE}/plan/{name}")
    make_state.command("prepare", "read-plan", f"{STORE}/blend.json", "--to", f"{STORE}/plan")
    assert {name: store.cat_file(f"{STORE}/plan/{name}") for name in written} == written
    dataset = binidx.PlannedDataset(f"{STORE}/plan", make_plans.config(**make_plans.BLEND))
    whole = binidx.Run.load(f"{STORE}/blend.json").build()[0]
    served, needed = ([each[number]["tokens"].tolist() for number in range(88)] for each in (dataset, whole))
    assert served == needed


def without_version(file: Path) -> bytes:
    """Bytes of a run file without the last field, the version of the library that wrote it."""
    text, found = re.subn(rb',\n "library": "[^"]*"(?=\n}\n$)', b"", file.read_bytes())
    assert found == 1
    return text


@pytest.mark.parametrize("name", make_plans.OPTIONS)
def test_a_saved_run_is_loaded_and_saved_as_the_same_bytes(name: str, store: Any, tmp_path: Path) -> None:
    binidx.Run.load(f"{STORE}/{name}.json").save(f"{tmp_path}/again.json")
    assert without_version(tmp_path / "again.json") == (make_plans.PLANS / "s3" / f"{name}.json").read_bytes()


def test_a_pinned_file_is_found_kept_and_binds(store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = (make_plans.PLANS / "s3/cache").glob("*-binidx-pinned.json")
    assert main(["prepare", "index", f"{STORE}/blend.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pinned"] == f"{STORE}/cache/{path.name}"
    again, written = json.loads(store.cat_file(f"{STORE}/cache/{path.name}")), json.loads(path.read_bytes())
    assert again["pairs"] == written["pairs"]
    store.pipe_file(f"{STORE}/cache/{path.name}", path.read_bytes())
    moved = (make_plans.PLANS / "s3/en.bin").read_bytes()
    store.pipe_file(f"{STORE}/en.bin", moved[::-1])
    with pytest.raises(ObjectChangedError, match="pins this run"):
        binidx.Run.load(f"{STORE}/blend.json").build()[0][0]
    store.pipe_file(f"{STORE}/en.bin", moved)
    assert binidx.Run.load(f"{STORE}/blend.json").build()[0][0] is not None


@pytest.mark.parametrize("name", make_plans.HISTORY)
def test_a_history_reads_the_samples_of_its_writer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = shutil.copytree(make_plans.PLANS / "local", tmp_path / "local")
    shutil.copytree(make_state.STATE / "local/corpus", local / "corpus")
    monkeypatch.chdir(local)
    assert make_plans.rows_of_history(name) == EXPECTED["histories"][name]
    binidx.Run.load(f"{name}.json").save("again.json")
    assert without_version(Path("again.json")) == Path(f"{name}.json").read_bytes()


def test_a_state_with_the_samples_of_main_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(make_state.STATE / "local/corpus", tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    assert make_plans.samples_of_main() == EXPECTED["samples of main"]
    monkeypatch.setattr(make_state, "EARLIER", {"megatron_samples": "main"})
    for name, splits in EXPECTED["samples of main"].items():
        for split, dataset in make_state.DATASETS[name]().items():
            for kind, recorded in splits[split]["loader"].items():
                assert make_state.resumed(dataset, kind, recorded["state"]) == recorded["next"], name
