"""binidx cache: what it fetches, what it says is there, what it finds damaged, what it removes."""

from __future__ import annotations

import gc
import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.conversion import build
from helpers.gpt_data import TOKENIZER
from helpers.random_datasets import Document, build_ours

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_identity
from binidx.testing import ended_well, forked
from binidx.tools import main
from binidx.tools._warming import sample_ranges
from binidx.tools.cache import age, belongs

TOKENS = 400_000


@pytest.fixture(scope="module")
def prefix(s3: Bucket, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset in a bucket, 800 kB of tokens."""
    uri = f"{s3.fresh()}/en"
    convert_dataset(build(tmp_path_factory.mktemp("source") / "en", TOKENS), uri, verify="size")
    return uri


def call(capsys, *arguments: Any, status: int = 0) -> str:
    assert main(["cache", *map(str, arguments)]) == status
    return capsys.readouterr().out


def call_json(capsys, *arguments: Any, status: int = 0) -> dict[str, Any]:
    gc.collect()
    found: dict[str, Any] = json.loads(call(capsys, *arguments, "--json", status=status))
    return found


def options(directory: Path) -> dict[str, Any]:
    return {"binidx": {"cache_dir": str(directory)}}


def test_a_warm_prefix_is_there_whole_and_is_not_fetched_again(prefix: str, tmp_path: Path, capsys) -> None:
    done = call_json(capsys, "warm", prefix, "--dir", tmp_path)
    whole = sum(object_identity(Location.of(f"{prefix}.{end}"))["size"] for end in ("bin", "idx"))
    assert whole > 2 * TOKENS
    assert (done["num_objects"], done["num_bytes"], done["lacking_bytes"]) == (2, whole, 0)
    assert done["fetched_bytes"] == whole
    assert call_json(capsys, "warm", prefix, "--dir", tmp_path)["fetched_bytes"] == 0
    reader = IndexedDataset(prefix, storage_options=options(tmp_path)).bin_reader
    assert isinstance(reader, DiskCache)
    assert bytes(reader.read([(0, reader.size)])[0]) == fsspec.open(f"{prefix}.bin").open().read()
    assert reader.stats.bytes_moved == 0


def test_warm_goes_on_where_it_was_killed(prefix: str, tmp_path: Path, capsys) -> None:
    reader = IndexedDataset(prefix, storage_options=options(tmp_path)).bin_reader
    reader.read([(0, 300_000)])
    del reader
    done = call_json(capsys, "warm", f"{prefix}.bin", "--dir", tmp_path)
    assert (done["num_bytes"], done["fetched_bytes"]) == (2 * TOKENS, 2 * TOKENS - 5 * 65536)


def test_warm_says_that_the_rest_was_there_only_where_there_was_one(prefix: str, tmp_path: Path, capsys) -> None:
    assert re.search(r"fetched in .*/s\)$", call(capsys, "warm", f"{prefix}.bin", "--dir", tmp_path), re.MULTILINE)
    assert re.search(r"/s\), the rest was cached$", call(capsys, "warm", prefix, "--dir", tmp_path), re.MULTILINE)


def test_a_cache_that_is_too_small_is_said_before_anything_is_fetched(prefix: str, tmp_path: Path, capsys) -> None:
    assert main(["cache", "warm", prefix, "--dir", str(tmp_path), "--bytes", "500kB"]) == 2
    assert re.search(r"needs 78\d\.\d KiB, its bound is 488\.3 KiB; raise --bytes", capsys.readouterr().err)
    assert not list(tmp_path.glob("objects/*/*.block"))


def test_index_files_are_listed_and_pruned_where_there_is_no_other_cache(
    prefix: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", str(tmp_path))
    assert ended_well(forked(lambda: len(IndexedDataset(prefix))))
    assert [each["uri"] for each in call_json(capsys, "list")["objects"]] == [f"{prefix}.idx"]
    assert call_json(capsys, "prune", "--bytes", 0)["num_bytes"] > 0
    assert sum(each["cached_bytes"] for each in call_json(capsys, "list")["objects"]) == 0


def test_what_finds_no_room_is_said(prefix: str, tmp_path: Path, capsys) -> None:
    """Room for one of the two at a time, and the first is in use."""
    reader = IndexedDataset(prefix, storage_options=options(tmp_path)).bin_reader
    reader.read([(0, reader.size)])

    def child() -> None:
        from binidx.storage.cache import cached_object

        cached_object._objects.clear()
        other = build_other(prefix)
        assert main(["cache", "warm", f"{other}.bin", "--dir", str(tmp_path), "--bytes", "1MB"]) == 1

    def build_other(beside: str) -> str:
        with fsspec.open(f"{beside}-other.bin", "wb") as out:
            out.write(os.urandom(900_000))
        return f"{beside}-other"

    assert ended_well(forked(child))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["warm"], "needs URIs, or --run FILE"),
        (["warm", "{prefix}", "--run", "x"], "needs URIs, or --run FILE"),
        (["warm", "--run", "x"], "needs --steps N"),
        (["warm", "{local}"], "lies on this machine, needs no disk cache"),
        (["warm", "{prefix}-none"], "en-none.bin: no such object"),
        (["list"], "no disk cache of binidx"),
        (["prune"], "no disk cache of binidx"),
    ],
)
def test_a_wrong_call_is_one_line_and_2(
    prefix: str, tmp_path: Path, arguments: list[str], message: str, capsys
) -> None:
    local = build(tmp_path / "en", 600)
    given = [each.format(prefix=prefix, local=local) for each in arguments]
    assert main(["cache", *given, "--dir", str(tmp_path / "cache")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_without_a_directory_the_environment_names_it(prefix: str, tmp_path: Path, monkeypatch: Any, capsys) -> None:
    monkeypatch.delenv("BINIDX_CACHE_DIR", raising=False)
    assert main(["cache", "warm", prefix]) == 2
    monkeypatch.setenv("BINIDX_INDEX_DIR", "off")
    assert main(["cache", "list"]) == 2
    assert "no directory of a disk cache given: needs --dir or BINIDX_CACHE_DIR" in capsys.readouterr().err
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path))
    call(capsys, "warm", f"{prefix}.idx")
    assert f"{prefix}.idx" in call(capsys, "list")


# A run


@pytest.fixture(scope="module")
def run(s3: Bucket, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved run over a blend of two datasets of a bucket, 6 samples a step."""
    base, local = s3.fresh(), tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(1)
    for name in ("en", "code"):
        documents = [
            Document(rng.integers(0, 999, length, np.uint16), [length], [])
            for length in rng.integers(100, 20_000, 80).tolist()
        ]
        convert_dataset(build_ours(local / name, documents, np.uint16), f"{base}/{name}", verify="size")
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=256, blend=([f"{base}/en", f"{base}/code"], [0.7, 0.3]), split="1,0,0",
        tokenizer=TOKENIZER, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    binidx.Run(config, [600, 0, 0], 2, data_parallel_size=3, consumed_samples=12).save(f"{base}/run.json")
    return f"{base}/run.json"


@pytest.mark.parametrize("given", [[], ["--consumed", "30"], ["--rank", "1", "--rank", "2"]], ids=str)
def test_warm_run_fetches_what_the_steps_read_and_nothing_else(
    run: str, given: list[str], tmp_path: Path, capsys
) -> None:
    small = {"binidx": {"cache_chunk_bytes": 1024}}
    done = call_json(
        capsys, "warm", "--run", run, "--steps", 5, "--dir", tmp_path, *given, "--storage-options", json.dumps(small)
    )
    consumed, ranks = (30 if "30" in given else 12), ([1, 2] if "--rank" in given else [0, 1, 2])
    idxs = [consumed + 6 * step + 2 * rank + one for step in range(5) for rank in ranks for one in (0, 1)]
    kept = {"binidx": {**small["binidx"], "cache_dir": str(tmp_path)}}
    train: Any = binidx.Run.load(run, kept).build()[0]
    readers = [each.dataset.bin_reader for each in train.datasets]
    plain: Any = binidx.Run.load(run).build()[0]
    for ours, needed in zip(train.__getitems__(idxs), plain.__getitems__(idxs), strict=True):
        assert (np.asarray(ours["tokens"]) == np.asarray(needed["tokens"])).all()
    assert [reader.stats.bytes_moved for reader in readers] == [0, 0]
    wanted = sum(
        len(np.unique(np.concatenate([np.arange(start // 1024, -(-stop // 1024)) for start, stop in ranges])))
        for _, ranges in sample_ranges(plain, idxs)
    )
    assert (wanted - 2) * 1024 < done["num_bytes"] <= wanted * 1024
    assert done["num_bytes"] == done["fetched_bytes"] < 0.5 * sum(reader.size for reader in readers)


def test_a_rank_that_the_run_has_not_is_refused(run: str, tmp_path: Path, capsys) -> None:
    assert main(["cache", "warm", "--run", run, "--steps", "1", "--rank", "3", "--dir", str(tmp_path)]) == 2
    assert "--rank: found 3, the run has ranks 0 to 2" in capsys.readouterr().err


# What is there


def test_list_says_what_is_there_and_when_it_was_used(prefix: str, tmp_path: Path, capsys) -> None:
    IndexedDataset(prefix, storage_options=options(tmp_path)).bin_reader.read([(100_000, 200_000)])
    found = call_json(capsys, "list", "--dir", tmp_path)
    by_uri = {row["uri"]: row for row in found["objects"]}
    row = by_uri[f"{prefix}.bin"]
    assert (row["size"], row["cached_bytes"]) == (2 * TOKENS, 3 * 65536)
    assert abs(row["used_at"] - time.time()) < 60
    assert set(by_uri) == {f"{prefix}.bin", f"{prefix}.idx"}
    text = call(capsys, "list", "--dir", tmp_path)
    assert re.search(rf"{re.escape(prefix)}\.bin\n  192\.0 KiB of 781\.2 KiB, used \d+\.\d s ago\n", text)
    assert re.search(r"^2 objects, \d+\.\d KiB on the disk$", text, re.MULTILINE)


def test_prune_by_prefix_and_size(prefix: str, tmp_path: Path, capsys) -> None:
    call(capsys, "warm", prefix, "--dir", tmp_path)
    gc.collect()
    assert call_json(capsys, "prune", "--dir", tmp_path, "--uri", f"{prefix}x")["num_bytes"] == 0
    assert call_json(capsys, "prune", "--dir", tmp_path, "--older-than", "1h")["num_bytes"] == 0
    assert call_json(capsys, "prune", "--dir", tmp_path, "--uri", prefix)["num_bytes"] > 2 * TOKENS
    assert sum(row["cached_bytes"] for row in call_json(capsys, "list", "--dir", tmp_path)["objects"]) == 0
    call(capsys, "warm", prefix, "--dir", tmp_path)
    gc.collect()
    assert "removed, 0 leftovers" in call(capsys, "prune", "--dir", tmp_path, "--bytes", "0")
    reader = IndexedDataset(prefix, storage_options=options(tmp_path)).bin_reader
    reader.read([(0, 100)])
    assert re.search(r"68\.0 KiB kept: in use", call(capsys, "prune", "--dir", tmp_path, "--bytes", "0"))


def test_what_belongs_to_a_uri_by_hand() -> None:
    chosen = {"s3://b/en": 3, "s3://b/en.bin": 1, "s3://b": 5, "s3://b/": 5, "s3://b/e": 0, "s3://b/en/": 1}
    uris = ["s3://b/en.bin", "s3://b/en.idx", "s3://b/en/cache/x.npy", "s3://b/english.bin", "s3://b/code.bin"]
    assert {each: sum(belongs(uri, each) for uri in uris) for each in chosen} == chosen


def test_ages_by_hand() -> None:
    assert [age(text) for text in ("90", "90s", "30m", "12h", "7d")] == [90, 90, 1800, 43_200, 604_800]


def test_a_terminal_sees_a_bar_and_a_pipe_does_not(prefix: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "binidx", "cache", "warm", prefix, "--dir"]
    quiet = subprocess.run([*command, str(tmp_path / "a")], check=True, capture_output=True)
    assert quiet.stderr == b""
    assert b"fetched in" in quiet.stdout
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    loud = subprocess.Popen([*command, str(tmp_path / "b")], stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    assert loud.wait() == 0
    seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert re.search(r"warm: .*/78\dk.*B/s", seen)


def test_the_example_of_the_help_runs(prefix: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["cache", "--help"])
    lines = capsys.readouterr().out.rstrip().split("example:\n")[1].splitlines()
    assert len(lines) == 3
    (tmp_path / "indices").mkdir()
    given = {"s3://corpus/en": prefix, "/nvme/binidx": f"{tmp_path}/blocks", "s3://corpus/cache": f"{tmp_path}/indices"}
    said = []
    for line in lines:
        command = [given.get(word, word) for word in line.split()]
        assert command[:2] == ["binidx", "cache"]
        said.append(call(capsys, *command[2:]))
    assert f"{prefix}.bin\n  781.2 KiB of 781.2 KiB, used" in said[1]
    assert said[2].splitlines()[-1] == "0 bytes would be removed"
