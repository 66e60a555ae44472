"""binidx preprocess: the call, what a person and a program are told, Megatron's options."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.preprocess_jobs import EOD, corpus, files_of, texts, theirs, tokenizer_path, write_lines
from tokenizers import Tokenizer

from binidx.format.indexed_dataset import IndexedDataset
from binidx.tools import main

CALL = ["--tokenizer", tokenizer_path(), "--eod", EOD, "--append-eod", "--workers", "1"]
pytestmark = pytest.mark.usefixtures("local_workers_are_threads")


def test_it_says_what_came_in_and_went_out(tmp_path: Path, capsys: Any) -> None:
    rows = [{"text": f"the sea {number}"} for number in range(10)]
    first = write_lines(tmp_path / "a.jsonl", [*rows, "", "{", {"text": None}])
    second = write_lines(tmp_path / "b.jsonl", [*rows, {"text": ""}])
    call = ["preprocess", first, second, "--to", f"{tmp_path}/en", *CALL, "--on-error", "quarantine"]
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path}/en_text_document: 21 documents, ")
    assert "tokens of uint16\n" in out
    assert f"\n  {first}: 13 rows = 10 documents + 3 dropped: 1 blank line, 1 malformed, 1 null\n" in out
    assert f"\n  {second}: 11 rows = 11 documents (1 empty)\n" in out
    assert "\n  all: 24 rows = 21 documents (1 empty) + 3 dropped: 1 blank line, 1 malformed, 1 null\n" in out
    assert err == ""
    assert main([*call, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["finished"], told["parts_made"]) == (True, 0)
    assert told["datasets"] == {"text": f"{tmp_path}/en_text_document"}
    assert len((tmp_path / "en.quarantine.jsonl").read_text().splitlines()) == 2


def test_text_comes_through_a_pipe_and_its_copy_goes(tmp_path: Path) -> None:
    text = write_lines(tmp_path / "a.jsonl", [{"text": f"the sea {number}"} for number in range(40)])
    assert main(["preprocess", text, "--to", f"{tmp_path}/file", *CALL]) == 0
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "binidx", "preprocess", "-", "--to", f"{tmp_path}/pipe", *CALL], capture_output=True,
        env={**os.environ, "TMPDIR": f"{tmp_path}/tmp"}, input=Path(text).read_bytes(),
    )  # fmt: skip
    assert (done.returncode, b"40 documents" in done.stdout) == (0, True), done.stderr
    for suffix in (".bin", ".idx"):
        made, needed = (Path(f"{tmp_path}/{name}_text_document{suffix}").read_bytes() for name in ("pipe", "file"))
        assert made == needed
    assert [*(tmp_path / "tmp").glob("binidx-stdin-*")] == []


def test_errors_are_one_line_and_a_status(tmp_path: Path, capsys: Any) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", [{"text": "a"}, "{"])
    target = ["--to", f"{tmp_path}/en"]
    (tmp_path / "folder").mkdir()
    cases = {
        "line 2, byte 14: malformed": (1, [bad, *target, *CALL]),
        "none.jsonl: no such file": (2, [f"{tmp_path}/none.jsonl", *target, *CALL]),
        "folder: a folder without files to read": (2, [f"{tmp_path}/folder", *target, *CALL]),
        "blank.jsonl: no document in them; no dataset is left; name other text": (
            1,
            [write_lines(tmp_path / "blank.jsonl", [""]), "--to", f"{tmp_path}/none", *CALL],
        ),
        "--tokenizer: found none": (2, [bad, *target]),
        "no token '<end>'": (2, [bad, *target, "--tokenizer", tokenizer_path(), "--eod", "<end>"]),
        "needed local, ray": (2, [bad, *target, *CALL, "--engine", "spark"]),
        "found none, need at least one": (2, [*target, *CALL]),
        "--tokenizer, --vocab-file: found both": (2, [bad, *target, *CALL, "--vocab-file", tokenizer_path()]),
        "is of kind json, --tokenizer-type says SentencePieceTokenizer": (
            2,
            [bad, *target, *CALL, "--tokenizer-type", "SentencePieceTokenizer"],
        ),
        "--id-key: ids are stored in the lineage": (2, [bad, *target, *CALL, "--id-key", "id", "--no-lineage"]),
    }
    for message, (status, arguments) in cases.items():
        assert main(["preprocess", *arguments]) == status
        err = capsys.readouterr().err
        assert message in err
        assert err.startswith("binidx preprocess: ")
        assert err.count("\n") == 1
    assert not [*tmp_path.glob("none*")]
    blank = [f"{tmp_path}/blank.jsonl", "--to", f"{tmp_path}/blank", "--compress", *CALL]
    assert main(["preprocess", *blank, "--overwrite"]) == 1
    assert "no document in them; the dataset is empty; name other text" in capsys.readouterr().err
    assert len(IndexedDataset(f"{tmp_path}/blank_text_document")) == 0
    assert main(["preprocess", *blank]) == 1
    assert [path.name for path in tmp_path.glob("blank*")] == ["blank.jsonl"]
    for arguments in (["--shard", "3/3"], ["--on-error", "ignore"]):
        with pytest.raises(SystemExit) as end:
            main(["preprocess", bad, *target, *CALL, *arguments])
        assert end.value.code == 2


def test_shards_and_finish_are_calls_of_their_own(tmp_path: Path, capsys: Any) -> None:
    inputs = corpus(tmp_path / "in")
    call = ["preprocess", *inputs, "--to", f"{tmp_path}/en", *CALL, "--part-bytes", "5000"]
    assert main([*call, "--shard", "0/2"]) == 0
    assert "5 of 10 are missing" in capsys.readouterr().out
    assert main([*call, "--finish"]) == 1
    assert "or this command without --shard and --finish" in capsys.readouterr().out
    assert main([*call, "--shard", "1/2"]) == 0
    assert "400 documents" in capsys.readouterr().out
    assert main([*call, "--finish"]) == 0
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")


def test_a_call_of_megatrons_tool_means_the_same_here(tmp_path: Path, capsys: Any) -> None:
    inputs = corpus(tmp_path / "in", files=1)
    shutil.copy(tokenizer_path(), tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOD}))
    call = f"""preprocess --input {inputs[0]} --output-prefix {tmp_path}/en --json-keys text id --append-eod
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path} --workers 2 --partitions 2
    --keep-sequential-samples --log-interval 1000"""
    assert main(shlex.split(call)) == 0
    told = capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["preprocess", "--help"])
    usage = capsys.readouterr().out
    for flag in ("--partitions", "--log-interval", "--keep-sequential-samples"):
        assert f"binidx preprocess: {flag}: has no effect; " in told
        assert flag not in usage
    for key in ("text", "id"):
        assert files_of(tmp_path / f"en_{key}_document") == theirs(inputs, tmp_path / f"theirs_{key}", key)


def test_gpt2_comes_as_a_vocabulary_and_merges(tmp_path: Path) -> None:
    Tokenizer.from_file(tokenizer_path()).model.save(str(tmp_path))
    call = ["preprocess", write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(20)]), "--workers", "1"]
    files = ["--vocab-file", f"{tmp_path}/vocab.json", "--merge-file", f"{tmp_path}/merges.txt"]
    assert main([*call, "--to", f"{tmp_path}/two", "--tokenizer-type", "GPT2BPETokenizer", *files]) == 0
    assert main([*call, "--to", f"{tmp_path}/one", "--tokenizer", tokenizer_path()]) == 0
    assert files_of(f"{tmp_path}/two_text_document") == files_of(f"{tmp_path}/one_text_document")


def test_the_example_of_the_help_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["preprocess", "--help"])
    example = shlex.split(capsys.readouterr().out.partition("example:")[2].replace("\\\n", ""))
    monkeypatch.undo()  # as a user: processes, and paths from where he stands
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    inputs = [write_lines(tmp_path / "data" / "web.jsonl", [{"text": text} for text in texts(50)])]
    named = Path(tokenizer_path()).read_text().replace(EOD, example[example.index("--eod") + 1])
    (tmp_path / "data" / "tokenizer.json").write_text(named)
    found = subprocess.run([Path(sys.executable).parent / example[0], *example[1:]], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert files_of(tmp_path / "data" / "web_text_document") == theirs(inputs, tmp_path / "theirs")


def test_a_dry_run_shows_three_documents_and_writes_nothing(tmp_path: Path, capsys: Any) -> None:
    text = write_lines(tmp_path / "a.jsonl", [{"text": f"the sea {number}"} for number in range(10)])
    assert main(["preprocess", text, "--to", f"{tmp_path}/out/en", *CALL, "--dry-run"]) == 0
    out, _ = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("the sea")] == [f"the sea {each}" for each in range(3)]
    assert out.count(f"| … |{EOD}\n") == 3
    assert f"to {tmp_path}/out/en_text_document\ntokens " in out
    assert main(["preprocess", text, "--to", f"{tmp_path}/out/en", *CALL, "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["documents"][0]["text"] == "the sea 0"
    assert main(["preprocess", text, "--to", f"{tmp_path}/out/en", *CALL]) == 0
    assert told["documents"][0]["ids"] == IndexedDataset(f"{tmp_path}/out/en_text_document")[0].tolist()
    bad = write_lines(tmp_path / "bad.jsonl", [{"content": {"text": "a"}}])
    assert main(["preprocess", bad, "--to", f"{tmp_path}/new/en", *CALL, "--dry-run"]) == 1
    assert "--json-keys content.text reads the nested one" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_end_token_of_a_tokenizer_without_a_config_is_taken_if_there_is_one(tmp_path: Path, capsys: Any) -> None:
    text = write_lines(tmp_path / "a.jsonl", [{"text": "the sea"}])
    known = json.loads(Path(tokenizer_path()).read_text().replace(EOD, "<|endoftext|>"))
    call = ["preprocess", text, "--to", f"{tmp_path}/en", "--tokenizer", f"{tmp_path}/tokenizer.json", "--append-eod"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    assert main([*call, "--workers", "1"]) == 0
    assert "EOD: <|endoftext|> (" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text(Path(tokenizer_path()).read_text().replace(EOD, "<end>"))
    assert main([*call, "--overwrite"]) == 2
    assert "name the token with eod (--eod), such as one of its special tokens: <end>" in capsys.readouterr().err
