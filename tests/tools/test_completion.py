"""The script of `binidx --completion` in real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from binidx.tools import main

CASES = [
    ("binidx ver", "binidx verify"),
    ("binidx verify --voc", "binidx verify --vocab-size"),
    ("binidx prepare read", "binidx prepare read-plan"),
    ("binidx prepare bake --scr", "binidx prepare bake --scratch"),
    ("binidx account run.json --figure len", "--figure lengths"),
    ("binidx import nano", "binidx import nanotron"),
    ("binidx inspect some-t", "binidx inspect some-tokens"),
]
"""Typed words before Tab, and what the line then has."""
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], ". ./script"),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(cat script)"'),
}
"""Name of a shell -> its call, and the line that loads the script."""


@pytest.mark.parametrize("shell", [*SHELLS, "fish"])
def test_tab_completes_commands_subcommands_options_and_paths(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["--completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "some-tokens.idx").touch()
    for typed, completed in CASES:
        if shell == "fish":  # prints what Tab would offer
            call = ["fish", "--no-config", "-c", f"source script; complete -C '{typed}'"]
            shown = subprocess.run(call, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
            assert shown.startswith(completed.rpartition(" ")[2]), typed
        else:
            assert completed in line_after_tab(*SHELLS[shell], typed, completed, tmp_path), typed


def line_after_tab(call: list[str], load: str, typed: str, completed: str, folder: Path) -> str:
    """What a shell on a terminal shows after some keys and Tab, until it has `completed`, or for a minute."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "200", "HOME": str(folder)}
    shell = subprocess.Popen(
        call, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True
    )
    os.close(theirs)
    shown = ""

    def read_until(text: str) -> None:
        nonlocal shown
        while text not in shown and select.select([ours], [], [], 60)[0]:
            shown += os.read(ours, 1 << 16).decode()

    try:
        os.write(ours, f"{load}; echo it is rea''dy\n".encode())
        read_until("it is ready")
        shown = ""
        os.write(ours, f"{typed}\t".encode())
        read_until(completed)
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    return shown


def test_a_script_needs_a_known_shell_and_shtab(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--completion", "bash"]) == 2
    assert "needs shtab; pip install 'binidx[completion]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", object())
    with pytest.raises(SystemExit):
        main(["--completion", "tcsh"])
    assert "invalid choice: 'tcsh' (choose from" in capsys.readouterr().err
