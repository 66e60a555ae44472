"""What docs/how-to/shuffle.md shows runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from helpers.lineage_data import build_with_lineage, read_lineage
from helpers.preprocess_jobs import tokenizer_path, write_lines
from helpers.shuffle_oracle import new_order

from binidx.tools import COMMANDS

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "shuffle.md").read_text()


def test_the_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [build_with_lineage(tmp_path / name, 30, seed) for seed, name in enumerate(("en", "code"))]
    write_lines(tmp_path / "a.jsonl", [{"text": "the sea"}] * 5)
    shutil.copy(tokenizer_path(), tmp_path / "tokenizer.json")
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(example, {"base": str(tmp_path)})
    counts, origins, tokens = capsys.readouterr().out.splitlines()
    rows = [row for source in sources for row in read_lineage(source)]
    assert counts == "60 1"
    assert origins == str({place: rows[number] for place, number in enumerate(new_order(1, 60)[:2])})
    assert re.fullmatch(r"(\d+) to \1 tokens, \d+ bytes", tokens)


def test_the_commands_are_there() -> None:
    assert set(re.findall(r"binidx ([a-z]+)", PAGE)) - {"prepare"} <= set(COMMANDS)
