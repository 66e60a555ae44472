"""Stands in for `megatron.core.datasets.masked_dataset`."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from binidx.compat.megatron.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from binidx.compat.megatron.indexed_dataset import IndexedDataset
from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.dataset import masked
from binidx.dataset.megatron_dataset import required

logger = logging.getLogger(__name__)


@dataclass
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig, masked.MaskedWordPieceDatasetConfig):
    """Ours."""

    def __post_init__(self) -> None:
        super().__post_init__()


class MaskedWordPieceDataset(masked.MaskedWordPieceDataset, MegatronDataset):
    """Ours, of low-level datasets of the class that scripts know."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: masked.MaskedWordPieceDatasetConfig
    ) -> IndexedDataset:
        prefix = required(dataset_path)
        return IndexedDataset(prefix, mmap=config.mmap_bin_files, storage_options=config.storage_options)
