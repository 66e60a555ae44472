"""Steps whose loss is far above those before it, and the samples that made it so.

    loss of a step    mean of the losses recorded for its samples
    spike             loss > median + k * 1.4826 * MAD, both over the last `window` steps before it that have
                      losses, also of the runs before
    excess            loss of a sample - mean of its source's losses in these steps

MAD is the median absolute deviation from the median; 1.4826 MAD estimates the standard deviation of normal noise, and
a spike in the window moves neither. A loss that is no number is above every limit.

Source: Hampel's identifier (Davies and Gather, The identification of multiple outliers, JASA 88, 1993).
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.megatron.blended import row_blocks
from binidx.errors import ConfigError
from binidx.order.order_protocols import Numbers
from binidx.run.global_order import SampleReads
from binidx.run.provenance.contents import trace_origins
from binidx.run.provenance.run_order import RunOrder
from binidx.run.schedule import check_steps

NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation: 1 / 0.6745."""

LEAST_STEPS = 10
"""Steps before a step without which it is not judged."""

NEVER = np.iinfo(np.int64).max

BLOCK = 4096
"""Steps whose windows are in memory together."""


@dataclass(frozen=True)
class Spike:
    """Step with a loss above its limit, and its samples by falling excess.

    Attributes:
        order: order of the run that trained it.
        step: number of the step.
        loss, median, limit: mean loss of the step; median loss, and limit, of the steps before it.
        reads: its recorded samples.
        losses, excess: loss of each, and what it has above the mean of its source; shape (n,).
    """

    order: RunOrder
    step: int
    loss: float
    median: float
    limit: float
    reads: SampleReads
    losses: NDArray[np.float32]
    excess: NDArray[np.float64]


@dataclass(frozen=True)
class RunLosses:
    """Losses of the steps of one run.

    Args:
        order: order of the run.
        steps: steps that have losses, ascending, shape (n,).
        means: mean loss of each, shape (n,).
        bounds: step i has the losses from bounds[i] to before bounds[i + 1], shape (n + 1,).
        positions, losses: of samples, as `read_losses` returns them.
    """

    order: RunOrder
    steps: Numbers
    means: NDArray[np.float64]
    bounds: Numbers
    positions: Numbers
    losses: NDArray[np.float32]

    @classmethod
    def of(
        cls, order: RunOrder, positions: Numbers, losses: NDArray[np.float32], stop_step: int | None = None
    ) -> RunLosses:
        """Return the losses of a run.

        Args:
            order: order of the run.
            positions, losses: as `read_losses` returns them; losses before the first step of the run are ignored.
            stop_step: first step whose losses are ignored: those of another run that went on from there, or of steps
                that were given up. None: all must be of the run.

        Raises:
            ConfigError: losses behind the end of the run.
        """
        schedule = order.reading.schedule
        stop = None if stop_step is None else schedule.samples_before(stop_step)
        rows = slice(*np.searchsorted(positions, [schedule.consumed_samples, NEVER if stop is None else stop]).tolist())
        positions, losses = positions[rows], losses[rows]
        first, last = order.first_step, schedule.step_of(int(positions[-1])) + 1 if len(positions) else order.first_step
        try:
            check_steps(range(first, last), order.num_steps(), "losses", first)
        except IndexError as error:
            raise ConfigError(f"{error}; they are of another run") from error
        edges = np.searchsorted(positions, [schedule.samples_before(step) for step in range(first, last + 1)])
        steps = np.flatnonzero(np.diff(edges))
        bounds = np.append(edges[steps], len(positions))
        sums = np.add.reduceat(losses.astype(np.float64), bounds[:-1]) if len(steps) else np.empty(0)
        return cls(order, steps + first, sums / np.diff(bounds), bounds, positions, losses)

    def part(self, first: int, stop: int) -> tuple[RunOrder, Numbers, NDArray[np.float32]]:
        """Return the order, and the positions and losses of the steps in places `first` to before `stop`."""
        rows = slice(*self.bounds[np.clip([first, stop], 0, len(self.steps))].tolist())
        return self.order, self.positions[rows], self.losses[rows]


def find_spikes(runs: Sequence[RunLosses], *, window: int = 200, threshold: float = 6.0) -> Iterator[Spike]:
    """Yield the spikes of a model's runs, in the order of their steps.

    Args:
        runs: losses of one run after the other.
        window: number of steps before a step with which it is compared; a step with fewer than 10 is not judged.
        threshold: k.

    Raises:
        ConfigError: a window below 10.

    Source: Hampel's identifier.
    """
    if window < LEAST_STEPS:
        raise ConfigError(f"window: found {window}, needs at least {LEAST_STEPS} steps")
    starts = np.cumsum([0, *(len(run.steps) for run in runs)]).tolist()
    means = np.concatenate([np.empty(0), *(run.means for run in runs)])
    for place, median, limit in _beyond_limit(means, window, threshold):
        number = bisect_right(starts, place) - 1
        run, own = runs[number], place - starts[number]
        before = [each.part(place - window - start, place - start) for each, start in zip(runs, starts, strict=False)]
        step, (order, positions, losses) = int(run.steps[own]), run.part(own, own + 1)
        reads = order.reading.readings(range(step, step + 1))
        present = np.isin(reads.position, positions)
        reads = reads.at(present)
        losses = losses[np.searchsorted(positions, reads.position)]
        excess = losses - mean_losses(order, before, median)[trace_origins(order.order, reads.sample).source]
        ranked = np.argsort(-np.nan_to_num(excess, nan=np.inf), kind="stable")
        reads = reads.at(ranked)
        yield Spike(order, step, float(means[place]), median, limit, reads, losses[ranked], excess[ranked])


def mean_losses(
    order: RunOrder, parts: Iterable[tuple[RunOrder, Numbers, NDArray[np.float32]]], otherwise: float
) -> NDArray[np.float64]:
    """Return the mean loss of each source of an order, shape (number of sources,).

    Args:
        order: the order.
        parts: orders of runs, positions of samples, shape (n,), and the loss of each.
        otherwise: value of a source without a loss.
    """
    sums, counts = Counter[str](), Counter[str]()
    for each, positions, losses in parts:
        sources = trace_origins(each.order, each.reading.samples_at(positions)).source
        known = np.bincount(sources, np.nan_to_num(losses, posinf=0, neginf=0), len(each.sources)).tolist()
        for source, total, count in zip(each.sources, known, np.bincount(sources, minlength=len(known)), strict=True):
            sums[source.prefix] += total
            counts[source.prefix] += int(count)
    names = [source.prefix for source in order.sources]
    return np.array([sums[name] / counts[name] if counts[name] else otherwise for name in names], np.float64)


def _beyond_limit(means: NDArray[np.float64], window: int, threshold: float) -> Iterator[tuple[int, float, float]]:
    """Yield place, median and limit of the values above their limit."""
    padded = np.concatenate([np.full(window, np.nan), means])
    for rows in row_blocks(LEAST_STEPS, len(means), BLOCK):
        views = np.lib.stride_tricks.sliding_window_view(padded, window)[rows]  # those before each value
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of windows without a number
            median = np.nanmedian(views, axis=1)
            deviation = np.nanmedian(np.abs(views - median[:, None]), axis=1)
        limit = median + threshold * NORMAL * deviation
        for place in np.flatnonzero(~(means[rows] <= limit)).tolist():
            yield rows.start + place, float(median[place]), float(limit[place])
