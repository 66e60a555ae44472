"""Requests of the splits of a run, from its config alone, before anything is opened.

config, sizes ─► group     splits whose datasets are of the same prefixes: those of `blend`, or one of `blend_per_split`
              ─► requests  of each split: of the only prefix, or of the blend; of validation sets, one of each prefix
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from binidx.dataset.blend_arguments import Blend
from binidx.dataset.config import BlendedMegatronDatasetConfig, Bookends, Split, SplitMatrix
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import cache_directory, request_order
from binidx.index.blend import normalize
from binidx.order.requests import BlendRequest, Request, SourceRequest

Sizes = Sequence[int | None]

WHOLE: Bookends = (0.0, 1.0)

SplitRequests = Mapping[Split, Sequence[Request]]
"""The request of each split that has a share; several of a list of validation sets."""


def group_requests(
    kind: type[MegatronDataset], config: BlendedMegatronDatasetConfig, sizes: Sizes
) -> list[SplitRequests]:
    """Return the requests of Megatron's orders of all splits: of those that share their prefixes together.

    Args:
        kind: class of the datasets.
        config: options of the run.
        sizes: the least number of samples of each split; None is one epoch.
    """

    def group(blend: Blend, matrix: SplitMatrix, blended: bool) -> SplitRequests:
        prefixes, weights = blend
        asked: Sequence[Sizes] = [sizes] * len(prefixes)
        if blended:
            asked = sizes_per_dataset(len(prefixes), weights, sizes, config.mid_level_dataset_surplus)

        def request(split: Split, bookends: Bookends) -> Sequence[Request]:
            counts = [of_prefix[split.value] for of_prefix in asked]
            sources = [
                kind.request_source(prefix, count, split, config, bookends)
                for prefix, count in zip(prefixes, counts, strict=True)
            ]
            return [request_blend(sources, weights, sizes[split.value], config)] if blended else sources

        pairs = zip(Split, matrix, strict=True)
        return {split: request(split, bookends) for split, bookends in pairs if bookends is not None}

    if config.blend is not None:
        prefixes, weights = config.blend
        return [
            group(config.blend, config.split_matrix or [None] * len(Split), len(prefixes) > 1 or weights is not None)
        ]
    groups = []
    for split, blend in zip(Split, config.blend_per_split or (), strict=False):
        if blend is not None:
            is_list = config.multiple_validation_sets and split is Split.valid
            matrix = [WHOLE if other is split else None for other in Split]
            groups.append(group(blend, matrix, len(blend[0]) > 1 and not is_list))
    return groups


def request_blend(
    sources: Sequence[SourceRequest], weights: Sequence[float] | None, size: int | None, config: Any
) -> BlendRequest:
    """Return the request of a blend of sources.

    Args:
        sources: the request of each source.
        weights: one for each source; None: in proportion to their numbers of samples.
        size: the least number of samples of the split: with weights, the share of each source is rounded up; None is
            all samples.
        config: options of the run.

    Source: Megatron Core, `BlendedMegatronDatasetBuilder`.
    """
    if weights is not None and size is not None:
        weights = normalize(list(weights))
        size = sum(ceil(size * share) for share in weights)
    split, surplus = sources[0].split, config.mid_level_dataset_surplus
    return BlendRequest(sources, weights, size, split, cache_directory(config), surplus=surplus)


def request_splits(kind: type[MegatronDataset], config: BlendedMegatronDatasetConfig, sizes: Sizes) -> SplitRequests:
    """Return the requests of all splits, with the order for which the config asks.

    Args:
        kind, config, sizes: as for `group_requests`.
    """
    return {
        split: [request_order(config, request) for request in requests]
        for group in group_requests(kind, config, sizes)
        for split, requests in group.items()
    }


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
