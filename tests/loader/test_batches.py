"""A batch is its samples stacked, whether C laid it out or torch stacked it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from torch.utils.data import default_collate

import binidx
from binidx.dataset.torch_bridge import Samples
from binidx.loader.collate import collate


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("batches")
    rng = np.random.default_rng(3)
    dtypes = (np.uint16, np.int32)
    return [
        write_with_megatron(directory / f"s{i}", rng.integers(0, 40, 200).astype(np.int32), rng, dtype)
        for i, dtype in enumerate(dtypes)
    ]


def blend(prefixes: list[str], kind: type[binidx.GPTDataset] = binidx.GPTDataset, **changes: Any) -> Any:
    config = binidx.GPTDatasetConfig(**{
        "random_seed": 1, "sequence_length": 24, "blend": (prefixes, [1.0] * len(prefixes)), "split": "1,0,0",
        "tokenizer": TOKENIZER, "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
        **changes,
    })  # fmt: skip
    return binidx.BlendedMegatronDatasetBuilder(kind, [200, 0, 0], lambda: True, config).build()[0]


FLAGS = ["reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"]


@pytest.mark.parametrize("flags", [[], *([flag] for flag in FLAGS), FLAGS], ids=str)
def test_a_batch_is_its_samples_stacked(prefixes: list[str], flags: list[str]) -> None:
    dataset = blend(prefixes, **dict.fromkeys(flags, True))
    samples = dataset.__getitems__(range(16))
    assert isinstance(samples, Samples)
    assert_same_sample(collate(samples), default_collate([dataset[idx] for idx in range(16)]))
    assert {int(dataset_id) for dataset_id in collate(samples)["dataset_id"]} == {0, 1}


def test_writing_to_a_batch_changes_nothing_else(prefixes: list[str]) -> None:
    dataset = blend(prefixes, create_attention_mask=True)
    before = collate(dataset.__getitems__(range(4)))
    for column in collate(dataset.__getitems__(range(4))).values():
        column.zero_()
    assert_same_sample(collate(dataset.__getitems__(range(4))), before)


def test_spans_and_assembly_of_a_subclass_are_used(prefixes: list[str]) -> None:
    class Reversed(binidx.GPTDataset):
        def assemble(self, idx: Any, sequences: Any) -> Any:
            return super().assemble(idx, [sequence[::-1] for sequence in sequences])

    class First(binidx.GPTDataset):
        def spans(self, idx: Any) -> Any:
            return super().spans(0)

    plain = blend(prefixes)
    reversed_, first = (blend(prefixes, kind) for kind in (Reversed, First))
    assert (plain.dataset_sample_index == first.dataset_sample_index).all()
    for idx, sample in enumerate(reversed_.__getitems__(range(8))):
        assert not (sample["tokens"] == plain[idx]["tokens"]).all()
    for sample in first.__getitems__(range(8)):
        needed = plain.datasets[int(sample["dataset_id"])][0]
        assert (sample["tokens"] == needed["tokens"]).all()


def test_a_loader_gives_what_the_samples_are(prefixes: list[str], tmp_path: Path) -> None:
    dataset = blend(prefixes)
    loader = binidx.build_pretraining_data_loader(dataset, 0, 8)
    assert loader is not None
    for step, batch in enumerate(loader):
        assert_same_sample(batch, default_collate([dataset[idx] for idx in range(8 * step, 8 * step + 8)]))


def test_datasets_of_other_configs_keep_theirs_in_one_blend(prefixes: list[str]) -> None:
    plain, masking = (blend(prefixes[:1], eod_mask_loss=value).datasets[0] for value in (False, True))
    both = binidx.megatron.BlendedDataset([plain, masking], [0.5, 0.5], 20, plain.config)
    for sample, dataset_id, number in zip(
        both.__getitems__(range(20)), both.dataset_index, both.dataset_sample_index, strict=True
    ):
        assert_same_sample(sample, {"dataset_id": dataset_id, **[plain, masking][dataset_id][int(number)]})


def test_an_empty_batch_is_empty(prefixes: list[str]) -> None:
    dataset = blend(prefixes)
    assert list(dataset.__getitems__([])) == []
    assert list(dataset.datasets[0].__getitems__([])) == []
