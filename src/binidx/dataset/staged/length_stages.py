"""A run whose sequence length changes on the way: short samples first, long ones later, and no token lost or repeated.

    windows of 8,192 tokens      0 1 2 3 4 5 6 7 | 8 9 10 11 ..        in the order of the run of that length
    stage 0, 2,048               4 samples each  |
    stage 1, 8,192                               | one sample each

The order is that of the longest length: a stage takes the next of its windows, and cuts each into samples of its own
length. So the documents are those of the run of 8,192 tokens at every moment, and its seam is between two windows.

The rows of all stages, 10 bytes a sample, and where the samples of each length start, 12, are mapped from the cache as
other indices are; they are made and checked a few groups of windows at a time. Without a `path_to_cache` the rows are
memory of each rank, as those of a plain blend.
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

from binidx.dataset.blended import BlendedDataset, row_blocks
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.megatron_dataset import recorded_name
from binidx.errors import BlendError, ConfigError
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_files import Arrays
from binidx.index.document_sample import build_sample_index, shuffle_dtype
from binidx.index.documents import fill_numbers
from binidx.index.gpt_indices import build_window_order

MIXED_WINDOWS = 1024
"""Windows whose parts are served in turn."""

AT_ONCE = 1 << 18
"""Samples that are made and checked together, unless a group has more."""

SOURCE_BITS = 48
"""Above the numbers of samples."""

MADE_ONCE = ("_orders", "recipe", "_plan", "unique_description", "unique_description_hash")
"""What a dataset keeps that depends on its length."""


@dataclass(frozen=True)
class LengthStage:
    """One stretch of the run.

    Args:
        sequence_length: of its samples; divides the length of the windows.
        num_samples: whole windows of them. For full batches at the seam, a multiple of the global batch size as well.
    """

    sequence_length: int
    num_samples: int


@dataclass(frozen=True)
class Stretch:
    """Samples of whole groups of windows.

    Args:
        rows: where they are among all.
        windows: those that are to be served.
        parts: samples of a window.
        window, part: of each sample.
    """

    stage: LengthStage
    rows: slice
    windows: range
    parts: int
    window: NDArray[np.int64]
    part: NDArray[np.int64]


class LengthStagedDataset(BlendedDataset):
    """The samples of all stages, one after the other: a `BlendedDataset` whose datasets are sources at a length.

    Args:
        windows: a `GPTDataset`, or a blend of them, built for the longest length.
        stages: in their order; together no more windows than there are.
        mixed_windows: windows whose parts are served in turn, so that neighbours come apart.

    Raises:
        ConfigError: a length that does not divide the windows', a stage that ends inside a window, too many samples.

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "LengthStagedDataset"

    def __init__(
        self, windows: GPTDataset | BlendedDataset, stages: Sequence[LengthStage], *, mixed_windows: int = MIXED_WINDOWS
    ) -> None:
        self.config: Any = windows.config
        self.stages, self.windows, self.mixed_windows = tuple(stages), windows, mixed_windows
        sources: list[Any] = [*windows.datasets] if isinstance(windows, BlendedDataset) else [windows]
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
        self.unique_identifiers = self._identifiers()
        self.dataset_index, self.dataset_sample_index = self._load_or_build()
        self.check()

    @property
    def order_identity(self) -> Any:
        return {"class": recorded_name(type(self)), "windows": self.windows.order_identity, "stages": self._stages}

    def _identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([*super()._identifiers().items(), ("stages", self._stages)])

    @property
    def _stages(self) -> list[Any]:
        return [self.mixed_windows, *((stage.sequence_length, stage.num_samples) for stage in self.stages)]

    def _fingerprint(self) -> dict[str, Any]:
        """The windows, whose order is that of their data too."""
        order = json.dumps(self.windows.order_identity, sort_keys=True, default=str)
        return {"windows": xxhash.xxh3_128_hexdigest(order.encode())}

    def _build(self, writer: ArrayWriter) -> None:
        size = sum(stage.num_samples for stage in self.stages)
        with (
            writer.array("dataset_index", (size,), np.int16) as ids,
            writer.array("dataset_sample_index", (size,), np.int64) as samples,
        ):
            for each in self._stretches():
                source, place = _windows_of(self.windows, each.window)
                ids[each.rows] = self._first_of[each.stage.sequence_length] + source
                samples[each.rows] = place * each.parts + each.part

    def check(self) -> None:
        """Raise BlendError unless each stage serves every part of its windows once, and of no others."""
        num_sources = len(self.datasets) // len(self._first_of)
        for each in self._stretches():
            source, place = _windows_of(self.windows, np.arange(each.windows.start, each.windows.stop))
            wanted = np.sort((source << SOURCE_BITS) + place * each.parts)[:, None] + np.arange(each.parts)
            served = self.dataset_index[each.rows].astype(np.int64) % num_sources << SOURCE_BITS
            found = np.sort(served + self.dataset_sample_index[each.rows])
            if (found != wanted.ravel()).any():
                raise BlendError("stages: a window is skipped, or served twice; this is a fault of ours")

    def _stretches(self) -> Iterator[Stretch]:
        """All samples, some whole groups of windows at a time."""
        first = begun = 0
        for stage in self.stages:
            parts = self.config.sequence_length // stage.sequence_length
            groups = self.mixed_windows * parts
            for rows in row_blocks(0, stage.num_samples, max(1, AT_ONCE // groups) * groups):
                window, part = build_window_order(stage.num_samples, parts, self.mixed_windows, rows)
                windows = range(begun + rows.start // parts, begun + rows.stop // parts)
                here = slice(first + rows.start, first + rows.stop)
                yield Stretch(stage, here, windows, parts, begun + window, part)
            first, begun = first + stage.num_samples, begun + stage.num_samples // parts


def check_stages(stages: Sequence[LengthStage], window_length: int, num_windows: int) -> None:
    """Raise ConfigError unless every stage cuts whole windows, of which there are enough."""
    used = 0
    for number, stage in enumerate(stages):
        parts, rest = divmod(window_length, max(stage.sequence_length, 1))
        if stage.sequence_length < 1 or rest or not parts:
            raise ConfigError(
                f"stage {number}: samples of {stage.sequence_length}, needs a length that divides {window_length}, for "
                "which the dataset was built"
            )
        if stage.num_samples < 1 or stage.num_samples % parts:
            raise ConfigError(
                f"stage {number}: {stage.num_samples} samples, {parts} of which are a window; needs whole windows, "
                f"such as {max(1, round(stage.num_samples / parts)) * parts}"
            )
        used += stage.num_samples // parts
    if not stages or used > num_windows:
        raise ConfigError(f"stages: {len(stages)} that need {used} windows of {window_length}, there are {num_windows}")


def cut_dataset(windows: GPTDataset, sequence_length: int) -> GPTDataset:
    """The same stream of documents in samples of another length, numbered as they come: not shuffled."""
    config = windows.config
    cut = copy.copy(windows)
    for name in MADE_ONCE:
        vars(cut).pop(name, None)
    cut.config = replace(config, sequence_length=sequence_length)
    cut.unique_identifiers = OrderedDict([*windows.unique_identifiers.items(), ("cut_to", sequence_length)])
    arrays = _load_or_build_cut(cut, windows)
    cut.sample_index, cut.shuffle_index = arrays["sample_index"], arrays["shuffle_index"]
    return cut


def _load_or_build_cut(cut: GPTDataset, windows: GPTDataset) -> Arrays:
    """Where its samples start, and the numbers 0, 1, 2, ... as their order."""
    config = cut.config

    def build(writer: ArrayWriter) -> None:
        rows = build_sample_index(
            cut.dataset.sequence_lengths,
            cut.document_index,
            config.sequence_length,
            windows.num_tokens,
            add_extra_token=config.add_extra_token_to_sequence,
            threads=config.num_dataset_builder_threads,
        )
        with writer.array("sample_index", rows.shape, rows.dtype) as out:
            out[:] = rows
        with writer.array("shuffle_index", (len(rows) - 1,), shuffle_dtype(len(rows) - 1)) as out:
            fill_numbers(out, range(len(out)), config.num_dataset_builder_threads)

    if windows._is_small() and not config.cache_small_indices:
        build(writer := ArrayWriter())
        return writer.arrays
    cache = replace(cut._cache, order=None, trusted=None)  # no index of another name is the same, nor Megatron's
    fingerprint = {**windows._fingerprint(), **windows._order().fields, "cut_to": config.sequence_length}
    return cache.load_or_build(cut.unique_description, fingerprint, ("sample_index", "shuffle_index"), build)


def _windows_of(windows: Any, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of each window, and where it lies in the source's stream: its number before the shuffle."""
    if not isinstance(windows, BlendedDataset):
        return np.zeros_like(numbers), windows.shuffle_index[numbers].astype(np.int64)
    source = windows.dataset_index[numbers].astype(np.int64)
    sample = windows.dataset_sample_index[numbers]
    place = np.empty_like(sample)
    for each, dataset in enumerate(windows.datasets):
        here = source == each
        place[here] = cast(GPTDataset, dataset).shuffle_index[sample[here]]
    return source, place
