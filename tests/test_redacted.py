"""What is written down of a URI holds no password and no signature."""

from __future__ import annotations

import json
import pickle
import traceback
import uuid
from pathlib import Path
from typing import Any

import pytest
from servers.http_objects import Server

from binidx.errors import (
    AccessError,
    BinidxError,
    BlendError,
    FormatError,
    MissingDriverError,
    ShortReadError,
    redacted,
    redacted_text,
)
from binidx.prepare.text.batch import Problem
from binidx.storage.adapters import JoinedReader
from binidx.storage.cache.block_files import CachedContent, write_meta
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.quota_files import QuotaDirectory
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.retries import Failure, History, is_transient, out_of_time
from binidx.storage.stores.driver_errors import cause_of, http_status, storage_errors
from binidx.tools import main

SIGNED = "https://b.example/en.jsonl?X-Amz-Credential=AK%2Fx&X-Amz-Signature=5ec4e7&X-Amz-Expires=60"
AZURE = "abfs://web@acct.dfs.core.windows.net/en.jsonl"


@pytest.mark.parametrize(
    ("uri", "needed"),
    [
        ("corpus/what?sig=1.jsonl", "corpus/what?sig=1.jsonl"),
        ("s3://corpus/en?sig=1.jsonl", "s3://corpus/en?sig=1.jsonl"),
        ("https://me:5ec4e7@host:80/en.jsonl", "https://host:80/en.jsonl"),
        ("https://host/a@b.jsonl", "https://host/a@b.jsonl"),
        (SIGNED, "https://b.example/en.jsonl"),
        ("https://h/e.jsonl?part=2&sv=2024&sig=5ec4e7&download=1", "https://h/e.jsonl?part=2&download=1"),
        ("https://h/e.jsonl?Expires=1&Signature=5ec4e7&Key-Pair-Id=K", "https://h/e.jsonl"),
        *((uri, uri) for uri in (f"{each}://web@acct.dfs.core.windows.net/x" for each in ("abfs", "abfss", "az"))),
    ],
)
def test_passwords_and_signatures_are_left_out(uri: str, needed: str) -> None:
    assert redacted(uri) == needed


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        (f"{SIGNED}: 41 bytes, needed 52", "https://b.example/en.jsonl: 41 bytes, needed 52"),
        (f"url='{SIGNED}'), 403", "url='https://b.example/en.jsonl'), 403"),
        (
            f"{SIGNED}&part=2: no such (see {SIGNED}).",
            "https://b.example/en.jsonl?part=2: no such (see https://b.example/en.jsonl).",
        ),
        ("https://me:5ec4e7@h/my file.jsonl?sig=5ec4e7, really?", "https://h/my file.jsonl, really?"),
        ("https://h/a?part=1&password=5ec?4e7&b=2", "https://h/a?part=1&b=2"),
        (f"{AZURE}: no such object", f"{AZURE}: no such object"),
        ("what?sig=1: no URL, and s3://b/k?sig=1 is a key", "what?sig=1: no URL, and s3://b/k?sig=1 is a key"),
        ("", ""),
    ],
)
def test_every_error_of_ours_leaves_them_out_of_its_words(text: str, needed: str) -> None:
    assert redacted_text(text) == needed == redacted_text(needed)
    for kind in (BinidxError, FormatError, AccessError, MissingDriverError, BlendError, ShortReadError):
        error = kind(text)
        assert str(error) == str(pickle.loads(pickle.dumps(error))) == needed
        assert error.args == (needed,)


def test_a_cause_that_tells_one_is_replaced_and_says_as_much_of_what_failed() -> None:
    def driver(url: str, reason: Exception) -> Exception:
        try:
            raise FileNotFoundError(url) from reason
        except FileNotFoundError as error:
            with pytest.raises(BinidxError) as raised, storage_errors(url):
                raise error
        return raised.value

    reset, refused = ConnectionResetError(f"GET {SIGNED}"), OSError(f"403 of {SIGNED}")
    refused.status = 403  # type: ignore[attr-defined]
    for reason, retried, status in ((reset, True, None), (refused, False, 403)):
        found = driver(SIGNED, reason)
        assert "5ec4e7" not in "".join(traceback.format_exception(found))
        assert is_transient(found) == retried
        assert http_status(found) == status
    plain = ValueError("of no URL")
    assert cause_of(plain) is plain


