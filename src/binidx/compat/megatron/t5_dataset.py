"""Stand-in for `megatron.core.datasets.t5_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig
from binidx.dataset.assemble import sentences
from binidx.dataset.megatron import t5


@dataclass(repr=False)
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig, sentences.T5MaskedWordPieceDatasetConfig):
    """binidx's config under Megatron's name."""


class T5MaskedWordPieceDataset(MaskedWordPieceDataset, t5.T5MaskedWordPieceDataset):
    """binidx's dataset under Megatron's name."""
