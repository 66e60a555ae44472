"""Indices that a build would need, computed from the config alone, before anything is opened.

config, sizes ─► RequiredIndex  one per prefix and split: number of samples, and the name of its cache
                 RequiredBlend  one per split of several prefixes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from binidx.dataset.blended import BlendedDataset, blend_identifiers
from binidx.dataset.builder import WHOLE, Sizes, sizes_per_dataset
from binidx.dataset.config import Blend, Bookends, GPTDatasetConfig, Split, SplitMatrix, normalize
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.megatron_dataset import describe, digest, recorded_name
from binidx.index.cache.index_files import IndexFiles


@dataclass(frozen=True)
class RequiredIndex:
    """Index of one split of one prefix.

    Args:
        num_samples: number of samples to build; None is one epoch.
        bookends: begin and end of the split in the sequences, from 0 to 1.
    """

    split: Split
    prefix: str
    num_samples: int | None
    bookends: Bookends

    def identifiers(self, config: GPTDatasetConfig) -> OrderedDict[str, Any]:
        return GPTDataset.identify(self.prefix, self.num_samples, self.split, config)

    def files(self, config: GPTDatasetConfig) -> IndexFiles:
        """Return its cache files, whether or not they exist."""
        return GPTDataset.cached_in(self.prefix, self.num_samples, self.split, config)


@dataclass(frozen=True)
class RequiredBlend:
    """Blend of one split.

    Args:
        members: the index of each dataset.
        shares: share of each dataset, with sum 1; None serves all samples of each.
        size: number of samples requested; None is all of them.
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
        """Return its cache files; None if it is not cached, or its name depends on lengths that are not given.

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
    if config.blend is not None:
        matrix = config.split_matrix or [None] * len(Split)
        return _require(config.blend, matrix, sizes, config, alone=config.blend[1] is None)
    found = RequiredIndices([], [])
    for split, blend in zip(Split, config.blend_per_split or (), strict=False):
        if blend is not None:
            matrix = [WHOLE if other is split else None for other in Split]
            listed = bool(config.multiple_validation_sets) and split is Split.valid
            part = _require(blend, matrix, sizes, config, alone=True, listed=listed)
            found.indices.extend(part.indices)
            found.blends.extend(part.blends)
    return found


def _require(
    blend: Blend, matrix: SplitMatrix, sizes: Sizes, config: GPTDatasetConfig, *, alone: bool, listed: bool = False
) -> RequiredIndices:
    """Return those of one distribution; `alone`: a single prefix is not blended; `listed`: no prefixes are."""
    prefixes, weights = blend
    single = len(prefixes) == 1 and alone
    if single or listed:
        requested: Sequence[Sizes] = [sizes] * len(prefixes)
    else:
        requested = sizes_per_dataset(len(prefixes), weights, matrix, sizes, config.mid_level_dataset_surplus)
    found = RequiredIndices([], [])
    for split, bookends in zip(Split, matrix, strict=True):
        if bookends is None:
            continue
        members = [
            RequiredIndex(split, prefix, each[split.value], bookends)
            for prefix, each in zip(prefixes, requested, strict=True)
        ]
        found.indices.extend(members)
        if not single and not listed:
            shares = None if weights is None else normalize(list(weights))
            found.blends.append(RequiredBlend(split, members, shares, sizes[split.value]))
    return found