def test_a_problem_is_told_without_them() -> None:
    problem = Problem("null", SIGNED, 0, 0, "line 1", "'text' is null")
    assert str(problem) == "https://b.example/en.jsonl: line 1: null: 'text' is null"


def test_a_job_and_its_parts_are_the_same_when_signed_anew(tmp_path: Path) -> None:
    from helpers.preprocess_jobs import job_of

    from binidx.prepare.preprocess.job import plan_parts
    from binidx.prepare.preprocess.job_files import JobFiles
    from binidx.prepare.preprocess.part_writer import format_problem
    from binidx.prepare.text.slices import Input

    def marked(uri: str) -> Any:
        job = job_of([uri], tmp_path / "en")
        parts = plan_parts(job, [Input(uri, "jsonl", {"size": 9000, "ETag": "e"})])
        return JobFiles(job, parts).content, [str(each) for each in parts], json.dumps(job.to_json())

    assert marked(SIGNED) == marked(SIGNED.replace("5ec4e7", "other"))
    assert marked(AZURE) != marked(AZURE.replace("web@", "books@"))
    assert "5ec4e7" not in str(marked(SIGNED))
    assert b"5ec4e7" not in format_problem(Problem("null", SIGNED, 0, 0, "", ""), 0)


def signed_at(server: Server, name: str, secret: str = "5ec4e7") -> str:
    return f"{server.endpoint}/{name}?X-Amz-Credential=AK&X-Amz-Signature={secret}&part=2"


def test_readers_and_a_cache_of_a_signed_url_hold_no_signature(web: Server, tmp_path: Path) -> None:
    name, data = uuid.uuid4().hex, bytes(range(251)) * 1000
    web.objects[f"/{name}"] = data
    options = {"binidx": {"cache_dir": str(tmp_path)}}
    for secret in ("5ec4e7", "another"):
        reader = open_object(signed_at(web, name, secret), storage_options=options)
        assert isinstance(reader, DiskCache)
        assert bytes(reader.read([(5, 100_000)])[0]) == data[5:100_000]
        joined = JoinedReader(reader.uri, [reader], [reader.size])
        assert repr(joined) == f"JoinedReader({web.endpoint}/{name}?part=2, 1 part, 251,000 bytes)"
        assert repr(reader) == f"DiskCache(RemoteObject({web.endpoint}/{name}?part=2, 251,000 bytes), {tmp_path})"
    [meta] = tmp_path.rglob("meta.json")  # one for both
    assert json.loads(meta.read_text())["uri"] == f"{web.endpoint}/{name}?part=2"
    assert reader.stats.bytes_moved == 0
    assert repr(Location(reader.uri).store) == f"HttpStore({web.endpoint}/{name}?part=2)"


def test_a_cached_object_that_an_earlier_version_named_by_a_signed_url_is_pruned(tmp_path: Path, capsys) -> None:
    QuotaDirectory(str(tmp_path))
    old = CachedContent(SIGNED, 9, {"size": 9, "etag": "e"})
    write_meta(f"{tmp_path}/objects/{old.key}", old)
    (tmp_path / "objects" / old.key / "00000000.block").write_bytes(bytes(5000))
    assert main(["cache", "list", "--dir", str(tmp_path), "--json"]) == 0
    assert "5ec4e7" not in capsys.readouterr().out
    assert main(["cache", "prune", "--dir", str(tmp_path), "--uri", "https://other"]) == 0
    assert not list(tmp_path.rglob("*.block"))


def test_no_cause_of_a_read_that_ran_out_of_time_has_a_signature() -> None:
    history = History(0.0)
    history.note(Failure(ConnectionResetError(f"GET {SIGNED}")), 60.0)
    error = out_of_time(SIGNED, "bytes 1-5", history, 0.0, 60.0)
    text = "".join(traceback.format_exception(error))
    assert "ConnectionResetError: GET https://b.example/en.jsonl" in text
    assert "5ec4e7" not in text
    assert is_transient(error)
