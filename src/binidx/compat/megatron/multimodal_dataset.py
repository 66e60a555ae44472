"""Stand-in for `megatron.core.datasets.multimodal_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from binidx.dataset.assemble import text_and_images
from binidx.dataset.megatron import multimodal


@dataclass(repr=False)
class MultimodalDatasetConfig(GPTDatasetConfig, text_and_images.MultimodalDatasetConfig):
    """binidx's config with Megatron's defaults."""


class MockMultimodalDataset(MockGPTDataset, multimodal.MockMultimodalDataset):
    """binidx's dataset under Megatron's name."""
