"""Whole steps of a rank in one list, by Megatron-LM's rule."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron

import binidx
from binidx.errors import ConfigError
from binidx.loader.samplers import HybridCPMegatronPretrainingSampler
from binidx.loader.torch_loader import PretrainingLoader


def model(total: int, consumed: int, m: int, whole: int, rank: int, size: int, drop_last: bool) -> Iterator[list[int]]:
    starts = [rank * m + i * m * size for i in range(whole // (m * size))]
    batch: list[int] = []
    for idx in range(consumed, total):
        batch.append(idx)
        if len(batch) == whole:
            yield [idx for start in starts for idx in batch[start : start + m]]
            batch = []
    if batch and not drop_last:
        yield [idx for start in starts for idx in batch[start : start + m]]


@pytest.mark.parametrize("drop_last", [True, False])
def test_each_step_is_the_rule_from_every_position(drop_last: bool) -> None:
    for m, size, times, total in product([1, 2, 3], [1, 2], [1, 2, 3], [1, 12, 31]):
        for consumed, rank in product(range(0, total, 5), range(size)):
            topology = (m, m * size * times, rank, size)
            sampler = HybridCPMegatronPretrainingSampler(total, consumed, *topology, drop_last)
            assert [*sampler] == [*model(total, consumed, *topology, drop_last)]
            for step, batch in enumerate(model(total, 0, *topology, True)):
                assert sampler.batch(step) == batch
    with pytest.raises(IndexError, match="step 9: 31 samples fill"):
        sampler.batch(9)
    with pytest.raises(TypeError, match="loader: found 'tokens', needs the number of a step"):
        sampler.batch("tokens")  # type: ignore[arg-type]


def test_a_loader_gives_the_samples_of_a_step_apart_and_goes_on_after_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    config = binidx.GPTDatasetConfig(
        random_seed=3, sequence_length=16, tokenizer=TOKENIZER, split="1,0,0", hybrid_context_parallel=True,
        blend=([write_with_megatron(tmp_path / "en", rng.integers(1, 40, 50).astype(np.int32), rng)], None),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, inter_document_masking=True,
    )  # fmt: skip
    train = binidx.BlendedMegatronDatasetBuilder(
        binidx.megatron.VarlenGPTDataset, [40, 0, 0], lambda: True, config
    ).build()[0]
    sampler = HybridCPMegatronPretrainingSampler(40, 0, 2, 8, 1, 2)
    loader = PretrainingLoader(train, batch_sampler=sampler, collate_fn=list, look_ahead=2)
    batches = iter(loader)
    for step, needed in enumerate([[2, 3, 6, 7], [10, 11, 14, 15]], 1):
        for sample, idx in zip(next(batches), needed, strict=True):
            assert_same_sample(sample, train[idx])
        assert loader.consumed_samples == 8 * step


def test_a_step_that_is_not_made_of_micro_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_batch_size: found 10, needs a multiple of 4"):
        HybridCPMegatronPretrainingSampler(40, 0, 2, 10, 0, 2)
