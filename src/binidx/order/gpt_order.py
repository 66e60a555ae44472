"""Megatron Core's order of GPT samples: S + 1 consecutive tokens of the shuffled, concatenated sequences.

sample i  ─ shuffle_index ─►  rows j and j + 1 of sample_index: where it starts and ends in document_index
          ─ document_index ─►  spans of sequences
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.forks import cached_property
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import bind_sequences, index_of
from binidx.index.cache.array_writer import ArrayWriter, build_in_memory
from binidx.index.cache.index_cache import Outcome
from binidx.index.cache.index_files import Arrays
from binidx.index.cache.manifest import describe_documents, get_origin
from binidx.index.cache.order_record import OrderKey, get_order_key
from binidx.index.document_sample import EpochPlan, build_sample_index, count_tokens, plan_epochs, shuffle_dtype
from binidx.index.documents import Documents, fill_numbers
from binidx.index.gpt_indices import ARRAYS, build_gpt_index, check_gpt_index
from binidx.native.gpt_samples import GPTIndex
from binidx.native.permutations import RandomState
from binidx.order.opener import DEFAULT_OPENER, IndexOptions, Opener
from binidx.order.order_protocols import Bounds, Numbers, Source, SpanIndex
from binidx.order.source_order import SourceOrder, find_positions, join_ranges, sorted_unique

SMALL = 2**15
"""Number of samples, and documents of all epochs, up to which an index is not cached: building it takes 0.2 ms, as does
opening four small files on a disk."""


@dataclass(frozen=True, slots=True)
class GPTParameters:
    """Options that determine an order of GPT samples, besides the data.

    Args:
        kind: recorded name of the class of dataset, part of the names of caches.
        num_samples: the least number of samples; None is one epoch.
        random_seed: seed of the shuffles.
        sequence_length: S, tokens fed per sample.
        add_extra_token: whether a sample includes the first token of the next one.
        drop_last_partial: whether the tokens after the last full sample are dropped; else they are a padded sample.
        versions: further fields of the identity, which the arrays do not depend on.
    """

    kind: str
    num_samples: int | None
    random_seed: int
    sequence_length: int
    add_extra_token: bool = True
    drop_last_partial: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)

    def fingerprint(self, documents: Documents) -> dict[str, Any]:
        """Return the options that determine the arrays, besides the data and the number of samples.

        Args:
            documents: the sequences of the split.

        Returns:
            JSON values by name, as a manifest stores them.
        """
        return {
            "class": self.kind,
            "random_seed": self.random_seed,
            "sequence_length": self.sequence_length,
            "documents": describe_documents(documents),
            "add_extra_token_to_sequence": self.add_extra_token,
            "drop_last_partial_sequence": self.drop_last_partial,
        }

    @property
    def full_length(self) -> int | None:
        """`sequence_length` if all samples are full; None if the last one may have fewer tokens."""
        return self.sequence_length if self.drop_last_partial else None

    def plan(self, tokens_per_epoch: int) -> EpochPlan:
        """Return the plan of the fewest epochs that hold the samples; raise IndexBuildError if none do."""
        return plan_epochs(
            tokens_per_epoch,
            self.sequence_length,
            self.num_samples,
            add_extra_token=self.add_extra_token,
            drop_last_partial=self.drop_last_partial,
        )

    def key(self, plan: EpochPlan) -> OrderKey:
        """Return the fields of a plan on which the order depends, and the numbers of samples that share them."""
        return get_order_key(plan, self.sequence_length, add_extra_token=self.add_extra_token)

    def is_small(self, num_documents: int, plan: EpochPlan) -> bool:
        """Return whether the index is built faster than fetched, so that it is not cached by default.

        Args:
            num_documents: number of sequences of the split.
            plan: the epochs of the index.
        """
        return num_documents * plan.num_epochs + plan.num_samples <= SMALL


def array_of_index(name: str) -> Any:
    """Return a property of an order: an array of its index."""
    return property(lambda order: order.get_array(name))


class GPTOrder(SourceOrder):
    """Megatron Core's order of the samples of one source.

    Args:
        parameters: options of the order.
        source: the sequences.
        arrays: document_index, sample_index and shuffle_index; `RangedArray`s are read by ranges. None: they are built
            when one of them is first used, as a small index is.
        plan: the epochs of the index; None: counted when it is needed.

    Attributes:
        document_index: sequence numbers in reading order over all epochs, shape (E·D,), int32.
        sample_index: position in document_index and token offset where each sample starts, shape (num_samples + 1, 2).
        shuffle_index: row of sample_index of each served sample, shape (num_samples,).

    Source: Megatron Core, `GPTDataset`.
    """

    array_names = ARRAYS

    def __init__(
        self, parameters: GPTParameters, source: Source, arrays: Arrays | None, plan: EpochPlan | None = None
    ) -> None:
        super().__init__(source)
        self.parameters, self.given_plan = parameters, plan
        self._arrays: Mapping[str, Any] = arrays or {}
        self.sequence_length, self.full_length = parameters.sequence_length, parameters.full_length

    def set_arrays(self, arrays: Mapping[str, Any]) -> None:
        vars(self).pop("index", None)
        self._arrays = {**self._arrays, **arrays}

    def get_array(self, name: str) -> Any:
        """Return an array; those of a small index are built at the first use, and those that were assigned stay."""
        if name not in self._arrays:
            self._arrays = {**build_small_index(self.parameters, self.source, self.plan), **self._arrays}
        return self._arrays[name]

    document_index, sample_index, shuffle_index = map(array_of_index, ARRAYS)

    @cached_property
    def index(self) -> SpanIndex:
        arrays = self.shuffle_index, self.sample_index, self.document_index
        dataset, extra = self.source.dataset, self.parameters.add_extra_token
        if isinstance(dataset, IndexedDataset) and not isinstance(self.document_index, np.ndarray):
            return RangedGPTIndex(arrays, dataset, extra)
        return GPTIndex(*arrays, bind_sequences(dataset), add_extra_token=extra)

    @property
    def plan(self) -> EpochPlan:
        """The epochs of the index."""
        if self.given_plan is None:
            self.given_plan = count_epochs(self.parameters, self.source)
        return self.given_plan

    @property
    def identity(self) -> dict[str, Any]:
        fixed, changing = self.parameters.fingerprint(self.source.sequences), self.parameters.key(self.plan).fields
        return {**fixed, **changing, "data": self.source.dataset.identity, **self.parameters.versions}

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all epochs."""
        return self.plan.num_tokens

    @property
    def num_epochs(self) -> int:
        """Number of epochs in `document_index`."""
        return len(self.document_index) // max(len(self.source.sequences), 1)

    def __len__(self) -> int:
        return len(self.sample_index) - 1 if "sample_index" in self._arrays else self.plan.num_samples

    def cut(self, sequence_length: int, options: IndexOptions) -> GPTOrder:
        """Return the order of the same stream of documents in samples of another length, in the order of the stream.

        Its sample_index has the start of each sample, and its shuffle_index 0, 1, 2, ...

        Args:
            sequence_length: number of tokens of a sample.
            options: of the cache of these two arrays, and of their build.
        """
        parameters, dataset, plan, document_index = self.parameters, self.source.dataset, self.plan, self.document_index

        def build(writer: ArrayWriter) -> None:
            rows = build_sample_index(
                index_of(dataset).sequence_lengths[:],
                document_index[:],
                sequence_length,
                plan.num_tokens,
                add_extra_token=parameters.add_extra_token,
                threads=options.opener.threads,
            )
            with writer.array("sample_index", rows.shape, rows.dtype) as out:
                out[:] = rows
            with writer.array("shuffle_index", (len(rows) - 1,), shuffle_dtype(len(rows) - 1)) as out:
                fill_numbers(out, range(len(out)), options.opener.threads)

        sequences = self.source.sequences
        fixed = {**parameters.fingerprint(sequences), **parameters.key(plan).fields, "cut_to": sequence_length}
        is_small, is_ranged = parameters.is_small(len(sequences), plan), not isinstance(document_index, np.ndarray)
        names = ("sample_index", "shuffle_index")
        cut = options.load_or_build(dataset, fixed, names, build, is_small=is_small, is_ranged=is_ranged)
        arrays = {"document_index": document_index, **cut}
        return GPTOrder(replace(parameters, sequence_length=sequence_length), self.source, arrays, plan)

    def candidates(self, sequences: Numbers) -> Numbers:
        """Return the samples that may contain a token of the given sequences, ascending; no sample with one is missing.

        The method reads `document_index` and `shuffle_index` once from start to end, and searches `sample_index`.

        Args:
            sequences: sequence numbers in the dataset, in any order, shape (n,), int64.

        Returns:
            Sample numbers, shape (m,), int64. Some of these samples may contain no token of the given sequences.
        """
        positions = find_positions(self.document_index, sequences)
        # Row j ends where row j + 1 starts, and may take its last token from there: both ends count.
        # Searched for values of its own type, or all of it would be converted to another.
        starts, kind = self.sample_index[:, 0], self.sample_index.dtype
        first = np.maximum(starts.searchsorted((positions - 1).astype(kind), side="right") - 1, 0)
        last = np.minimum(starts.searchsorted(positions.astype(kind), side="right"), len(self.sample_index) - 1)
        return find_positions(self.shuffle_index, sorted_unique(join_ranges(first, last)))

    def epochs(self, samples: Numbers) -> Numbers:
        if self.num_epochs <= 1:
            return np.zeros_like(samples)
        positions = self.sample_index[self.shuffle_index[samples], 0].astype(np.int64)
        numbers: Numbers = positions // max(len(self.source.sequences), 1)
        return numbers


