"""Runs whose tokens say where they come from: a token is its document's number times 1000, and its place there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from helpers.gpt_data import Tokenizer

from binidx.dataset.builder import BlendedMegatronDatasetBuilder
from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder


def write_source(prefix: Path, choose: random.Random, several_sequences: bool) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", np.int32) as builder:
        count = choose.randrange(5, 40)
        for number in range(count):
            lengths = [choose.randrange(1, 30) for _ in range(choose.randrange(0, 4) if several_sequences else 1)]
            builder.add_document([number * 1000 + place for place in range(sum(lengths))], lengths)
        builder.add_document(np.arange(40) + count * 1000, [40])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_config(
    choose: random.Random, seed: int, prefixes: list[str], weights: list[float] | None, cache: str, **fields: Any
) -> tuple[GPTDatasetConfig, list[int | None]]:
    """Of random lengths and splits over these sources, and how many samples of each split are asked for."""
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=choose.choice([1, 7, 16, 33]),
        blend=(prefixes, weights),
        split=choose.choice(["1,0,0", "90,10,0"]),
        tokenizer=Tokenizer(pad=-5, eod=-6),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        add_extra_token_to_sequence=choose.random() < 0.8,
        path_to_cache=cache,
        **fields,
    )
    return config, [choose.choice([choose.randrange(1, 60), choose.randrange(60, 300)]), 1, 0]


def random_run(directory: Path, seed: int, kind: type[GPTDataset] = GPTDataset) -> Any:
    """The train dataset of a random config: one source or a blend, one epoch or several."""
    choose = random.Random(seed)
    prefixes = [
        write_source(directory / f"s{n}", choose, choose.random() < 0.5) for n in range(choose.choice([1, 1, 3]))
    ]
    weights = [choose.random() + 0.05 for _ in prefixes] if len(prefixes) > 1 or choose.random() < 0.5 else None
    config, sizes = random_config(choose, seed, prefixes, weights, f"{directory}/cache")
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()[0]
