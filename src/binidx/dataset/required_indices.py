"""Indices that a run needs, planned from its config alone, before anything is opened.

config, sizes ─► Distribution   prefixes that are built together: splits, and samples of each prefix
              ─► RequiredIndex  one per prefix and split: number of samples, and the name of its cache
                 RequiredBlend  one per split of several prefixes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from binidx.dataset.blended import BlendedDataset, blend_identifiers
from binidx.dataset.builder import Sizes, plan_distributions
from binidx.dataset.config import (
    Bookends,
    GPTDatasetConfig,
    Split,
    normalize,
)
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.megatron_dataset import describe, digest, recorded_name
from binidx.index.cache.index_files import IndexFiles


@dataclass(frozen=True)
class RequiredIndex:
    """Index of one split of one prefix.

    Args:
        num_samples: number of samples to build; None is one epoch.
        bookends: start and end of the split in the sequences, from 0 to 1.
    """

    split: Split
    prefix: str
    num_samples: int | None
    bookends: Bookends

    def identifiers(self, config: GPTDatasetConfig) -> OrderedDict[str, Any]:
        return GPTDataset.identify(self.prefix, self.num_samples, self.split, config)

    def files(self, config: GPTDatasetConfig) -> IndexFiles:
        """Return the cache files of the index, whether or not they exist."""
        return GPTDataset.name_files(self.prefix, describe(self.identifiers(config)), self.split, config)


@dataclass(frozen=True)
class RequiredBlend:
    """Blend of one split.

    Args:
        members: the index of each dataset.
        shares: share of each dataset, with sum 1; None serves all samples of each dataset.
        size: number of samples requested; None is all samples.
    """

    split: Split
    members: Sequence[RequiredIndex]
    shares: Sequence[float] | None
    size: int | None

    @property
    def num_samples(self) -> int | None:
        """Number of samples served; None if it depends on the datasets' lengths."""
        if self.shares is None or self.size is None:
            return None
        return sum(ceil(self.size * share) for share in self.shares)

    def files(self, config: GPTDatasetConfig, lengths: Sequence[int] | None = None) -> IndexFiles | None:
        """Return the cache files of the blend; None if it is not cached, or their name depends on lengths not given.

        Args:
            lengths: number of samples of each member, for a blend without weights.
        """
        weights = lengths if self.shares is None else self.shares
        if config.path_to_cache is None or weights is None:
            return None
        size = self.num_samples
        if self.shares is None and self.size is not None:
            size = min(self.size, int(sum(weights)))
        members = [each.identifiers(config) for each in self.members]
        shares = list(weights) if size is None else normalize(list(weights))
        name = recorded_name(BlendedDataset)
        md5 = digest(describe(blend_identifiers(name, members, self.split, shares, size)))
        return IndexFiles(config.path_to_cache, f"{md5}-{name}-{self.split.name}", config.storage_options)


class RequiredIndices(NamedTuple):
    """All indices of a run, in the order of splits and prefixes."""

    indices: list[RequiredIndex]
    blends: list[RequiredBlend]


def required_indices(config: GPTDatasetConfig, sizes: Sizes) -> RequiredIndices:
    """Return the indices that `BlendedMegatronDatasetBuilder(GPTDataset, sizes, ..., config).build()` would build."""
    found = RequiredIndices([], [])
    for each in plan_distributions(config, sizes):
        shares = None if each.weights is None else normalize(list(each.weights))
        for split, bookends in zip(Split, each.matrix, strict=True):
            if bookends is None:
                continue
            prefixes = zip(each.prefixes, each.requested, strict=True)
            members = [RequiredIndex(split, prefix, counts[split.value], bookends) for prefix, counts in prefixes]
            found.indices.extend(members)
            if each.blended:
                found.blends.append(RequiredBlend(split, members, shares, sizes[split.value]))
    return found
