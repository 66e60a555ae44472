"""binidx diff: 0 the same, 1 they differ; for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.conversion import build

from binidx.tools import main


def test_same_is_0_and_different_1(tmp_path: Path, capsys) -> None:
    a, b = build(tmp_path / "a", 1000), build(tmp_path / "b", 1000, 1)
    assert main(["diff", a, a, "--scratch", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert f"A {a}: 10 documents, 1,000 tokens, 0 copies of earlier documents\nB {a}: 10" in out
    assert "\n  in both       10\n  removed       0\n" in out
    assert "the same documents in the same order" in out
    assert err == ""
    assert main(["diff", a, b, "--few", "2"]) == 1
    assert "\n  removed       10: documents 0, 1 ... of A\n" in capsys.readouterr().out
    assert main(["diff", a, b, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["num_added"]) == (False, 10)
    assert main(["diff", a, f"{tmp_path}/nothing"]) == 2
