"""A run over S3 with a cache directory: the same samples, and a second run that moves no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample
from helpers.random_datasets import Document, build_ours
from servers.latency_proxy import latency_proxy

import binidx
from binidx.corpus.convert import convert_dataset

BATCH = 8


@pytest.fixture(scope="module")
def prefixes(s3: Bucket, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """The same two datasets on the disk and in a bucket."""
    directory, base, rng = tmp_path_factory.mktemp("training"), s3.fresh(), np.random.default_rng(0)
    for name in ("en", "code"):
        lengths = rng.integers(1, 900, 200).tolist()
        documents = [Document(rng.integers(0, 999, length, np.uint16), [length], []) for length in lengths]
        convert_dataset(build_ours(directory / name, documents, np.uint16), f"{base}/{name}", verify="size")
    return [f"{directory}/en", f"{directory}/code"], [f"{base}/en", f"{base}/code"]


def batches(prefixes: list[str], indices: Path, **loader: Any) -> list[Any]:
    config = binidx.GPTDatasetConfig(
        random_seed=3, sequence_length=64, blend=(prefixes, [0.6, 0.4]), split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=str(indices),
    )  # fmt: skip
    train = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [900, 0, 0], lambda: True, config).build()[0]
    found = binidx.build_pretraining_data_loader(train, 0, BATCH, **loader)
    assert found is not None
    return list(found)


@pytest.mark.parametrize("workers", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_samples_are_the_local_ones_and_a_second_run_moves_no_token(
    s3: Bucket, prefixes: tuple[list[str], list[str]], tmp_path: Path, workers: str | None, monkeypatch: Any
) -> None:
    local, remote = prefixes
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BINIDX_CACHE_FILL", "never")
    needed = batches(local, tmp_path / "local")
    options = {"num_workers": 2, "multiprocessing_context": workers} if workers else {}
    moved = []
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        for _ in range(2):
            before = proxy.counts()
            for found, right in zip(batches(remote, tmp_path / "remote", **options), needed, strict=True):
                assert_same_sample(found, right)
            moved.append((proxy.counts() - before).bytes)
    stored = sum(Path(f"{prefix}.{end}").stat().st_size for prefix in local for end in ("bin", "idx"))
    # Everything once, whole chunks and all workers together; then only what openings answer.
    assert stored <= moved[0] < stored + 20_000
    assert moved[1] < 20_000
