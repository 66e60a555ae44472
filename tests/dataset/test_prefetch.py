"""A large dataset: cached arrays come with its `.idx`, which is not checked again while it is the same object."""

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
from binidx.format.idx import parse_index
from binidx.index.cache import index_files
from binidx.native import token_files
from binidx.storage.writing.publish import create_object, read_small

DOCUMENTS = [Document([n % 100] * (3 + n % 5), [3 + n % 5], []) for n in range(200)]


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_files, "LARGE_BYTES", 0)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often all of an `.idx` was gone through."""
    counts: Counter[str] = Counter()
    inside = token_files.count_valid_sequences

    def counted(*arguments: Any) -> Any:
        counts["passes"] += 1
        return inside(*arguments)

    monkeypatch.setattr(token_files, "count_valid_sequences", counted)
    return counts


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


def test_a_start_fetches_each_array_once_and_goes_through_no_idx(
    s3: Bucket, checks: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", DOCUMENTS, np.uint16)
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        first = start(prefix)
        assert checks["passes"] == 1
        monkeypatch.setenv("BINIDX_INDEX_DIR", str(tmp_path))
        monkeypatch.setenv("BINIDX_HEDGE", "0")
        proxy.reset()
        assert start(prefix) == first
        log = Counter(each.path for each in proxy.log() if each.path.endswith((".npy", "binidx.json")))
    assert checks["passes"] == 1
    assert len(log) == 12
    assert {*log.values()} == {1}


def test_an_idx_that_was_replaced_is_checked_and_its_index_rebuilt(s3: Bucket, checks: Counter[str]) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", DOCUMENTS, np.uint16)
    before = start(prefix)
    build_ours(prefix, DOCUMENTS[:150], np.uint16)
    assert start(prefix) != before
    assert checks["passes"] == 2


def test_an_idx_that_was_broken_since_is_an_error(s3: Bucket) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", DOCUMENTS, np.uint16)
    start(prefix)
    whole = bytearray(read_small(f"{prefix}.idx") or b"")
    whole[34 + 4 * 7] ^= 1  # the length of sequence 7
    with create_object(f"{prefix}.idx") as out:
        out.write(whole)
    with pytest.raises(FormatError, match="sequence 8 starts at byte"):
        start(prefix)


@pytest.mark.parametrize("suffix", ["-sample_index.npy", "-binidx.json"])
def test_a_damaged_cache_is_built_anew(s3: Bucket, checks: Counter[str], suffix: str) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", DOCUMENTS, np.uint16)
    before = start(prefix)
    fs = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=s3.server.endpoint)
    for path in fs.glob(f"{prefix}-cache/*{suffix}"):
        data = bytearray(fs.cat_file(path))
        data[-2] ^= 1
        fs.pipe_file(path, bytes(data))
    assert start(prefix) == before


def test_what_is_said_to_be_sound_is_parsed_by_its_header_and_size(tmp_path: Path) -> None:
    for documents in (DOCUMENTS, []):
        data = Path(f"{build_ours(tmp_path / f'p{len(documents)}', documents, np.uint16)}.idx").read_bytes()
        checked, believed = (parse_index(data, uri="x", trusted=sound) for sound in (False, True))
        assert (believed.num_tokens, len(believed)) == (checked.num_tokens, len(checked))
        with pytest.raises(FormatError, match="x: "):
            parse_index(data[:-1], uri="x", trusted=True)
