"""Datasets of one build, made at the same time in several threads: what one raises ends the others.

    computes                    goes on to its end, and nobody waits for it
    raises                      out of here, at once
    waits for another process   is called away: its check raises, see `turn.Checks`
    has not begun               never does

So no rank keeps an error to itself for as long as another node builds, and none waits for that when it ends.

From a config to the train, valid and test datasets of a run.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from inspect import get_annotations
from math import ceil
from typing import Any, TypeVar

from binidx.dataset.blended import BlendedDataset
from binidx.dataset.config import (
    Blend,
    BlendedMegatronDatasetConfig,
    Split,
    SplitMatrix,
    normalize,
    split_indices,
    split_range,
)
from binidx.dataset.megatron_dataset import MegatronDataset, required
from binidx.dataset.rank_agreement import agree_on_outcome
from binidx.dataset.torch_bridge import is_distributed, rank
from binidx.errors import ConfigError, PeerError
from binidx.format.idx import get_idx_path
from binidx.format.idx_bundle import BundlePlace
from binidx.format.pair import KnownPrefix
from binidx.format.prefix_listing import ListedPair, list_with_bundle
from binidx.index.cache.build_context import BuildContext, OnOutcome
from binidx.index.cache.build_lock import Check
from binidx.index.cache.index_cache import Access
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.prefetch import prefetch
from binidx.index.cache.thread_budget import Budget
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import Threads

WAITING_THREADS = 128


"""Remote prefixes that are opened at once: as many requests as a process has in flight."""


SLOW_SECONDS, PATIENCE_SECONDS = 0.005, 0.25


"""For each that computes only, ten times what it takes and less than a round trip; and for a machine that is busy."""


Result = TypeVar("Result")


Work = Callable[[Check], Result]


"""Work on one dataset. It calls the check while it waits; the check raises once another dataset has failed."""


Submit = Callable[[Callable[[], Any]], Future[Any]]


_submit = Threads("binidx-open", lambda: WAITING_THREADS).submit


def run_in_threads(works: Sequence[Work[Result]], threads: int) -> list[Result]:
    """What pieces of work give that compute, so many at the same time."""
    pool = ThreadPoolExecutor(threads, "binidx-build")
    try:
        return run_concurrently(works, submit=pool.submit)
    finally:
        pool.shutdown(wait=False)


def run_concurrently(
    works: Sequence[Work[Result]], at_hand: Sequence[bool] = (), *, submit: Submit = _submit
) -> list[Result]:
    """What pieces of work give that wait for a store, done at the same time.

    Args:
        at_hand: which of them have to compute only, as far as we know. They are done in this thread: a hundred threads
            that compute take the GIL from each other, and need three times as long. If they take longer than that,
            the rest waits with the others.

    Raises:
        The first error, without waiting for the rest.
    """
    here = [number for number, each in enumerate(at_hand) if each]
    found: dict[int, Result] = {}
    pending: dict[int, Future[Result]] = {}
    failed: list[BaseException] = []

    def begin(number: int) -> None:
        pending[number] = submit(partial(works[number], check))
        pending[number].add_done_callback(lambda done: failed.extend(_errors(done)))

    def check() -> None:
        if failed:
            raise PeerError(f"not waited for: another dataset of this build failed: {failed[0]}")

    try:
        for number in {*range(len(works))}.difference(here):
            begin(number)
        began = time.monotonic()
        for number in here:
            if time.monotonic() - began > PATIENCE_SECONDS + SLOW_SECONDS * len(found):
                begin(number)
            else:
                found[number] = works[number](check)
        wait(pending.values(), return_when=FIRST_EXCEPTION)
        found |= {number: each.result() for number, each in sorted(pending.items()) if each.done()}
        return [found[number] for number in range(len(works))]
    except BaseException as error:
        failed.append(error)
        for each in pending.values():
            each.cancel()
        raise failed[0] from failed[0].__cause__


def _errors(done: Future[Any]) -> list[BaseException]:
    error = None if done.cancelled() else done.exception()
    return [] if error is None else [error]


Sizes = Sequence[int | None]


TopLevelDataset = BlendedDataset | MegatronDataset


Built = list[TopLevelDataset | list[MegatronDataset] | None]


"""One dataset per split, or the list of its validation sets; None: the split has no share."""


WHOLE = (0.0, 1.0)


class BlendedMegatronDatasetBuilder:
    """Builds every split of a run.

    Args:
        cls: the kind of dataset, such as `GPTDataset`.
        sizes: the least number of samples per split, or None for one epoch (only without weights).
        is_built_on_rank: whether this process builds; asked only under torch.distributed.
        config: what the run asks for.
        access: "ranges" for a run whose order is asked for, and few of its samples: see `GPTDataset.open_later`.
        splits: which are built; the others are None.

    Every rank may build: the indices are a function of the config, their cache appears whole or not at all, so there is
    no barrier and no rank that has to be first. Of all that ask one builds an index: `index.turn`. Under
    torch.distributed every rank is to call `build`, and what one raises all raise: `ranks`.

    Source: Megatron Core, `BlendedMegatronDatasetBuilder`; its barriers are left out.
    """

    blended: type[BlendedDataset] = BlendedDataset
    """What several datasets become."""

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sizes,
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        *,
        access: Access = "load",
        splits: Collection[Split] = tuple(Split),
    ) -> None:
        self.cls = cls
        self.access, self.splits = access, splits
        self.sizes = [None if size is None else operator.index(size) for size in sizes]
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        if len(sizes) != len(Split):
            raise ConfigError(f"sizes: found {len(sizes)}, needs {len(Split)}, one per split")
        check_kind(cls, config)
        for split, blend, size in zip(Split, self._blends(), sizes, strict=True):
            if size is None and blend is not None and blend[1] is not None:
                raise ConfigError(f"sizes: found None for {split.name}, a blend with weights needs a number")

    def build(self, *, on_outcome: OnOutcome = None) -> Built:
        """One dataset per split, None for a split without a share (or on a rank that does not build).

        A single prefix without weight gives the dataset itself, several a `BlendedDataset`; with
        `multiple_validation_sets` the valid split is a list.

        Args:
            on_outcome: called with the outcome of each index, by any thread (ours).

        Raises:
            PeerError: under torch.distributed, what another rank raised in here: `ranks.together`.
        """
        with agree_on_outcome() as checks:
            return self._build(BuildContext(checks, on_outcome=on_outcome))

    def _build(self, context: BuildContext) -> Built:
        if is_distributed() and not self.is_built_on_rank():
            return [None] * len(Split)
        if self.config.mock:
            return [*self._build_prefix(None, self._matrix(), self.sizes, context)]
        if self.config.blend is not None:
            return self._build_one_distribution(self.config.blend, context)
        blends = zip(Split, self._blends(), strict=True)
        return [self._build_split(split, blend if split in self.splits else None, context) for split, blend in blends]

    def _matrix(self) -> SplitMatrix:
        """The config's, of the splits that are built."""
        matrix = self.config.split_matrix or [None] * len(Split)
        return [bookends if split in self.splits else None for split, bookends in zip(Split, matrix, strict=True)]

    def _blends(self) -> Sequence[Blend | None]:
        if self.config.blend is not None:
            return [self.config.blend] * len(Split)
        return self.config.blend_per_split or [None] * len(Split)

    def _build_one_distribution(self, blend: Blend, context: BuildContext) -> Built:
        prefixes, weights = blend
        matrix = self._matrix()
        if len(prefixes) == 1 and weights is None:
            return [*self._build_prefix(prefixes[0], matrix, self.sizes, context)]
        datasets = self._build_prefixes(prefixes, weights, matrix, self.sizes, context)

        def build(split: Split, check: Check) -> BlendedDataset | None:
            return self._blend(split, weights, self.sizes, datasets, context.with_check(check))

        if self._is_remote([]):
            return [*run_concurrently([partial(build, split) for split in Split])]
        return [self._blend(split, weights, self.sizes, datasets, context) for split in Split]

    def _build_split(
        self, split: Split, blend: Blend | None, context: BuildContext
    ) -> TopLevelDataset | list[MegatronDataset] | None:
        if blend is None:
            return None
        prefixes, weights = blend
        matrix: SplitMatrix = [WHOLE if other is split else None for other in Split]
        sizes = [self.sizes[other.value] if other is split else 0 for other in Split]
        if len(prefixes) == 1:
            return self._build_prefix(prefixes[0], matrix, sizes, context)[split.value]
        if self.config.multiple_validation_sets and split is Split.valid:
            return self._build_validation_sets(prefixes, matrix, sizes, context)
        datasets = self._build_prefixes(prefixes, weights, matrix, sizes, context)
        return self._blend(split, weights, sizes, datasets, context)

    def _build_validation_sets(
        self, prefixes: Sequence[str], matrix: SplitMatrix, sizes: Sizes, context: BuildContext
    ) -> list[MegatronDataset]:
        if self.config.full_validation and sizes[Split.valid.value] is not None:
            raise ConfigError(f"sizes: found {sizes[Split.valid.value]} for valid, full_validation needs None")
        built = (self._build_prefix(prefix, matrix, sizes, context)[Split.valid.value] for prefix in prefixes)
        return [dataset for dataset in built if dataset is not None]

    def _build_prefixes(
        self,
        prefixes: Sequence[str],
        weights: Sequence[float] | None,
        matrix: SplitMatrix,
        sizes: Sizes,
        context: BuildContext,
    ) -> list[list[MegatronDataset | None]]:
        """Per prefix, its splits.

        All whose files are remote are opened at the same time, as many requests as a process may have in flight; no
        more are built than there are threads.
        """
        asked = sizes_per_dataset(len(prefixes), weights, matrix, sizes, self.config.mid_level_dataset_surplus)
        if self.access == "ranges":
            each_asked = zip(prefixes, asked, strict=True)
            return [self._build_prefix(prefix, matrix, each, context) for prefix, each in each_asked]
        budget = Budget(self.config.num_dataset_builder_threads)

        def wait_and_build(prefix: str, sizes: Sizes, check: Check) -> list[MegatronDataset | None]:
            mine = replace(context.with_check(check), worker=budget.waiter())
            return self._build_prefix(prefix, matrix, sizes, mine, listed.get(prefix))

        def build(prefix: str, sizes: Sizes, check: Check) -> list[MegatronDataset | None]:
            with budget.worker() as worker:
                return self._build_prefix(prefix, matrix, sizes, replace(context.with_check(check), worker=worker))

        if not self._is_remote(prefixes):
            works = [partial(build, *each) for each in zip(prefixes, asked, strict=True)]
            return run_in_threads(works, self.config.num_dataset_builder_threads)
        with list_with_bundle(prefixes, self.config.storage_options, self._bundle()) as listed:
            works = [partial(wait_and_build, *each) for each in zip(prefixes, asked, strict=True)]
            return run_concurrently(
                works, [prefix in listed and listed[prefix].index is not None for prefix in prefixes]
            )

    def _is_remote(self, prefixes: Sequence[str]) -> bool:
        """Whether some of these, or their caches, lie in a store."""
        return any(uri and local_path(uri) is None for uri in (*prefixes, self.config.path_to_cache))

    def _bundle(self) -> BundlePlace | None:
        """Where small `.idx` files of many prefixes are kept together: with the caches; one rank writes it."""
        if self.config.path_to_cache is None:
            return None
        return BundlePlace(self.config.path_to_cache, rank() == 0, self.config.storage_options)

    def _build_prefix(
        self,
        prefix: str | None,
        matrix: SplitMatrix,
        sizes: Sizes,
        context: BuildContext,
        listed: ListedPair | None = None,
    ) -> list[MegatronDataset | None]:
        if self.access == "ranges":
            return [
                None if bookends is None else self.cls.open_later(required(prefix), bookends, size, split, self.config)
                for split, bookends, size in zip(Split, matrix, sizes, strict=True)
            ]
        if prefix is None:
            return self._build_opened(None, prefix, matrix, sizes, context)
        fetched = None
        if self._is_remote([prefix]):
            fetched = prefetch(idx_bytes(prefix, listed), partial(self._cached_in, prefix, matrix, sizes))
        known = KnownPrefix(prefix, listed, fetched.checked if fetched else tuple, context.checks)
        context = replace(context, prefetch=fetched)
        return self._build_opened(known, prefix, matrix, sizes, context)

    def _cached_in(self, prefix: str, matrix: SplitMatrix, sizes: Sizes) -> list[IndexFiles]:
        """Where the indices of a prefix lie, if they are cached."""
        wanted = [each for each in zip(Split, matrix, sizes, strict=True) if each[1] is not None]
        found = [self.cls.cached_in(prefix, size, split, self.config) for split, _, size in wanted]
        return [files for files in found if files is not None]

    def _build_opened(
        self, known: KnownPrefix | None, prefix: str | None, matrix: SplitMatrix, sizes: Sizes, context: BuildContext
    ) -> list[MegatronDataset | None]:
        low_level = self.cls.build_low_level_dataset(known, self.config)
        num_elements = self.cls.numel_low_level_dataset(low_level)
        # Of the class that has the constructor: one of a user's, over ours, is given an array.
        kind = next(each for each in self.cls.__mro__ if "__init__" in vars(each))
        elements: Any = split_range if vars(kind).get("takes_a_range") else split_indices
        return [
            None
            if bookends is None
            else self.cls.built_with(
                context, low_level, prefix, elements(bookends, num_elements), size, split, self.config
            )
            for split, bookends, size in zip(Split, matrix, sizes, strict=True)
        ]

    def _blend(
        self,
        split: Split,
        weights: Sequence[float] | None,
        sizes: Sizes,
        datasets_per_prefix: list[list[MegatronDataset | None]],
        context: BuildContext,
    ) -> BlendedDataset | None:
        datasets = [dataset for splits in datasets_per_prefix if (dataset := splits[split.value]) is not None]
        if not datasets:
            return None
        size = sizes[split.value]
        if weights is not None and size is not None:
            shares = normalize(list(weights))
            total = sum(ceil(size * share) for share in shares)
            return self.blended.built_with(context, datasets, shares, total, self.config, access=self.access)

        def length(dataset: MegatronDataset, check: Check) -> int:
            return len(dataset)

        lengths = run_concurrently(
            [partial(length, each) for each in datasets], [self.access == "load"] * len(datasets)
        )
        most = None if size is None else min(size, sum(lengths))
        return self.blended.built_with(context, datasets, lengths, most, self.config, access=self.access)


