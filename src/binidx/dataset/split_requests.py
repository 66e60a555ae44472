"""The splits of a run from its config alone, before anything is opened: their shares, and their requests.

config, sizes ─► group     splits whose datasets are of the same prefixes: those of `blend`, or one of `blend_per_split`
              ─► requests  of each split: of the only prefix, or of the blend; of validation sets, one of each prefix
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from binidx.dataset.config import BlendedMegatronDatasetConfig, Bookends, Split, SplitMatrix
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import request_order
from binidx.index.blend import normalize
from binidx.order.requests import BlendRequest, Request

Sizes = Sequence[int | None]

WHOLE: Bookends = (0.0, 1.0)

SplitRequests = Mapping[Split, Sequence[Request]]
"""The request of each split that has a share; several of a list of validation sets."""


@dataclass(frozen=True)
class SplitGroup:
    """Splits whose datasets are of the same prefixes.

    Args:
        prefixes: prefix of each dataset, as the user wrote it.
        weights: share of each dataset; None: not weighted.
        matrix: start and end of each split in the sequences, from 0 to 1; None for a split without a share.
        sizes: the least number of samples of each split; None is one epoch.
        is_blend: whether a split is a blend of its datasets.
    """

    prefixes: Sequence[str]
    weights: Sequence[float] | None
    matrix: SplitMatrix
    sizes: Sizes
    is_blend: bool

    @property
    def splits(self) -> list[Split]:
        """The splits with a share."""
        return [split for split, bookends in zip(Split, self.matrix, strict=True) if bookends is not None]

    def sizes_per_dataset(self, surplus: float) -> Sequence[Sizes]:
        """Return, for each dataset, the number of samples to build of each split.

        Args:
            surplus: `mid_level_dataset_surplus` of the config.
        """
        if not self.is_blend:
            return [self.sizes] * len(self.prefixes)
        return sizes_per_dataset(len(self.prefixes), self.weights, self.sizes, surplus)

    def request_blend(self, split: Split, parts: Sequence[Request], config: Any) -> BlendRequest:
        """Return the request of the blend of a split.

        With weights, the share of each source in the size is rounded up; else a source has samples in proportion to
        their number.

        Args:
            split: the split.
            parts: the request of each source.
            config: options of the run.

        Source: Megatron Core, `BlendedMegatronDatasetBuilder`.
        """
        weights, size = self.weights, self.sizes[split.value]
        if weights is not None and size is not None:
            weights = normalize(list(weights))
            size = sum(ceil(size * share) for share in weights)
        surplus = config.mid_level_dataset_surplus
        return BlendRequest(parts, weights, size, split.name, config.cache_directory, surplus=surplus)


def group_splits(config: BlendedMegatronDatasetConfig, sizes: Sizes) -> list[SplitGroup]:
    """Return the splits of a config, those that share their prefixes together.

    Args:
        config: options of the run.
        sizes: the least number of samples of each split; None is one epoch.
    """
    if config.blend is not None:
        prefixes, weights = config.blend
        matrix = config.split_matrix or [None] * len(Split)
        return [SplitGroup(prefixes, weights, matrix, sizes, len(prefixes) > 1 or weights is not None)]
    groups = []
    for split, blend in zip(Split, config.blend_per_split or (), strict=False):
        if blend is not None:
            is_list = config.multiple_validation_sets and split is Split.valid
            matrix = [WHOLE if other is split else None for other in Split]
            groups.append(SplitGroup(*blend, matrix, sizes, len(blend[0]) > 1 and not is_list))
    return groups


def request_splits(kind: type[MegatronDataset], config: BlendedMegatronDatasetConfig, sizes: Sizes) -> SplitRequests:
    """Return the requests of all splits, with the order for which the config asks.

    Args:
        kind: class of the datasets.
        config, sizes: as for `group_splits`.
    """
    requests: dict[Split, Sequence[Request]] = {}
    for group in group_splits(config, sizes):
        of_prefixes = [*zip(group.prefixes, group.sizes_per_dataset(config.mid_level_dataset_surplus), strict=True)]
        for split in group.splits:
            bookends = group.matrix[split.value]
            parts = [kind.request_source(each, of[split.value], split, config, bookends) for each, of in of_prefixes]
            asked = [group.request_blend(split, parts, config)] if group.is_blend else parts
            requests[split] = [request_order(config, request) for request in asked]
    return requests


def sizes_per_dataset(
    num_datasets: int, weights: Sequence[float] | None, sizes: Sizes, surplus: float
) -> Sequence[Sizes]:
    """Return, for each dataset, the number of samples to build of each split.

    That is its share by weight, rounded up, plus `surplus`, a fraction of it, rounded up again. A size of None is one
    epoch; without weights all are None.

    Args:
        num_datasets: number of datasets of the blend.
        weights: share of each dataset; None: not weighted.
        sizes: number of samples of each split; None is one epoch.
        surplus: `mid_level_dataset_surplus` of the config.

    Source: Megatron Core, which also rounds twice.
    """
    if weights is None:
        return [[None] * len(sizes)] * num_datasets
    shares = normalize(list(weights))
    return [[None if size is None else ceil(ceil(size * share) * (1 + surplus)) for size in sizes] for share in shares]
