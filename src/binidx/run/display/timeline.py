"""Course of a run over its steps: samples of each source, planned shares, epochs and their seams, batch sizes.

    steps      0      100     200     300      bounds of the bins
    en         71     70      68               samples of each source in each bin, exact
    code       29     30      32
    seams      code ends its epoch 1 at step 187

Cost: one pass over the sources of all samples before the last step, two bytes each; in memory, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import normalize
from binidx.order.blended_order import map_sources
from binidx.order.order_protocols import ComposedOrder, Numbers
from binidx.run.provenance.accounts import STRETCH, tokens_of_source
from binidx.run.provenance.run_order import RunOrder
from binidx.run.schedule import check_steps

MOST_SEAMS = 100
"""Most seams of one source that are searched."""


@dataclass(frozen=True)
class EpochSeam:
    """End of an epoch of a source: the first step after which so many of its tokens are read.

    Attributes:
        source: number of the source in the timeline.
        epoch: number of passes over the source that are complete.
        step: the step.
    """

    source: int
    epoch: int
    step: int


@dataclass(frozen=True)
class Timeline:
    """Course of a run over some steps, in bins.

    Attributes:
        names: prefixes of the sources; the rounds of a source of a run in stages are one.
        bounds: steps at which bins begin, and the end of the last, shape (b + 1,).
        counts: samples of each source in each bin, shape (b, n).
        before: samples of each source before the first bin, shape (n,).
        planned: share of each source in each bin by the weights of the run, shape (b, n); None if it has none.
        tokens: tokens of one epoch of each source, shape (n,).
        sequence_length: tokens of a sample.
        batch_sizes: samples of the first step of each bin, shape (b,).
        seams: ends of epochs in these steps.
    """

    names: Sequence[str]
    bounds: Numbers
    counts: Numbers
    before: Numbers
    planned: NDArray[np.float64] | None
    tokens: Numbers
    sequence_length: int
    batch_sizes: Numbers
    seams: Sequence[EpochSeam]

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of each source in the samples of each bin, shape (b, n)."""
        shares: NDArray[np.float64] = self.counts / np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return shares

    @property
    def epochs(self) -> NDArray[np.float64]:
        """Tokens read / tokens of each source at each bound, shape (b + 1, n), as in `account`."""
        read = np.vstack([self.before, self.before + np.cumsum(self.counts, axis=0)])
        epochs: NDArray[np.float64] = read * self.sequence_length / np.maximum(self.tokens, 1)
        return epochs

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each bin and source, as JSON values."""
        shares, epochs = self.shares, self.epochs
        for place, (first, stop) in enumerate(zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True)):
            for source, name in enumerate(self.names):
                planned = None if self.planned is None else float(self.planned[place, source])
                counts = {"samples": int(self.counts[place, source]), "share": float(shares[place, source])}
                ends = {"planned_share": planned, "epochs_after": float(epochs[place + 1, source])}
                size = int(self.batch_sizes[place])
                yield {"first_step": first, "stop_step": stop, "batch_size": size, "source": name, **counts, **ends}


def build_timeline(order: RunOrder, steps: range, num_bins: int = 200) -> Timeline:
    """Return the course of a run over some steps.

    Args:
        order: the order of the run.
        steps: the steps.
        num_bins: most bins.

    Raises:
        IndexError: the run has no such step.
    """
    check_steps(steps, order.num_steps(), first_step=order.first_step)
    names = list(dict.fromkeys(order.prefixes))
    group = np.array([names.index(name) for name in order.prefixes])
    num_bins = max(min(num_bins, len(steps)), 1)
    bounds = steps.start + np.arange(num_bins + 1) * len(steps) // num_bins
    positions = [0, *(order.reading.schedule.samples_before(step) for step in bounds.tolist())]
    composed = order.order if isinstance(order.order, ComposedOrder) else None
    sources = composed.list_sources() if composed else np.zeros(len(order.order), np.int16)

    def read(first: int, stop: int) -> Numbers:
        samples = order.reading.samples_at(np.arange(first, stop))
        chosen: Numbers = group[sources[samples]]
        return chosen

    def count(first: int, stop: int) -> Numbers:
        parts = range(first, stop, STRETCH)
        return sum(
            (np.bincount(read(part, min(part + STRETCH, stop)), minlength=len(names)) for part in parts),
            np.zeros(len(names), np.int64),
        )

    counts = np.array([count(*span) for span in pairwise(positions)])
    tokens = np.zeros(len(names), np.int64)
    tokens[group] = map_sources(order.order, range(len(group)), lambda number: tokens_of_source(order.sources[number]))
    length, seams = order.config.sequence_length, list[EpochSeam]()
    total = np.cumsum(counts, axis=0)
    for source in range(len(names)):
        epochs = total[[0, -1], source] * length // max(int(tokens[source]), 1)
        for epoch in range(int(epochs[0]) + 1, min(int(epochs[1]), int(epochs[0]) + MOST_SEAMS) + 1):
            needed = ceil(epoch * int(tokens[source]) / length)
            place = int(np.searchsorted(total[:, source], needed))
            own = np.flatnonzero(read(positions[place], positions[place + 1]) == source)
            position = positions[place] + int(own[needed - int(total[place - 1, source]) - 1])
            seams.append(EpochSeam(source, epoch, order.reading.schedule.step_of(position)))
    schedule = order.reading.schedule
    sizes = np.diff([schedule.samples_before(step) for first in bounds[:-1].tolist() for step in (first, first + 1)])
    planned = _planned_shares(order, names, positions[1:-1])
    return Timeline(names, bounds, counts[1:], counts[0], planned, tokens, length, sizes[::2], seams)


def _planned_shares(order: RunOrder, names: Sequence[str], positions: Sequence[int]) -> NDArray[np.float64] | None:
    """Return the share of each source by the weights of the run at some positions, shape (b, n)."""
    config, stages = order.config, order.run.stages if order.run else None
    shares = np.zeros((len(positions), len(names)))
    if stages is None:
        blend = config.blend or (config.blend_per_split or [None])[0]
        if blend is None or blend[1] is None or len(blend[1]) != len(order.prefixes):
            return None
        for name, share in zip(order.prefixes, normalize(list(blend[1])), strict=True):
            shares[:, names.index(name)] += share
        return shares
    first = 0
    for stage in stages:
        inside = (np.array(positions) >= first) & (np.array(positions) < first + stage.num_samples)
        for prefix, share in zip(stage.blend[0], stage.shares, strict=True):
            shares[inside, names.index(str(config.as_written(prefix)))] = share
        first += stage.num_samples
    return shares
