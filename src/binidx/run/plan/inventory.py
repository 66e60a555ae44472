"""State of a run's data and caches, read from the heads of its files and the manifests of its caches.

prefixes   ─► headers      some dozens of bytes of each `.idx`, or a small one whole
           ─► exact tokens of each split, hence samples, epochs and sizes of indices
caches     ─► manifests    present, missing or stale; no array is read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.pinned_run import PinnedFile
from binidx.errors import FormatError, IndexBuildError
from binidx.forks import cached_property
from binidx.format.prefix_listing import ListedPair
from binidx.format.source import DatasetFiles, open_source
from binidx.index.cache.inspection import CacheState, IndexFilesState
from binidx.index.cache.order_record import OrderKey
from binidx.index.document_sample import EpochPlan
from binidx.order.requests import BlendRequest, SourceRequest, find_blend
from binidx.run.run_file import Run
from binidx.storage.location import Location
from binidx.storage.threads import OPENS


@dataclass(frozen=True)
class IndexInventory:
    """State of the index of one split of one prefix.

    Attributes:
        wanted: the index that the run needs.
        documents, tokens: counts of the split.
        options: those of the split and the config on which the arrays depend.
        plan: plan of the epochs; None if the index cannot be built, for the reason in `problem`.
        order: fields on which the order depends; None without a plan, or of chosen documents, which are not counted.
        cache: state of the cached files.
        problem: reason for which the index cannot be built; "" if it can.
    """

    wanted: SourceRequest
    documents: int
    tokens: int
    options: Mapping[str, Any]
    plan: EpochPlan | None
    order: OrderKey | None
    cache: IndexFilesState
    problem: str = ""

    @property
    def num_samples(self) -> int:
        return self.plan.num_samples if self.plan else 0


@dataclass(frozen=True)
class BlendInventory:
    """State of the blend of a split.

    Attributes:
        wanted: the blend that the run needs.
        size: number of samples that it serves.
        cache: state of the cached files.
    """

    wanted: BlendRequest
    size: int
    cache: IndexFilesState


@dataclass(frozen=True)
class RunInventory:
    """State of all indices, blends and sources of a run.

    Attributes:
        run: the run.
        datasets: size and version of the data of each source, by prefix.
        indices: the index of each split of each prefix.
        blends: the blend of each split of several prefixes.
        listed: the prefixes that are opened by a listing of their folder.
        uncounted: parts of the orders of the run that are not counted, a line each.
        tokenizers: URI and digest of the tokenizer in the manifest of each source, by prefix; None: it has none.
    """

    run: Run
    datasets: Mapping[str, DatasetFiles]
    indices: Sequence[IndexInventory]
    blends: Sequence[BlendInventory]
    listed: Set[str]
    uncounted: Sequence[str] = ()
    tokenizers: Mapping[str, tuple[str, str] | None] = field(default_factory=dict)

    @cached_property
    def pinned(self) -> Set[str]:
        """The prefixes in the run's pinned file; none if there is no such file."""
        pins = PinnedFile.of(self.run.config)
        content = None if pins is None else pins.read()
        return content[0].pairs.keys() if content else set()

    @property
    def train(self) -> list[IndexInventory]:
        """The index of each source of the train split."""
        return [index for index in self.indices if index.wanted.split == Split.train.name]

    @property
    def num_samples(self) -> int:
        """Number of samples of the train split."""
        if self.run.stages is not None:
            return sum(stage.num_samples for stage in self.run.stages)
        sizes = [blend.size for blend in self.blends if blend.wanted.split == Split.train.name]
        return sum(sizes or (index.num_samples for index in self.train))

    def shares(self) -> list[tuple[IndexInventory, float]]:
        """Return the index of each source of the train split, and the source's share of the samples."""
        train = self.train
        if self.run.stages is not None:
            total = self.num_samples
            parts = {index.wanted.prefix: 0.0 for index in train}
            for stage in self.run.stages:
                for prefix, share in zip(stage.blend[0], stage.shares, strict=True):
                    parts[prefix] += share * stage.num_samples / total
            return [(index, parts[index.wanted.prefix]) for index in train]
        blend = next((blend.wanted for blend in self.blends if blend.wanted.split == Split.train.name), None)
        if blend is None:
            return [(index, 1.0) for index in train]
        if blend.weights is not None:
            weights = np.array(blend.weights, np.float64)
            return [*zip(train, (weights / weights.sum()).tolist(), strict=True)]
        total = max(1, sum(index.num_samples for index in train))
        return [(index, index.num_samples / total) for index in train]


