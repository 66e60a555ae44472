"""Stands in for `megatron.core.datasets.blended_megatron_dataset_builder`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from binidx.compat.megatron.blended_dataset import BlendedDataset
from binidx.compat.megatron.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig,
)
from binidx.compat.megatron.gpt_dataset import GPTDatasetConfig as GPTDatasetConfig
from binidx.compat.megatron.megatron_dataset import LowLevelDataset, MegatronDataset
from binidx.compat.megatron.utils import Split
from binidx.compat.megatron.utils import normalize as normalize
from binidx.dataset import builder
from binidx.dataset.torch_bridge import is_distributed
from binidx.index.cache.build_context import BuildContext

logger = logging.getLogger(__name__)

MidLevelDataset = MegatronDataset
TopLevelDataset = BlendedDataset | MidLevelDataset
DistributedDataset = TopLevelDataset | MidLevelDataset | LowLevelDataset | torch.utils.data.Dataset[Any]

BUILDS = ("__init__", "_build_document_sample_shuffle_indices", "_build_indices")
"""Methods in which datasets build and cache what they need."""


class BlendedMegatronDatasetBuilder(builder.BlendedMegatronDatasetBuilder):
    """Ours; datasets that users build in their own way are built on rank 0 first, since they may count on its files."""

    blended_class = BlendedDataset

    def _build(self, context: BuildContext) -> list[Any]:
        if builds_as_ours(self.cls):
            return super()._build(context)
        return list(rank_0_first(partial(super()._build, context)))

    def _build_blended_dataset_splits(self) -> list[Any]:
        return self._build(BuildContext())

    def _build_megatron_dataset_splits(
        self, dataset_path: str | None, split: Any, sizes: Any, synchronize_ranks: bool = True
    ) -> list[Any]:
        """Adapts `_build_prefix`, on the ranks that build."""
        if is_distributed() and not self.is_built_on_rank():
            return [None] * len(Split)
        return [*self._build_prefix(dataset_path, split, sizes, BuildContext())]

    @staticmethod
    def build_generic_dataset(
        cls: Callable[..., Any], is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """`cls(*args)` on the ranks that build, None on others; with `synchronize_ranks`, on rank 0 first."""

        def build() -> Any:
            return cls(*args) if not is_distributed() or is_built_on_rank() else None

        return rank_0_first(build) if synchronize_ranks else build()


def builds_as_ours(cls: type) -> bool:
    """Whether it builds by methods of ours alone, which need no order of ranks."""
    return all(getattr(cls, name).__module__.startswith("binidx.") for name in BUILDS if hasattr(cls, name))


def rank_0_first(build: Callable[[], Any]) -> Any:
    """What each rank builds; all others after rank 0. It may call for barriers of its own, as long as all ranks do.

    Source: Megatron Core; there ranks wait at the barrier for ever when rank 0 raises.
    """
    if not is_distributed():
        return build()
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
        return build()
    try:
        return build()
    finally:
        torch.distributed.barrier()


def _get_size_per_split_per_dataset(
    normalized_weights: Sequence[float], target_size_per_split: Sequence[int | None], surplus: float = 0.0
) -> list[Any]:
    """Adapts `sizes_of_shares`."""
    return builder.sizes_of_shares(normalized_weights, target_size_per_split, surplus)
