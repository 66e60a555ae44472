"""On a terminal a bar is drawn and vanishes; off it there is a line a minute, or JSON."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.conversion import build
from helpers.lineage_data import build_with_lineage

from binidx.tools._display import Bar, fitted, print_above

MAIN = "import sys; from binidx.tools import main; sys.exit(main())"

CALLS = {
    "verify": ["verify", "en"],
    "diff": ["diff", "en", "en"],
    "merge": ["merge", "en", "en", "--to", "out"],
    "merge --virtual": ["merge", "en", "en", "--to", "out", "--virtual"],
    "cut": ["cut", "sample", "en", "--to", "out", "--fraction", "0.5", "--seed", "1"],
    "shuffle": ["shuffle", "en", "--to", "out", "--seed", "1"],
    "convert": ["convert", "en", "--to", "out"],
}


def on_terminal(call: list[str], folder: Path, **environment: str) -> tuple[str, list[str]]:
    """What a terminal of 80 columns is sent, and the lines that it shows in the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", MAIN, *call]
    variables = {**{name: value for name, value in os.environ.items() if name != "NO_COLOR"}, **environment}
    with subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 1 << 16):
                said += piece
        except OSError:  # Linux: the last one who had it open is gone
            pass
        process.wait()
    os.close(ours)
    text = said.decode().replace("\r\n", "\n")
    return text, [line.rpartition("\r")[2] for line in text.split("\n")]


@pytest.mark.parametrize("name", CALLS)
def test_a_bar_on_a_terminal_that_vanishes_and_nothing_off_it(name: str, tmp_path: Path) -> None:
    build(tmp_path / "en", 100)
    text, lines = on_terminal(CALLS[name], tmp_path)
    bars = re.findall(r"[^\r\n]+%\|[^\r\n]*", text)
    assert bars
    assert all(bar.rstrip().endswith("]") and len(bar.rpartition("\x1b[A")[2]) <= 80 for bar in bars), bars
    for path in tmp_path.glob("out*"):
        path.unlink()
    command = [sys.executable, "-c", MAIN, *CALLS[name]]
    quiet = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
    shown = " ".join(line.strip() for line in lines if line)
    times = r"\d+(\.\d+)?( bytes/s| [KMG]iB/s| s\b)"
    assert re.sub(times, "", shown) == re.sub(times, "", " ".join(map(str.strip, quiet.stdout.splitlines())))


def test_the_bar_of_a_lineage_counts_rows(tmp_path: Path) -> None:
    build_with_lineage(tmp_path / "en", 60, 1, np.uint8)
    text, _ = on_terminal(["cut", "head", "en", "--to", "out", "-n", "30"], tmp_path)
    assert re.search(r"lineage: .*rows/s\]", text)


def test_a_long_line_is_wrapped_and_an_error_coloured_on_a_terminal(tmp_path: Path) -> None:
    call = ["verify", f"{tmp_path}/{'a' * 60}"]
    text, lines = on_terminal(call, tmp_path)
    assert text.startswith("\x1b[31mbinidx verify\x1b[0m:")
    assert lines[-2] == "  no such file"
    assert "\x1b" not in on_terminal(call, tmp_path, NO_COLOR="1")[0]
    assert fitted("a " * 60, sys.stdout) == "a " * 60


def test_a_warning_of_the_library_is_coloured_and_stands_above_the_bar(tmp_path: Path) -> None:
    build(tmp_path / "en", 100)
    text, lines = on_terminal(["verify", "en"], tmp_path, BINIDX_CACHE_DRI="x")
    assert "\x1b[33mbinidx verify\x1b[0m: BINIDX_CACHE_DRI: is no setting" in text
    assert not [line for line in lines if "%|" in line]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_clock_of_a_bar_runs_while_nothing_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Bar("convert") as bar:
        bar.begin("compress s3://corpus/a_name_that_is_longer_than_the_line_has_room_for.bin.zst", 10, 0)
        bar.say("an older copy goes")
        while not re.search(r"\[00:(?!00)", terminal.getvalue()):
            time.sleep(0.01)
    assert "compress a_na…or.bin.zst:" in terminal.getvalue()
    assert "binidx convert: an older copy goes\n" in terminal.getvalue()


def test_work_that_counts_nothing_shows_its_time_and_rows_stand_above_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        patched.setattr(sys, "stdout", terminal)
        with Bar("where") as bar:
            bar.begin("search", 0, 0, unit="")
            while not re.search("search: 00:0[1-9]", terminal.getvalue()):
                time.sleep(0.01)
            print_above("step 3")
    shown = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    assert shown[0] == "step 3"
    assert not shown[-1].strip()
    with Bar("where") as bar:
        bar.begin("search", 0, 0, unit="")
        bar.print_progress()
        print_above("step 3")
    said = capsys.readouterr()
    assert re.fullmatch(r"binidx where: search: \d+\.\d s\n", said.err)
    assert said.out == "step 3\n"


def test_off_a_terminal_a_line_a_minute_and_json_at_both_ends_of_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("merge") as bar:
        bar.begin("tokens", 4 << 20, 1 << 20)
        bar.advance(1 << 20)
        bar.print_progress()
        bar.begin("lineage", 10, 0, "rows")
        bar.print_progress()
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"binidx merge: tokens: 2.0 MiB of 4.0 MiB \(50%\), \S+ \w+/s, .* left", first)
    assert second == "binidx merge: lineage: 0 rows of 10 rows (0%), 0 rows/s"
    with Bar("merge", "json") as bar:
        bar.begin("tokens", 8, 2)
        bar.advance(6)
    ends = [json.loads(line)["progress"] for line in capsys.readouterr().err.splitlines()]
    assert [(each["stage"], each["done"], each["total"], each["unit"]) for each in ends] == [
        ("tokens", 2, 8, "bytes"),
        ("tokens", 8, 8, "bytes"),
    ]
    assert ends[1]["per_second"] > 0 == ends[1]["seconds_left"]