def count_epochs(parameters: GPTParameters, source: Source, opener: Opener = DEFAULT_OPENER) -> EpochPlan:
    """Return the epochs that a source needs for the samples.

    Args:
        parameters: options of the order.
        source: the sequences.
        opener: options of the build.

    Raises:
        IndexBuildError: no number of epochs holds the samples.
    """
    run, index = source.sequences, index_of(source.dataset)
    if isinstance(run, range) and run.step == 1 and 0 <= run.start <= run.stop <= len(index):
        return parameters.plan(index.tokens_of(run))
    with opener.context.threads(opener.threads) as num_threads:
        tokens_per_epoch = count_tokens(index.sequence_lengths, run, threads=num_threads)
    return parameters.plan(tokens_per_epoch)


def build_small_index(parameters: GPTParameters, source: Source, plan: EpochPlan) -> Arrays:
    """Return the three arrays, built in the memory of this process by one thread."""
    return build_in_memory(lambda writer: _build(writer, parameters, source, plan, 1))


def _build(writer: ArrayWriter, parameters: GPTParameters, source: Source, plan: EpochPlan, threads: int) -> None:
    build_gpt_index(
        writer,
        source.dataset.sequence_lengths,
        source.sequences,
        plan,
        RandomState(parameters.random_seed),
        parameters.sequence_length,
        add_extra_token=parameters.add_extra_token,
        threads=threads,
    )


