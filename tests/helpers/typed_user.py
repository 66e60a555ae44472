"""Script of a user who checks types strictly: `make lint` runs mypy over it; what is Any there is an error here."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from numpy.typing import NDArray

import binidx


def train(prefix: str) -> float:
    """Read samples and batches, as a trainer does."""
    dataset = binidx.load_dataset(prefix, 4096, split="99,1,0", storage_options={"anon": True}, read_plan=True)
    assert_type(dataset[0], binidx.GPTBatch)
    assert_type(dataset[:2], list[binidx.GPTBatch])
    total = 0.0
    for batch in dataset.loader(batch_size=8):
        assert_type(batch, binidx.GPTBatch)
        assert_type(batch["tokens"], torch.Tensor)
        total += float(batch["loss_mask"].sum())
    assert_type(dataset.loader(batch_size=8)[41_200], binidx.GPTBatch)
    return total


def read(prefix: str) -> NDArray[Any]:
    """Read stored sequences."""
    stored = binidx.IndexedDataset(prefix)
    assert_type(stored[0:2], list[NDArray[Any]])
    assert_type(stored.get(0, offset=1), NDArray[Any])
    return stored[0]


def misspelt(prefix: str) -> None:
    """Calls that a type checker must refuse: mypy reports an ignore that nothing needs."""
    binidx.load_dataset(prefix, 4096, path_to_cahce="indices")  # type: ignore[call-arg]
    binidx.load_dataset(prefix, 4096, read_plan="yes")  # type: ignore[arg-type]
