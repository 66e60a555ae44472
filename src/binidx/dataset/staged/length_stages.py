"""Dataset whose sequence length changes during a run, without losing or repeating a token.

    windows of 8,192 tokens      0 1 2 3 4 5 6 7 | 8 9 10 11 ..        in the order of the run of that length
    stage 0, 2,048               4 samples each  |
    stage 1, 8,192                               | one sample each

The order is that of the longest length: each stage takes the next windows of it, and cuts each into samples of its own
length. So the documents served up to any window are those of the run of 8,192 tokens.

The rows of all stages, 10 bytes a sample, and the starts of the samples of each length, 12 bytes, are cached and mapped
like other indices; they are written and checked a few groups of windows at a time.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.dataset.megatron.blended import BlendedDataset, blend_arrays, row_blocks
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.errors import BlendError, ConfigError
from binidx.index.cache.array_writer import ArrayWriter, build_in_memory
from binidx.index.cache.index_cache import DEFAULT_CONTEXT
from binidx.index.cache.index_files import Arrays, recorded_name
from binidx.index.cache.manifest import get_origin
from binidx.index.document_sample import build_sample_index, shuffle_dtype
from binidx.index.documents import fill_numbers
from binidx.index.gpt_indices import build_window_order
from binidx.order.blended_order import BlendedOrder
from binidx.order.gpt_order import GPTOrder

MIXED_WINDOWS = 1024
"""Default number of windows whose parts are interleaved."""

AT_ONCE = 1 << 18
"""Samples that are written and checked together, unless a group has more."""

SOURCE_BITS = 48
"""Number of bits for a sample number below the number of its source, in one int64."""

LENGTH_ATTRIBUTES = ("_parameters", "unique_description", "unique_description_hash")
"""Computed attributes of a dataset that depend on its sequence length."""


@dataclass(frozen=True)
class LengthStage:
    """One stage of a `LengthStagedDataset`.

    Args:
        sequence_length: length of its samples; must divide the length of the windows, which are cut into these samples.
        num_samples: number of samples; must fill whole windows. For full batches at the change, it should be a multiple
            of the global batch size, too.

    Example:
        >>> binidx.LengthStage(sequence_length=2048, num_samples=4_000_000)

    Source: ours.
    """

    sequence_length: int
    num_samples: int


@dataclass(frozen=True)
class WindowGroups:
    """Samples of one stage that are cut from some groups of windows.

    Args:
        stage: the stage.
        rows: rows of these samples among all samples of the dataset.
        windows: the windows that these samples must serve.
        parts: number of samples per window.
        window, part: the window of each sample, and its part of that window.
    """

    stage: LengthStage
    rows: slice
    windows: range
    parts: int
    window: NDArray[np.int64]
    part: NDArray[np.int64]


class LengthStagedDataset(BlendedDataset):
    """Samples of several lengths, stage after stage: a `BlendedDataset` whose datasets are sources cut to a length.

    Args:
        windows: a `GPTDataset`, or a blend of them, built for the longest length; its samples are the windows.
        stages: stages in their order; together they may use no more windows than there are.
        mixed_windows: number of windows whose parts are interleaved, so that parts of a window are not neighbours.

    Raises:
        ConfigError: a length does not divide that of the windows, a stage ends inside a window, or there are too few
            windows.

    Example:
        >>> stages = [binidx.LengthStage(2048, 4_000_000), binidx.LengthStage(8192, 1_000_000)]
        >>> dataset = binidx.LengthStagedDataset(train, stages)

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "LengthStagedDataset"

    def __init__(
        self, windows: GPTDataset | BlendedDataset, stages: Sequence[LengthStage], *, mixed_windows: int = MIXED_WINDOWS
    ) -> None:
        windows.check_whole()
        self.config: Any = windows.config
        self.stages, self.windows, self.mixed_windows = tuple(stages), windows, mixed_windows
        sources: list[Any] = [*windows.parts]
        for source in sources:
            if not isinstance(source._order, GPTOrder):
                raise ConfigError(f"windows: found {source!r} in an order of its own, needs Megatron's order")
        self.split = sources[0].index_split
        check_stages(self.stages, self.config.sequence_length, len(windows))
        cut = {
            length: [cut_dataset(source, length) for source in sources]
            for length in dict.fromkeys(stage.sequence_length for stage in self.stages)
        }
        self.datasets = [dataset for datasets in cut.values() for dataset in datasets]
        self._first_of = {length: number * len(sources) for number, length in enumerate(cut)}
        self.weights = [1 / len(self.datasets)] * len(self.datasets)
        self.size = sum(stage.num_samples for stage in self.stages)
        self._open(DEFAULT_CONTEXT)
        self._is_whole = True  # windows have the order that the option requests
        self.check()

    def _make_order(self, arrays: Arrays) -> BlendedOrder:
        fields = {"class": recorded_name(type(self)), "stages": self._stages}
        return BlendedOrder([dataset.order for dataset in self.datasets], arrays, fields, windows=self.windows.order)

    def _identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([*super()._identifiers().items(), ("stages", self._stages)])

    @property
    def _stages(self) -> list[Any]:
        return [self.mixed_windows, *((stage.sequence_length, stage.num_samples) for stage in self.stages)]

    def _fingerprint(self) -> dict[str, Any]:
        """Return the identity of the windows, which includes that of their data."""
        order = json.dumps(self.windows.order_identity, sort_keys=True, default=str)
        return {"windows": xxhash.xxh3_128_hexdigest(order.encode())}

    def _build(self, writer: ArrayWriter) -> None:
        with blend_arrays(writer, self.weights, self.size) as (ids, samples):
            for group in self._groups():
                source, number = _locate_windows(self.windows, group.window)
                ids[group.rows] = self._first_of[group.stage.sequence_length] + source
                samples[group.rows] = number * group.parts + group.part

    def check(self) -> None:
        """Raise BlendError unless each stage serves every part of its windows once, and no other parts."""
        num_sources = len(self.datasets) // len(self._first_of)
        for group in self._groups():
            source, number = _locate_windows(self.windows, np.arange(group.windows.start, group.windows.stop))
            expected = np.sort((source << SOURCE_BITS) + number * group.parts)[:, None] + np.arange(group.parts)
            served = self.dataset_index[group.rows].astype(np.int64) % num_sources << SOURCE_BITS
            actual = np.sort(served + self.dataset_sample_index[group.rows])
            if (actual != expected.ravel()).any():
                raise BlendError("stages: a window is skipped, or served twice; please report this bug")

    def _groups(self) -> Iterator[WindowGroups]:
        """Yield all samples, some groups of windows at a time."""
        first = begun = 0
        for stage in self.stages:
            parts = self.config.sequence_length // stage.sequence_length
            groups = self.mixed_windows * parts
            for rows in row_blocks(0, stage.num_samples, max(1, AT_ONCE // groups) * groups):
                window, part = build_window_order(stage.num_samples, parts, self.mixed_windows, rows)
                windows = range(begun + rows.start // parts, begun + rows.stop // parts)
                run_rows = slice(first + rows.start, first + rows.stop)
                yield WindowGroups(stage, run_rows, windows, parts, begun + window, part)
            first, begun = first + stage.num_samples, begun + stage.num_samples // parts


def check_stages(stages: Sequence[LengthStage], window_length: int, num_windows: int) -> None:
    """Raise ConfigError unless every stage fills whole windows, and there are enough windows.

    Args:
        stages: stages in their order.
        window_length: number of tokens of a window.
        num_windows: number of windows of the dataset.
    """
    used = 0
    for number, stage in enumerate(stages):
        parts, rest = divmod(window_length, max(stage.sequence_length, 1))
        if stage.sequence_length < 1 or rest or not parts:
            raise ConfigError(
                f"stage {number}: found sequence_length {stage.sequence_length}, need a divisor of {window_length}, "
                "the length of the windows"
            )
        if stage.num_samples < 1 or stage.num_samples % parts:
            raise ConfigError(
                f"stage {number}: found {stage.num_samples} samples, need whole windows of {parts}, "
                f"such as {max(1, round(stage.num_samples / parts)) * parts}"
            )
        used += stage.num_samples // parts
    if not stages or used > num_windows:
        raise ConfigError(f"stages: found {num_windows} windows of {window_length}, {len(stages)} stages need {used}")


def cut_dataset(windows: GPTDataset, sequence_length: int) -> GPTDataset:
    """Return a dataset of the same stream of documents in samples of another length, in stream order (not shuffled).

    Args:
        windows: the dataset of the longer samples.
        sequence_length: number of tokens of the samples that they are cut into.
    """
    config = windows.config
    cut = copy.copy(windows)
    for name in LENGTH_ATTRIBUTES:
        vars(cut).pop(name, None)
    cut.config = replace(config, sequence_length=sequence_length)
    cut.index_digests, cut.build_context = {}, DEFAULT_CONTEXT  # a copy has neither
    cut.unique_identifiers = OrderedDict([*windows.unique_identifiers.items(), ("cut_to", sequence_length)])
    document_index = {"document_index": windows.document_index}
    arrays = {**document_index, **_load_or_build_cut(cut, windows)}
    cut.serve(GPTOrder(cut._parameters, windows._source, arrays, windows._plan))
    return cut


def _load_or_build_cut(cut: GPTDataset, windows: GPTDataset) -> Arrays:
    """Load or build the arrays of `cut`, the stream of `windows` in shorter samples.

    These are the start of each sample, and 0, 1, 2, ... as shuffle_index, the order of the stream.
    """
    config, parameters, plan = cut.config, windows._parameters, windows._plan

    def build(writer: ArrayWriter) -> None:
        rows = build_sample_index(
            windows.dataset.sequence_lengths,
            windows.document_index,
            config.sequence_length,
            windows.num_tokens,
            add_extra_token=config.add_extra_token_to_sequence,
            threads=config.num_dataset_builder_threads,
        )
        with writer.array("sample_index", rows.shape, rows.dtype) as out:
            out[:] = rows
        with writer.array("shuffle_index", (len(rows) - 1,), shuffle_dtype(len(rows) - 1)) as out:
            fill_numbers(out, range(len(out)), config.num_dataset_builder_threads)

    is_small = parameters.is_small(len(windows.own_sequences), plan)
    if not windows.dataset.is_stored or (is_small and not config.cache_small_indices):
        return build_in_memory(build)
    cache = cut._index_options.cache(origin=get_origin(windows.dataset))
    fixed = parameters.fingerprint(windows.own_sequences)
    fingerprint = {**fixed, **parameters.key(plan).fields, "cut_to": config.sequence_length}
    return cache.load_or_build(cut.unique_description, fingerprint, ("sample_index", "shuffle_index"), build)


def _locate_windows(
    windows: GPTDataset | BlendedDataset, numbers: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each window, and its number in the source's stream, before the shuffle."""
    source, sample = windows.order.locate(numbers)
    in_stream = np.empty_like(sample)
    for number, dataset in enumerate(windows.parts):
        of_source = source == number
        in_stream[of_source] = cast(GPTDataset, dataset).shuffle_index[sample[of_source]]
    return source, in_stream
