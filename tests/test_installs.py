"""binidx with core dependencies alone, and with an extra: a command works, or names what is missing in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.installs import CHILD, check_api, check_commands, link_environment, run_in, write_data

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("extras", [(), ("tokenizers",)], ids=" ".join)
def test_every_command_works_or_names_the_missing_extra(
    extras: tuple[str, ...], data: dict[str, str], tmp_path: Path
) -> None:
    check_commands(link_environment(tmp_path / "venv", extras), extras, data, tmp_path)


def test_the_demo_of_a_clone_names_its_extra(tmp_path: Path) -> None:
    python = link_environment(tmp_path / "venv", ())
    [found] = json.loads(run_in(python, tmp_path, "-c", CHILD, stdin=json.dumps([["demo"]])))
    said = "binidx demo: needs torch, s3fs, tokenizers; in the clone: pip install -e '.[demo]'\n"
    assert found == [2, said]


def test_what_needs_no_torch_works_without_it(data: dict[str, str], tmp_path: Path) -> None:
    check_api(link_environment(tmp_path / "venv", ()), (), data, tmp_path)


def test_python_m_binidx_is_the_command(tmp_path: Path) -> None:
    found = [
        subprocess.run([*command, "--help"], capture_output=True, check=True, cwd=tmp_path).stdout
        for command in ([Path(sys.executable).parent / "binidx"], [sys.executable, "-m", "binidx"])
    ]
    assert found[0] == found[1]


def test_an_editable_install_is_found_from_the_parent_of_a_clone_named_binidx(tmp_path: Path) -> None:
    # Python puts the current folder first; `binidx` in it is a namespace package unless a .pth names a whole package.
    python = link_environment(tmp_path / "venv", ())
    site = next(tmp_path.glob("venv/lib/python*/site-packages"))
    (site / "binidx").unlink()
    (tmp_path / "binidx").symlink_to(ROOT)
    (site / "binidx.pth").write_text(str(tmp_path / "binidx" / "src"))
    code = "import binidx, binidx.tools.inspect_dataset; print(binidx.__version__, binidx.__file__)"
    assert str(tmp_path / "binidx" / "src") in run_in(python, tmp_path, "-c", code)


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["--version"], ["verify", "nowhere"]])
def test_a_closed_pipe_is_no_trouble(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "binidx", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    expected = "binidx verify: nowhere.bin: " if arguments[0] == "verify" else ""
    assert (done.returncode, done.stderr[: len(expected) or None]) == (2 if expected else 0, expected)
