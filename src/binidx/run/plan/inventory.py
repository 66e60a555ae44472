"""State of a run's data and caches, read from the heads of its files and the manifests of its caches.

prefixes   ─► summaries    some dozens of bytes of each `.idx`
           ─► exact tokens of each split, hence samples, epochs and sizes of indices
caches     ─► manifests    present, missing or stale; no array is read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from binidx.dataset.builder import WHOLE, sizes_per_dataset
from binidx.dataset.config import GPTDatasetConfig, Split, normalize, split_range
from binidx.dataset.required_indices import RequiredBlend, RequiredIndex, RequiredIndices, required_indices
from binidx.errors import ConfigError, FormatError, IndexBuildError, StorageError
from binidx.format.prefix_listing import list_pairs
from binidx.format.summary import DatasetSummary, read_summary
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import (
    ALGORITHM,
    DECIDING,
    Fields,
    Manifest,
    get_idx_identity,
    hash_fields,
    list_differences,
)
from binidx.index.cache.order_record import ORDERS, OrderKey, describe_change, parse_known
from binidx.index.document_sample import EpochPlan
from binidx.run.run_file import Run
from binidx.storage.location import Location
from binidx.storage.stores.identity import same_object
from binidx.storage.threads import OPENS

THERE, MISSING, STALE, UNPROVEN, SMALL_ONE, UNNAMED = "there", "missing", "stale", "to be proven", "not kept", "none"
"""States of a cache. UNPROVEN: the `.idx` is another object than when the index was built, maybe of the same content; a
start compares it."""


@dataclass(frozen=True)
class Cache:
    """State of a cached index.

    Attributes:
        state: THERE, MISSING, STALE, UNPROVEN, SMALL_ONE or UNNAMED.
        why: the reason of the state STALE or UNPROVEN.
        manifest: the manifest of an index that is THERE, or UNPROVEN with an `.idx` of unchanged size.
    """

    state: str
    why: str = ""
    manifest: Manifest | None = None


@dataclass(frozen=True)
class IndexInventory:
    """State of the index of one split of one prefix.

    Attributes:
        wanted: the index that the run needs.
        documents, tokens: counts of the split.
        fingerprint: options of the split and the config, as in the manifest of the cache.
        plan: plan of the epochs; None if the index cannot be built, for the reason in `problem`.
        order: fields on which the order depends; None without a plan.
        cache: state of the cached files.
        problem: reason for which the index cannot be built; "" if it can.
    """

    wanted: RequiredIndex
    documents: int
    tokens: int
    fingerprint: Fields
    plan: EpochPlan | None
    order: OrderKey | None
    cache: Cache
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

    wanted: RequiredBlend
    size: int
    cache: Cache


@dataclass(frozen=True)
class RunInventory:
    """State of all indices, blends and sources of a run.

    Attributes:
        run: the run.
        summaries: size and version of the data of each source, by prefix.
        indices: the index of each split of each prefix.
        blends: the blend of each split of several prefixes.
        listed: the prefixes that are opened by a listing of their folder.
    """

    run: Run
    summaries: Mapping[str, DatasetSummary]
    indices: Sequence[IndexInventory]
    blends: Sequence[BlendInventory]
    listed: Set[str]

    @property
    def num_samples(self) -> int:
        """Number of samples of the train split."""
        if self.run.stages is not None:
            return sum(stage.num_samples for stage in self.run.stages)
        sizes = [blend.size for blend in self.blends if blend.wanted.split is Split.train]
        return sum(sizes or (index.num_samples for index in self.indices if index.wanted.split is Split.train))

    def shares(self) -> list[tuple[IndexInventory, float]]:
        """Return the index of each source of the train split, and the source's share of the samples."""
        train = [index for index in self.indices if index.wanted.split is Split.train]
        if self.run.stages is not None:
            total = sum(stage.num_samples for stage in self.run.stages)
            parts = {index.wanted.prefix: 0.0 for index in train}
            for stage in self.run.stages:
                for prefix, share in zip(stage.blend[0], stage.shares, strict=True):
                    parts[prefix] += share * stage.num_samples / total
            return [(index, parts[index.wanted.prefix]) for index in train]
        blend = next((blend.wanted for blend in self.blends if blend.wanted.split is Split.train), None)
        if blend is None:
            return [(index, 1.0) for index in train]
        if blend.shares is not None:
            return [*zip(train, normalize([*blend.shares]), strict=True)]
        total = max(1, sum(index.num_samples for index in train))
        return [(index, index.num_samples / total) for index in train]


def take_inventory(run: Run) -> RunInventory:
    """Read the state of a run's data and caches; build and write nothing.

    Raises:
        ObjectNotFoundError, FormatError: the data is absent or malformed.
    """
    wanted = indices_needed(run)
    prefixes = [*dict.fromkeys(index.prefix for index in wanted.indices)]
    locations = [Location(prefix, run.config.storage_options) for prefix in prefixes]
    listed = list_pairs(locations)
    summaries = dict(zip(prefixes, OPENS.map(lambda at: read_summary(at, listed.get(at.uri)), locations), strict=True))
    bounds = dict(zip(prefixes, OPENS.map(partial(_bounds, wanted), summaries.values()), strict=True))
    indices = OPENS.map(
        lambda index: inspect_index(index, summaries[index.prefix], bounds[index.prefix], run.config), wanted.indices
    )
    blends = OPENS.map(lambda blend: _inspect_blend(blend, indices, run.config), wanted.blends)
    return RunInventory(run, summaries, indices, blends, listed.keys())


