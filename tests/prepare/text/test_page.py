"""What docs/reference/text-inputs.md shows runs, and its table names every kind of problem."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.pages import python_blocks, read_page

from binidx.prepare.text.batch import PROBLEMS_BY_KIND
from binidx.prepare.text.read import FORMATS

PAGE = read_page("reference/text-inputs")

LINES = """{"text": "one", "id": 1, "lang": "en"}
{"text": "two", "id": "b", "lang": "de"}

{"text": null, "lang": "en"}
{"text": "3", "lang": "en"}
"""


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    for example in python_blocks(PAGE):
        exec(example, {"base": str(tmp_path)})
    said = capsys.readouterr().out
    assert said.startswith("1 one ['1'] Counter({'blank line': 1, 'keep lang': 1, 'min characters': 1}) ")
    assert said.endswith("a.jsonl: line 4, byte 81: null: 'text' is null\n")


def test_the_table_names_every_kind_of_problem_and_every_format() -> None:
    assert [kind for kind in PROBLEMS_BY_KIND if f"`{kind}`" not in PAGE] == []
    suffixes = [suffix for row in FORMATS.values() for suffix in row.suffixes]
    assert [suffix for suffix in suffixes if f".{suffix.split('.')[1]}" not in PAGE] == []
