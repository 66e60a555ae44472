"""Validation on all samples: every one once over all ranks, whatever their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from torch.utils.data import default_collate

import binidx
from binidx.errors import ConfigError
from binidx.loader.samplers import MegatronFullValidationSampler
from binidx.loader.torch_loader import build_pretraining_data_loader


@pytest.mark.parametrize("total", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_every_sample_is_seen_once_by_the_rule_of_megatron(total: int, size: int) -> None:
    if total < size:
        with_none = [rank for rank in range(size) if not [*MegatronFullValidationSampler(total, rank, size)]]
        assert with_none == [*range(total, size)]
    for rank in range(size):
        sampler = MegatronFullValidationSampler(total, rank, size)
        batches = [[start + rank] for start in range(0, total, size) if start + rank < total]
        assert [*sampler] == [*sampler] == batches
        assert len(sampler) == len(batches)
        assert [sampler.batch(step) for step in range(len(batches))] == batches
        with pytest.raises(IndexError, match=f"step {len(batches)}: rank {rank} has"):
            sampler.batch(len(batches))


def build(prefixes: list[str], **changes: Any) -> list[Any]:
    given: dict[str, Any] = {
        "random_seed": 3, "sequence_length": 16, "tokenizer": TOKENIZER, "full_validation": True,
        "blend_per_split": [(prefixes[:1], None), (prefixes, None), None],
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip
    config = binidx.GPTDatasetConfig(**{**given, **changes})
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [50, None, None], lambda: True, config).build()


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    rng = np.random.default_rng(0)
    return [write_with_megatron(tmp_path / n, rng.integers(1, 40, 20).astype(np.int32), rng) for n in ("en", "code")]


@pytest.mark.parametrize("look_ahead", [0, 2])
def test_loaders_of_validation_sets_read_each_whole_and_those_of_training_do_not(
    look_ahead: int, prefixes: list[str]
) -> None:
    train, valid, _ = build(prefixes, multiple_validation_sets=True)
    assert len(valid) == 2
    for dataset in valid:
        loaders = [build_pretraining_data_loader(dataset, 7, 4, rank, 3, look_ahead=look_ahead) for rank in range(3)]
        served = [[*loader] for loader in loaders if loader is not None]
        for idx in range(len(dataset)):
            assert_same_sample(served[idx % 3][idx // 3], default_collate([dataset[idx]]))
        assert sum(map(len, served)) == len(dataset)
    loader = build_pretraining_data_loader(train, 0, 4)
    assert loader is not None
    assert next(iter(loader))["tokens"].shape == (4, 16)
    with pytest.raises(ConfigError, match="a list of 2 datasets"):
        build_pretraining_data_loader(valid, 0, 4)


def test_a_blend_of_validation_sets_is_read_whole(prefixes: list[str]) -> None:
    valid = build(prefixes)[1]
    loader = build_pretraining_data_loader(valid, 0, 4)
    assert loader is not None
    batches = [*loader]
    assert len(batches) == len(valid)
    assert all(batch["tokens"].shape == (1, 16) for batch in batches)