def indices_needed(run: Run) -> RequiredIndices:
    """Return the indices that a run needs; for a run in stages, those of the first pass over each source."""
    if run.config.order is not None:
        found = type(run.config.order).__name__
        raise ConfigError(f"order: found {found}, plan knows Megatron's order alone; plan the run without it")
    rest = required_indices(run.config, run.sizes)
    if run.stages is None:
        return rest
    matrix = run.config.split_matrix or [WHOLE] * len(Split)
    first: dict[str, RequiredIndex] = {}
    for stage in run.stages:
        surplus = run.config.mid_level_dataset_surplus
        asked = sizes_per_dataset(len(stage.shares), stage.shares, [stage.planned], surplus)
        for prefix, [num_samples] in zip(stage.blend[0], asked, strict=True):
            first.setdefault(prefix, RequiredIndex(Split.train, prefix, num_samples, matrix[0] or (0.0, 0.0)))
    others = [index for index in rest.indices if index.split is not Split.train]
    return RequiredIndices(
        [*first.values(), *others], [blend for blend in rest.blends if blend.split is not Split.train]
    )


def _bounds(wanted: RequiredIndices, summary: DatasetSummary) -> dict[int, int]:
    """Return the number of tokens before the first sequence of each split of a prefix, and before its end; one read."""
    splits = [
        split_range(index.bookends, len(summary.index)) for index in wanted.indices if index.prefix == summary.prefix
    ]
    ends = sorted({end for documents in splits for end in (documents.start, documents.stop)})
    return dict(zip(ends, summary.tokens_before(ends), strict=True))


def inspect_index(
    wanted: RequiredIndex, summary: DatasetSummary, bounds: Mapping[int, int], config: GPTDatasetConfig
) -> IndexInventory:
    """Return the state of one index, by its manifest.

    Args:
        wanted: the index that the run needs.
        summary: size and version of the data of its prefix.
        bounds: number of tokens before the split's first sequence, and before the one after its last, by sequence.
    """
    documents = split_range(wanted.bookends, len(summary.index))
    begin, end = bounds[documents.start], bounds[documents.stop]
    parameters = wanted.parameters(config)
    fingerprint = {"algorithm": ALGORITHM, **parameters.fingerprint(documents)}
    try:
        plan = parameters.plan(end - begin)
    except IndexBuildError as error:
        return IndexInventory(wanted, len(documents), end - begin, fingerprint, None, None, Cache(UNNAMED), str(error))
    order = parameters.key(plan)
    if parameters.is_small(len(documents), plan) and not config.cache_small_indices:
        cache = Cache(SMALL_ONE)
    else:
        idx = {} if summary.num_parts else get_idx_identity(summary.location + ".idx", summary.identities["idx"])
        cache = inspect_cache(wanted.name(config).files, fingerprint, idx)
    return IndexInventory(wanted, len(documents), end - begin, fingerprint, plan, order, cache)


def inspect_cache(files: IndexFiles, fingerprint: Fields, idx: Fields | None) -> Cache:
    """Return the state of a cached index, by its manifest alone.

    Args:
        files: files of the index in the cache.
        fingerprint: fields that its manifest must have.
        idx: current identity of the `.idx`; None if the index has no data.
    """
    try:
        manifest = files.read_manifest()
    except (FormatError, StorageError) as error:
        return Cache(STALE, str(error))
    if manifest is None:
        return Cache(MISSING)
    if wrong := list_differences(manifest.fingerprint, fingerprint):
        return Cache(STALE, "; ".join(wrong))
    if idx is None or same_object(manifest.data.get("idx"), idx):
        return Cache(THERE, manifest=manifest)
    likely = manifest if idx.get("size") == manifest.data.get("idx", {}).get("size") else None
    return Cache(UNPROVEN, "nothing shows that the .idx is the one it was: a start reads and compares it", likely)


def order_changes(inventory: RunInventory) -> list[str]:
    """Return messages for the sources whose order differs from the last run in the same directory.

    The record of orders is named by a hash of the data, which the manifest of any index of the same prefix contains.
    """
    contents = {
        index.wanted.prefix: {name: index.cache.manifest.content.get(name) for name in DECIDING}
        for index in inventory.indices
        if index.cache.manifest
    }
    messages = []
    for index in inventory.indices:
        content = contents.get(index.wanted.prefix)
        if content is None or index.order is None or index.cache.state not in (MISSING, STALE):
            continue
        files = index.wanted.name(inventory.run.config).files
        record = IndexFiles(files.directory, hash_fields(index.fingerprint, content))
        with suppress(StorageError):
            if change := describe_change(parse_known(record.read_small(ORDERS) or b""), index.order, files.name):
                messages.append(f"{index.wanted.prefix}, {index.wanted.split.name}: {change}")
    return messages


def _inspect_blend(
    wanted: RequiredBlend, indices: Sequence[IndexInventory], config: GPTDatasetConfig
) -> BlendInventory:
    lengths = [index.num_samples for index in indices if index.wanted.split is wanted.split]
    files = wanted.files(config, lengths)
    cache = Cache(SMALL_ONE) if files is None else inspect_cache(files, {"algorithm": ALGORITHM}, None)
    return BlendInventory(wanted, wanted.num_samples(lengths), cache)
