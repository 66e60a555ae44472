"""Stand-in for `megatron.core.datasets.masked_dataset`."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from binidx.compat.megatron.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from binidx.compat.megatron.indexed_dataset import IndexedDataset
from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.compat.megatron.utils import Split
from binidx.dataset.kinds import masked_sentences
from binidx.dataset.megatron_dataset import required

logger = logging.getLogger(__name__)


@dataclass
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig, masked_sentences.MaskedWordPieceDatasetConfig):
    """Our config under Megatron's name."""


class MaskedWordPieceDataset(masked_sentences.MaskedWordPieceDataset, MegatronDataset):
    """Our dataset, over low-level datasets of the stand-in class."""

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: masked_sentences.MaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: masked_sentences.MaskedWordPieceDatasetConfig
    ) -> IndexedDataset:
        prefix = required(dataset_path)
        return IndexedDataset(prefix, mmap=config.mmap_bin_files, storage_options=config.storage_options)
