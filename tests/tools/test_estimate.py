"""binidx estimate: the call, what a person and a program are told."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.conversion import build
from helpers.preprocess_jobs import corpus, tokenizer_path
from tokenizers import Tokenizer

from binidx.corpus.merge import merge_virtually
from binidx.tools import main


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
    assert main([*call, "--json", "--sample", "1MB", "--tokenizer-engine", "hf"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["documents"]["total"], told["engine"]) == (400, "hf")
    assert main([*call, "--keep", "nonsense"]) == 2


def test_it_takes_the_tokenizers_that_preprocess_takes(tmp_path: Path, capsys) -> None:
    corpus(tmp_path / "in")
    Tokenizer.from_file(tokenizer_path()).model.save(str(tmp_path))
    call = ["estimate", str(tmp_path / "in"), "--json"]
    two = ["--vocab-file", f"{tmp_path}/vocab.json", "--merge-file", f"{tmp_path}/merges.txt"]
    told = []
    for named in (two, ["--tokenizer", tokenizer_path()]):
        assert main([*call, *named]) == 0
        told.append(json.loads(capsys.readouterr().out)["tokens"])
    assert told[0] == told[1]
    assert main(call) == 2
    assert "--tokenizer: found none" in capsys.readouterr().err


def test_rows_of_which_none_is_a_document_are_1(tmp_path: Path, capsys) -> None:
    (tmp_path / "in.jsonl").write_text('{"content": "no text"}\n' * 3)
    assert main(["estimate", f"{tmp_path}/in.jsonl", "--tokenizer", tokenizer_path()]) == 1
    assert "3 rows of the sample are no documents; they are not counted, and no other" in capsys.readouterr().out
    (tmp_path / "in.jsonl").write_text("")
    assert main(["estimate", f"{tmp_path}/in.jsonl", "--tokenizer", tokenizer_path()]) == 0


def test_a_dataset_is_told_from_text(tmp_path: Path, capsys) -> None:
    source = build(tmp_path / "en", 100)
    merge_virtually([source], tmp_path / "list")
    for each in (source, f"{source}.bin", f"{tmp_path}/list", f"{tmp_path}/list.parts.json"):
        assert main(["estimate", each, "--tokenizer", tokenizer_path()]) == 2
        prefix = each.removesuffix(".bin").removesuffix(".parts.json")
        assert f"{each}: is a dataset, needed text; binidx inspect {prefix} says" in capsys.readouterr().err
