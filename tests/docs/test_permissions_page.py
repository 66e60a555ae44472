"""The policies of docs/how-to/permissions.md: what the page says each allows works under it, and the rest is denied."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.pages import read_page
from helpers.preprocess_jobs import tokenizer_path
from servers import seaweed

import binidx
from binidx.tools import main

PAGE = "how-to/permissions"


def policies() -> dict[str, str]:
    return dict(re.findall(r'^```json title="(\w+)\.json"\n(.*?)^```', read_page(PAGE), re.M | re.S))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[seaweed.S3Server]:
    """A server with an identity for each policy; its name is its key and its secret."""
    arguments = seaweed.arguments

    def with_policies(directory: Path, identities: Path, ports: list[int]) -> list[str]:
        config = json.loads(identities.read_text())
        for name, policy in policies().items():
            key = {"accessKey": name, "secretKey": name}
            config["identities"].append({"name": name, "credentials": [key], "policyNames": [name]})
            config.setdefault("policies", []).append({"name": name, "content": policy})
        identities.write_text(json.dumps(config))
        return arguments(directory, identities, ports)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seaweed, "arguments", with_policies)
        patch.setattr(seaweed, "SECONDS_TO_START", 900.0)
        with seaweed.s3_server(tmp_path_factory.mktemp("s3")) as found, found.in_environment():
            found.make_bucket("corpus")
            found.make_bucket("text")
            yield found


def keys(server: seaweed.S3Server) -> list[str]:
    client = seaweed.s3_client(server.endpoint, server.key, server.secret)
    found = [each["Key"] for each in client.list_objects_v2(Bucket="corpus").get("Contents", [])]
    client.close()
    return found


def test_each_policy_allows_its_tasks_and_no_others(
    server: seaweed.S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert policies().keys() == {"train", "make"}

    def become(name: str) -> dict[str, str]:
        options = {"key": name, "secret": name}
        for which in ("STORAGE", "SOURCE", "TARGET", "LEFT", "RIGHT"):
            monkeypatch.setenv(f"BINIDX_{which}_OPTIONS", json.dumps(options))
        return options

    def call(*words: str) -> int:
        status = main([*words])
        assert status == 0 or "access denied" in capsys.readouterr().err
        return status

    (tmp_path / "text.jsonl").write_text('{"text": "the sea and the sky"}\n' * 500)
    seaweed.s3_client(server.endpoint, server.key, server.secret).put_object(
        Bucket="text", Key="en/0.jsonl", Body=(tmp_path / "text.jsonl").read_bytes()
    )
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/code.bin", np.uint16) as builder:
        for number in range(300):
            builder.add_document([number] * 100, [100])
        builder.finalize(f"{tmp_path}/code.idx")

    options = become("make")
    given = {"source_options": options, "target_options": options}
    tokenizer = binidx.describe_tokenizer(tokenizer_path(), eod="<eod>")
    job = binidx.Job(("s3://text/en/*.jsonl",), "s3://corpus/en", tokenizer, append_eod=True, **given)
    with ThreadPoolExecutor(2) as executor:
        binidx.preprocess(job, executor=executor)
    en, code, both = "s3://corpus/en_text_document", "s3://corpus/code", "s3://corpus/both"
    assert call("convert", f"{tmp_path}/code", "--to", code) == 0
    assert call("merge", en, code, "--to", both) == 0
    assert call("cut", "head", both, "--to", f"{both}-head", "-n", "10") == 0
    about: dict[str, Any] = {
        "split": "98,1,1",
        "tokenizer": binidx.SpecialTokens(),
        "cache_small_indices": True,
    }
    about |= {"random_seed": 1, "sequence_length": 16, "blend": ([en, code], [0.5, 0.5])}
    config = binidx.GPTDatasetConfig(path_to_cache="s3://corpus/cache", storage_options=options, **about)
    binidx.Run(config, [100, 4, 4], 2).save("s3://corpus/run.json")
    data = keys(server)

    options = become("train")
    assert call("plan", "s3://corpus/run.json") == 0
    assert call("prepare", "index", "s3://corpus/run.json") == 0
    written = {key for key in keys(server) if key not in data}
    assert {key.partition("/")[0] for key in written} == {"cache"}
    assert any(key.endswith("-binidx.json") for key in written)
    assert not any(key.endswith("-claim") for key in written)
    run = binidx.Run.load("s3://corpus/run.json", options)
    train = run.build()[0]
    caplog.clear()
    again = replace(run, config=replace(run.config, path_to_cache="s3://corpus/elsewhere")).build()[0]
    logged = " ".join(re.sub(r"\s+", " ", record.getMessage()) for record in caplog.records)
    page = " ".join(read_page(PAGE).split())
    for line in ("no lease on the index, so each node builds its own", "index not kept, every start builds it again"):
        assert line in logged
        assert f"`{line}`" in page
    batches = [next(iter(binidx.build_pretraining_data_loader(each, 0, 2)))["tokens"] for each in (train, again)]
    assert (batches[0] == batches[1]).all()
    for words in (
        ["inspect", both],
        ["verify", both],
        ["diff", both, both],
        ["trace", "s3://corpus/run.json", "--steps", "3"],
    ):
        assert call(*words) == 0
    before = keys(server)
    assert call("convert", f"{tmp_path}/code", "--to", "s3://corpus/new") == 2
    assert call("merge", en, code, "--to", "s3://corpus/new") == 2
    assert call("estimate", "s3://text/en/*.jsonl", "--tokenizer", str(tokenizer_path())) == 2
    assert keys(server) == before
