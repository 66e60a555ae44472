"""Stand-in for `megatron.core.datasets.multimodal_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.gpt_dataset import GPTDataset, GPTDatasetConfig
from binidx.dataset.assemble import text_and_images
from binidx.dataset.megatron import mock


@dataclass(repr=False)
class MultimodalDatasetConfig(GPTDatasetConfig, text_and_images.MultimodalDatasetConfig):
    """binidx's config with Megatron's defaults."""


class MockMultimodalDataset(mock.MockMultimodalDataset, GPTDataset):
    """binidx's dataset under Megatron's name."""
