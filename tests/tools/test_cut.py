"""binidx cut: its three commands, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.conversion import build, pair

from binidx.tools import main


def test_head_sample_and_split_say_what_they_wrote(tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 100)
    assert main(["cut", "head", source, "--to", f"{tmp_path}/head", "-n", "3"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{source}: 10 documents; ")
    assert f"\n  {tmp_path}/head: 3 documents, 3 sequences, " in out
    assert err == ""
    assert main(["cut", "sample", source, "--to", f"{tmp_path}/s", "--fraction", "1", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["shares"][0]["num_documents"] == 10
    assert pair(f"{tmp_path}/s") == pair(source)
    both = [f"{tmp_path}/a", f"{tmp_path}/b"]
    assert main(["cut", "split", source, "--to", *both, "--fractions", "0.5", "0.5", "--seed", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["cut", "sample", source, "--to", f"{tmp_path}/s", "--fraction", "2", "--seed", "1"]) == 2
    assert "need shares of 0 to 1" in capsys.readouterr().err
    Path(f"{source}.idx").write_bytes(b"nonsense")
    assert main(["cut", "head", source, "--to", f"{tmp_path}/x", "-n", "3"]) == 1
