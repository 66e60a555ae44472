"""Samples that are drawn: the same for the same number and epoch, wherever they are read."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import binidx


class Drawn(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, idx: int) -> torch.Tensor:
        return torch.tensor([idx, torch.rand(1).item(), random.random(), np.random.random()])


def epochs(num_workers: int, persistent: bool = False, consumed: int = 0) -> list[Any]:
    dataset = binidx.megatron.RandomSeedDataset(Drawn(), 5)
    loader = binidx.build_pretraining_data_loader(
        dataset, consumed, 4, dataloader_type="cyclic", num_workers=num_workers, persistent_workers=persistent
    )
    assert loader is not None
    return [torch.cat([*loader]) for _ in range(3 - consumed // 24)]


@pytest.mark.parametrize(("num_workers", "persistent"), [(1, False), (2, True)])
def test_workers_draw_what_the_trainer_would_in_every_epoch(num_workers: int, persistent: bool) -> None:
    for ours, here in zip(epochs(num_workers, persistent), epochs(0), strict=True):
        assert (ours == here).all()


def test_each_epoch_draws_anew_and_a_resumed_one_the_same() -> None:
    first, second, third = epochs(0)
    by_number = [epoch[epoch[:, 0].argsort()] for epoch in (first, second, third)]
    assert (by_number[0][:, 0] == by_number[1][:, 0]).all()
    assert not (by_number[0][:, 1:] == by_number[1][:, 1:]).any()
    assert (epochs(0, consumed=48)[0] == third).all()


def test_the_seed_of_a_sample_is_seed_and_epoch_and_number_as_in_megatron() -> None:
    dataset = binidx.megatron.RandomSeedDataset(Drawn(), 5)
    dataset.set_epoch(2)
    drawn = dataset[7][1]
    torch.manual_seed(5 + 2 + 7)
    assert drawn == torch.rand(1).item()
