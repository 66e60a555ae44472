"""Stand-in for `megatron.training.datasets.fim_dataset`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from binidx.compat.megatron.gpt_dataset import GPTDataset, GPTDatasetConfig
from binidx.dataset.assemble import fill_in_middle
from binidx.dataset.megatron import gpt_variants

logger = logging.getLogger(__name__)


@dataclass(repr=False)
class GPTFIMDatasetConfig(GPTDatasetConfig, fill_in_middle.GPTFIMDatasetConfig):
    """binidx's config with Megatron's defaults."""


class GPTFIMDataset(GPTDataset, gpt_variants.GPTFIMDataset):
    """binidx's dataset: seed and number decide a sample; Megatron's also depends on the samples read before it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.fim_rate, self.fim_spm_rate = self.config.fim_rate, self.config.fim_spm_rate
        self.fragment_fim_rate = self.config.fim_fragment_rate
        logger.warning("GPTFIMDataset: cuts differ from Megatron's, which depend on the samples read before")