def load_or_build_gpt_index(
    parameters: GPTParameters, source: Source, plan: EpochPlan, options: IndexOptions
) -> Arrays | None:
    """Load the arrays from the cache, or build them; None if they are small, as `GPTOrder` builds these later.

    The index of computed tokens is not cached, and a small one by default not, as it is built faster.

    Args:
        parameters: options of the order.
        source: the sequences.
        plan: the epochs of the index.
        options: of the cache and the build.
    """

    def build(writer: ArrayWriter) -> None:
        with options.opener.context.threads(options.opener.threads) as threads:
            _build(writer, parameters, source, plan, threads)

    def check(arrays: Arrays) -> None:
        length, extra = parameters.sequence_length, parameters.add_extra_token
        check_gpt_index(arrays, bind_sequences(dataset), source.sequences, length, extra)

    dataset, context = source.dataset, options.opener.context
    is_small = parameters.is_small(len(source.sequences), plan)
    is_cached = options.opener.cache_small or not is_small
    if isinstance(dataset, IndexedDataset) and (is_cached or options.opener.trust):
        fingerprint = parameters.fingerprint(source.sequences)
        cache = options.cache(
            origin=get_origin(dataset),
            order=partial(parameters.key, plan),
            trusted=check if options.opener.trust else None,
        )
        if is_cached:
            return cache.load_or_build(options.name.description, fingerprint, ARRAYS, build)
        if arrays := cache.load(fingerprint, ARRAYS):
            return arrays
    if isinstance(dataset, IndexedDataset) and context.on_outcome is not None:
        context.report(Outcome(options.name.files, Outcome.NOT_KEPT, 0.0))
    return None if is_small else build_in_memory(build)


