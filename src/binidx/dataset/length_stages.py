"""A run whose sequence length changes on the way: short samples first, long ones later, and no token lost or repeated.

    windows of 8,192 tokens      0 1 2 3 4 5 6 7 | 8 9 10 11 ..        in the order of the run of that length
    stage 0, 2,048               4 samples each  |
    stage 1, 8,192                               | one sample each

The order is that of the longest length: a stage takes the next of its windows, and cuts each into samples of its own
length. So the documents are those of the run of 8,192 tokens at every moment, and its seam is between two windows.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import BlendedDataset
from binidx.dataset.gpt import GPTDataset
from binidx.errors import BlendError, ConfigError
from binidx.index.cut_windows import build_window_order
from binidx.index.sample import build_sample_index
from binidx.index.shuffle import shuffle_dtype

MIXED_WINDOWS = 1024
"""Windows whose parts are served in turn."""
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
        first_of = {length: number * len(sources) for number, length in enumerate(cut)}
        rows = [*_rows(windows, sources, self.stages, first_of, mixed_windows)]
        self.dataset_index = np.concatenate([ids for ids, _ in rows])
        self.dataset_sample_index = np.concatenate([numbers for _, numbers in rows])
        self.weights = [1 / len(self.datasets)] * len(self.datasets)
        self.size = len(self.dataset_index)
        self.unique_identifiers = self._identifiers()
        self.check()

    @property
    def order_identity(self) -> Any:
        return {"class": type(self).__name__, "windows": self.windows.order_identity, "stages": self._stages}

    def _identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([*super()._identifiers().items(), ("stages", self._stages)])

    @property
    def _stages(self) -> list[Any]:
        return [self.mixed_windows, *((stage.sequence_length, stage.num_samples) for stage in self.stages)]

    def check(self) -> None:
        """Raise BlendError unless each stage serves every part of its windows once, and of no others."""
        num_sources = len(self.datasets) // len({dataset.config.sequence_length for dataset in self.datasets})
        first = begun = 0
        for stage in self.stages:
            parts = self.config.sequence_length // stage.sequence_length
            source, place = _windows_of(self.windows, np.arange(begun, begun + stage.num_samples // parts))
            wanted = np.sort((source << SOURCE_BITS) + place * parts)[:, None] + np.arange(parts)
            rows = slice(first, first + stage.num_samples)
            served = self.dataset_index[rows].astype(np.int64) % num_sources << SOURCE_BITS
            if (np.sort(served + self.dataset_sample_index[rows]) != wanted.ravel()).any():
                raise BlendError("stages: a window is skipped, or served twice; this is a fault of ours")
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
    cut.sample_index = build_sample_index(
        windows.dataset.sequence_lengths,
        windows.document_index,
        sequence_length,
        windows.num_tokens,
        add_extra_token=config.add_extra_token_to_sequence,
        threads=config.num_dataset_builder_threads,
    )
    count = len(cut.sample_index) - 1
    cut.shuffle_index = np.arange(count, dtype=shuffle_dtype(count))
    return cut


def _rows(
    windows: Any, sources: Sequence[Any], stages: Sequence[LengthStage], first_of: dict[int, int], group: int
) -> Any:
    """dataset_index and dataset_sample_index of each stage."""
    begun = 0
    for stage in stages:
        parts = windows.config.sequence_length // stage.sequence_length
        window, part = build_window_order(stage.num_samples, parts, group)
        source, number = _windows_of(windows, begun + window)
        begun += stage.num_samples // parts
        yield (first_of[stage.sequence_length] + source).astype(np.int16), number * parts + part


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
