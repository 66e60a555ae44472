"""State of a run's data and caches, read from the heads of its files and the manifests of its caches.

prefixes   ─► summaries    some dozens of bytes of each `.idx`
           ─► exact tokens of each split, hence samples, epochs and sizes of indices
caches     ─► manifests    present, missing or stale; no array is read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from binidx.dataset.config import GPTDatasetConfig, Split, split_range
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.gpt_index import SMALL, drops_last_partial
from binidx.dataset.required_indices import (
    WHOLE,
    RequiredBlend,
    RequiredIndex,
    RequiredIndices,
    required_indices,
    sizes_per_dataset,
)
from binidx.errors import FormatError, IndexBuildError, StorageError
from binidx.format.idx import get_idx_path
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
from binidx.index.cache.order_record import ORDERS, OrderKey, describe_change, get_order_key, parse_known
from binidx.index.document_sample import EpochPlan, plan_epochs
from binidx.run.run_file import Run
from binidx.storage.stores.identity import same_object
from binidx.storage.threads import OPENS

"""Prefixes looked at together."""

THERE, MISSING, STALE, UNPROVEN, SMALL_ONE, UNNAMED = "there", "missing", "stale", "to be proven", "not kept", "none"
"""States of a cache. UNPROVEN: its `.idx` is another object, maybe of the same content: a start compares it."""


@dataclass(frozen=True)
class Cache:
    """State of a cached index.

    Attributes:
        why: the reason of a state other than present, or an additional cost.
        manifest: the manifest of an index that is present; for UNPROVEN, if the size of the `.idx` is unchanged.
    """

    state: str
    why: str = ""
    manifest: Manifest | None = None


@dataclass(frozen=True)
class IndexInventory:
    """The index of one split of one prefix.

    Attributes:
        documents, tokens: counts of the split.
        plan: epochs over them; None if the split is empty, and `problem` is the reason.
    """

    wanted: RequiredIndex
    documents: int
    tokens: int
    plan: EpochPlan | None
    order: OrderKey | None
    cache: Cache
    problem: str = ""

    @property
    def num_samples(self) -> int:
        return self.plan.num_samples if self.plan else 0


@dataclass(frozen=True)
class BlendInventory:
    """The blend of a split, and the number of samples it serves."""

    wanted: RequiredBlend
    size: int
    cache: Cache


@dataclass(frozen=True)
class SourceInventory:
    """Use of one source in training.

    Attributes:
        samples: samples served, all ranks together.
        epochs: passes over its tokens.
    """

    headline: DatasetSummary
    documents: int
    tokens: int
    samples: float
    epochs: float


@dataclass(frozen=True)
class RunInventory:
    """State of all indices, blends and sources of a run.

    Attributes:
        num_samples: samples of train.
    """

    run: Run
    summaries: Mapping[str, DatasetSummary]
    indices: Sequence[IndexInventory]
    blends: Sequence[BlendInventory]
    num_samples: int

    def sources(self, samples_read: int) -> list[SourceInventory]:
        """Return the use of each source of train after a number of samples."""
        length, found = self.run.config.sequence_length, []
        for each, share in self._shares():
            samples = samples_read * share
            epochs = samples * length / each.tokens if each.tokens else 0.0
            headline = self.summaries[each.wanted.prefix]
            found.append(SourceInventory(headline, each.documents, each.tokens, samples, epochs))
        return found

    def _shares(self) -> list[tuple[IndexInventory, float]]:
        train = [each for each in self.indices if each.wanted.split is Split.train]
        if self.run.stages is not None:
            total = sum(stage.num_samples for stage in self.run.stages)
            parts = {each.wanted.prefix: 0.0 for each in train}
            for stage in self.run.stages:
                for prefix, share in zip(stage.blend[0], stage.shares, strict=True):
                    parts[prefix] += share * stage.num_samples / total
            return [(each, parts[each.wanted.prefix]) for each in train]
        blend = next((each.wanted for each in self.blends if each.wanted.split is Split.train), None)
        if blend is None:
            return [(each, 1.0) for each in train]
        if blend.shares is not None:
            return [*zip(train, blend.shares, strict=True)]
        total = max(1, sum(each.num_samples for each in train))
        return [(each, each.num_samples / total) for each in train]


def take_inventory(run: Run) -> RunInventory:
    """Read the state of a run's data and caches; build and write nothing.

    Raises:
        ObjectNotFoundError, FormatError: the data is absent or malformed.
    """
    wanted = indices_needed(run)
    prefixes = [*dict.fromkeys(each.prefix for each in wanted.indices)]
    options = run.config.storage_options
    found = list_pairs(prefixes, options)
    summaries = dict(OPENS.map(lambda prefix: (prefix, read_summary(prefix, options, found.get(prefix))), prefixes))
    bounds = dict(zip(prefixes, OPENS.map(partial(_bounds, wanted, run.config), summaries.values()), strict=True))
    indices = OPENS.map(
        lambda each: inspect_index(each, summaries[each.prefix], bounds[each.prefix], run.config), wanted.indices
    )
    blends = OPENS.map(lambda each: _look_at_blend(each, indices, run.config), wanted.blends)
    return RunInventory(run, summaries, indices, blends, _train_size(run, indices, blends))


def indices_needed(run: Run) -> RequiredIndices:
    """Return the indices that a run needs; of stages, those of the first round of each source."""
    if run.stages is None:
        return required_indices(run.config, run.sizes)
    rest = required_indices(run.config, run.sizes)
    matrix = run.config.split_matrix or [WHOLE] * len(Split)
    first: dict[str, RequiredIndex] = {}
    for stage in run.stages:
        surplus = run.config.mid_level_dataset_surplus
        asked = sizes_per_dataset(len(stage.shares), stage.shares, [stage.planned], surplus)
        for prefix, [num_samples] in zip(stage.blend[0], asked, strict=True):
            first.setdefault(prefix, RequiredIndex(Split.train, prefix, num_samples, matrix[0] or (0.0, 0.0)))
    others = [each for each in rest.indices if each.split is not Split.train]
    return RequiredIndices([*first.values(), *others], [each for each in rest.blends if each.split is not Split.train])


def inspect_index(
    wanted: RequiredIndex, headline: DatasetSummary, bounds: Mapping[int, int], config: GPTDatasetConfig
) -> IndexInventory:
    """Return the state of one index, by its manifest.

    Args:
        bounds: tokens before its first sequence, and before the one after its last.
    """
    documents = split_range(wanted.bookends, headline.num_sequences)
    begin, end = bounds[documents.start], bounds[documents.stop]
    drop = drops_last_partial(wanted.split, config)
    extra, length = config.add_extra_token_to_sequence, config.sequence_length
    try:
        plan = plan_epochs(end - begin, length, wanted.num_samples, add_extra_token=extra, drop_last_partial=drop)
    except IndexBuildError as error:
        return IndexInventory(wanted, len(documents), end - begin, None, None, Cache(UNNAMED), str(error))
    order = get_order_key(plan, length, add_extra_token=extra)
    fingerprint = {"algorithm": ALGORITHM, **GPTDataset.get_fingerprint(documents, wanted.split, config)}
    small = len(documents) * plan.num_epochs + plan.num_samples <= SMALL and not config.cache_small_indices
    cache = Cache(SMALL_ONE) if small else inspect_cache(wanted.files(config), fingerprint, _idx_of(headline))
    return IndexInventory(wanted, len(documents), end - begin, plan, order, cache)


def inspect_cache(files: IndexFiles, fingerprint: Fields, idx: Fields | None) -> Cache:
    """Return the state of a cached index, by its manifest alone.

    Args:
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
        each.wanted.prefix: {name: each.cache.manifest.content.get(name) for name in DECIDING}
        for each in inventory.indices
        if each.cache.manifest
    }
    found, config = [], inventory.run.config
    for each in inventory.indices:
        content = contents.get(each.wanted.prefix)
        if content is None or each.order is None or each.cache.state not in (MISSING, STALE):
            continue
        documents = split_range(each.wanted.bookends, inventory.summaries[each.wanted.prefix].num_sequences)
        fingerprint = {"algorithm": ALGORITHM, **GPTDataset.get_fingerprint(documents, each.wanted.split, config)}
        name = each.wanted.files(config).name
        record = each.wanted.files(config).named(hash_fields(fingerprint, content))
        with suppress(StorageError):
            if words := describe_change(parse_known(record.read_small(ORDERS) or b""), each.order, name):
                found.append(f"{each.wanted.prefix}, {each.wanted.split.name}: {words}")
    return found


