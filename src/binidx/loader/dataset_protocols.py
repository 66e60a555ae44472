"""Optional capabilities of a map-style dataset that the loader uses, and the functions that check for them.

A user's own dataset needs `__len__` and `__getitem__` only. What it has besides is checked here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, cast, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import Split
from binidx.dataset.megatron.blended import BlendedDataset
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import own_methods
from binidx.dataset.megatron_releases import find_rules_in_effect
from binidx.dataset.served import get_split, list_parts
from binidx.dataset.torch_bridge import GPTBatch, Samples
from binidx.format.indexed_dataset import IndexedDataset
from binidx.html_table import format_html_table
from binidx.order.order_protocols import Numbers
from binidx.storage.interfaces import RangeReader
from binidx.storage.ranges import as_composite, provides
from binidx.storage.requests.cancellation import Scope
from binidx.storage.stores.registry import place_of
from binidx.storage.threads import OPENS

if TYPE_CHECKING:
    from binidx.loader.samplers import PretrainingSampler

Batch = list[int]
"""Sample numbers of a micro-batch."""

ReadBatch = Callable[[Batch], Any]
"""Function from the sample numbers of a batch to its samples."""

SAMPLE_METHODS = ("__getitem__", "__getitems__", "spans", "assemble", "_query_document_sample_shuffle_indices")
"""Methods that make samples; the last is one of `compat.megatron` that users override."""


@runtime_checkable
class BatchedDataset(Protocol):
    """A dataset that reads the samples of a batch in one call: torch's protocol for map-style datasets."""

    def __getitems__(self, idxs: Sequence[int], /) -> Any:
        """Return the samples of these numbers, in order."""


