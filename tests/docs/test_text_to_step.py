"""The commands of docs/tutorials/text-to-step.md, one after the other, against a real S3 server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from conftest import Bucket
from demo.corpus import manual_topics, train_bpe
from helpers.pages import python_blocks, read_page

from binidx.tools import main

BUCKET = "s3://binidx-demo"
NUMBERS = re.compile(r"\b\d[\d,.]*( [KM]iB| bytes)?|\"\w+\"")


def train_steps(count: int) -> list[str]:
    """The lines of `python train.py`, which is killed after `count` of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "train.py"], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = [line.strip() for line in islice(process.stdout, count)]
        process.kill()
        lines += [line.strip() for line in process.stdout]
    return lines


def test_every_command_runs_and_prints_what_the_page_shows(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = read_page("tutorials/text-to-step").replace(BUCKET, s3.fresh()).replace("\\\n", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    train_bpe([*islice(manual_topics(), 20)], tmp_path / "demo" / "tokenizer.json", vocab_size=4096)
    upload, describe, train = python_blocks(page)
    (tmp_path / "train.py").write_text(train)
    shown = dict(re.findall(r"```bash\n(binidx .*)\n```\n\n```text\n(.*\n)", page))
    commands = [shlex.split(command)[1] for command in shown]
    assert commands == ["preprocess", "verify", "plan", "prepare", "trace", "where"]

    exec(upload, {})
    for command, first in shown.items():
        if "run.json" in command and not Path("run.json").exists():
            exec(describe, {})
            capsys.readouterr()
        assert main(shlex.split(command)[1:]) == 0, command
        printed = capsys.readouterr().out
        expected = NUMBERS.sub("N", first.strip().removesuffix(" ..."))  # the page shortens lines
        assert NUMBERS.sub("N", printed).startswith(expected), command
    killed = train_steps(23)
    resumed = train_steps(5)
    assert [line.split("  ")[0] for line in killed] == [f"step {number}" for number in range(len(killed))]
    first = int(resumed[0].split()[1])  # a checkpoint is saved every ten steps
    assert first % 10 == 0
    assert 20 <= first <= len(killed)
    again = len(killed) - first
    assert resumed[:again] == killed[first : first + len(resumed)]
    assert [line.split("  ")[0] for line in resumed] == [f"step {first + number}" for number in range(len(resumed))]
    assert len(resumed) >= 5
