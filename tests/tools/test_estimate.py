"""binidx estimate: the call, what a person and a program are told."""

from __future__ import annotations

import json
from pathlib import Path

from binidx.tools import main
from preprocessing import corpus, tokenizer_path


def test_it_tells_the_interval_and_the_cost(tmp_path: Path, capsys) -> None:
    corpus(tmp_path / "in")
    call = ["estimate", str(tmp_path / "in"), "--tokenizer", tokenizer_path(), "--seed", "3"]
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "tokens     " in out
    assert "(± 0.00%)" in out  # all of it was looked at
    assert "of " in out.split("looked at ")[1]
    assert "CPU-hours with " in out
    assert main([*call, "--json", "--sample", "1MB"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"]["total"] == 400
    assert main([*call, "--keep", "nonsense"]) == 2
