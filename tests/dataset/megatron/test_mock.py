"""Made-up tokens are Megatron Core's, and made up only for those who ask."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, Tokenizer, assert_same_sample
from helpers.oracle import megatron
from torch.utils.data import default_collate

import binidx
from binidx.dataset.megatron.mock import MockGPTDataset, MockGPTLowLevelDataset
from binidx.errors import ConfigError
from binidx.loader.collate import collate
from binidx.loader.torch_loader import build_pretraining_data_loader

CONFIG: dict[str, Any] = {
    "random_seed": 1234,
    "sequence_length": 64,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": True,
    "create_attention_mask": False,
    "tokenizer": TOKENIZER,
}


def ours(sizes: Any = (300, 20, None), **changes: Any) -> list[Any]:
    config = binidx.GPTDatasetConfig(**{**CONFIG, **changes})
    return binidx.BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


def theirs(sizes: Any = (300, 20, None), **changes: Any) -> list[Any]:
    config = megatron.gpt.GPTDatasetConfig(**{**CONFIG, **changes})
    return megatron.builder.BlendedMegatronDatasetBuilder(
        megatron.gpt.MockGPTDataset, list(sizes), lambda: True, config
    ).build()


def test_made_up_sequences_are_megatrons() -> None:
    tokenizer = Tokenizer(vocab_size=1000, eod=7)
    found, needed = MockGPTLowLevelDataset(tokenizer), megatron.gpt.MockGPTLowLevelDataset(tokenizer)
    assert len(found) == len(needed) == 100_000
    np.testing.assert_array_equal(found.sequence_lengths, needed.sequence_lengths)
    for idx in (0, 1, 77, 99_999, int(np.argmin(found.sequence_lengths))):
        assert found[idx].dtype == needed[idx].dtype
        np.testing.assert_array_equal(found[idx], needed[idx])
        length = len(needed[idx])
        np.testing.assert_array_equal(found.get(idx, length // 2), needed.get(idx, length // 2))
        np.testing.assert_array_equal(found.get(idx, 0, length // 2), needed.get(idx, 0, length // 2))


@pytest.mark.parametrize("split", [None, "969, 30, 1"])
def test_made_up_runs_are_megatrons_whatever_split_they_name(split: str | None) -> None:
    for found, needed in zip(ours(split=split), theirs(split=split), strict=True):
        assert len(found) == len(needed)
        assert found.unique_description == needed.unique_description
        np.testing.assert_array_equal(found.shuffle_index, needed.shuffle_index)
        for idx in (0, 5, len(found) - 1, None):
            assert_same_sample(found[idx], needed[idx])


def test_batches_of_made_up_samples_are_stacked_and_pickle() -> None:
    (train, *_), (needed, *_) = ours(), theirs()
    batch = collate(train.__getitems__(range(8)))
    assert_same_sample(batch, default_collate([needed[idx] for idx in range(8)]))
    assert_same_sample(pickle.loads(pickle.dumps(train))[3], needed[3])
    loader = build_pretraining_data_loader(train, 8, 4, look_ahead=2)
    assert loader is not None
    assert_same_sample(next(iter(loader)), default_collate([needed[idx] for idx in range(8, 12)]))
    assert train.read_tokens([3]).shape == (1, 65)


def test_a_config_without_data_is_an_error_for_other_kinds() -> None:
    config = binidx.GPTDatasetConfig(**CONFIG)
    assert (config.mock, config.split) == (True, "1,1,1")
    builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [1, 1, 1], lambda: True, config)
    with pytest.raises(ConfigError, match=r"blend: found none, .* for made-up tokens build MockGPTDataset"):
        builder.build()
    with pytest.raises(ConfigError, match="blend: found none, a run needs"):
        binidx.Run(config, [1, 1, 1], micro_batch_size=1)


def test_made_up_tokens_do_not_stand_in_for_a_blend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a blend, needs none"):
        ours(blend=([f"{tmp_path}/en"], None), split="1,0,0")
