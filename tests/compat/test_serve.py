"""Our modules in the place of Megatron's: in this process's children, since here Megatron's are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compat.running import DROP_IN, HERE, start
from helpers.gpt_data import write_with_megatron
from helpers.oracle import megatron

import binidx.compat.megatron
from binidx.errors import ConfigError


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(4)
    return write_with_megatron(tmp_path_factory.mktemp("corpus") / "en", rng.integers(1, 40, 50).astype(np.int32), rng)


def test_modules_of_megatron_are_ours_and_the_rest_stays_its_own() -> None:
    [[found]] = start([str(HERE / "served.py")]).lines()
    ours = "binidx.compat.megatron."
    assert found["before"] == []
    assert found["torch at install"] is False
    assert found["homes"] == [
        ours + "gpt_dataset",
        "megatron.core.datasets.helpers",
        ours + "helpers_cpp",
        ours + "indexed_dataset",
        "megatron.core.datasets.data_schedule",
        "megatron.core.datasets.megatron_tokenizer",
        ours + "fim_dataset",
        ours + "data_samplers",
    ]
    assert found["spec"] == ours + "gpt_dataset"
    assert found["same"]
    assert found["pickled"]
    assert found["own"]
    assert found["options"] == [True, "0.16.1"]
    assert found["mask"]
    own = "megatron.core.datasets.gpt_dataset"
    assert found["left"] == [own, own, "binidx.dataset.config"]
    assert found["missing"].endswith("compat.megatron.gpt_dataset, has no attribute 'nonsense'")
    assert found["beside"] == [ours + "gpt_dataset", ours + "sft_dataset"]  # Megatron's class over ours
    assert found["after"] == ["megatron.core.datasets.utils", False]
    assert "before any import of Megatron" in found["late"]


def test_what_megatron_has_imported_already_is_an_error_that_says_what_to_do() -> None:
    assert megatron.gpt.__name__ in sys.modules
    with pytest.raises(ConfigError, match="or run: python -m"):
        binidx.compat.megatron.install()  # the oracle of this very process


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *DROP_IN, *arguments], capture_output=True, text=True, timeout=1200)


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (tmp_path / "beside.py").write_text("HERE = 1\n")
    script.write_text(
        "import sys, beside\n"
        "def annotated(x: int): ...\n"
        "print(__name__, __file__ == sys.argv[0], sys.argv[1:], sys.modules['__main__'].beside is beside)\n"
        "print(annotated.__annotations__['x'] is int)\n"
        "sys.exit(3)\n"
    )
    done = run(str(script), "--seed", "1")
    assert (done.stdout.splitlines(), done.returncode) == (["__main__ True ['--seed', '1'] True", "True"], 3)


def test_a_script_that_is_not_there_is_one_line() -> None:
    done = run("not-there.py")
    assert (done.stderr, done.returncode) == ("not-there.py: no such script; give the path of a training script\n", 2)


@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("--help",), 0)])
def test_a_call_without_a_script_says_how(arguments: tuple[str, ...], code: int) -> None:
    done = run(*arguments)
    assert done.returncode == code
    shown = done.stdout if code == 0 else done.stderr
    assert "torchrun --nproc-per-node" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_an_unknown_option_before_the_script_is_named() -> None:
    done = run("--nonsense", "x.py")
    assert done.returncode == 2
    assert done.stderr.startswith("--nonsense: unknown option; needs one of --trust-cache, --cache-small")


def test_workers_that_are_spawned_know_the_classes_of_the_script_and_the_options(prefix: str) -> None:
    [[found]] = start([*DROP_IN, "--megatron-samples=0.19.2", str(HERE / "spawning.py"), prefix]).lines()
    home = "binidx.compat.megatron.gpt_dataset"
    assert found == {"workers": [0], "versions": ["0.19.2"], "equal": True, "home": home}


def test_datasets_that_users_build_are_built_on_rank_0_first(prefix: str, tmp_path: Path) -> None:
    ranks: list[list[dict[str, Any]]] = start([str(HERE / "rank_zero_first.py"), prefix, str(tmp_path)], 2).lines()
    zero, one = (rank[0] for rank in ranks)
    assert zero["tokens"] == one["tokens"]
    assert zero["blended"]
    assert (zero["error"], one["error"]) == ("ValueError", "PeerError")
    assert (zero["built"], one["built"]) == (None, [1, 2])