@dataclass(frozen=True)
class RangedGPTIndex:
    """`GPTIndex` over `RangedArray`s: reads the parts of the arrays that the requested samples need.

    Args:
        arrays: shuffle_index, sample_index and document_index.
        dataset: the dataset of the sequences that document_index refers to.
        add_extra_token: as for GPTIndex.
    """

    arrays: tuple[Any, Any, Any]
    dataset: IndexedDataset
    add_extra_token: bool

    def spans(self, served: Sequence[int] | Numbers) -> tuple[Numbers, Bounds]:
        index, sequences = self._parts(served)
        spans, bounds = index.spans(range(len(index.arrays[0])))
        spans[:, 0] = sequences[spans[:, 0]]
        return spans, bounds

    def ends(
        self, served: Sequence[int] | Numbers
    ) -> tuple[Bounds, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        index, sequences = self._parts(served)
        bounds, numbers, starts, stops = index.ends(range(len(index.arrays[0])))
        return bounds, sequences[numbers], starts, stops

    def _parts(self, served: Sequence[int] | Numbers) -> tuple[GPTIndex, NDArray[np.int32]]:
        """Return the index of these samples, which counts their sequences from 0, and the real sequence numbers."""
        shuffle_index, sample_index, document_index = self.arrays
        count = len(shuffle_index)
        numbers = np.asarray(served, np.int64).reshape(-1)
        if len(numbers) and not -count <= numbers.min() <= numbers.max() < count:
            raise IndexError(f"samples {numbers.min()} to {numbers.max()}: out of range (there are {count})")
        rows = shuffle_index[numbers % max(count, 1)].astype(np.int64)
        try:
            ends = sample_index[np.stack([rows, rows + 1], axis=1)].reshape(-1, 2)
            first, stop = ends[::2, 0].astype(np.int64), ends[1::2, 0].astype(np.int64) + 1
            sequences, positions = np.unique(document_index.runs(first, stop), return_inverse=True)
            some = self.dataset.sequences_at(sequences.astype(np.int64))
        except IndexError as error:
            raise IndexBuildError(f"the index arrays contradict each other: {error}") from error
        # Sample i has rows 2 i and 2 i + 1, and its documents follow those of the sample before.
        before = np.cumsum(stop - first) - (stop - first)
        ends[::2, 0], ends[1::2, 0] = before, before + (stop - first) - 1
        arrays = np.arange(0, len(ends), 2, dtype=np.uint32), ends, positions.reshape(-1).astype(np.int32)
        return GPTIndex(*arrays, some, add_extra_token=self.add_extra_token), sequences


@dataclass(frozen=True)
class GPTRule:
    """Megatron Core's order of GPT samples as a rule of a source: see `order.requests.SourceRule`."""

    parameters: GPTParameters
    fields: ClassVar[Mapping[str, Any]] = {}
    uncounted: ClassVar[str] = ""

    def open(self, source: Source, options: IndexOptions) -> GPTOrder:
        plan = count_epochs(self.parameters, source, options.opener)
        return GPTOrder(self.parameters, source, load_or_build_gpt_index(self.parameters, source, plan, options), plan)
