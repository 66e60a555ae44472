"""GPT samples in the order they are stored, shuffled in blocks: for thin links, and chosen by name alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.split import Split
from binidx.errors import ConfigError
from binidx.index.block_shuffle import build_block_shuffle_index
from binidx.index.building import Building
from binidx.index.documents import Documents, fill
from binidx.index.epochs import EpochPlan
from binidx.index.growth import Order
from binidx.index.sample import build_sample_index
from binidx.native import RandomState


@dataclass
class BlockShuffledGPTDatasetConfig(GPTDatasetConfig):
    """What block-shuffled samples need to know besides.

    Args:
        block_samples: neighbouring samples that are served near each other.
        blocks_mixed: blocks whose samples are shuffled together.
    """

    block_samples: int = 256
    blocks_mixed: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_samples", "blocks_mixed"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}, needs at least 1")


class BlockShuffledGPTDataset(GPTDataset):
    """GPT samples cut from the documents as they are stored, shuffled in blocks: `index.block_shuffle` says the price.

    Not Megatron's order: shuffle the corpus once (`binidx shuffle`) before you train so. Every epoch is served before
    the next, so a run that grows keeps its order.

    Source: ours; WebDataset and MosaicML Streaming shuffle in this way.
    """

    config: BlockShuffledGPTDatasetConfig
    config_class = BlockShuffledGPTDatasetConfig

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "block_samples", "blocks_mixed"]

    @classmethod
    def fingerprint_of(cls, documents: Documents, split: Split, config: Any) -> dict[str, Any]:
        blocks = {"block_samples": config.block_samples, "blocks_mixed": config.blocks_mixed}
        return {**super().fingerprint_of(documents, split, config), **blocks}

    @property
    def order_identity(self) -> dict[str, Any]:
        # Where a partial sample is padded it comes last in all, so it moves when another epoch follows.
        end = None if self._drop_last_partial() else self._plan.num_samples
        return {**self._fingerprint(), "data": self.dataset.identity, "end": end}

    def _order(self) -> Order:
        return replace(super()._order(), grows=self._drop_last_partial())

    def _build_planned(self, building: Building, plan: EpochPlan, threads: int) -> None:
        size = len(self._documents)
        with building.array("document_index", (plan.num_epochs * size,), np.int32) as document_index:
            for epoch in document_index.reshape(plan.num_epochs, size):
                fill(epoch, self._documents, threads)
        sample_index = build_sample_index(
            self.dataset.sequence_lengths,
            document_index,
            self.config.sequence_length,
            plan.num_tokens,
            add_extra_token=self.config.add_extra_token_to_sequence,
            drop_last_partial=self._drop_last_partial(),
            threads=threads,
        )
        with building.array("sample_index", sample_index.shape, sample_index.dtype) as rows:
            rows[:] = sample_index
        order = build_block_shuffle_index(
            self._samples_per_epoch(plan),
            self.config.block_samples,
            self.config.blocks_mixed,
            RandomState(self.config.random_seed),
        )
        with building.array("shuffle_index", order.shape, order.dtype, in_order=False) as shuffle_index:
            shuffle_index[:] = order

    def _samples_per_epoch(self, plan: EpochPlan) -> NDArray[np.int64]:
        """Samples that end in each epoch: so many whether another one follows or not."""
        tokens = plan.tokens_per_epoch * np.arange(1, plan.num_epochs + 1) - self.config.add_extra_token_to_sequence
        ends = np.maximum(tokens, 0) // self.config.sequence_length
        ends[-1] = plan.num_samples
        return np.diff(ends, prepend=0)
