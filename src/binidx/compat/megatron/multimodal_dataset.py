"""Stands in for `megatron.core.datasets.multimodal_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from binidx.dataset.kinds import multimodal


@dataclass
class MultimodalDatasetConfig(GPTDatasetConfig, multimodal.MultimodalDatasetConfig):
    """Ours with Megatron's defaults."""

    def __post_init__(self) -> None:
        super().__post_init__()


class MockMultimodalDataset(MockGPTDataset, multimodal.MockMultimodalDataset):
    """Ours."""
