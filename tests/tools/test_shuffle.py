"""binidx shuffle: the call, what a person and a program are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.conversion import build, pair

from binidx.tools import main


def test_it_shuffles_and_says_what_it_did(tmp_path: Path, capsys) -> None:
    sources = [build(tmp_path / name, 100, n) for n, name in enumerate("ab")]
    call = ["shuffle", *sources, "--to", f"{tmp_path}/new", "--seed", "1"]
    assert main([*call, "--memory", "600MB"]) == 0
    out, err = capsys.readouterr()
    assert f"{tmp_path}/new: 2 datasets\n  20 documents, 20 sequences, 200 tokens\n  1 bucket; no lineage; " in out
    assert err == ""
    before = pair(tmp_path / "new")
    assert main([*call[:-1], "2"]) == 2
    assert "holds .bin, .idx, needed a free name; --overwrite replaces it" in capsys.readouterr().err
    assert main([*call, "--overwrite", "--json", "--memory", "512MB"]) == 0
    assert json.loads(capsys.readouterr().out)["num_documents"] == 20
    assert pair(tmp_path / "new") == before


def test_lines_too(tmp_path: Path, capsys) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"a\nb\nc\nd")
    call = ["shuffle", "--lines", f"{tmp_path}/in.jsonl", "--to", f"{tmp_path}/new.jsonl", "--seed", "1"]
    assert main(call) == 0
    assert f"{tmp_path}/new.jsonl: 4 lines, 8 bytes; 1 bucket; " in capsys.readouterr().out
    assert sorted((tmp_path / "new.jsonl").read_bytes().split()) == [b"a", b"b", b"c", b"d"]
    assert main([*call, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_lines"] == 4


def test_a_call_that_is_wrong_is_one_line(tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "a", 100)
    for seed in ("-1", "1.5", str(2**64)):
        for command in (["shuffle"], ["cut", "sample", "--fraction", "0.5"]):
            with pytest.raises(SystemExit):
                main([*command, source, "--to", f"{tmp_path}/new", "--seed", seed])
            assert f"--seed: found {seed}, needed a whole number from 0 to 2^64 - 1" in capsys.readouterr().err
    assert main(["shuffle", source, "--to", f"{tmp_path}/new", "--seed", "1", "--memory", "1MB"]) == 2
    assert "memory: 1,000,000 bytes are too few, need at least 512 MB" in capsys.readouterr().err
    assert main(["shuffle", source, "--to", f"{tmp_path}/new", "--seed", "1", "--scratch", f"{tmp_path}/none"]) == 2
    assert f"--scratch: found {tmp_path}/none (No such file or directory), need a folder to" in capsys.readouterr().err