@runtime_checkable
class StoredSamples(Protocol):
    """A dataset that names the readers of the bytes of its samples, so that loaders read remote ones ahead."""

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers; none if the samples are computed."""


@runtime_checkable
class LocatedSamples(Protocol):
    """A dataset that knows where the bytes of its samples are stored, so that loaders fill disk caches ahead."""

    def locate_bytes(self, samples: Numbers) -> Iterator[tuple[RangeReader, NDArray[np.int64], Numbers]]:
        """Yield a reader, the ranges of bytes of the samples in it, and the place in `samples` of each range."""


@runtime_checkable
class ForwardSamples(Protocol):
    """A dataset that is stored in the order of its samples, so that loaders fetch whole extents of it ahead.

    Attributes:
        is_uncached: whether its bytes are read from a store without a cache on the disk of the node.
        sample_bytes: size of each stored sample.
    """

    is_uncached: bool
    sample_bytes: int

    def read_forward(self, num_ahead: int, scope: Scope) -> Any:
        """Return the dataset for reads in the order of its samples."""


class DatasetView:
    """Base of a dataset that serves the samples of another one unchanged: loaders read that one.

    Args:
        wrapped: a `GPTDataset`, or a `BlendedDataset` of several.
    """

    def __init__(self, wrapped: BlendedDataset | MegatronDataset) -> None:
        self.wrapped = wrapped

    def __len__(self) -> int:
        return len(self.wrapped)

    @staticmethod
    def unwrap(dataset: Any) -> Any:
        """Return the dataset that a view serves; any other one is returned as it is."""
        return dataset.wrapped if isinstance(dataset, DatasetView) else dataset

    @overload
    def __getitem__(self, idx: SupportsIndex) -> GPTBatch: ...
    @overload
    def __getitem__(self, idx: slice | Sequence[int]) -> list[GPTBatch]: ...
    def __getitem__(self, idx: Any) -> Any:
        return self.wrapped[idx]

    def __getitems__(self, idxs: Sequence[int]) -> Sequence[GPTBatch]:
        """Return the samples of a batch, whose tokens are read at once."""
        samples: Any = self.wrapped.__getitems__(idxs)
        return cast(Sequence[GPTBatch], samples)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.wrapped!r}"

    def _repr_html_(self) -> str:
        return self.wrapped._repr_html_()


class ShownLoader:
    """Base of a loader: its `repr`, and its table in notebooks."""

    dataset: Any
    _sampler: PretrainingSampler
    _consumed_samples: int

    def _facts(self) -> tuple[str, dict[str, Any]]:
        """Return the name of the dataset, and name -> value of what describes the loader."""
        own, sampler = type(self.dataset).__module__.startswith("binidx."), self._sampler
        rank = f"{sampler.data_parallel_rank} of {sampler.data_parallel_size}"
        facts = {"batches": sampler.num_batches, "samples a batch": sampler.micro_batch_size, "rank": rank}
        name = repr(self.dataset) if own else type(self.dataset).__name__
        return name, {**facts, "samples consumed": self._consumed_samples}

    def __repr__(self) -> str:
        name, facts = self._facts()
        batches, size, rank, consumed = facts.values()
        batches_of = f"{batches:,} batches of {size}"
        return f"PretrainingLoader({name}, {batches_of}, rank {rank}, {consumed:,} samples consumed)"

    def _repr_html_(self) -> str:
        name, facts = self._facts()
        return format_html_table(f"PretrainingLoader: {name}", [*facts.items()])


def batch_reader(dataset: Any) -> ReadBatch:
    """Return the function with which torch reads a batch of a dataset."""
    if isinstance(dataset, BatchedDataset):
        return dataset.__getitems__
    return lambda batch: [dataset[idx] for idx in batch]


def batch_bytes(samples: Any) -> int:
    """Return the size in bytes of the tensors and arrays of a batch; a tensor that samples share counts once."""
    if isinstance(samples, Samples):
        return samples.num_bytes
    rows = samples if isinstance(samples, list | tuple) else [samples]
    values = [value for row in rows for value in (row.values() if isinstance(row, dict) else [row])]
    return sum(map(_num_bytes, {id(value): value for value in values}.values()))


def _num_bytes(value: Any) -> int:
    try:
        return int(value.nbytes)
    except AttributeError:  # no tensor or array
        return 0


def is_full_validation(dataset: Any) -> bool:
    """Return whether a dataset is a validation split, or a blend of some, whose config has `full_validation`."""
    return get_split(dataset) is Split.valid and bool(dataset.config.full_validation)


def find_megatron_samples(dataset: Any) -> str | None:
    """Return `megatron_samples` of the config of a dataset or blend; None if its samples do not depend on it."""
    kinds = [part for part in list_parts(dataset) if part.release_rules]
    return kinds[0].config.megatron_samples if kinds else None


def compare_releases(dataset: Any, release: str) -> list[str]:
    """Return the rules in which the samples of a dataset or blend differ from those of another release of Megatron.

    Args:
        dataset: the dataset.
        release: `megatron_samples` of the other release.

    Raises:
        ConfigError: no known release.
    """
    found: set[str] = set()
    for part in list_parts(dataset):
        ours = find_rules_in_effect(part.config, part.release_rules, part.config.megatron_samples)
        found |= ours ^ find_rules_in_effect(part.config, part.release_rules, release)
    return sorted(found)


def digest_tokens(dataset: Any) -> list[dict[str, str]]:
    """Return `IndexedDataset.token_digests` of each low-level dataset of a dataset or blend, in its order."""
    low_level = [part.dataset for part in list_parts(dataset)]
    return OPENS.map(lambda tokens: tokens.token_digests if isinstance(tokens, IndexedDataset) else {}, low_level)


def is_pure(dataset: Any) -> bool:
    """Return whether each sample is a function of its number alone: no class of a user changes how samples are made."""
    kinds: set[Any] = {type(part) for part in (dataset, *list_parts(dataset)) if provides(part, StoredSamples)}
    return bool(kinds) and not any(own_methods(kind, *SAMPLE_METHODS) for kind in kinds)


def remote_places(dataset: Any) -> set[str]:
    """Return the hosts and buckets of the readers that a dataset names; none for bytes on this machine."""
    readers = dataset.token_readers() if isinstance(dataset, StoredSamples) else []
    composites = [(reader, as_composite(reader)) for reader in readers]
    parts = [part for reader, own in composites for part in (own.component_readers() if own else [reader])]
    return {place_of(part.uri) for part in parts} - {"file://"}
