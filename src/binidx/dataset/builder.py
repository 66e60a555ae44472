"""Build of the train, valid and test datasets of a run from its config."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from inspect import get_annotations
from typing import Any, SupportsIndex, TypeVar

from binidx.dataset.blend_arguments import is_sequence_of
from binidx.dataset.config import (
    BlendedMegatronDatasetConfig,
    GPTDatasetConfig,
    Split,
    SplitMatrix,
    check_num_samples,
    split_indices,
)
from binidx.dataset.megatron.blended import BlendedDataset, request_parts
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import (
    OrderedDataset,
    building,
    check_listed_sources,
    make_opener,
    own_methods,
    request_order,
)
from binidx.dataset.pinned_run import PinnedFile, open_pins
from binidx.dataset.rank_agreement import agree_on_outcome
from binidx.dataset.rank_comparison import compare_with_ranks
from binidx.dataset.split_requests import WHOLE, Sizes, SplitGroup, SplitRequests, group_splits, request_splits
from binidx.dataset.staged import Stage, StagedBlendedDataset, request_stages
from binidx.dataset.stored.planned import PlannedDataset, open_plan
from binidx.dataset.torch_bridge import is_distributed, is_first_rank
from binidx.errors import ConfigError, PeerError, trims_traceback
from binidx.format.prefix_listing import IdxBundle, ListedPair, list_pairs_with_bundle
from binidx.index.cache.build_lock import Checks
from binidx.index.cache.index_cache import BuildContext, OnOutcome
from binidx.index.cache.index_files import recorded_name
from binidx.index.documents import split_range
from binidx.order.opener import Opener
from binidx.order.requests import find_blend
from binidx.storage.location import Location
from binidx.storage.stats import span
from binidx.storage.threads import OPENS, rare_collections

SLOW_SECONDS, SLACK_SECONDS, BUSY_TIMES = 0.005, 0.25, 8
"""Seconds that `run_concurrently` allows for each piece of work in the calling thread, ten times the usual; slack; and
seconds that it allows for one of CPU time, as on a busy machine, where threads would only cost more."""

Result = TypeVar("Result")

Work = Callable[[BuildContext], Result]
"""Function that builds one dataset or several in a context, whose checks it calls while it waits."""

TopLevelDataset = BlendedDataset | MegatronDataset | PlannedDataset

Built = list[TopLevelDataset | list[MegatronDataset] | None]
"""One dataset per split, or the list of its validation sets; None if the split has no share."""


class BlendedMegatronDatasetBuilder:
    """Builder of the datasets of all splits of a run.

    Every rank may build: the indices are a function of the config, and a cache appears complete or not at all, so there
    is no barrier and no first rank. One process builds each index while the others wait (`index.cache.build_lock`).
    Under torch.distributed every rank must call `build`, and an error on one rank is raised on all
    (`dataset.rank_agreement`).

    Args:
        cls: kind of dataset, such as `GPTDataset`.
        sizes: the least number of samples of train, valid and test; None is one epoch (only without weights).
        is_built_on_rank: returns whether this process needs the datasets; called only under torch.distributed.
        config: options of the run.
        splits: the splits to build; the others are None.
        opened: prefix -> its low-level dataset, where the caller has it already; `build` opens the others.
        other_prefixes: other prefixes of the run, which lists of documents may name.
        stages: stages of a `StagedBlendedDataset`, which is train, instead of the config's blend.
        pinned: open the objects in the versions of the run's pinned file, if there is one.
        planned: use the read plans of these options that are there, as if the config had `read_plan`.
        warns: as in `BuildContext`.

    Raises:
        ConfigError: sizes, config and kind do not fit.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.GPTDataset, [1_000_000, 10_000, 0], lambda: True, config)
        >>> train, valid, test = builder.build()

    Source: Megatron Core, `BlendedMegatronDatasetBuilder`, without its barriers; the arguments by keyword are ours.
    """

    blended_class: type[BlendedDataset] = BlendedDataset
    """Class of the blend of several datasets."""

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: Sizes,
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        *,
        splits: Collection[Split] = tuple(Split),
        opened: Mapping[str, Any] | None = None,
        other_prefixes: Collection[str] = (),
        stages: Sequence[Stage] | None = None,
        pinned: bool = True,
        planned: bool = False,
        warns: bool = True,
    ) -> None:
        self.cls = cls
        self.splits = splits
        if not is_sequence_of(sizes, (SupportsIndex, type(None))):
            raise ConfigError(f"sizes: found {sizes!r}, needs numbers of train, valid and test, as [1_000_000, 0, 0]")
        self.sizes = [None if size is None else operator.index(size) for size in sizes]
        check_num_samples("sizes", max(filter(None, self.sizes), default=0))
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self.opened, self.stages, self.pinned, self.warns = {} if opened is None else opened, stages, pinned, warns
        self.planned = planned
        self.other_prefixes = [*other_prefixes, *(prefix for stage in stages or () for prefix in stage.blend[0])]
        if len(sizes) != len(Split):
            raise ConfigError(f"sizes: found {len(sizes)}, needs {len(Split)}, one per split")
        check_kind(cls, config)
        blends = config.blend_per_split if config.blend is None else [config.blend] * len(Split)
        for split, blend, size in zip(Split, blends or (), sizes, strict=False):
            if size is None and blend is not None and blend[1] is not None:
                raise ConfigError(f"sizes: found None for {split.name}, a blend with weights needs a number")
        valid = config.blend_per_split and config.multiple_validation_sets and config.blend_per_split[Split.valid.value]
        if valid and len(valid[0]) > 1 and config.full_validation and sizes[Split.valid.value] is not None:
            raise ConfigError(f"sizes: found {sizes[Split.valid.value]} for valid, full_validation needs None")

    @trims_traceback
    def build(self, *, on_outcome: OnOutcome = None) -> Built:
        """Build the datasets.

        Args:
            on_outcome: called with the outcome of each index, from any thread (not in Megatron Core).

        Returns:
            One dataset per split; None for a split without a share, and on a rank that does not build. A single prefix
            without weight gives the dataset itself, several a `BlendedDataset`; with `multiple_validation_sets` the
            valid split is a list. With `read_plan`, a split with a read plan is a `PlannedDataset`.

        Raises:
            BlendError: a blend needs more samples of a dataset than it has.
            IndexBuildError: a split has too few tokens.
            ObjectNotFoundError: a file is missing.
            ObjectChangedError: objects or indices are not those of the pinned file: `dataset.pinned_run`.
            PeerError: another rank failed, or has another order or other data: `dataset.rank_comparison`.
        """
        check_listed_sources(self.config, self.other_prefixes)
        with rare_collections(), span("binidx.start") as parent:
            work = partial(self._build_and_compare, on_outcome, parent)
            return agree_on_outcome(work) if is_distributed() else work((), "")

    def _build_and_compare(self, on_outcome: OnOutcome, parent: Any, checks: Checks, name: str) -> Built:
        """Build the datasets, and compare them with those of the other ranks under a name."""
        context = BuildContext(checks, on_outcome=on_outcome, parent=parent, warns=self.warns)
        built = self._build(replace(context, run_prefixes=self.other_prefixes))
        datasets: dict[str, TopLevelDataset] = {}
        for split, entry in zip(Split, built, strict=True):
            if isinstance(entry, list):
                datasets |= {f"{split.name}[{number}]": dataset for number, dataset in enumerate(entry)}
            elif entry is not None:
                datasets[split.name] = entry
        for dataset in datasets.values():
            if isinstance(dataset, OrderedDataset):
                dataset.order  # noqa: B018 - opens it, for its errors
        if is_distributed():
            for check in checks:  # the store may have gone since the outcome was read
                check(False)
            compare_with_ranks("build()", name, {"sizes": self.sizes}, datasets)
        return built

    def requests(self) -> SplitRequests:
        """Return the request of each split that has a share, with the order for which the config asks; open nothing."""
        requests = dict(request_splits(self.cls, self.config, self.sizes))
        if self.stages is not None:
            asked = request_stages(self.cls, self.stages, self.config)
            requests[Split.train] = [request_order(self.config, asked, self.other_prefixes)]
        return requests

    def opener(self, **options: Any) -> Opener:
        """Return an opener of the requests; `options` are further arguments of `Opener`."""
        return make_opener(self.config, context=BuildContext(warns=self.warns), **options)

    @staticmethod
    def open_counted(
        cls: type[MegatronDataset], config: BlendedMegatronDatasetConfig, split: Split
    ) -> tuple[dict[str, Any], int]:
        """Open the low-level datasets of a blend concurrently, and count the tokens of a split.

        Args:
            cls: kind of dataset, whose `build_low_level_dataset` opens them.
            config: options of the run, with a blend.
            split: the split.

        Returns:
            Prefix -> dataset; and the number of tokens, those of a prefix that repeats several times.
        """
        prefixes, _ = config.blend or ([], None)
        distinct, bookends = [*dict.fromkeys(prefixes)], (config.split_matrix or [])[split.value] or (0.0, 0.0)
        locations = [Location(prefix, config.storage_options) for prefix in distinct]
        with open_pins(config) as pins:
            listed = list_pairs_with_bundle(locations, idx_bundle(config), pins.pairs if pins else {})

            def open_one(prefix: str) -> Any:
                with building(BuildContext(listed=listed)):
                    return cls.build_low_level_dataset(prefix, config)

            opened = dict(zip(distinct, OPENS.map(open_one, distinct), strict=True))
        counts = {prefix: each.index.tokens_of(split_range(bookends, len(each))) for prefix, each in opened.items()}
        return opened, sum(counts[prefix] for prefix in prefixes)

    def _build(self, context: BuildContext) -> Built:
        if is_distributed() and not self.is_built_on_rank():
            return [None] * len(Split)
        if self.config.mock:
            matrix = _choose(self.config.split_matrix or [], self.splits)
            return [*self._build_prefix(None, matrix, self.sizes, context)]
        built: Built = [*self._open_planned()]
        with open_pins(self.config, self.opened) if self.pinned else contextlib.nullcontext() as pins:
            pairs = pins.pairs if pins else {}
            for group in group_splits(self.config, self.sizes):
                open_splits = [split for split in self.splits if built[split.value] is None]
                chosen = replace(group, matrix=_choose(group.matrix, open_splits))
                for split, dataset in self._build_group(chosen, context, pairs).items() if chosen.splits else ():
                    built[split.value] = dataset
            if pins:
                pins.check_indices(PinnedFile.list_indexed(built))
        if self.stages is not None:
            with building(context):
                built[Split.train.value] = StagedBlendedDataset(self.cls, self.stages, self.config)
        return built

    def _open_planned(self) -> list[PlannedDataset | None]:
        """Return the dataset of each split that has a read plan for these options.

        Where the config does not ask for plans, a split without one ends the search: most runs have none.
        """
        config, matrix = self.config, self.config.split_matrix or [WHOLE] * len(Split)
        if not isinstance(config, GPTDatasetConfig) or not (config.read_plan or self.planned):
            return [None] * len(Split)
        planned: dict[Split, PlannedDataset | None] = {}
        wanted = [split for split in Split if split in self.splits and matrix[split.value] is not None]

        def open_split(split: Split) -> PlannedDataset | None:
            return open_plan(recorded_name(self.cls), config, split, self.sizes[split.value])

        if wanted and not config.read_plan:
            planned = {wanted[0]: open_split(wanted[0])}
            wanted = wanted[1:] if planned[wanted[0]] is not None else []
        planned |= zip(wanted, OPENS.map(open_split, wanted), strict=True)
        return [*map(planned.get, Split)]

    def _build_group(
        self, group: SplitGroup, context: BuildContext, pinned: Mapping[str, ListedPair]
    ) -> dict[Split, Any]:
        """Return the dataset of each split, its blend, or its list of validation sets."""
        built = self._build_prefixes(group, context, pinned)
        datasets: dict[Split, Any] = {split: [of_prefix[split.value] for of_prefix in built] for split in group.splits}
        if not group.is_blend:
            return {split: own if len(own) > 1 else own[0] for split, own in datasets.items()}
        works = [partial(self._blend, group, split, own) for split, own in datasets.items()]
        made = (run_concurrently if self._is_remote([]) else run_in_order)(works, context)
        return dict(zip(datasets, made, strict=True))

    def _build_prefixes(
        self, group: SplitGroup, context: BuildContext, pinned: Mapping[str, ListedPair]
    ) -> Sequence[list[MegatronDataset | None]]:
        """Return the datasets of each prefix, one per split.

        Remote prefixes are opened at the same time, with as many requests as a process may have in flight. The config
        limits the number of threads that compute; each prefix gets its share of them.
        """
        prefixes, sizes = group.prefixes, group.sizes_per_dataset(self.config.mid_level_dataset_surplus)
        if len(prefixes) == 1:
            return [self._build_prefix(prefixes[0], group.matrix, sizes[0], replace(context, listed=pinned))]
        threads, is_remote = self.config.num_dataset_builder_threads, self._is_remote(prefixes)
        slots = threading.Semaphore(threads)
        context = replace(context, num_threads=max(1, threads // len(prefixes)))

        def build(prefix: str, sizes: Sizes, context: BuildContext) -> list[MegatronDataset | None]:
            with contextlib.nullcontext() if is_remote else slots:
                for check in context.checks:
                    check(False)
                return self._build_prefix(prefix, group.matrix, sizes, context)

        works = [partial(build, *of_prefix) for of_prefix in zip(prefixes, sizes, strict=True)]
        if not is_remote:
            run = run_in_order if threads == 1 else partial(run_concurrently, in_this_thread=[True] * len(works))
            return run(works, context)
        closed = [Location(prefix, self.config.storage_options) for prefix in prefixes if prefix not in self.opened]
        listed = list_pairs_with_bundle(closed, idx_bundle(self.config), pinned)
        indexed = self.opened.keys() | {prefix for prefix, pair in listed.items() if pair.index is not None}
        context = replace(context, slot=slots, listed=listed)
        return run_concurrently(works, context, [prefix in indexed for prefix in prefixes])

    def _is_remote(self, prefixes: Sequence[str]) -> bool:
        """Return whether some of these prefixes, or their caches, are in a store."""
        return any(uri and Location(uri).local_path is None for uri in (*prefixes, self.config.path_to_cache))

    def _build_prefix(
        self, prefix: str | None, matrix: SplitMatrix, sizes: Sizes, context: BuildContext
    ) -> list[MegatronDataset | None]:
        # A constructor of the user's gets an array, as in Megatron.
        elements: Any = split_indices if own_methods(self.cls, "__init__") else split_range
        with building(context):
            if (low_level := self.opened.get(prefix or "")) is None:
                low_level = self.cls.build_low_level_dataset(prefix, self.config)
            num_elements = self.cls.numel_low_level_dataset(low_level)
            return [
                None
                if bookends is None
                else self._construct(
                    self.cls, low_level, prefix, elements(bookends, num_elements), size, split, self.config
                )
                for split, bookends, size in zip(Split, matrix, sizes, strict=True)
            ]

    def _construct(self, kind: Callable[..., Result], *arguments: Any) -> Result:
        return kind(*arguments)

    def _blend(
        self, group: SplitGroup, split: Split, datasets: Sequence[MegatronDataset], context: BuildContext
    ) -> BlendedDataset:
        request = group.request_blend(split, [], self.config)
        if request.weights is None:
            opened = replace(request, parts=request_parts(datasets, self.config))
            drawn = find_blend(request_order(self.config, opened, self.other_prefixes)) or opened
            request = request.measured([len(make_opener(self.config).open(part)) for part in drawn.parts])
        with building(context):
            return self._construct(self.blended_class, [*datasets], request.weights or [], request.size, self.config)


def _choose(matrix: SplitMatrix, splits: Collection[Split]) -> SplitMatrix:
    """Return a split matrix with None for the splits that are not to be built."""
    return [bookends if split in splits else None for split, bookends in zip(Split, matrix, strict=True)]


def idx_bundle(config: BlendedMegatronDatasetConfig) -> IdxBundle | None:
    """Return the bundle of small `.idx` files beside the indices, which rank 0 writes; None without caches."""
    directory = config.cache_directory
    return None if directory is None else IdxBundle(directory, is_first_rank())


def check_kind(cls: type[MegatronDataset], config: BlendedMegatronDatasetConfig) -> None:
    """Raise ConfigError if the config lacks options of this kind of dataset, as another kind's config does."""
    needed = cls.config_class
    if missing := [name for name in get_annotations(needed) if not hasattr(config, name)]:
        found = f"{type(config).__name__}, without {', '.join(missing)}"
        raise ConfigError(f"config: found a {found}; {cls.__name__} needs a {needed.__name__}")


