"""The data of the benches, and both readers' datasets over them.

    mixed       documents of log-normal length, as web text has: a shuffled sample of 4,096 tokens lies in five places
    long        documents of 2^18 tokens: a shuffled sample is one range, seldom two

One token in eight tells which thousandth of the corpus it is from, so that anybody's samples show how far they were
shuffled (`places_of` in readers/stopwatch.py); the others are noise. SeaweedFS keeps what compresses as gzip, and then
unpacks megabytes for every range of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from helpers.gpt_data import TOKENIZER
from helpers.oracle import megatron
from numpy.typing import NDArray

import binidx

SEQUENCE_LENGTH = 4096
MEAN_TOKENS = 1000
LONG_TOKENS = 1 << 18
BLOCK_TOKENS = 1 << 22

PLACES = 1000
FIRST_PLACE = 16
PLACE_BITS = 5
# Noise begins where places end.
NOISE = 1 << 15


def write_corpus(
    prefix: Path,
    num_bytes: int,
    seed: int = 0,
    *,
    dtype: type = np.uint16,
    long_documents: bool = False,
    mean_tokens: int = MEAN_TOKENS,
) -> str:
    """A pair of about `num_bytes` of `.bin`, one sequence a document."""
    rng = np.random.default_rng(seed)
    num_tokens = num_bytes // np.dtype(dtype).itemsize
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype) as builder:
        for start in range(0, num_tokens, BLOCK_TOKENS):
            tokens = tokens_at(start, min(BLOCK_TOKENS, num_tokens - start), num_tokens, rng, dtype)
            for document in documents_of(tokens, long_documents, rng, mean_tokens):
                builder.add_document(document, [len(document)])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def tokens_at(start: int, count: int, num_tokens: int, rng: np.random.Generator, dtype: type) -> NDArray[Any]:
    """Tokens `start` to `start + count` of a corpus of `num_tokens`; none is 0, an EOD."""
    tokens = rng.integers(NOISE, np.iinfo(dtype).max, count, dtype, endpoint=True)
    telling = rng.integers(0, 8, len(tokens)) == 0
    places = FIRST_PLACE + np.arange(start, start + count)[telling] * PLACES // num_tokens
    tokens[telling] = (places << PLACE_BITS) + rng.integers(0, 1 << PLACE_BITS, len(places))
    return tokens


def documents_of(
    tokens: NDArray[Any], long_documents: bool, rng: np.random.Generator, mean_tokens: int
) -> Iterator[NDArray[Any]]:
    """The block, cut into documents."""
    if long_documents:
        yield from np.split(tokens, range(LONG_TOKENS, len(tokens), LONG_TOKENS))
        return
    lengths = np.maximum(1, rng.lognormal(np.log(mean_tokens) - 0.5, 1.0, 2 * len(tokens) // mean_tokens + 8))
    bounds = np.cumsum(lengths.astype(int))
    yield from np.split(tokens, bounds[bounds < len(tokens)])


def run_config(prefix: str, cache: str) -> dict[str, Any]:
    """The arguments that both configs take."""
    return {
        "random_seed": 1234, "sequence_length": SEQUENCE_LENGTH, "blend": ([prefix], None), "split": "1,0,0",
        "path_to_cache": cache, "tokenizer": TOKENIZER, "create_attention_mask": False,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip


def open_ours(prefix: str, cache: str) -> Any:
    config = binidx.GPTDatasetConfig(**run_config(prefix, cache))
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None, 0, 0], lambda: True, config).build()[0]


def open_theirs(prefix: str, cache: str, block_bytes: int | None = None) -> Any:
    """Megatron's dataset; for an s3:// prefix with its own reader and this block size."""
    remote = {"mmap_bin_files": False, "object_storage_cache_path": f"{cache}/idx"} if block_bytes else {}
    config = megatron.gpt.GPTDatasetConfig(**run_config(prefix, cache), **remote)
    dataset = megatron.builder.BlendedMegatronDatasetBuilder(
        megatron.gpt.GPTDataset, [None, 0, 0], lambda: True, config
    ).build()[0]
    if block_bytes:
        dataset.dataset.bin_reader._cache_nbytes = block_bytes
    return dataset