def _bounds(wanted: RequiredIndices, config: GPTDatasetConfig, headline: DatasetSummary) -> dict[int, int]:
    """Return the tokens before the ends of all splits of a prefix, by one read."""
    splits = [
        split_range(each.bookends, headline.num_sequences) for each in wanted.indices if each.prefix == headline.prefix
    ]
    ends = sorted({end for documents in splits for end in (documents.start, documents.stop)})
    return dict(zip(ends, headline.tokens_before(ends, config.storage_options), strict=True))


def _idx_of(headline: DatasetSummary) -> Fields:
    if headline.num_parts:
        return {}
    return get_idx_identity(get_idx_path(headline.prefix), headline.identities["idx"])


def _look_at_blend(
    wanted: RequiredBlend, indices: Sequence[IndexInventory], config: GPTDatasetConfig
) -> BlendInventory:
    lengths = [each.num_samples for each in indices if each.wanted.split is wanted.split]
    size = wanted.num_samples
    if size is None:
        size = sum(lengths) if wanted.size is None else min(wanted.size, sum(lengths))
    files = wanted.files(config, lengths)
    cache = Cache(SMALL_ONE) if files is None else inspect_cache(files, {"algorithm": ALGORITHM}, None)
    return BlendInventory(wanted, size, cache)


def _train_size(run: Run, indices: Sequence[IndexInventory], blends: Sequence[BlendInventory]) -> int:
    if run.stages is not None:
        return sum(stage.num_samples for stage in run.stages)
    blend = next((each for each in blends if each.wanted.split is Split.train), None)
    if blend is not None:
        return blend.size
    return sum(each.num_samples for each in indices if each.wanted.split is Split.train)
