"""What a URL is signed with appears nowhere: no error, no traceback, no log, nothing that a job writes or says."""

from __future__ import annotations

import gzip
import io
import json
import logging
import random
import re
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import zstandard
from conftest import Bucket
from helpers.preprocess_jobs import (
    EOD,
    files_of,
    job_of,
    make_recorded,
    run,
    texts,
    theirs,
    tokenizer_path,
    write_lines,
)
from helpers.signed_urls import put_signed, secrets_in, signed, with_user
from helpers.text_oracle import read_all, read_file

from binidx import describe_tokenizer
from binidx.errors import AccessError, BinidxError, UnreachableError, WorkerError
from binidx.prepare.preprocess import tokenize_part
from binidx.prepare.preprocess.job import plan_parts
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.slices import Extent, check_extents, plan_slices
from binidx.storage.requests.retries import is_transient
from binidx.tools import main

LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts(40))


def as_parquet(column: Any, name: str = "text") -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.table({name: column}), out, use_dictionary=False, compression="zstd")
    return out.getvalue()


def damaged(data: bytes) -> bytes:
    return data[:4] + b"\xff" * 36 + data[40:]


def lying_table() -> bytes:
    """A .zst of two frames whose seek table takes from one what it gives to the other."""
    plain = [random.Random(seed).randbytes(600_000).hex().encode() + b"\n" for seed in range(4)]
    frames = [zstandard.ZstdCompressor(write_content_size=False).compress(each) for each in plain]
    sizes = [len(each) + change for each, change in zip(plain, (0, -9, 9, 0), strict=True)]
    entries = b"".join(struct.pack("<II", len(frame), size) for frame, size in zip(frames, sizes, strict=True))
    table = entries + struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    return b"".join(frames) + struct.pack("<II", 0x184D2A5E, len(table)) + table


UNREADABLE: dict[str, tuple[str, bytes, str]] = {
    "unknown format": ("a.doc", LINES, "unknown format"),
    "not gzip": ("a.jsonl.gz", LINES, "not gzip, or damaged"),
    "gzip cut off": ("a.jsonl.gz", gzip.compress(LINES)[:-9], "ends in the middle of a gzip member"),
    "not zstd": ("a.jsonl.zst", LINES, "not zstd, or damaged"),
    "zstd cut off": ("a.jsonl.zst", zstandard.compress(LINES)[:-9], "ends in the middle of a zstd frame"),
    "zstd with a lying table": ("a.jsonl.zst", lying_table(), "its seek table says"),
    "not parquet": ("a.parquet", LINES, "not a Parquet file, or damaged"),
    "parquet without the column": ("a.parquet", as_parquet(["x"], "body"), "no column 'text'"),
    "parquet of numbers": ("a.parquet", as_parquet([1, 2]), "column 'text' is int64"),
}


def clean(action: Callable[[], object], message: str = "") -> BinidxError:
    """The error that it raises, of which neither it nor its traceback tells a secret."""
    with pytest.raises(BinidxError) as raised:
        action()
    assert message in str(raised.value)
    assert secrets_in(str(raised.value)) == []
    assert secrets_in("".join(traceback.format_exception(raised.value))) == []
    return raised.value


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_named_without_them(s3: Bucket, case: str) -> None:
    name, data, message = UNREADABLE[case]
    url = put_signed(s3, name, data)
    found = clean(lambda: read_file(url, part_bytes=1 << 20), message)
    assert f"/{name}: " in str(found)


def test_damaged_pages_are_problems_without_them(s3: Bucket) -> None:
    (problem,) = read_file(put_signed(s3, "a.parquet", damaged(as_parquet(texts(200)))), part_bytes=1 << 20).problems
    assert "/a.parquet: row 0: damaged: row group 0 is damaged" in str(problem)
    assert secrets_in(str(problem)) == []


def test_what_is_not_there_or_refused_or_not_reached_is_named_without_them(s3: Bucket) -> None:
    url = put_signed(s3, "a.jsonl", LINES)
    clean(lambda: find_inputs(url.replace("/a.jsonl", "/b.jsonl")))
    clean(lambda: find_inputs(with_user(signed(f"{s3.fresh()}/none.jsonl"))), "matches no object")
    refused = clean(lambda: find_inputs(url[:-4] + "0000"), "access denied")
    assert isinstance(refused, AccessError)
    assert not is_transient(refused)
    port = s3.server.endpoint.rpartition(":")[2]
    away = clean(lambda: find_inputs(url.replace(f":{port}/", ":1/")), "Cannot connect")
    assert isinstance(away, UnreachableError)
    assert is_transient(away)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_what_changed_since_the_plan_is_named_without_them(s3: Bucket, name: str) -> None:
    data = {"a.jsonl": LINES, "a.jsonl.gz": gzip.compress(LINES), "a.parquet": as_parquet(texts(9))}[name]
    uri = f"{s3.fresh()}/{name}"
    fs, path = fsspec.url_to_fs(uri)
    fs.pipe_file(path, data)
    plan = plan_slices(find_inputs(with_user(signed(uri))), 1 << 20)
    fs.pipe_file(path, data[:-1] + b"\n\n")
    clean(lambda: read_all(plan), "changed since it was planned")


