"""The data of the benches: documents of log-normal length, as web text has, and both readers' datasets over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from cases import TOKENIZER
from oracle import megatron

import binidx

SEQUENCE_LENGTH = 4096
MEAN_TOKENS = 1000
BLOCK_TOKENS = 1 << 22


def write_corpus(prefix: Path, num_bytes: int, seed: int = 0) -> str:
    """A pair of uint16 tokens, about `num_bytes` of `.bin`, one sequence a document."""
    rng = np.random.default_rng(seed)
    written = 0
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        while written < num_bytes:
            lengths = np.maximum(
                1, rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, BLOCK_TOKENS // MEAN_TOKENS).astype(int)
            )
            for document in np.split(rng.integers(0, 999, lengths.sum(), np.uint16), np.cumsum(lengths)[:-1]):
                builder.add_document(document, [len(document)])
            written += 2 * int(lengths.sum())
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


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
