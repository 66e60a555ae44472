"""A run with relative paths: it is opened from the directory in which it was saved, whatever the current one is."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, write_with_megatron

import binidx
from binidx import RunOrder
from binidx.dataset.rank_comparison import identify_options
from binidx.errors import ConfigError
from binidx.run.run_file import format_run, parse_run
from binidx.tools import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(8)
    for name in ("en", "code"):
        write_with_megatron(directory / name, np.full(40, 30, np.int32), rng)
    return directory


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    return directory


BLEND: Any = (["en", "./code"], [0.7, 0.3])
PER_SPLIT: Any = {"blend": None, "split": None, "blend_per_split": [BLEND, None, (["code"], None)]}
CASES: dict[str, dict[str, Any]] = {
    "one": {"blend": (["en"], None)},
    "blend": {},
    "cached": {"path_to_cache": "cache", "cache_small_indices": True},
    "per split": PER_SPLIT,
    "staged": {"stages": [binidx.Stage(BLEND, 20), binidx.Stage((["./code"], None), 10)], "sizes": [0, 4, 0]},
    "counted": {"sequences_per_dataset": {"en": (40, 41), "./code": (40, 41)}},
}


def make(**changes: Any) -> binidx.Run:
    names = changes.keys() & binidx.Run.__dataclass_fields__.keys()
    run = {"sizes": [50, 4, 0], "micro_batch_size": 2, **{name: changes.pop(name) for name in names}}
    config = binidx.GPTDatasetConfig(**{
        "random_seed": 1, "sequence_length": 24, "blend": BLEND, "split": "8,1,1", "tokenizer": TOKENIZER, **changes
    })  # fmt: skip
    return binidx.Run(config, **run)


def described(run: binidx.Run) -> Any:
    """What the names of caches, bakes and states depend on, and the tokens of a sample."""
    order = RunOrder.of(run)
    train: Any = run.build()[0]
    return train.unique_description, order.fingerprint, train.order_identity, train[3]["tokens"].tolist()


def test_ranks_may_have_copies_of_a_run_in_other_directories(
    data: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = []
    for directory in (data, shutil.copytree(data, elsewhere / "copy")):
        monkeypatch.chdir(directory)
        options.append(identify_options([make().build()[0]]))
    assert options[0] == options[1]


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_relative_paths_is_the_same_run_from_any_directory(
    case: str, data: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(data)
    run = make(**CASES[case])
    run.save(f"{case}.json")
    needed, path = described(run), data / f"{case}.json"
    assert main(["trace", f"{case}.json", "--steps", "1", "--json"]) == 0
    traced = capsys.readouterr().out
    before = sorted(data.rglob("*"))

    monkeypatch.chdir(elsewhere)
    loaded = binidx.Run.load(str(path))
    assert described(loaded) == needed
    assert format_run(loaded) == format_run(replace(loaded, consumed_samples=0)) == path.read_bytes()
    for command in (["trace", str(path), "--steps", "1", "--json"], ["where", str(path), "--document", "3"],
                    ["plan", str(path)], ["account", str(path)], ["prepare", "index", str(path)]):  # fmt: skip
        sources = ["--source", "en"] if command[0] == "where" else []
        assert main([*command, *sources]) == 0
        out = capsys.readouterr().out
        assert command[0] != "trace" or out == traced
    assert not [*elsewhere.iterdir()]
    assert sorted(data.rglob("*")) == before


def test_a_baked_run_is_read_from_any_directory(data: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    make().save("run.json")
    assert main(["prepare", "bake", "run.json", "--to", f"{elsewhere}/baked", "--steps", "0:8"]) == 0
    monkeypatch.chdir(elsewhere)
    # The same bake: its fingerprint has the text of the prefixes, not the place from which they were opened.
    assert main(["prepare", "bake", f"{data}/run.json", "--to", "baked", "--steps", "0:8"]) == 0
    run = binidx.Run.load(f"{data}/run.json")
    baked, train = binidx.BakedDataset("baked", run.config), run.build()[0]
    assert baked[0]["tokens"].tolist() == train[0]["tokens"].tolist()  # type: ignore[index]


def test_only_a_run_with_relative_paths_records_its_directory(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    make(blend=([f"{data}/en", "s3://corpus/code"], None), sizes=[50, None, None]).save("memory://runs/absolute.json")
    text = binidx.open_object("memory://runs/absolute.json").read([(0, 10)])
    assert "directory" not in json.loads(format_run(binidx.Run.load("memory://runs/absolute.json")))
    assert bytes(text[0]) == b'{\n "config'
    make().save("memory://runs/relative.json")
    assert binidx.Run.load("memory://runs/relative.json").directory == str(data)


def test_a_file_without_a_directory_keeps_its_bytes_and_is_opened_from_here(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({**json.loads(format_run(make())), "directory": None}, indent=1)
    text = text.replace(',\n "directory": null', "") + "\n"
    monkeypatch.chdir(data)
    run = parse_run(text.encode())
    assert format_run(replace(run, consumed_samples=0)) == text.encode()
    assert run.build()[0] is not None
    assert run.config.blend == BLEND


def test_a_directory_that_is_not_absolute_is_refused() -> None:
    for directory in ("data", "s3://corpus", ""):
        text = json.dumps({**json.loads(format_run(make())), "directory": directory})
        with pytest.raises(ConfigError, match=rf"directory: found '{directory}', needs an absolute path"):
            parse_run(text.encode())


def test_a_run_of_the_config_of_a_loaded_one_keeps_its_directory(
    data: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    make().save("first.json")
    monkeypatch.chdir(elsewhere)
    loaded = binidx.Run.load(f"{data}/first.json")
    other = binidx.Run(loaded.config, [0, 4, 0], 2, stages=[binidx.Stage(BLEND, 10)])
    other.save("second.json")
    monkeypatch.chdir("/")
    again = binidx.Run.load(f"{elsewhere}/second.json")
    assert again.directory == str(data)
    assert described(again) == described(other)


def test_a_planned_run_is_read_from_any_directory(data: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    assert main(["prepare", "read-plan", "run.json", "--to", f"{elsewhere}/plan", "--steps", "0:8"]) == 0
    monkeypatch.chdir(elsewhere)
    # The same plan: its fingerprint has the text of the prefixes, not the place from which they were opened.
    assert main(["prepare", "read-plan", f"{data}/run.json", "--to", "plan", "--steps", "0:8"]) == 0
    run = binidx.Run.load(f"{data}/run.json")
    planned, train = binidx.PlannedDataset("plan", run.config), run.build()[0]
    assert planned[0]["tokens"].tolist() == train[0]["tokens"].tolist()  # type: ignore[index]


def test_a_run_that_moved_with_its_data_is_built_without_the_plan_of_the_old_place(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(data, old)
    monkeypatch.chdir(old)
    make(path_to_cache="cache").save("run.json")
    assert main(["prepare", "read-plan", "run.json"]) == 0
    assert isinstance(binidx.Run.load("run.json").build()[0], binidx.PlannedDataset)
    needed = [sample["tokens"].tolist() for sample in binidx.Run.load("run.json").build(planned=False)[0]]
    old.rename(new)
    file = new / "run.json"
    file.write_text(file.read_text().replace(f'"{old}"', f'"{new}"'))
    run = binidx.Run.load(str(file))
    assert [sample["tokens"].tolist() for sample in run.build()[0]] == needed
    assert f"prefixes (found {old}/en, the config has {new}/en)" in caplog.text
    other = re.escape(f"is of another order: prefixes (found {old}/en, the config has {new}/en)")
    with pytest.raises(
        ConfigError, match=f"{other}: if it is the same data, mount or link it where it was and name that"
    ):
        binidx.Run(replace(run.config, read_plan=True), run.sizes, 2).build()
    old.symlink_to(new)  # that way out
    there = replace(run.config, blend=([f"{old}/en", f"{old}/./code"], BLEND[1]), read_plan=True)
    plan = next(new.glob("cache/*-train-read-plan"))
    assert [sample["tokens"].tolist() for sample in binidx.PlannedDataset(str(plan), there)] == needed