def idx_bytes(prefix: str, listed: ListedPair | None) -> int | None:
    """Size of the `.idx` under a prefix; None where only its store knows."""
    if listed is not None:
        return int(listed.identity["size"])
    path = local_path(get_idx_path(prefix))
    return os.path.getsize(path) if path is not None and os.path.exists(path) else None


def sizes_per_dataset(
    num_datasets: int, weights: Sequence[float] | None, matrix: SplitMatrix, sizes: Sizes, surplus: float
) -> list[Sizes]:
    """How many samples to build of each dataset for each split: its share and a little more; None is one epoch.

    Source: Megatron Core: both roundings are part of the result.
    """
    if weights is None:
        return [[None] * len(Split)] * num_datasets
    return sizes_of_shares(normalize(list(weights)), sizes, surplus)


def sizes_of_shares(shares: Sequence[float], sizes: Sizes, surplus: float) -> list[Sizes]:
    """The same of weights that add up to 1."""
    return [[None if size is None else ceil(ceil(size * share) * (1 + surplus)) for size in sizes] for share in shares]


def check_kind(cls: type[MegatronDataset], config: BlendedMegatronDatasetConfig) -> None:
    """ConfigError where the config is another kind's: one without the options that this kind has of its own."""
    needed = getattr(cls, "config_class", BlendedMegatronDatasetConfig)
    if missing := [name for name in get_annotations(needed) if not hasattr(config, name)]:
        found = f"{type(config).__name__}, without {', '.join(missing)}"
        raise ConfigError(f"config: found a {found}; {cls.__name__} needs a {needed.__name__}")