def test_slices_that_leave_something_out_are_named_without_them(s3: Bucket) -> None:
    plan = plan_slices(find_inputs(put_signed(s3, "a.jsonl", LINES)), 200)
    clean(lambda: check_extents((piece, Extent()) for piece in plan), "need each once")


@pytest.mark.parametrize(
    ("data", "message"), [(b"{}", "tokenizer.json"), (b"\xff", "tokenizer.json"), (None, "no token '<end>'")]
)
def test_a_tokenizer_that_cannot_be_read_is_named_without_them(s3: Bucket, data: bytes | None, message: str) -> None:
    url = put_signed(s3, "tokenizer.json", data or Path(tokenizer_path()).read_bytes())
    clean(lambda: describe_tokenizer(url, eod="<end>"), message)


def test_a_fault_of_ours_comes_across_without_them(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = put_signed(s3, "a.jsonl", LINES)
    job = job_of([url], tmp_path / "en")
    (part, *_) = plan_parts(job, find_inputs(job.inputs))

    def broken(*_: object) -> None:
        raise KeyError(url)

    monkeypatch.setattr(tokenize_part, "PartTokenizer", broken)
    with pytest.raises(WorkerError, match="KeyError") as raised:
        make_recorded(job, part)
    assert secrets_in(str(raised.value)) == []


@pytest.mark.usefixtures("local_workers_are_threads")
def test_a_whole_job_writes_and_says_none_of_them(s3: Bucket, tmp_path: Path, capfd: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG, "binidx")
    rows = [{"text": text} for text in texts(60)]
    bad = write_lines(tmp_path / "bad.jsonl", [*rows, "{", {"text": None}, {"text": f"{EOD} x"}, *rows])
    inputs = [put_signed(s3, "a.jsonl", LINES), put_signed(s3, "b.jsonl", Path(bad).read_bytes())]
    inputs.append(put_signed(s3, "c.parquet", as_parquet(texts(30))))
    tokenizer = put_signed(s3, "tokenizer.json", Path(tokenizer_path()).read_bytes())
    target = s3.fresh()
    call = ["preprocess", *inputs, "--to", f"{target}/en", "--tokenizer", tokenizer, "--eod", EOD, "--append-eod"]
    call += ["--specials", "error", "--part-bytes", "2000", "--workers", "2"]
    said = ""

    def ran(*options: str) -> int:
        nonlocal said
        status = main([*call, *options])
        out, err = capfd.readouterr()
        said += out + err
        return status

    assert ran() == 1  # the bad row
    written = everything(target)
    assert ran("--on-error", "quarantine", "--shard", "0/2", "--json") == 0
    assert ran("--on-error", "quarantine", "--status") == 0
    written += everything(target)
    assert ran("--on-error", "quarantine", "--json") == 0
    assert ran("--on-error", "quarantine", "--status", "--json") == 0
    assert ran("--on-error", "quarantine", "--overwrite") == 0
    written += everything(target)
    assert re.search(r"b.jsonl: byte \d+: malformed", said)
    assert secrets_in(said) == secrets_in(caplog.text) == secrets_in(written) == []
    assert {"en.quarantine.jsonl", "en_text_document.manifest.json"} < {
        name.rpartition("/")[2] for name in below(target)
    }
    told = json.loads(files_named(target, "en_text_document.manifest.json"))
    assert [each["uri"].rpartition("/")[2] for each in told["sources"]] == ["a.jsonl", "b.jsonl", "c.parquet"]
    lineage = parquet.read_table(io.BytesIO(files_named(target, "en_text_document.lineage.parquet")))
    assert secrets_in(str(lineage["source"].to_pylist())) == []


def below(uri: str) -> list[str]:
    fs, path = fsspec.url_to_fs(uri)
    fs.invalidate_cache()
    return [name for name in fs.find(path) if name != path]


def everything(uri: str) -> str:
    """Names and bytes of all objects there; a parquet file's strings are told apart, as they are compressed."""
    fs, _ = fsspec.url_to_fs(uri)
    return "\n".join(f"{name}\n{fs.cat_file(name).decode('latin-1')}" for name in below(uri))


def files_named(uri: str, name: str) -> bytes:
    fs, path = fsspec.url_to_fs(uri)
    found: bytes = fs.cat_file(f"{path}/{name}")
    return found


def test_signed_inputs_give_the_same_dataset_and_are_the_same_job_when_signed_anew(s3: Bucket, tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts(60)])
    uri = f"{s3.fresh()}/a.jsonl"
    fs, path = fsspec.url_to_fs(uri)
    fs.put(plain, path)
    assert run(job_of([signed(uri, 3600)], tmp_path / "en", part_bytes=1000)).finished
    assert run(job_of([signed(uri, 3601)], tmp_path / "en", part_bytes=1000)).parts_made == 0
    assert files_of(tmp_path / "en_text_document") == theirs([plain], tmp_path / "theirs")
