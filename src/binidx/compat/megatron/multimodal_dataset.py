"""Stand-in for `megatron.core.datasets.multimodal_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from binidx.dataset.kinds import multimodal


@dataclass
class MultimodalDatasetConfig(GPTDatasetConfig, multimodal.MultimodalDatasetConfig):
    """Our config with Megatron's defaults."""


class MockMultimodalDataset(MockGPTDataset, multimodal.MockMultimodalDataset):
    """Our dataset under Megatron's name."""
