"""Stands in for `megatron.training.datasets.fim_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.gpt_dataset import GPTDataset, GPTDatasetConfig
from binidx.dataset import fim


@dataclass
class GPTFIMDatasetConfig(GPTDatasetConfig, fim.GPTFIMDatasetConfig):
    """Ours with Megatron's defaults."""

    def __post_init__(self) -> None:
        super().__post_init__()


class GPTFIMDataset(GPTDataset, fim.GPTFIMDataset):
    """Ours: a sample is a function of seed and number, where Megatron's depends on those that were read before it."""
