"""binidx cache prune --indices: what it removes from a path_to_cache, and what it never touches."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from conftest import Bucket
from golden import make_state as golden

import binidx
from binidx.index.cache.build_lock import Lease
from binidx.index.cache.index_cache import Outcome
from binidx.index.cache.pruning import find_indices
from binidx.storage.location import Location
from binidx.storage.steps import run
from binidx.tools import main


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the golden state, of old files, as the working directory."""
    found = shutil.copytree(golden.STATE / "local", tmp_path / "local")
    golden.same_times(found)
    monkeypatch.chdir(found)
    return found


def prune(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """Run the command; return state -> names."""
    assert main(["cache", "prune", "--indices", *arguments, "--json"]) == 0
    found: dict[str, list[str]] = {}
    for row in json.loads(capsys.readouterr().out)["indices"]:
        found.setdefault(row["state"], []).append(row["name"])
    return found


def num_built(run: str, cache: str | None = None) -> int:
    outcomes: list[str] = []
    loaded = binidx.Run.load(run)
    if cache is not None:
        loaded = replace(loaded, config=replace(loaded.config, path_to_cache=cache))
    loaded.build(on_outcome=lambda outcome: outcomes.append(outcome.how))
    return outcomes.count(Outcome.BUILT)


@pytest.mark.parametrize("kept", ["run", "cyclic", "staged"])
def test_the_indices_of_a_kept_run_stay_and_the_others_go(
    kept: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {*os.listdir("cache")}
    arguments = ["cache", "--keep", f"runs/{kept}.json", "--older-than", "1d"]
    planned = prune(capsys, *arguments, "--dry-run")
    assert {*os.listdir("cache")} == before
    done = prune(capsys, *arguments)
    assert planned["kept"] == done["kept"]
    assert planned["remove"] == done["removed"]
    assert not any(name.startswith(tuple(done["removed"])) for name in os.listdir("cache"))
    assert num_built(f"runs/{kept}.json") == 0
    assert "removed" not in prune(capsys, *arguments)


def test_what_binidx_did_not_write_stays(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = ["notes.txt", "run.json", f"{'a' * 32}-binidx.bin", f"{'c' * 31}-GPTDataset-train-binidx.json"]
    megatron = [f"{'b' * 32}-GPTDataset-train-{end}" for end in ("description.txt", "document_index.npy")]
    for name in (*foreign, *megatron):
        Path("cache", name).write_text("{}")
        os.utime(f"cache/{name}", (golden.MTIME, golden.MTIME))
    assert {*prune(capsys, "cache", "--older-than", "0s")} == {"removed"}
    assert {*os.listdir("cache")} == {*foreign, *megatron}


def test_the_index_of_another_version_goes_with_the_one_of_its_name(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [manifest] = Path("cache").glob("11a29178f75c362c51c662b114819238-*-train-binidx.json")
    numbered = Path(str(manifest).replace("-train-", "-train-4-"))
    shutil.copy(manifest, numbered)
    assert manifest.name.removesuffix("-binidx.json") in prune(capsys, "cache", "--older-than", "1d")["young"]
    os.utime(numbered, (golden.MTIME, golden.MTIME))
    assert manifest.name.removesuffix("-binidx.json") in prune(capsys, "cache", "--older-than", "1d")["removed"]
    assert not numbered.exists()


def test_a_young_index_stays(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("cache")
    assert num_built("runs/run.json") > 0
    assert {*prune(capsys, "cache", "--older-than", "1d")} == {"young"}


def test_an_index_that_is_being_built_stays(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "11a29178f75c362c51c662b114819238-GPTDataset-train"
    lease = Lease(Location.of(f"cache/{name}-binidx.json-claim"))
    held = run(lease.acquire())
    assert held is not None
    with held:
        assert prune(capsys, "cache", "--older-than", "0s")["being built"] == [name]
        assert Path(f"cache/{name}-document_index.npy").exists()


@pytest.mark.parametrize("listed", [True, False])
def test_a_build_that_begins_after_the_listing_keeps_its_index(listed: bool, state: Path) -> None:
    name, directory = "11a29178f75c362c51c662b114819238-GPTDataset-train", Location.of("cache")
    lease = Lease(directory / f"{name}-binidx.json-claim")
    if listed:  # of a builder that was killed long ago
        run(lease.acquire())
        os.utime(f"cache/{name}-binidx.json-claim", (golden.MTIME, golden.MTIME))
    [index] = [index for index in find_indices(directory, lambda *_: False, 0) if index.name == name]
    if listed:
        run(lease.remove())
    held = run(lease.acquire())
    assert held is not None
    with held:
        assert not index.remove(directory)
    assert Path(f"cache/{name}-binidx.json").exists()


def test_the_lease_of_a_builder_that_was_killed_long_ago_goes_with_its_arrays(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree("cache")
    name = f"cache/{'d' * 32}-GPTDataset-train"
    Path("cache").mkdir()
    run(Lease(Location.of(f"{name}-binidx.json-claim")).acquire())
    Path(f"{name}-document_index.npy").touch()
    golden.same_times(Path("cache"))
    assert prune(capsys, "cache", "--older-than", "1d") == {"removed": [Path(name).name]}
    assert os.listdir("cache") == []


def test_indices_in_a_bucket_are_pruned(state: Path, s3: Bucket, capsys: pytest.CaptureFixture[str]) -> None:
    cache = f"{s3.fresh()}/cache"
    other = binidx.Run.load("runs/run.json")
    replace(other, config=replace(other.config, random_seed=99)).save("runs/other.json")
    built = [num_built(f"runs/{name}.json", cache) for name in ("run", "other")]
    assert min(built) > 0
    assert {*prune(capsys, cache, "--older-than", "1d")} == {"young"}
    done = prune(capsys, cache, "--keep", "runs/run.json", "--older-than", "0s")
    assert done["kept"]
    assert done["removed"]
    fs = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=s3.server.endpoint)
    left = [path.rpartition("/")[2] for path in fs.find(cache)]
    assert all(name.startswith(tuple(done["kept"])) for name in left)
    assert num_built("runs/run.json", cache) == 0
    assert num_built("runs/other.json", cache) > 0


def test_a_person_sees_what_goes(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cache", "prune", "--indices", "cache", "--keep", "runs/run.json", "--older-than", "1d", "--dry-run"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "remove" in out
    assert "would be removed" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--indices", "cache"], "prune --indices: needs --older-than AGE"),
        (["--indices", "cache", "--older-than", "1d", "--bytes", "1"], "and neither --dir, --bytes nor --uri"),
        (["--keep", "runs/run.json"], "--keep and --dry-run need --indices URI"),
        (["--indices", "nowhere", "--older-than", "1d"], "nowhere"),
        (["--indices", "cache", "--older-than", "1d", "--keep", "corpus/en"], "not the file of a run"),
    ],
)
def test_a_wrong_call_removes_nothing(
    arguments: list[str], message: str, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {*os.listdir("cache")}
    assert main(["cache", "prune", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert {*os.listdir("cache")} == before
