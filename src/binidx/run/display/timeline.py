"""Course of a run, or of a history of runs, over its steps: samples of each source, planned shares, epochs, sizes.

    steps      0      100     200     300      bounds of the bins
    en         71     70      68               samples of each source in each bin, exact
    code       29     30      32
    seams      code ends its epoch 1 at step 187
    starts     a run that resumes at step 150

Cost: one pass over the sources of all samples before the last step, two bytes each; in memory those of one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.order.order_protocols import Numbers
from binidx.run.history import Runs
from binidx.run.run_order import RunOrder, count_source
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
class RunStart:
    """Step with which another run of a history begins, or another stage of a run.

    Attributes:
        step: the step.
        kind: "resume" if the samples of the run before go on, "phase" if its datasets begin anew, "stage".
    """

    step: int
    kind: str


@dataclass(frozen=True)
class Timeline:
    """Course of a run over some steps, in bins.

    Attributes:
        names: prefixes of the sources; the rounds of a source of a run in stages are one.
        bounds: steps at which bins begin, and the end of the last, shape (b + 1,).
        counts: samples of each source in each bin, shape (b, n).
        planned: share of each source in each bin by the weights of the run, shape (b, n); None if it has none.
        epochs: tokens read / tokens of each source at each bound, shape (b + 1, n), as in `account`.
        batch_sizes, sequence_lengths: samples and tokens a sample of the first step of each bin, shape (b,).
        skipped: steps of each bin whose samples are read and not trained, shape (b,).
        seams: ends of epochs in these steps.
        starts: starts of runs and of stages in these steps, without the first.
    """

    names: Sequence[str]
    bounds: Numbers
    counts: Numbers
    planned: NDArray[np.float64] | None
    epochs: NDArray[np.float64]
    batch_sizes: Numbers
    sequence_lengths: Numbers
    skipped: Numbers
    seams: Sequence[EpochSeam]
    starts: Sequence[RunStart]

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of each source in the samples of each bin, shape (b, n)."""
        shares: NDArray[np.float64] = self.counts / np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return shares

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each bin and source, as JSON values."""
        shares, epochs = self.shares, self.epochs
        for place, (first, stop) in enumerate(zip(self.bounds[:-1].tolist(), self.bounds[1:].tolist(), strict=True)):
            for source, name in enumerate(self.names):
                planned = None if self.planned is None else float(self.planned[place, source])
                counts = {"samples": int(self.counts[place, source]), "share": float(shares[place, source])}
                ends = {"planned_share": planned, "epochs_after": float(epochs[place + 1, source])}
                sizes = {"batch_size": int(self.batch_sizes[place]), "skipped_steps": int(self.skipped[place])}
                yield {"first_step": first, "stop_step": stop, **sizes, "source": name, **counts, **ends}


def build_timeline(order: Runs, steps: range, num_bins: int = 200) -> Timeline:
    """Return the course of a run, or of a history, over some steps.

    Args:
        order: the order of a run, or the history of several.
        steps: the steps.
        num_bins: most bins.

    Raises:
        IndexError: the run has no such step.
    """
    check_steps(steps, order.num_steps(), first_step=order.first_step)
    parts = [*order.orders(range(order.first_step, steps.stop))]
    joined = order.joined
    names = list(dict.fromkeys(name for each, _ in parts for name in joined.names_of(each.sources)))
    num_bins = max(min(num_bins, len(steps)), 1)
    bounds = steps.start + np.arange(num_bins + 1) * len(steps) // num_bins
    counts, epochs = np.zeros((num_bins + 1, len(names)), np.int64), np.zeros((num_bins + 1, len(names)))
    planned: NDArray[np.float64] | None = np.zeros((num_bins, len(names)))
    sizes, lengths, skipped = np.zeros((3, num_bins), np.int64)
    seams, starts, read_before = list[EpochSeam](), list[RunStart](), [Fraction(0)] * len(names)
    for number, (each, part) in enumerate(parts):
        group = np.array([names.index(name) for name in joined.names_of(each.sources)])
        course = _Course(each, group, len(names), part, bounds, each.reading.schedule.consumed_samples * bool(number))
        counts += course.counts
        epochs += course.epochs
        seams += course.find_seams(read_before)
        read_before = course.add_epochs(read_before)
        schedule = each.reading.schedule
        own = np.flatnonzero((bounds[:-1] >= part.start) & (bounds[:-1] < part.stop))
        firsts = [schedule.samples_before(step) for step in bounds[own].tolist()]
        sizes[own] = [schedule.samples_before(step + 1) for step in bounds[own].tolist()] - np.array(firsts, np.int64)
        lengths[own] = each.config.sequence_length
        shares = _planned_shares(each, group, len(names), firsts)
        if planned is not None and shares is not None:
            planned[own] = shares
        planned = None if shares is None else planned
        skipped += np.histogram([step for step in schedule.skipped_steps if step in part], bounds)[0]
        if number:
            is_new = schedule.earlier_samples > parts[number - 1][0].reading.schedule.earlier_samples
            starts.append(RunStart(part.start, "phase" if is_new else "resume"))
        starts += [RunStart(step, "stage") for step in each.stage_starts if step in part]
    seams.sort(key=lambda seam: seam.step)
    inside = [start for start in starts if steps.start < start.step < steps.stop]
    return Timeline(names, bounds, counts[1:], planned, epochs, sizes, lengths, skipped, seams, inside)


class _Course:
    """Reads of one run of a history, in the bins of the timeline.

    Args:
        order: the order of the run.
        group: number in the timeline of each source of the run.
        size: number of sources of the timeline.
        part: the steps of the run that belong to the history.
        bounds: bounds of the bins.
        first: position of its first sample that counts.

    Attributes:
        counts: samples of each source before the first bin and in each bin, shape (b + 1, n).
        epochs: tokens read / tokens of each source at each bound, shape (b + 1, n).
    """

    def __init__(self, order: RunOrder, group: Numbers, size: int, part: range, bounds: Numbers, first: int) -> None:
        self.order, self.num_sources, self._group = order, size, group
        before = order.reading.schedule.samples_before
        self._positions = [first, *(before(step) for step in np.clip(bounds, part.start, part.stop).tolist())]
        reads = np.array([order.count_reads([span]) for span in pairwise(self._positions)])
        self.counts, read = np.moveaxis(reads @ (group[:, None] == np.arange(size)), 1, 0)
        self._tokens = np.zeros(size, np.int64)
        self._tokens[self._group] = order.reads.map_sources(
            range(len(self._group)), lambda number: count_source(order.sources[number])[1]
        )
        self._total = np.cumsum(read, axis=0)
        self.epochs = self._total / np.maximum(self._tokens, 1)

    def find_seams(self, earlier: Sequence[Fraction]) -> Iterator[EpochSeam]:
        """Yield the ends of epochs in the bins; `earlier` runs have read so many epochs of each source."""
        for source in range(self.num_sources):
            before, tokens = earlier[source], max(int(self._tokens[source]), 1)
            ends = [int(before + Fraction(int(total), tokens)) for total in self._total[[0, -1], source]]
            for epoch in range(ends[0] + 1, min(ends[1], ends[0] + MOST_SEAMS) + 1):
                needed = ceil((epoch - before) * tokens)
                place = int(np.searchsorted(self._total[:, source], needed))
                sources, inputs = self._read(*self._positions[place : place + 2])
                own = np.flatnonzero(sources == source)
                read = int(self._total[place - 1, source]) + np.cumsum(inputs[own])
                position = self._positions[place] + int(own[np.searchsorted(read, needed)])
                yield EpochSeam(source, epoch, self.order.reading.schedule.step_of(position))

    def add_epochs(self, earlier: Sequence[Fraction]) -> list[Fraction]:
        """Return the epochs of each source that this run and the earlier ones have read, exact."""
        read, tokens = self._total[-1].tolist(), np.maximum(self._tokens, 1).tolist()
        return [before + Fraction(*ratio) for before, *ratio in zip(earlier, read, tokens, strict=True)]

    def _read(self, first: int, stop: int) -> tuple[Numbers, Numbers]:
        """Return source and number of input tokens of the samples at some positions."""
        samples = self.order.reading.samples_at(np.arange(first, stop))
        return self._group[self.order.list_sources[samples]], self.order.count_inputs(samples)


def _planned_shares(order: RunOrder, group: Numbers, size: int, firsts: Sequence[int]) -> NDArray[np.float64] | None:
    """Return the share of each source by the weights of the run at some positions, shape (b, n)."""
    config, stages = order.config, order.run.stages if order.run else None
    shares = np.zeros((len(firsts), size))
    if stages is None:
        blend = config.blend or (config.blend_per_split or [None])[0]
        if blend is None or blend[1] is None or len(blend[1]) != len(order.prefixes):
            return None
        np.add.at(shares.T, group, np.array(blend[1], np.float64)[:, None] / np.sum(blend[1]))
        return shares
    numbers = dict(zip(order.prefixes, group, strict=True))
    for number, stage in enumerate(stages):
        inside = np.searchsorted(order.stage_ends, firsts, side="right") == number
        for prefix, share in zip(stage.blend[0], stage.shares, strict=True):
            shares[inside, numbers[str(config.as_written(prefix))]] = share
    return shares
