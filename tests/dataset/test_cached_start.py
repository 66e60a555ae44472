"""Starts with a cache in a store: each file is fetched once, and replaced or damaged ones are noticed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER
from helpers.random_datasets import Document, build_ours
from servers.latency_proxy import latency_proxy

import binidx
from binidx.errors import FormatError
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small
from binidx.storage.writing.publish import create_object

DOCUMENTS = [Document([n % 100] * (3 + n % 5), [3 + n % 5], []) for n in range(200)]


def config(prefix: str) -> Any:
    return binidx.GPTDatasetConfig(
        random_seed=7, sequence_length=16, blend=([prefix], None), split="8,1,1", tokenizer=TOKENIZER,
        path_to_cache=f"{prefix}-cache", cache_small_indices=True, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip


def start(prefix: str) -> list[list[int]]:
    """The samples of all splits, as tokens."""
    built = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [60, 5, 5], lambda: True, config(prefix)).build()
    return [dataset[n]["tokens"].tolist() for dataset in built for n in range(len(dataset))]


def test_a_start_fetches_each_array_once(s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", DOCUMENTS, np.uint16)
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        first = start(prefix)
        monkeypatch.setenv("BINIDX_INDEX_DIR", str(tmp_path))
        monkeypatch.setenv("BINIDX_HEDGE", "0")
        proxy.reset()
        assert start(prefix) == first
        log = Counter(each.path for each in proxy.log() if each.path.endswith((".npy", "binidx.json")))
    assert len(log) == 12
    assert {*log.values()} == {1}


def test_an_idx_that_was_replaced_is_checked_and_its_index_rebuilt(s3: Bucket) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", DOCUMENTS, np.uint16)
    before = start(prefix)
    build_ours(prefix, DOCUMENTS[:150], np.uint16)
    assert start(prefix) != before


def test_an_idx_that_was_broken_since_is_an_error(s3: Bucket) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", DOCUMENTS, np.uint16)
    start(prefix)
    whole = bytearray(read_small(Location.of(f"{prefix}.idx")) or b"")
    whole[34 + 4 * 7] ^= 1  # the length of sequence 7
    with create_object(Location.of(f"{prefix}.idx")) as out:
        out.write(whole)
    with pytest.raises(FormatError, match="sequence 8 starts at byte"):
        start(prefix)


@pytest.mark.parametrize("suffix", ["-sample_index.npy", "-binidx.json"])
def test_a_damaged_cache_is_built_anew(s3: Bucket, suffix: str) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", DOCUMENTS, np.uint16)
    before = start(prefix)
    fs = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=s3.server.endpoint)
    for path in fs.glob(f"{prefix}-cache/*{suffix}"):
        data = bytearray(fs.cat_file(path))
        data[-2] ^= 1
        fs.pipe_file(path, bytes(data))
    assert start(prefix) == before
