"""The example of docs/reference/tokenizers.md runs, and its table of engines is the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.pages import python_blocks, read_page
from helpers.trained_tokenizers import save

from binidx.prepare.tokenizers.engine_choice import ENGINES

PAGE = read_page("reference/tokenizers")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save("digits", tmp_path)
    monkeypatch.chdir(tmp_path)
    (example,) = python_blocks(PAGE)
    exec(example, names := {})
    told = capsys.readouterr().out
    assert names["engine"].name == "hf"
    assert told == re.sub("^    ", "", PAGE.split("into digits:\n\n")[1].split("\n\n")[0], flags=re.MULTILINE) + "\n"


def test_every_engine_is_in_the_table() -> None:
    assert re.findall(r"^\| `(\w+)` \|.*binidx\[", PAGE, re.MULTILINE) == list(ENGINES)
