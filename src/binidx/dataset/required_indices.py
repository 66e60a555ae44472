"""What the builder would build for a config: told before anything is opened, from the config alone.

config, sizes ─► WantedIndex  one a prefix and split: samples to ask for, and what Megatron's md5 is of
                 WantedBlend  one a split of several prefixes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from binidx.dataset.builder import WHOLE, Sizes, sizes_per_dataset
from binidx.dataset.config import Blend, Bookends, GPTDatasetConfig, Split, SplitMatrix, normalize
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.megatron_dataset import describe, digest
from binidx.index.cache.index_files import IndexFiles
from binidx.storage.writing.publish import join_uri


@dataclass(frozen=True)
class RequiredIndex:
    """The index of one split of one prefix.

    num_samples: to be asked for; None is one epoch.
    bookends: where the split begins and ends in the sequences, from 0 to 1.
    """

    split: Split
    prefix: str
    num_samples: int | None
    bookends: Bookends

    def identifiers(self, config: GPTDatasetConfig) -> OrderedDict[str, Any]:
        return GPTDataset.identify(self.prefix, self.num_samples, self.split, config)

    def files(self, config: GPTDatasetConfig) -> IndexFiles:
        """Where it lies, or would."""
        directory = config.path_to_cache or join_uri(self.prefix, "cache", "GPTDataset_indices")
        return _files(directory, self.identifiers(config), "GPTDataset", self.split, config)


@dataclass(frozen=True)
class RequiredBlend:
    """The blend of a split.

    members: its indices, in their order.
    shares: of each, their sum is 1; None: as many samples as each has.
    size: samples asked for; None is all of them.
    """

    split: Split
    members: Sequence[RequiredIndex]
    shares: Sequence[float] | None
    size: int | None

    @property
    def num_samples(self) -> int | None:
        """Samples that it serves, where weights tell."""
        if self.shares is None or self.size is None:
            return None
        return sum(ceil(self.size * share) for share in self.shares)

    def files(self, config: GPTDatasetConfig, lengths: Sequence[int] | None = None) -> IndexFiles | None:
        """Where its index lies; None where it is not kept, or its name depends on lengths that are not given.

        Args:
            lengths: samples of each member, for a blend without weights.
        """
        if config.path_to_cache is None or (self.shares is None and lengths is None):
            return None
        if self.shares is None:
            weights: Sequence[float] | None = lengths
            size = None if self.size is None else min(self.size, sum(lengths or ()))
        else:
            weights, size = self.shares, self.num_samples
        identifiers = OrderedDict[str, Any](
            [
                ("class", "BlendedDataset"),
                ("datasets", [each.identifiers(config) for each in self.members]),
                ("split", self.split.name),
                ("weights", list(weights or ()) if size is None else normalize(list(weights or ()))),
                ("size", size),
            ]
        )
        return _files(config.path_to_cache, identifiers, "BlendedDataset", self.split, config)


class RequiredIndices(NamedTuple):
    """All of a run, in the order of splits and prefixes."""

    indices: list[RequiredIndex]
    blends: list[RequiredBlend]


def required_indices(config: GPTDatasetConfig, sizes: Sizes) -> RequiredIndices:
    """What `BlendedMegatronDatasetBuilder(GPTDataset, sizes, ..., config).build()` builds; its rules."""
    if config.blend is not None:
        matrix = config.split_matrix or [None] * len(Split)
        return _of_blend(config.blend, matrix, sizes, config, alone=config.blend[1] is None)
    found = RequiredIndices([], [])
    for split, blend in zip(Split, config.blend_per_split or (), strict=False):
        if blend is not None:
            matrix = [WHOLE if other is split else None for other in Split]
            listed = bool(config.multiple_validation_sets) and split is Split.valid
            part = _of_blend(blend, matrix, sizes, config, alone=True, listed=listed)
            found.indices.extend(part.indices)
            found.blends.extend(part.blends)
    return found


def _of_blend(
    blend: Blend, matrix: SplitMatrix, sizes: Sizes, config: GPTDatasetConfig, *, alone: bool, listed: bool = False
) -> RequiredIndices:
    """Of one distribution: `alone` a single prefix is no blend, `listed` none is."""
    prefixes, weights = blend
    single = len(prefixes) == 1 and alone
    if single or listed:
        asked: Sequence[Sizes] = [sizes] * len(prefixes)
    else:
        asked = sizes_per_dataset(len(prefixes), weights, matrix, sizes, config.mid_level_dataset_surplus)
    found = RequiredIndices([], [])
    for split, bookends in zip(Split, matrix, strict=True):
        if bookends is None:
            continue
        members = [
            RequiredIndex(split, prefix, each[split.value], bookends)
            for prefix, each in zip(prefixes, asked, strict=True)
        ]
        found.indices.extend(members)
        if not single and not listed:
            shares = None if weights is None else normalize(list(weights))
            found.blends.append(RequiredBlend(split, members, shares, sizes[split.value]))
    return found


def _files(directory: str, identifiers: Any, kind: str, split: Split, config: GPTDatasetConfig) -> IndexFiles:
    name = f"{digest(describe(identifiers))}-{kind}-{split.name}"
    return IndexFiles(directory, name, config.storage_options)
