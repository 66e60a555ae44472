"""Stand-in for `megatron.core.datasets.masked_dataset`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from binidx.compat.megatron.indexed_dataset import IndexedDataset
from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.assemble import masking as options
from binidx.dataset.megatron import masked_sentences
from binidx.dataset.megatron.megatron_dataset import open_tokens


@dataclass(repr=False)
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig, options.MaskedWordPieceDatasetConfig):
    """binidx's config under Megatron's name."""


class MaskedWordPieceDataset(masked_sentences.MaskedWordPieceDataset, MegatronDataset):
    """binidx's dataset, which opens its `.bin`/`.idx` pairs as the stand-in `IndexedDataset`."""

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: options.MaskedWordPieceDatasetConfig
    ) -> IndexedDataset:
        return open_tokens(IndexedDataset, dataset_path, config)
