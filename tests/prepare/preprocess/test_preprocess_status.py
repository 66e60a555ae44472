"""binidx preprocess --status of a job whose text and parts lie in a store: while it runs, after a break, at its end."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import Bucket
from helpers.preprocess_jobs import EOD, corpus, files_of, job_of, run, theirs, tokenizer_path
from helpers.signed_urls import put_signed, secrets_in, signed

from binidx import describe_tokenizer
from binidx.errors import FormatError
from binidx.jobs.parts import Shard
from binidx.prepare.preprocess.preprocess import Report, preprocess
from binidx.tools import main


class Held(ThreadPoolExecutor):
    """Does so many tasks; the next one begins when it is let go on."""

    def __init__(self, count: int) -> None:
        super().__init__(1)
        self.left, self.reached, self.go_on = count, threading.Event(), threading.Event()

    def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        def held() -> Any:
            if self.left == 0:
                self.reached.set()
                assert self.go_on.wait(600)
            self.left -= 1
            return work(*arguments, **options)

        return super().submit(held)


@pytest.fixture
def inputs(s3: Bucket, tmp_path: Path) -> list[str]:
    """Two files in the store."""
    base = s3.fresh()
    fs, path = fsspec.url_to_fs(base)
    files = corpus(tmp_path / "in")
    for name in files:
        fs.put(name, f"{path}/{Path(name).name}")
    return [f"{base}/{Path(name).name}" for name in files]


def call(inputs: list[str], target: str, tokenizer: str, *options: str) -> list[str]:
    made = ["preprocess", *inputs, "--to", target, "--tokenizer", tokenizer, "--eod", EOD, "--append-eod"]
    return [*made, "--part-bytes", "5000", "--status", *options]


def told(capsys: Any, line: list[str]) -> dict[str, Any]:
    assert main([*line, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    assert 0 <= found["done_bytes"] <= found["total_bytes"]
    return found


def objects(uri: str) -> dict[str, Any]:
    """Name -> size and time of all that lies there."""
    fs, path = fsspec.url_to_fs(uri)
    fs.invalidate_cache()
    return {name: (each["size"], str(each.get("LastModified"))) for name, each in fs.find(path, detail=True).items()}


def test_a_job_in_a_store_is_seen_while_it_runs_and_when_it_has_ended(
    s3: Bucket, inputs: list[str], tmp_path: Path, capsys: Any
) -> None:
    target, reports = f"{s3.fresh()}/en", list[Report]()
    line = call(inputs, target, tokenizer_path())
    before = told(capsys, line)
    assert (before["finished"], before["parts_done"], before["done_bytes"]) == (False, 0, 0)
    assert objects(target.removesuffix("/en")) == {}
    with Held(3) as held:
        job = job_of(inputs, target)
        running = threading.Thread(target=lambda: reports.append(preprocess(job, executor=held, workers=1)))
        running.start()
        assert held.reached.wait(600)
        lying = objects(target.removesuffix("/en"))
        during = told(capsys, line)
        assert (during["finished"], during["parts"], during["parts_done"]) == (False, before["parts"], 3)
        assert 0 < during["done_bytes"] < during["total_bytes"] == before["total_bytes"]
        assert sum(each["parts"] for each in during["machines"].values()) == 3
        assert during["seconds_left"] > 0
        assert during["last_part_seconds"] >= 0
        assert main(line) == 0
        assert capsys.readouterr().out.startswith(f"{target}: 3 of {before['parts']} parts, ")
        assert objects(target.removesuffix("/en")) == lying
        held.go_on.set()
        running.join(600)
    after = told(capsys, line)
    assert (after["finished"], after["parts_done"], after["seconds_left"]) == (True, before["parts"], None)
    assert after["machines"] == reports[0].to_json()["machines"]
    assert main(line) == 0
    assert capsys.readouterr().out == f"{target}: finished, {before['parts']} parts\n"


def test_a_job_that_broke_off_in_a_store_is_seen_with_what_it_had_made(
    s3: Bucket, inputs: list[str], tmp_path: Path, capsys: Any
) -> None:
    bad = put_lines(s3, b'{"text": "the sea"}\n{\n')
    target = f"{s3.fresh()}/en"
    with pytest.raises(FormatError, match="malformed"):
        run(job_of([*inputs, bad], target))
    found = told(capsys, call([*inputs, bad], target, tokenizer_path()))
    assert (found["finished"], found["parts"] - found["parts_done"] >= 1) == (False, True)
    made = run(job_of([*inputs, bad], target, on_error="skip"))
    assert made.parts_made == found["parts"] - found["parts_done"]
    assert told(capsys, call([*inputs, bad], target, tokenizer_path(), "--on-error", "skip"))["finished"]


def put_lines(s3: Bucket, data: bytes) -> str:
    uri = f"{s3.fresh()}/bad.jsonl"
    fs, path = fsspec.url_to_fs(uri)
    fs.pipe_file(path, data)
    return uri


@pytest.mark.parametrize("kind", ["signed", "options"])
def test_inputs_that_need_a_signature_or_credentials_are_seen_with_other_ones(
    s3: Bucket, inputs: list[str], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Signed anew for each look; or by keys that are given as options, where the environment has none for the text."""
    target = f"{tmp_path}/en"
    options: dict[str, Any] = {}
    if kind == "options":
        options = s3.server.storage_options
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name)
    named = iter([[signed(uri, 3000 + n) for uri in inputs] if kind == "signed" else inputs for n in range(4)])
    tokenizer = tokenizer_path()
    spec = describe_tokenizer(tokenizer, eod=EOD)
    flags = ["--source-options", json.dumps(options)] if options else []
    half = run(job_of(next(named), target, tokenizer=spec, source_options=options), shard=Shard(0, 2))
    found = told(capsys, call(next(named), target, tokenizer, *flags))
    assert (found["finished"], found["parts_done"]) == (False, half.parts_made)
    run(job_of(next(named), target, tokenizer=spec, source_options=options))
    found = told(capsys, call(next(named), target, tokenizer, *flags))
    assert found["finished"]
    assert secrets_in(json.dumps(found)) == []
    assert files_of(f"{target}_text_document") == theirs(
        [f"{tmp_path}/in/{uri.rpartition('/')[2]}" for uri in inputs], tmp_path / "theirs"
    )


def test_a_signed_tokenizer_is_seen_too(s3: Bucket, inputs: list[str], capsys: Any) -> None:
    url = put_signed(s3, "tokenizer.json", Path(tokenizer_path()).read_bytes())
    target = f"{s3.fresh()}/en"
    run(job_of(inputs, target, tokenizer=describe_tokenizer(url, eod=EOD)), shard=Shard(0, 2))
    assert told(capsys, call(inputs, target, tokenizer_path()))["parts_done"] > 0
