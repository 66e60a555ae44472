"""Megatron's options of a quick start: taken, with its constraints, and no dtype is guessed for them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample

import binidx
from binidx.errors import ConfigError


class Tokenizer:
    """One with a vocabulary."""

    eod, pad = 0, -1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.unique_identifiers = OrderedDict(vocab_size=vocab_size)


def write(prefix: Path, vocab_size: int) -> str:
    """30 documents of 40 tokens up to the last of a vocabulary, in the dtype that is right for it."""
    dtype = binidx.DType.optimal_dtype(vocab_size)
    tokens = np.random.default_rng(0).integers(vocab_size - 40, vocab_size, (30, 40)).astype(dtype)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in tokens:
            builder.add_document(document, [40])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def arguments(prefix: str, cache: Path, **more: Any) -> dict[str, Any]:
    return {
        "random_seed": 3, "sequence_length": 16, "blend_per_split": [([prefix], None), None, None],
        "tokenizer": TOKENIZER, "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
        "path_to_cache": str(cache), **more,
    }  # fmt: skip


def build(given: dict[str, Any]) -> Any:
    config = binidx.GPTDatasetConfig(**given)
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [50, 0, 0], lambda: True, config).build()[0]


@pytest.mark.parametrize("vocab_size", [65499, 65500, 65535, 65536, 65537])
def test_the_dtype_is_that_of_the_header_whatever_the_tokenizer_has(tmp_path: Path, vocab_size: int) -> None:
    prefix = write(tmp_path / "en", vocab_size)
    plain = build(arguments(prefix, tmp_path, tokenizer=Tokenizer(vocab_size)))
    quick = build(
        arguments(
            prefix, tmp_path, tokenizer=Tokenizer(vocab_size), sequences_per_dataset={prefix: (30, 31)},
            fast_cache_load=True, defer_npy_index_mmap=True,
        )
    )  # fmt: skip
    assert quick.dataset.index.dtype is binidx.DType.optimal_dtype(vocab_size)
    assert len(quick) == len(plain)
    for found, needed in zip(quick.__getitems__(range(50)), plain.__getitems__(range(50)), strict=True):
        assert_same_sample(found, needed)
        assert vocab_size - 40 <= found["tokens"].min() <= found["tokens"].max() < vocab_size


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"other": (30, 31)}, r"wrong for .*en .found None, its .idx has "),
        ({"en": 30}, r"wrong for .*en .found 30, its .idx has \(30, 31\)"),
        ({}, None),
        (None, None),
    ],
)
def test_each_prefix_has_to_be_among_the_counts(tmp_path: Path, said: Any, message: str | None) -> None:
    said = said and {str(tmp_path / name): count for name, count in said.items()}
    given = arguments(write(tmp_path / "en", 999), tmp_path, sequences_per_dataset=said)
    if message is None:
        assert len(build(given)) >= 50
    else:
        with pytest.raises(ConfigError, match=message):
            build(given)


def test_counts_other_than_the_headers_are_an_error(tmp_path: Path) -> None:
    prefix = write(tmp_path / "en", 999)
    with pytest.raises(ConfigError, match=r"wrong for .*en .found \[29, 30\], its .idx has \(30, 31\)"):
        build(arguments(prefix, tmp_path, sequences_per_dataset={prefix: [29, 30]}))


@pytest.mark.parametrize("name", ["fast_cache_load", "defer_npy_index_mmap"])
def test_they_need_a_path_to_cache(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: needs path_to_cache"):
        binidx.GPTDatasetConfig(**arguments("en", tmp_path, **{name: True}) | {"path_to_cache": None})


def test_fast_cache_load_excludes_a_blend(tmp_path: Path) -> None:
    given = {**arguments("en", tmp_path, fast_cache_load=True), "blend_per_split": None}
    with pytest.raises(ConfigError, match="fast_cache_load: excludes blend"):
        binidx.GPTDatasetConfig(**given, blend=(["en"], None), split="1,0,0")


def test_what_their_caches_lack_is_built(tmp_path: Path) -> None:
    prefix = write(tmp_path / "en", 999)
    dataset = build(arguments(prefix, tmp_path / "nothing here", fast_cache_load=True, defer_npy_index_mmap=True))
    assert len(dataset) >= 50
