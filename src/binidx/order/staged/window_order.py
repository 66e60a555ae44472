"""Order whose sequence length changes during a run, without losing or repeating a token.

    windows of 8,192 tokens      0 1 2 3 4 5 6 7 | 8 9 10 11 ..        in the order of the run of that length
    stage 0, 2,048               4 samples each  |
    stage 1, 8,192                               | one sample each

The order is that of the longest length: each stage takes the next windows of it, and cuts each into samples of its own
length. So the documents served up to any window are those of the run of 8,192 tokens.

The rows of all stages, 10 bytes a sample, and the starts of the samples of each length, 12 bytes, are cached and mapped
like other indices; they are written and checked a few groups of windows at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import BlendError, ConfigError
from binidx.index.blend import blend_arrays, row_blocks
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_files import Arrays
from binidx.index.gpt_indices import build_window_order
from binidx.order.blended_order import BlendedOrder, list_members
from binidx.order.gpt_order import GPTOrder
from binidx.order.opener import Opener
from binidx.order.order_protocols import Numbers, Order
from binidx.order.requests import BlendRequest, OverRequest, SourceRequest, open_blend
from binidx.storage.location import Location

MIXED_WINDOWS = 1024
"""Default number of windows whose parts are interleaved."""

AT_ONCE = 1 << 18
"""Samples that are written and checked together, unless a group has more."""

SOURCE_BITS = 48
"""Number of bits for a sample number below the number of its source, in one int64."""


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
        rows: rows of these samples among all samples of the order.
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


@dataclass(frozen=True)
class WindowRequest(OverRequest):
    """Samples of several lengths, stage after stage: windows, which are the samples of another request, cut.

    Args:
        inner: see `OverRequest`; its sources have Megatron's order.
        stages: stages in their order; together they may use no more windows than there are.
        mixed_windows: number of windows whose parts are interleaved, so that parts of a window are not neighbours.
        directory: folder of the index; None: it is not cached.
        kind: recorded name of the class of the dataset.
    """

    stages: Sequence[LengthStage]
    mixed_windows: int = MIXED_WINDOWS
    directory: Location | None = None
    kind: str = "LengthStagedDataset"

    def open(self, opener: Opener) -> Order:
        return open_blend(*self.cut(opener.open(self.inner), self.inner.sources, opener), opener)

    def cut(
        self, windows: Order, sources: Sequence[SourceRequest], opener: Opener
    ) -> tuple[WindowBlend, Sequence[GPTOrder]]:
        """Return the blend of the samples of all lengths, and its parts: each source cut to the first length, ...

        Args:
            windows: the order of `inner`.
            sources: the request of each source of that order.
            opener: options of the caches and the builds.

        Raises:
            ConfigError: a source has an order of its own, a length does not divide that of the windows, a stage ends
                inside a window, or there are too few windows.
        """
        members: Sequence[Any] = list_members(windows)
        for source, member in zip(windows.sources, members, strict=True):
            if not isinstance(member, GPTOrder):
                raise ConfigError(f"windows: found {source.name} in an order of its own, needs Megatron's order")
        if len(sources) != len(members):
            raise ConfigError(f"windows: found {len(sources)} requests of {len(members)} sources; build the datasets")
        window_length = members[0].parameters.sequence_length
        check_stages(self.stages, window_length, len(windows))
        requests, parts = list[SourceRequest](), list[GPTOrder]()
        for length in (lengths := dict.fromkeys(stage.sequence_length for stage in self.stages)):
            for request, member in zip(sources, members, strict=True):
                # In Megatron the index is beside the opened data, whatever path names it.
                requests.append(replace(request, prefix=member.source.prefix, more={"cut_to": length}))
                parts.append(member.cut(length, requests[-1].index_options(replace(opener, digests={}))))
        identity = json.dumps(windows.identity, sort_keys=True, default=str).encode()
        blend = WindowBlend(
            requests,
            [1 / len(parts)] * len(parts),
            sum(stage.num_samples for stage in self.stages),
            sources[0].split,
            self.directory,
            self.kind,
            more={
                "stages": [self.mixed_windows, *((stage.sequence_length, stage.num_samples) for stage in self.stages)]
            },
            fingerprint={"windows": xxhash.xxh3_128_hexdigest(identity)},
            stages=self.stages,
            mixed_windows=self.mixed_windows,
            window_length=window_length,
            windows=windows,
            first_of={length: number * len(members) for number, length in enumerate(lengths)},
        )
        return blend, parts


@dataclass(frozen=True, kw_only=True)
class WindowBlend(BlendRequest):
    """Blend of the samples of all lengths: its parts are the sources cut to the first length, then to the second, ...

    Args:
        stages, mixed_windows: as in `WindowRequest`.
        window_length: number of tokens of a window.
        windows: the order of the windows.
        first_of: length -> number of its first part.
    """

    stages: Sequence[LengthStage]
    mixed_windows: int
    window_length: int
    windows: Order
    first_of: Mapping[int, int]

    def order_of(self, parts: Sequence[Order], arrays: Arrays) -> BlendedOrder:
        return BlendedOrder(parts, arrays, {"class": self.kind, **self.more}, windows=self.windows)

    def build(self, writer: ArrayWriter, threads: int) -> None:
        with blend_arrays(writer, self.shares, self.size) as (ids, samples):
            for group in self._groups():
                source, number = self._locate(group.window)
                ids[group.rows] = self.first_of[group.stage.sequence_length] + source
                samples[group.rows] = number * group.parts + group.part

    def check_rows(self, order: BlendedOrder) -> None:
        """Raise BlendError unless each stage serves every part of its windows once, and no other parts."""
        for group in self._groups():
            source, number = self._locate(np.arange(group.windows.start, group.windows.stop))
            expected = np.sort((source << SOURCE_BITS) + number * group.parts)[:, None] + np.arange(group.parts)
            served = order.dataset_index[group.rows].astype(np.int64) % len(self.windows.sources) << SOURCE_BITS
            actual = np.sort(served + order.dataset_sample_index[group.rows])
            if (actual != expected.ravel()).any():
                raise BlendError("stages: a window is skipped, or served twice; please report this bug")

    def _groups(self) -> Iterator[WindowGroups]:
        """Yield all samples, some groups of windows at a time."""
        first = begun = 0
        for stage in self.stages:
            parts = self.window_length // stage.sequence_length
            groups = self.mixed_windows * parts
            for rows in row_blocks(0, stage.num_samples, max(1, AT_ONCE // groups) * groups):
                window, part = build_window_order(stage.num_samples, parts, self.mixed_windows, rows)
                windows = range(begun + rows.start // parts, begun + rows.stop // parts)
                run_rows = slice(first + rows.start, first + rows.stop)
                yield WindowGroups(stage, run_rows, windows, parts, begun + window, part)
            first, begun = first + stage.num_samples, begun + stage.num_samples // parts

    def _locate(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each window, and its number in the source's stream, before the shuffle."""
        source, sample = self.windows.locate(numbers)
        in_stream = np.empty_like(sample)
        for number, member in enumerate(list_members(self.windows)):
            of_source = source == number
            in_stream[of_source] = cast(GPTOrder, member).shuffle_index[sample[of_source]]
        return source, in_stream


def check_stages(stages: Sequence[LengthStage], window_length: int, num_windows: int) -> None:
    """Raise ConfigError unless every stage fills whole windows, and there are enough windows.

    Args:
        stages: stages in their order.
        window_length: number of tokens of a window.
        num_windows: number of windows of the order.
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
