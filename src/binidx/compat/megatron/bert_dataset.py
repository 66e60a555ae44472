"""Stands in for `megatron.core.datasets.bert_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.indexed_dataset import IndexedDataset as IndexedDataset
from binidx.compat.megatron.masked_dataset import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig
from binidx.compat.megatron.utils import Split as Split
from binidx.dataset.kinds import bert


@dataclass
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig, bert.BERTMaskedWordPieceDatasetConfig):
    """Ours."""

    def __post_init__(self) -> None:
        super().__post_init__()


class BERTMaskedWordPieceDataset(MaskedWordPieceDataset, bert.BERTMaskedWordPieceDataset):
    """Ours."""
