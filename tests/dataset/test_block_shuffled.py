"""Block-shuffled samples: those of the stored stream, each once an epoch, and cheap where chunks are fetched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import Tokenizer
from helpers.traceable_runs import write_source

import binidx
from binidx.dataset.block_shuffled import BlockShuffledGPTDataset, BlockShuffledGPTDatasetConfig
from binidx.errors import ConfigError


def build(prefix: str, kind: Any = BlockShuffledGPTDataset, size: int | None = None, **options: Any) -> Any:
    config_kind = BlockShuffledGPTDatasetConfig if kind is BlockShuffledGPTDataset else binidx.GPTDatasetConfig
    resets = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    defaults = {"random_seed": 3, "sequence_length": 8, "split": "1,0,0", "tokenizer": Tokenizer(pad=-5, eod=-6)}
    config = config_kind(blend=([prefix], None), **{**defaults, **resets, **options})
    return binidx.BlendedMegatronDatasetBuilder(kind, [size, 0, 0], lambda: True, config).build()[0]


def stream_of(prefix: str, epochs: int) -> np.ndarray:
    stored = binidx.IndexedDataset(prefix)
    return np.concatenate([stored[number] for _ in range(epochs) for number in range(len(stored))])


@pytest.mark.parametrize(
    ("epochs", "block_samples", "blocks_mixed"), [(1, 3, 2), (3, 4, 3), (2, 1, 1000), (2, 1000, 1)]
)
def test_every_sample_of_the_stored_stream_is_served_once(
    tmp_path: Path, epochs: int, block_samples: int, blocks_mixed: int
) -> None:
    prefix = write_source(tmp_path / "a", random.Random(1), True)
    tokens = stream_of(prefix, 1)
    dataset = build(
        prefix, size=(epochs - 1) * len(tokens) // 8 + 1, block_samples=block_samples, blocks_mixed=blocks_mixed
    )
    stream = stream_of(prefix, epochs)
    cuts = [stream[start : start + 9] for start in range(0, len(stream) - 8, 8)]
    served = [[*sample["tokens"].tolist(), sample["labels"][-1].item()] for sample in dataset]
    assert len(served) == len(cuts)
    assert sorted(served) == sorted(cut.tolist() for cut in cuts)
    first = (len(tokens) - 1) // 8  # the first epoch is served before the second
    assert sorted(served[:first]) == sorted(cut.tolist() for cut in cuts[:first])


def test_a_run_that_grows_keeps_its_order(tmp_path: Path) -> None:
    prefix = write_source(tmp_path / "a", random.Random(1), True)
    short, long = build(prefix, size=20, block_samples=3), build(prefix, size=300, block_samples=3)
    assert len(long) > 2 * len(short)
    for number in range(len(short)):
        assert (short[number]["tokens"] == long[number]["tokens"]).all()


def test_a_run_that_grows_is_told_of_no_other_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = write_source(tmp_path / "a", random.Random(1), True)
    cached = {"cache_small_indices": True, "path_to_cache": str(tmp_path / "cache")}
    for size, told in ((20, 0), (300, 0)):
        build(prefix, size=size, **cached)
        assert caplog.text.count("this run reads") == told
    for size, told in ((20, 0), (300, 1)):  # Megatron's order is another one
        build(prefix, binidx.GPTDataset, size, **cached)
        assert caplog.text.count("this run reads") == told


def test_a_padded_last_sample_is_part_of_the_order(tmp_path: Path) -> None:
    prefix = write_source(tmp_path / "a", random.Random(1), True)
    short, long = (build(prefix, size=size, block_samples=3).order_identity for size in (20, 300))
    assert short == long

    def valid(size: int) -> Any:
        made = BlockShuffledGPTDatasetConfig(
            blend=([prefix], None), random_seed=3, sequence_length=8, split="0,1,0", tokenizer=Tokenizer(),
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
            drop_last_partial_validation_sequence=False,
        )  # fmt: skip
        return binidx.BlendedMegatronDatasetBuilder(BlockShuffledGPTDataset, [0, size, 0], lambda: True, made).build()[
            1
        ]

    assert valid(20).order_identity != valid(300).order_identity


def test_another_block_is_another_order_with_a_cache_of_its_own(tmp_path: Path) -> None:
    prefix = write_source(tmp_path / "a", random.Random(1), True)
    cached = {"cache_small_indices": True, "path_to_cache": str(tmp_path / "cache")}
    orders = [build(prefix, block_samples=size, blocks_mixed=2, **cached).shuffle_index.tolist() for size in (2, 3, 2)]
    assert orders[0] == orders[2] != orders[1]
    assert len([*(tmp_path / "cache").glob("*-shuffle_index.npy")]) == 2


def test_a_thin_link_with_a_cache_of_chunks_moves_each_byte_once(s3: Bucket, tmp_path: Path) -> None:
    prefix, rng = f"{s3.fresh()}/corpus", np.random.default_rng(1)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(2000):
            builder.add_document(rng.integers(0, 60000, 1000).astype(np.uint16), [1000])
        builder.finalize(f"{prefix}.idx")

    def moved(kind: Any, **options: Any) -> float:
        """Bytes fetched for a byte served, of the first 520 samples of 4,000."""
        stored = {"storage_options": {"binidx": {"cache_dir": str(tmp_path / kind.__name__)}}}
        dataset = build(prefix, kind, sequence_length=500, **options, **stored)
        reader = dataset.dataset.bin_reader
        before = reader.stats.bytes_moved
        for start in range(0, 520, 20):
            dataset.__getitems__(range(start, start + 20))
        return (reader.stats.bytes_moved - before) / (520 * 1000)

    assert moved(BlockShuffledGPTDataset, block_samples=260, blocks_mixed=2) < 1.5
    assert moved(binidx.GPTDataset) > 5


def test_blocks_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks_mixed: found 0"):
        build("nowhere", blocks_mixed=0)
