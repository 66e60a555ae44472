"""Which release of Megatron a script runs with, and what follows from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compat.running import DROP_IN, HERE, start
from helpers.gpt_data import write_with_megatron
from helpers.oracle import megatron
from helpers.release_oracle import find_release

from binidx.compat.megatron.serve import find_installed_release, install, read_release
from binidx.dataset.megatron_releases import MAIN, NEWEST
from binidx.errors import ConfigError


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(4)
    return write_with_megatron(tmp_path_factory.mktemp("corpus") / "en", rng.integers(1, 40, 90).astype(np.int32), rng)


def test_the_release_is_that_of_the_installed_package() -> None:
    assert find_installed_release() == "0.16"
    assert read_release(Path(megatron.gpt.__file__).parents[1]) == "0.16"


@pytest.mark.parametrize("text", [None, "", "MAJOR = 0\n", "MAJOR = 'x'\nMINOR = 'y'\n"])
def test_a_megatron_that_names_no_version_is_taken_for_main_with_a_warning(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if text is not None:
        (tmp_path / "package_info.py").write_text(text)
    assert read_release(tmp_path) == MAIN
    assert f"as {tmp_path} names no version): no known release" in caplog.text


@pytest.mark.parametrize(
    ("minor", "varlen", "release", "warns"),
    [
        ("17", "", "0.17", False),
        ("19", "", "0.19", False),
        ("13", None, "0.16", True),
        ("19rc0", "", "0.19", True),
        ("20", None, MAIN, True),
        ("20", "def _from_alpaca(): ...", MAIN, True),
        ("20", "class VarlenDataset(SFTDataset):", NEWEST, True),
    ],
)
def test_a_later_tree_is_known_by_its_varlen_dataset_and_named_in_the_log(
    minor: str, varlen: str | None, release: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core, datasets = tmp_path / "megatron/core", tmp_path / "megatron/training/datasets"
    core.mkdir(parents=True)
    datasets.mkdir(parents=True)
    (core / "package_info.py").write_text(
        f"MAJOR = 0\nMINOR = {minor[:2]}\nPATCH = 2\nPRE_RELEASE = '{minor[2:]}'\n\nVERSION = (MAJOR, MINOR)\n"
    )
    if varlen is not None:
        (datasets / "varlen_dataset.py").write_text(varlen)
    assert read_release(core) == release
    assert (f"Megatron 0.{minor}: no known release; its samples are taken to be those of {release}" in caplog.text) == (
        warns
    )


def test_a_major_release_is_later_than_those_of_major_0(tmp_path: Path) -> None:
    (tmp_path / "package_info.py").write_text("MAJOR = 1\nMINOR = 2\nPATCH = 0\nPRE_RELEASE = ''\n")
    assert read_release(tmp_path) == MAIN


def test_a_megatron_that_a_script_made_itself_is_no_release() -> None:
    made = "import sys, types; sys.modules |= {name: types.ModuleType(name) for name in ('megatron', 'megatron.core')}"
    found = "from binidx.compat.megatron.serve import find_installed_release; print(find_installed_release())"
    done = subprocess.run([sys.executable, "-c", f"{made}; {found}"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == MAIN


def test_a_script_that_asks_for_no_release_gets_the_samples_of_the_installed_one(prefix: str) -> None:
    [[found]] = start([*DROP_IN, str(HERE / "spawning.py"), prefix]).lines()
    assert found["versions"] == ["0.16"]  # test_serve.py asks for another one


def test_an_unknown_release_is_an_error_before_the_script_begins() -> None:
    command = [sys.executable, *DROP_IN, "--megatron-samples=0.15", str(HERE / "spawning.py"), "en"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "megatron_samples: found '0.15', need main, 0.16, 0.17" in done.stderr
    with pytest.raises(ConfigError, match=r"found '0\.15'"):
        install(megatron_samples="0.15")


def test_a_subclass_of_0_19_gets_and_gives_the_lengths_of_documents(prefix: str) -> None:
    folder = find_release("0.19.2")

    def run(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, str(HERE / "queried.py"), folder, prefix, *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    theirs, ours = run(), run("install")
    assert (theirs["release"], ours["release"]) == (None, "0.19")
    assert len(ours["samples"]) > 40
    assert ours["samples"] == theirs["samples"]
