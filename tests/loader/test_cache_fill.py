"""A loader fills the disk cache while it serves: the same samples, and a second pass that moves no token."""

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
from binidx.storage.stats import usage, usage_since


@pytest.fixture(scope="module")
def prefixes(s3: Bucket, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The same dataset of three extents on the disk and in a bucket."""
    directory, rng = tmp_path_factory.mktemp("fill"), np.random.default_rng(0)
    lengths = rng.integers(1, 60_000, 300).tolist()
    documents = [Document(rng.integers(0, 999, length, np.uint16), [length], []) for length in lengths]
    local, remote = build_ours(directory / "en", documents, np.uint16), f"{s3.fresh()}/en"
    convert_dataset(local, remote, verify="size")
    return str(local), remote


def loader_of(prefix: str, indices: Path, **options: Any) -> Any:
    config = binidx.GPTDatasetConfig(
        random_seed=3, sequence_length=512, blend=([prefix], None), split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=str(indices),
        storage_options={"binidx": options} if options else None,
    )  # fmt: skip
    train = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
    return binidx.build_pretraining_data_loader(train, 0, 8)


@pytest.mark.parametrize("fill", ["auto", "all"])
def test_samples_are_the_local_ones_and_a_second_pass_moves_no_token(
    s3: Bucket, prefixes: tuple[str, str], tmp_path: Path, fill: str
) -> None:
    local, remote = prefixes
    needed = [*loader_of(local, tmp_path / "local")]
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        loader = loader_of(remote, tmp_path / "remote", cache_dir=str(tmp_path / "cache"), cache_fill=fill)
        before = usage()
        for found, right in zip(loader, needed, strict=True):
            assert_same_sample(found, right)
        filled = usage_since(before)
        proxy.reset()
        for found, right in zip(loader, needed, strict=True):
            assert_same_sample(found, right)
        print(filled, proxy.counts())
        assert [each.path for each in proxy.log() if each.path.endswith(".bin")] == []
    assert filled["filled extents"] == 3
