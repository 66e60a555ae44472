"""On a terminal a bar is drawn, and what was done stands on lines of its own; off it nothing is said until the end."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from helpers.conversion import build
from helpers.lineage_data import build_with_lineage

MAIN = "import sys; from binidx.tools import main; sys.exit(main())"

CALLS = {
    "verify": ["verify", "en"],
    "diff": ["diff", "en", "en"],
    "merge": ["merge", "en", "en", "--to", "out"],
    "merge --virtual": ["merge", "en", "en", "--to", "out", "--virtual"],
    "cut": ["cut", "sample", "en", "--to", "out", "--fraction", "0.5", "--seed", "1"],
    "shuffle": ["shuffle", "en", "--to", "out", "--seed", "1"],
    "convert": ["convert", "en", "out"],
}


def on_terminal(call: list[str], folder: Path) -> list[str]:
    """The lines that a terminal of 80 columns shows in the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", MAIN, *call]
    with subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 1 << 16):
                said += piece
        except OSError:  # Linux: the last one who had it open is gone
            pass
        assert process.wait() == 0
    os.close(ours)
    return [line.rpartition("\r")[2] for line in said.decode().replace("\r\n", "\n").split("\n")]


@pytest.mark.parametrize("name", CALLS)
def test_a_bar_on_a_terminal_and_nothing_off_it(name: str, tmp_path: Path) -> None:
    build(tmp_path / "en", 100)
    lines = on_terminal(CALLS[name], tmp_path)
    bars = [line for line in lines if "100%|" in line]
    assert bars
    assert all(line.rstrip().endswith("]") and len(line) <= 80 for line in bars)
    for path in tmp_path.glob("out*"):
        path.unlink()
    command = [sys.executable, "-c", MAIN, *CALLS[name]]
    quiet = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
    said = [line for line in lines if line and line not in bars]
    assert len(said) == len(quiet.stdout.splitlines())


def test_the_bar_of_a_lineage_counts_rows(tmp_path: Path) -> None:
    build_with_lineage(tmp_path / "en", 60, 1, np.uint8)
    lines = on_terminal(["cut", "head", "en", "--to", "out", "-n", "30"], tmp_path)
    (bar,) = (line for line in lines if "lineage" in line)
    assert bar.startswith("lineage: 100%")
    assert bar.rstrip().endswith(" rows/s]")
