"""What a run will do, before it runs: out of its description, the heads of its data, and the manifests of its caches.

prefixes   ─► headlines    some dozens of bytes of each `.idx`
           ─► tokens of each split, exactly, so samples, epochs and sizes of indices
caches     ─► manifests    there, missing, stale; no array is read
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from binidx.dataset.builder import WHOLE, sizes_per_dataset
from binidx.dataset.config import GPTDatasetConfig, Split, split_range
from binidx.dataset.gpt import SMALL, GPTDataset, drops_last_partial
from binidx.dataset.required_indices import RequiredBlend, RequiredIndex, RequiredIndices, required_indices
from binidx.errors import FormatError, IndexBuildError, StorageError
from binidx.format.idx import get_idx_path
from binidx.format.prefix_listing import list_pairs
from binidx.format.summary import DatasetSummary, read_summary
from binidx.index.cache.array_reuse import ORDERS, OrderKey, change_in_words, order_of, parse_known
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import ALGORITHM, DECIDING, Fields, Manifest, differences, fields_key, idx_identity
from binidx.index.document_sample import EpochPlan, plan_epochs
from binidx.run.run_file import Run
from binidx.storage.stores.identity import same_object
from binidx.storage.threads import Threads

AT_ONCE = 64


"""Prefixes looked at together."""


THERE, MISSING, STALE, UNPROVEN, SMALL_ONE, UNNAMED = "there", "missing", "stale", "to be proven", "not kept", "none"


"""States of a cache. UNPROVEN: its `.idx` is another object, maybe of the same content: a start compares it."""


@dataclass(frozen=True)
class Cache:
    """How an index is found.

    why: what speaks against it, or what comes on top.
    manifest: of an index that is THERE; where it is UNPROVEN, if at least the size of the `.idx` is the same.
    """

    state: str
    why: str = ""
    manifest: Manifest | None = None


@dataclass(frozen=True)
class IndexInventory:
    """One index: of one split of one prefix.

    documents, tokens: of the split.
    plan: how often they are gone through; None: there is nothing to go through, `problem` says it.
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
    """The blend of a split, and the samples it serves."""

    wanted: RequiredBlend
    size: int
    cache: Cache


@dataclass(frozen=True)
class SourceInventory:
    """What a run takes of one source for training.

    samples: that it serves, all ranks together.
    epochs: how often its tokens are read.
    """

    headline: DatasetSummary
    documents: int
    tokens: int
    samples: float
    epochs: float


@dataclass(frozen=True)
class RunInventory:
    """All that is known of a run.

    num_samples: of train.
    """

    run: Run
    headlines: Mapping[str, DatasetSummary]
    indices: Sequence[IndexInventory]
    blends: Sequence[BlendInventory]
    num_samples: int

    def sources(self, samples_read: int) -> list[SourceInventory]:
        """Of train, after so many samples."""
        length, found = self.run.config.sequence_length, []
        for each, share in self._shares():
            samples = samples_read * share
            epochs = samples * length / each.tokens if each.tokens else 0.0
            headline = self.headlines[each.wanted.prefix]
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
    """Look at the data and caches of a run; builds nothing, writes nothing.

    Raises:
        ObjectNotFoundError, FormatError: there is no such data, or it breaks a rule.
    """
    wanted = wanted_of(run)
    prefixes = [*dict.fromkeys(each.prefix for each in wanted.indices)]
    options = run.config.storage_options
    found = list_pairs(prefixes, options)
    headlines = dict(_at_once(lambda prefix: (prefix, read_summary(prefix, options, found.get(prefix))), prefixes))
    bounds = dict(zip(prefixes, _at_once(partial(_bounds, wanted, run.config), headlines.values()), strict=True))
    indices = _at_once(
        lambda each: look_at_index(each, headlines[each.prefix], bounds[each.prefix], run.config), wanted.indices
    )
    blends = _at_once(lambda each: _look_at_blend(each, indices, run.config), wanted.blends)
    return RunInventory(run, headlines, indices, blends, _train_size(run, indices, blends))


def wanted_of(run: Run) -> RequiredIndices:
    """The indices of a run; of stages the first round of each source."""
    if run.stages is None:
        return required_indices(run.config, run.sizes)
    rest = required_indices(run.config, run.sizes)
    matrix = run.config.split_matrix or [WHOLE] * len(Split)
    first: dict[str, RequiredIndex] = {}
    for stage in run.stages:
        surplus = run.config.mid_level_dataset_surplus
        asked = sizes_per_dataset(len(stage.shares), stage.shares, [], [stage.planned], surplus)
        for prefix, [num_samples] in zip(stage.blend[0], asked, strict=True):
            first.setdefault(prefix, RequiredIndex(Split.train, prefix, num_samples, matrix[0] or (0.0, 0.0)))
    others = [each for each in rest.indices if each.split is not Split.train]
    return RequiredIndices([*first.values(), *others], [each for each in rest.blends if each.split is not Split.train])


