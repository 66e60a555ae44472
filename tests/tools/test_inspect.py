"""binidx inspect: what it says is what is there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours
from helpers.shuffle_oracle import read_documents
from hypothesis import given
from hypothesis import strategies as st

from binidx.explore.token_counts import PERCENTILES, LengthCounts
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.tools import main

GOLDEN = Path(__file__).parent.parent / "golden"
LENGTHS = st.lists(st.integers(0, 300) | st.integers(0, 2**31 - 1), min_size=1, max_size=60)


def inspect(capsys, *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 0
    return capsys.readouterr().out


def test_json_says_all_there_is_to_say(tmp_path: Path, capsys) -> None:
    documents = [Document([], [], []), Document([1, 2, 3], [3, 0], []), Document([4, 5, 6, 7, 8], [5], [])]
    prefix = build_ours(tmp_path / "en", documents, np.uint16)
    with Path(f"{prefix}.bin").open("ab") as file:
        file.write(b"xyz")
    report = json.loads(inspect(capsys, prefix, "--json", "--tokens", "4"))
    assert report == {
        "prefix": prefix,
        "version": 1,
        "dtype": "uint16",
        "dtype_code": 8,
        "num_documents": 3,
        "num_sequences": 3,
        "num_tokens": 8,
        "empty_documents": 1,
        "empty_sequences": 1,
        "bin_bytes": 19,
        "idx_bytes": 34 + 12 * 3 + 8 * 4,
        "stored": {"codec": "raw", "bytes": 19, "checksums": False},
        "trailing_bytes": 3,
        "sequence_lengths": {
            "mean": 8 / 3,
            "percentiles": {"1": 0, "5": 0, "25": 0, "50": 3, "75": 5, "95": 5, "99": 5, "max": 5},
        },
        "modes": None,
        "first_tokens": [
            {"document": 1, "sequence": 0, "tokens": [1, 2, 3]},
            {"document": 2, "sequence": 2, "tokens": [4, 5, 6, 7]},
        ],
    }


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.idx")))
def test_every_golden_dataset_is_described(name: str, capsys) -> None:
    out = inspect(capsys, str(GOLDEN / name))
    assert out.startswith(f"{GOLDEN / name}\n  format     MMIDIDX version 1, ")
    assert (
        json.loads(inspect(capsys, str(GOLDEN / name), "--json"))["bin_bytes"]
        == (GOLDEN / f"{name}.bin").stat().st_size
    )


def test_modes_are_found_without_being_told(capsys) -> None:
    assert "  modes      0: 1 sequences, 1: 1 sequences, -2: 1 sequences" in inspect(capsys, str(GOLDEN / "multimodal"))


def test_a_dataset_of_nothing_is_described(tmp_path: Path, capsys) -> None:
    out = inspect(capsys, build_ours(tmp_path / "none", [], np.int32))
    assert "  documents  0\n  sequences  0\n  tokens     0\n" in out
    assert json.loads(inspect(capsys, str(tmp_path / "none"), "--json"))["sequence_lengths"]["percentiles"] == {}


def test_the_same_from_a_bucket(s3: Bucket, capsys) -> None:
    target = f"{s3.fresh()}/en"
    assert main(["convert", str(GOLDEN / "multimodal"), "--to", target]) == 0
    capsys.readouterr()
    there = json.loads(inspect(capsys, target, "--json"))
    here = json.loads(inspect(capsys, str(GOLDEN / "multimodal"), "--json"))
    assert {**there, "prefix": ""} == {**here, "prefix": ""}


def test_a_compressed_one_shows_its_segments_and_a_summed_one_its_sums(tmp_path: Path, capsys) -> None:
    plain, zst = str(tmp_path / "en"), str(tmp_path / "zst")
    build_ours(plain, [Document(np.arange(50_000) % 999, [50_000], [])], np.uint16)
    assert main(["convert", plain, "--to", zst, "--compress"]) == 0
    assert main(["convert", plain, "--to", plain, "--checksums"]) == 0
    capsys.readouterr()
    stored = json.loads(inspect(capsys, zst, "--json"))["stored"]
    size = os.path.getsize(f"{zst}.bin.zst")
    assert stored == {"codec": "zstd", "bytes": size, "segments": 2, "segment_bytes": 65536}
    assert f".bin       100,000 bytes (97.7 KiB)\n  .bin.zst   {size:,} bytes" in inspect(capsys, zst)
    assert ".bin.xxh3  checksums\n" in inspect(capsys, plain)
    here, there = (json.loads(inspect(capsys, each, "--json")) for each in (plain, zst))
    assert {**here, "prefix": "", "stored": {}} == {**there, "prefix": "", "stored": {}}


@given(LENGTHS)
def test_percentiles_are_of_the_sorted_lengths(lengths: list[int]) -> None:
    found = LengthCounts(*np.unique(lengths, return_counts=True)).percentiles
    for percent in PERCENTILES:
        assert sum(length <= found[str(percent)] for length in lengths) * 100 >= percent * len(lengths)
        assert sum(length < found[str(percent)] for length in lengths) * 100 < percent * len(lengths)
    assert found["max"] == max(lengths)


def test_memory_stays_below_that_of_the_index(tmp_path: Path, capsys) -> None:
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint8) as builder:
        for _ in range(40):
            builder.add_document(np.zeros(100_000, np.uint8), [1] * 100_000)
        builder.finalize(f"{tmp_path}/en.idx")
    tracemalloc.start()
    try:
        inspect(capsys, f"{tmp_path}/en")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000 * 4 + (32 << 20)
    assert peak < (tmp_path / "en.idx").stat().st_size


@pytest.mark.parametrize(
    ("break_it", "status", "message"),
    [
        (lambda path: os.truncate(f"{path}.bin", 3), 1, "en.bin: 3 bytes, its .idx needs 6"),
        (lambda path: os.truncate(f"{path}.idx", 40), 1, "en.idx: 40 bytes, its header"),
        (lambda path: os.unlink(f"{path}.idx"), 2, "en.idx: no such"),
    ],
)
def test_a_damaged_dataset_is_one_line_on_stderr(break_it, status: int, message: str, tmp_path: Path, capsys) -> None:
    prefix = build_ours(tmp_path / "en", [Document([1, 2, 3], [3], [])], np.uint16)
    break_it(prefix)
    assert main(["inspect", prefix]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_the_example_of_the_help_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["inspect", "--help"])
    example = capsys.readouterr().out.rstrip().splitlines()[-1].split()
    (tmp_path / "data").mkdir()
    build_ours(tmp_path / "data" / "en", [Document([1, 2, 3], [3], [])], np.uint16)
    monkeypatch.chdir(tmp_path)
    assert example[0] == "binidx"
    assert "document 0: 1 2 3" in inspect(capsys, *example[2:])


def test_a_terminal_without_unicode_and_a_closed_pipe_are_no_trouble() -> None:
    command = [sys.executable, "-m", "binidx", "inspect", str(GOLDEN / "int32")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    assert b"MMIDIDX" in subprocess.run(command, env=environment, check=True, capture_output=True).stdout
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    closed = subprocess.run(["sh", "-c", f"{shlex.join(command)} >&-"], stderr=subprocess.PIPE)
    assert (closed.returncode, closed.stderr) == (0, b"")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "wb") as disk:
            full = subprocess.run(command, stdout=disk, stderr=subprocess.PIPE)
        assert (full.returncode, full.stderr) == (1, b"binidx: stdout: No space left on device\n")


def test_text_and_where_it_came_from(tmp_path: Path, capsys, caplog) -> None:
    from helpers.lineage_data import END, build_with_lineage, read_lineage
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(70_000)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(f"{tmp_path}/tokenizer.json")
    prefix = build_with_lineage(tmp_path / "en", 30, seed=1)
    report = json.loads(inspect(capsys, prefix, "--text", "3", "--tokenizer", f"{tmp_path}/tokenizer.json", "--json"))
    rows, documents = read_lineage(prefix), read_documents(prefix)
    full = [number for number, (sequences, _) in enumerate(documents) if sequences][:3]
    assert [each["document"] for each in report["texts"]] == full
    for each in report["texts"]:
        tokens = np.frombuffer(b"".join(documents[each["document"]][0]), np.uint16)
        assert each["text"].split() == [f"w{token}" for token in tokens]
        assert (each["origin"], each["whole"]) == (rows[each["document"]], True)
    Path(prefix + END).unlink()
    made = {"uri": "other.json", "digest": "1" * 64}
    Path(f"{prefix}.manifest.json").write_text(json.dumps({"binidx_manifest": 1, "job": {"tokenizer": made}}))
    assert main(["inspect", prefix, "--text", "1", "--tokenizer", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    made_by = f"{prefix}: made by the tokenizer other.json (111111111111), the text by {tmp_path}"
    assert [line for line in caplog.messages if line.startswith(made_by)]
    assert f"text\n  document {full[0]}\n    w" in said
    for flag in ("--documents", "--tokens", "--text"):
        assert main(["inspect", prefix, "--tokenizer", str(tmp_path), "--text", "1", flag, "-1"]) == 2
        assert f"{flag}: found a negative number, needs 0 or more" in capsys.readouterr().err
    assert main(["inspect", prefix, "--text", "1"]) == 2
    assert "--text and --tokenizer go together" in capsys.readouterr().err


def test_of_a_long_document_the_start_is_shown(tmp_path: Path, capsys) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0")).save(f"{tmp_path}/tokenizer.json")
    prefix = build_ours(tmp_path / "en", [Document([1] * 900, [300, 0, 300, 300], [0] * 4)], np.uint16)
    report = json.loads(inspect(capsys, prefix, "--text", "9", "--tokenizer", f"{tmp_path}/tokenizer.json", "--json"))
    (found,) = report["texts"]
    assert (found["text"].split(), found["whole"]) == (["w1"] * 512, False)
