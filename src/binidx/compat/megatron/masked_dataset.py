"""Stand-in for `megatron.core.datasets.masked_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from binidx.compat.megatron.indexed_dataset import IndexedDataset
from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.kinds import masked_sentences
from binidx.dataset.megatron_dataset import required


@dataclass
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig, masked_sentences.MaskedWordPieceDatasetConfig):
    """binidx's config under Megatron's name."""


class MaskedWordPieceDataset(masked_sentences.MaskedWordPieceDataset, MegatronDataset):
    """binidx's dataset, which opens its `.bin`/`.idx` pairs as the stand-in `IndexedDataset`."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: masked_sentences.MaskedWordPieceDatasetConfig
    ) -> IndexedDataset:
        prefix = required(dataset_path)
        return IndexedDataset(prefix, mmap=config.mmap_bin_files, storage_options=config.storage_options)
