"""Indices that a run needs, planned from its config alone, before anything is opened.

config, sizes ─► Distribution   prefixes that are built together: splits, and samples of each prefix
              ─► RequiredIndex  one per prefix and split: number of samples, and the name of its cache
                 RequiredBlend  one per split of several prefixes
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from binidx.dataset.builder import Sizes, measure_blend, plan_distributions
from binidx.dataset.config import Bookends, GPTDatasetConfig, Split, normalize, split_range
from binidx.dataset.megatron.blended import ARRAYS, BlendedDataset, blend_identifiers, build_blend_arrays
from binidx.dataset.megatron.gpt import GPTDataset, gpt_parameters, index_options
from binidx.index.cache.array_writer import build_in_memory
from binidx.index.cache.index_cache import BuildContext, IndexCache
from binidx.index.cache.index_files import IndexFiles, IndexName, describe, digest, recorded_name
from binidx.order.blended_order import BlendedOrder
from binidx.order.gpt_order import GPTParameters, GPTRequest, LazyOrder
from binidx.order.order_protocols import Order
from binidx.storage.location import Location
from binidx.storage.threads import OPENS

BLEND = recorded_name(BlendedDataset)


@dataclass(frozen=True)
class RequiredIndex:
    """Index of one split of one prefix.

    Args:
        split: the split.
        prefix: prefix of the data.
        num_samples: number of samples to build; None is one epoch.
        bookends: start and end of the split in the sequences, from 0 to 1.
    """

    split: Split
    prefix: str
    num_samples: int | None
    bookends: Bookends

    def identifiers(self, config: GPTDatasetConfig) -> OrderedDict[str, Any]:
        return GPTDataset.identify(self.prefix, self.num_samples, self.split, config)

    def name(self, config: GPTDatasetConfig) -> IndexName:
        """Return the name of the index in the cache."""
        description = describe(self.identifiers(config))
        return IndexName(GPTDataset.name_files(self.prefix, description, self.split, config), description)

    def description_hash(self, config: GPTDatasetConfig) -> str:
        """Return the md5 of the text with which Megatron names the index."""
        return digest(self.name(config).description)

    def parameters(self, config: GPTDatasetConfig) -> GPTParameters:
        """Return the options of the order."""
        return gpt_parameters(GPTDataset, self.num_samples, self.split, config)

    def order(self, config: GPTDatasetConfig, context: BuildContext) -> LazyOrder:
        """Return the order, whose index is opened at the first use, to read ranges of it."""
        name, own = str(config.as_written(self.prefix)), partial(split_range, self.bookends)
        cached = index_options(partial(self.name, config), config, context=context)
        request = GPTRequest(self.parameters(config), self.prefix, name, own, cached, config.mmap_bin_files)
        return LazyOrder(request)

    def open(self, config: GPTDatasetConfig, context: BuildContext) -> tuple[Order, str]:
        """Return the order, and the md5 of the text with which Megatron names the index."""
        return self.order(config, context), self.description_hash(config)


@dataclass(frozen=True)
class RequiredBlend:
    """Blend of one split.

    Args:
        split: the split.
        members: the index of each dataset.
        shares: weight of each dataset; None serves all samples of each dataset.
        size: number of samples requested; None is all samples.
    """

    split: Split
    members: Sequence[RequiredIndex]
    shares: Sequence[float] | None
    size: int | None

    def num_samples(self, lengths: Sequence[int]) -> int:
        """Return the number of samples served of datasets of these lengths."""
        size = measure_blend(self.shares, self.size, lengths)[1]
        return sum(lengths) if size is None else size

    def _measure(self, lengths: Sequence[int]) -> tuple[list[float], int | None]:
        """Return weights and size of the blend of datasets of these lengths, which count only without shares."""
        weights, size = measure_blend(self.shares, self.size, lengths)
        return [*weights] if size is None else normalize([*weights]), size

    def files(self, config: GPTDatasetConfig, lengths: Sequence[int] | None = None) -> IndexFiles | None:
        """Return the cache files of the blend; None if it is not cached, or their name depends on lengths not given.

        Args:
            config: options of the run.
            lengths: number of samples of each member, for a blend without weights.
        """
        if config.path_to_cache is None or (md5 := self.description_hash(config, lengths)) is None:
            return None
        directory = Location(config.path_to_cache, config.storage_options)
        return IndexFiles(directory, f"{md5}-{BLEND}-{self.split.name}")

    def description_hash(self, config: GPTDatasetConfig, lengths: Sequence[int] | None = None) -> str | None:
        """Return the md5 of the text with which Megatron names the index; None if it depends on lengths not given."""
        if self.shares is None and lengths is None:
            return None
        return digest(describe(self._identifiers(config, *self._measure(lengths or ()))))

    def _identifiers(
        self, config: GPTDatasetConfig, shares: Sequence[float], size: int | None
    ) -> OrderedDict[str, Any]:
        members = [member.identifiers(config) for member in self.members]
        return blend_identifiers(BLEND, members, self.split, shares, size)

    def open(self, config: GPTDatasetConfig, context: BuildContext) -> tuple[Order, str]:
        """Return the order, and the md5 of the text with which Megatron names the index.

        Ranges of the arrays are read if they are cached; else they are built.
        """
        members = [member.order(config, context) for member in self.members]
        lengths = OPENS.map(len, members) if self.shares is None else []
        shares, size = self._measure(lengths)
        description = describe(self._identifiers(config, shares, size))
        build = partial(build_blend_arrays, weights=shares, size=size, threads=config.num_dataset_builder_threads)
        if files := self.files(config, lengths):
            arrays = IndexCache(files).load_or_build(description, {}, ARRAYS, build, "ranges")
        else:
            arrays = build_in_memory(build)
        fields = {"class": BLEND, "weights": shares, "all": size is None}
        return BlendedOrder(members, arrays, fields), digest(description)


class RequiredIndices(NamedTuple):
    """All indices of a run, in the order of splits and prefixes."""

    indices: list[RequiredIndex]
    blends: list[RequiredBlend]


def required_indices(config: GPTDatasetConfig, sizes: Sizes) -> RequiredIndices:
    """Return the indices that `BlendedMegatronDatasetBuilder(GPTDataset, sizes, ..., config).build()` would build.

    Args:
        config: options of the run.
        sizes: the least number of samples of each split; None is one epoch.
    """
    required = RequiredIndices([], [])
    for distribution in plan_distributions(config, sizes):
        for split, bookends in zip(Split, distribution.matrix, strict=True):
            if bookends is None:
                continue
            prefixes = zip(distribution.prefixes, distribution.requested, strict=True)
            members = [RequiredIndex(split, prefix, counts[split.value], bookends) for prefix, counts in prefixes]
            required.indices.extend(members)
            if distribution.blended:
                required.blends.append(RequiredBlend(split, members, distribution.weights, sizes[split.value]))
    return required
