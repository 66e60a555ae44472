"""Stand-in for `megatron.core.datasets.bert_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig
from binidx.dataset.assemble import sentences
from binidx.dataset.megatron import bert


@dataclass(repr=False)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig, sentences.BERTMaskedWordPieceDatasetConfig):
    """binidx's config under Megatron's name."""


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset, bert.BERTMaskedWordPieceDataset):
    """binidx's dataset under Megatron's name."""