def look_at_index(
    wanted: RequiredIndex, headline: DatasetSummary, bounds: Mapping[int, int], config: GPTDatasetConfig
) -> IndexInventory:
    """One index, by its manifest.

    Args:
        bounds: the tokens before its first sequence and before the one after its last.
    """
    documents = split_range(wanted.bookends, headline.num_sequences)
    begin, end = bounds[documents.start], bounds[documents.stop]
    drop = drops_last_partial(wanted.split, config)
    extra, length = config.add_extra_token_to_sequence, config.sequence_length
    try:
        plan = plan_epochs(end - begin, length, wanted.num_samples, add_extra_token=extra, drop_last_partial=drop)
    except IndexBuildError as error:
        return IndexInventory(wanted, len(documents), end - begin, None, None, Cache(UNNAMED), str(error))
    order = order_of(plan, length, add_extra_token=extra)
    fingerprint = {"algorithm": ALGORITHM, **GPTDataset.fingerprint_of(documents, wanted.split, config)}
    small = len(documents) * plan.num_epochs + plan.num_samples <= SMALL and not config.cache_small_indices
    cache = Cache(SMALL_ONE) if small else look_at_cache(wanted.files(config), fingerprint, _idx_of(headline))
    return IndexInventory(wanted, len(documents), end - begin, plan, order, cache)


def look_at_cache(files: IndexFiles, fingerprint: Fields, idx: Fields | None) -> Cache:
    """What a start will find, by the manifest alone.

    Args:
        idx: identity of the `.idx` now; None: the index is of no data.
    """
    try:
        manifest = files.read_manifest()
    except (FormatError, StorageError) as error:
        return Cache(STALE, str(error))
    if manifest is None:
        return Cache(MISSING)
    if wrong := differences(manifest.fingerprint, fingerprint):
        return Cache(STALE, "; ".join(wrong))
    if idx is None or same_object(manifest.data.get("idx"), idx):
        return Cache(THERE, manifest=manifest)
    likely = manifest if idx.get("size") == manifest.data.get("idx", {}).get("size") else None
    return Cache(UNPROVEN, "nothing shows that the .idx is the one it was: a start reads and compares it", likely)


def changes_of_order(outlook: RunInventory) -> list[str]:
    """Where a run reads in another order than the one before it in the same directory, in words.

    The record of orders is named by the content of the data, which another index of the same prefix tells.
    """
    contents = {
        each.wanted.prefix: {name: each.cache.manifest.content.get(name) for name in DECIDING}
        for each in outlook.indices
        if each.cache.manifest
    }
    found, config = [], outlook.run.config
    for each in outlook.indices:
        content = contents.get(each.wanted.prefix)
        if content is None or each.order is None or each.cache.state not in (MISSING, STALE):
            continue
        documents = split_range(each.wanted.bookends, outlook.headlines[each.wanted.prefix].num_sequences)
        fingerprint = {"algorithm": ALGORITHM, **GPTDataset.fingerprint_of(documents, each.wanted.split, config)}
        name = each.wanted.files(config).name
        record = each.wanted.files(config).named(fields_key(fingerprint, content))
        with suppress(StorageError):
            if words := change_in_words(parse_known(record.read_small(ORDERS) or b""), each.order, name):
                found.append(f"{each.wanted.prefix}, {each.wanted.split.name}: {words}")
    return found


def _bounds(wanted: RequiredIndices, config: GPTDatasetConfig, headline: DatasetSummary) -> dict[int, int]:
    """Tokens before the ends of all splits of a prefix, in one read."""
    splits = [
        split_range(each.bookends, headline.num_sequences) for each in wanted.indices if each.prefix == headline.prefix
    ]
    ends = sorted({end for documents in splits for end in (documents.start, documents.stop)})
    return dict(zip(ends, headline.tokens_before(ends, config.storage_options), strict=True))


def _idx_of(headline: DatasetSummary) -> Fields:
    if headline.num_parts:
        return {}
    return idx_identity(get_idx_path(headline.prefix), headline.identities["idx"])


def _look_at_blend(
    wanted: RequiredBlend, indices: Sequence[IndexInventory], config: GPTDatasetConfig
) -> BlendInventory:
    lengths = [each.num_samples for each in indices if each.wanted.split is wanted.split]
    size = wanted.num_samples
    if size is None:
        size = sum(lengths) if wanted.size is None else min(wanted.size, sum(lengths))
    files = wanted.files(config, lengths)
    cache = Cache(SMALL_ONE) if files is None else look_at_cache(files, {"algorithm": ALGORITHM}, None)
    return BlendInventory(wanted, size, cache)


def _train_size(run: Run, indices: Sequence[IndexInventory], blends: Sequence[BlendInventory]) -> int:
    if run.stages is not None:
        return sum(stage.num_samples for stage in run.stages)
    blend = next((each for each in blends if each.wanted.split is Split.train), None)
    if blend is not None:
        return blend.size
    return sum(each.num_samples for each in indices if each.wanted.split is Split.train)


def _at_once(look: Any, things: Iterable[Any]) -> list[Any]:
    pending = [_submit(partial(look, each)) for each in things]
    return [each.result() for each in pending]


_submit = Threads("binidx-look", lambda: AT_ONCE).submit