def run_in_order(works: Sequence[Work[Result]], context: BuildContext) -> list[Result]:
    """Return the results of pieces of work, run one after another in the calling thread; the first error ends it."""
    return [work(context) for work in works]


def run_concurrently(
    works: Sequence[Work[Result]], context: BuildContext, in_this_thread: Sequence[bool] = ()
) -> list[Result]:
    """Return the results of work that waits for stores, run concurrently; the first error ends the rest.

    When one piece of work fails, work that only computes goes on to its end in its thread, work that waits for another
    process is interrupted by its check, and work that has not begun never begins. So no rank withholds an error for as
    long as another node builds.

    Args:
        works: called with the context, of which all pieces share one.
        context: of the build; gets a check that raises PeerError once another piece has failed.
        in_this_thread: per piece, whether it probably only computes. Such pieces run in the calling thread: a hundred
            computing threads compete for the GIL and need three times as long. If the first ones are slow, the rest
            gets threads, too.

    Raises:
        The first error, without waiting for the rest.
    """
    local = [number for number, is_local in enumerate(in_this_thread) if is_local]
    results: dict[int, Result] = {}
    pending: dict[int, Future[Result]] = {}
    errors: list[BaseException] = []

    def run(number: int) -> Result:
        try:
            return works[number](context)
        except BaseException as error:
            errors.append(error)
            raise

    def check(_: bool) -> None:
        if errors:
            raise PeerError(f"build interrupted: another dataset of this build failed: {errors[0]}")

    context = context.with_check(check)
    try:
        for number in {*range(len(works))}.difference(local):
            pending[number] = OPENS.submit(partial(run, number))
        started, used = time.monotonic(), time.thread_time()
        for number in local:
            allowed = SLACK_SECONDS + SLOW_SECONDS * len(results) + BUSY_TIMES * (time.thread_time() - used)
            if time.monotonic() - started > allowed:
                pending[number] = OPENS.submit(partial(run, number))
            else:
                results[number] = run(number)
        wait(pending.values(), return_when=FIRST_EXCEPTION)
        results |= {number: future.result() for number, future in sorted(pending.items()) if future.done()}
        return [results[number] for number in range(len(works))]
    except BaseException as error:
        errors.append(error)
        for future in pending.values():
            future.cancel()
        raise errors[0] from errors[0].__cause__
