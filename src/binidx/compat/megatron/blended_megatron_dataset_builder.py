"""Stand-in for `megatron.core.datasets.blended_megatron_dataset_builder`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from binidx.compat.megatron.blended_dataset import BlendedDataset
from binidx.dataset import builder
from binidx.dataset.builder import Built
from binidx.dataset.config import Split, SplitMatrix
from binidx.dataset.megatron.ordered_dataset import building, current_build, own_methods
from binidx.dataset.split_requests import Sizes
from binidx.dataset.torch_bridge import is_distributed
from binidx.errors import ConfigError
from binidx.index.cache.index_cache import BuildContext, OnOutcome

BUILDS = ("__init__", "_build_document_sample_shuffle_indices", "_build_indices")
"""Methods in which datasets build and cache their indices."""


class FailedAssertionError(ConfigError, AssertionError):
    """ConfigError for a call that fails an assertion in Megatron, so that scripts may catch either error."""


@contextlib.contextmanager
def failed_assertions() -> Iterator[None]:
    """Raise a ConfigError as a FailedAssertionError."""
    try:
        yield
    except ConfigError as error:
        raise FailedAssertionError(*error.args) from error


class BlendedMegatronDatasetBuilder(builder.BlendedMegatronDatasetBuilder):
    """binidx's builder; rank 0 builds first if a class has build methods of its own, which may need rank 0's files."""

    blended_class = BlendedDataset

    def __init__(self, *args: Any, **options: Any) -> None:
        with failed_assertions():
            super().__init__(*args, **options)

    def build(self, *, on_outcome: OnOutcome = None) -> Built:
        """Build the datasets as binidx's builder does; raise its ConfigErrors as FailedAssertionError."""
        with failed_assertions():
            return super().build(on_outcome=on_outcome)

    def _build(self, context: BuildContext) -> list[Any]:
        with building(context):
            build = self._build_blended_dataset_splits
            return [*(rank_0_first(build) if own_methods(self.cls, *BUILDS) else build())]

    def _build_blended_dataset_splits(self) -> list[Any]:
        return super()._build(current_build())

    def _build_prefix(self, prefix: str | None, matrix: SplitMatrix, sizes: Sizes, context: BuildContext) -> list[Any]:
        with building(context):
            return [*self._build_megatron_dataset_splits(prefix, matrix, sizes)]

    def _build_megatron_dataset_splits(
        self, dataset_path: str | None, split: Any, sizes: Any, synchronize_ranks: bool = True
    ) -> list[Any]:
        """Return the datasets of a prefix, one for each split, by `_build_prefix`; Nones on ranks that do not build."""
        if is_distributed() and not self.is_built_on_rank():
            return [None] * len(Split)
        return super()._build_prefix(dataset_path, split, sizes, current_build())

    def _construct(self, kind: Callable[..., Any], *arguments: Any) -> Any:
        return self.build_generic_dataset(kind, self.is_built_on_rank, False, *arguments)

    @staticmethod
    def build_generic_dataset(
        cls: Callable[..., Any], is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Return `cls(*args)` on ranks that build, None on others; with `synchronize_ranks`, rank 0 builds first.

        Args:
            cls: class of the dataset, or a function.
            is_built_on_rank: returns whether this process needs the dataset.
            synchronize_ranks: let rank 0 build before the other ranks.
            args: arguments of `cls`.
        """

        def build() -> Any:
            return cls(*args) if not is_distributed() or is_built_on_rank() else None

        return rank_0_first(build) if synchronize_ranks else build()


def rank_0_first(build: Callable[[], Any]) -> Any:
    """Return the result of `build`, called on rank 0 first, then on the other ranks; `build` may contain barriers.

    Source: Megatron Core, where the other ranks wait at the barrier for ever if rank 0 raises.
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