def take_inventory(run: Run) -> RunInventory:
    """Read the state of a run's data and caches; build and write nothing.

    Raises:
        ObjectNotFoundError, FormatError: the data is absent or malformed.
    """
    requests = [request for split in run.requests().values() for request in split]
    sources = [source for request in requests for source in request.sources]
    prefixes = [*dict.fromkeys(source.prefix for source in sources)]
    locations = [Location(prefix, run.config.storage_options) for prefix in prefixes]
    listed = ListedPair.list_all(locations)
    opened = OPENS.map(lambda prefix: open_files(prefix, listed.get(prefix.uri)), locations)
    datasets = dict(zip(prefixes, opened, strict=True))
    bounds = dict(zip(prefixes, OPENS.map(partial(_bounds, sources), datasets.values()), strict=True))
    indices = OPENS.map(
        lambda source: _take_index(source, datasets[source.prefix], bounds[source.prefix], run.config), sources
    )
    blends = OPENS.map(partial(_inspect_blend, indices), [*filter(None, map(find_blend, requests))])
    parts = dict.fromkeys(text for request in requests for text in request.list_uncounted())
    uncounted = [f"order: {run.config.order.kind_name}: {text}" for text in parts]
    tokenizers = dict(zip(prefixes, OPENS.map(lambda files: files.tokenizer, opened), strict=True))
    return RunInventory(run, datasets, indices, blends, listed.keys(), uncounted, tokenizers)


def open_files(prefix: Location, listed: ListedPair | None) -> DatasetFiles:
    """Open the files of a dataset; the parts of a virtual merge are not compared with their `.idx` here.

    Raises:
        ObjectNotFoundError: there is no dataset, or no checksums although the settings require them.
        ObjectChangedError: a part of a virtual merge was replaced since the list of parts was written.
        FormatError: a header breaks a rule, or the `.bin` is shorter than its `.idx` requires.
    """
    dataset = open_source(prefix, listed=listed)
    if not dataset.num_parts:
        dataset.require_sums()
        dataset.check_size(dataset.index.counts)
    return dataset


def _bounds(sources: Sequence[SourceRequest], dataset: DatasetFiles) -> dict[int, int]:
    """Return the number of tokens before the first sequence of each split of a prefix, and before its end; one read."""
    splits = [source.split_documents(len(dataset.index)) for source in sources if source.prefix == dataset.prefix.uri]
    return count_tokens_before(dataset, {end for documents in splits for end in (documents.start, documents.stop)})


def count_tokens_before(dataset: DatasetFiles, ends: Set[int]) -> dict[int, int]:
    """Return the number of tokens before each of these sequences, before the first and before the end of all.

    Pointers are a running sum, so the tokens of any run of sequences, such as a split, follow from two of them.

    Raises:
        FormatError: the pointers decrease, or exceed the number of tokens.
    """
    index = dataset.index
    inside = sorted(end for end in ends if 0 < end < len(index))
    bounds = [0, *index.tokens_before(inside).tolist(), index.num_tokens]
    if bounds != sorted(bounds):
        raise FormatError(f"{index.uri}: pointers {bounds} fall, or leave {index.num_tokens} tokens")
    return dict(zip([0, *inside, len(index)], bounds, strict=True))


def _take_index(
    wanted: SourceRequest, dataset: DatasetFiles, bounds: Mapping[int, int], config: GPTDatasetConfig
) -> IndexInventory:
    """Return the state of one index, by its manifest.

    Args:
        wanted: the index that the run needs.
        dataset: size and version of the data of its prefix.
        bounds: number of tokens before the split's first sequence, and before the one after its last, by sequence.
    """
    documents = wanted.split_documents(len(dataset.index))
    begin, end = bounds[documents.start], bounds[documents.stop]
    parameters = wanted.parameters
    options = parameters.fingerprint(documents)
    try:
        plan = parameters.plan(end - begin)
    except IndexBuildError as error:
        cache = IndexFilesState(CacheState.UNNAMED)
        return IndexInventory(wanted, len(documents), end - begin, options, None, None, cache, str(error))
    order = parameters.key(plan) if wanted.documents is None else None
    if wanted.documents is not None:
        del options["documents"]  # it chooses those of an opened source
    if parameters.is_small(len(documents), plan) and not config.cache_small_indices:
        cache = IndexFilesState(CacheState.SMALL_ONE)
    else:
        cache = IndexFilesState.of(wanted.index_name().files, options, dataset)
    return IndexInventory(wanted, len(documents), end - begin, options, plan, order, cache)


def order_changes(inventory: RunInventory) -> list[str]:
    """Return messages for the sources whose order differs from the last run in the same directory."""
    known = {index.wanted.prefix: index.cache for index in inventory.indices if index.cache.content}
    messages = []
    for index in inventory.indices:
        cache, is_unbuilt = known.get(index.wanted.prefix), index.cache.state in (CacheState.MISSING, CacheState.STALE)
        if cache is None or index.order is None or not is_unbuilt:
            continue
        if change := cache.read_order_change(index.wanted.index_name().files, index.options, index.order):
            messages.append(f"{index.wanted.prefix}, {index.wanted.split}: {change}")
    return messages


def _inspect_blend(indices: Sequence[IndexInventory], wanted: BlendRequest) -> BlendInventory:
    lengths = [index.num_samples for index in indices if index.wanted.split == wanted.split]
    name = wanted.measured(lengths).index_name()
    cache = IndexFilesState(CacheState.SMALL_ONE) if name is None else IndexFilesState.of(name.files, {})
    return BlendInventory(wanted, wanted.count(lengths), cache)
