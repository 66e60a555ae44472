"""Steps whose loss is far above those before it, and the samples that made it so.

    loss of a step    mean of the losses recorded for its samples
    spike             loss > median + k * 1.4826 * MAD, both over the last `window` steps before it that have losses
    excess            loss of a sample - mean of its source's losses in these steps

MAD is the median absolute deviation from the median; 1.4826 MAD estimates the standard deviation of normal noise, and
a spike in the window moves neither. A loss that is no number is above every limit.

Source: Hampel's identifier (Davies and Gather, The identification of multiple outliers, JASA 88, 1993).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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

BLOCK = 4096
"""Steps whose windows are in memory together."""


@dataclass(frozen=True)
class Spike:
    """Step with a loss above its limit, and its samples by falling excess.

    Attributes:
        step: number of the step.
        loss, median, limit: mean loss of the step; median loss, and limit, of the steps before it.
        reads: its recorded samples.
        losses, excess: loss of each, and what it has above the mean of its source; shape (n,).
    """

    step: int
    loss: float
    median: float
    limit: float
    reads: SampleReads
    losses: NDArray[np.float32]
    excess: NDArray[np.float64]


def find_spikes(
    order: RunOrder,
    positions: Numbers,
    losses: NDArray[np.float32],
    *,
    window: int = 200,
    threshold: float = 6.0,
    stop_step: int | None = None,
) -> Iterator[Spike]:
    """Yield the spikes of a run, in the order of their steps.

    Args:
        order: order of the run.
        positions, losses: as `read_losses` returns them; losses before step 0 of the run are ignored.
        window: number of steps before a step with which it is compared; a step with fewer than 10 is not judged.
        threshold: k.
        stop_step: first step that is not looked at; None: all that have losses.

    Raises:
        ConfigError: a window below 10, or losses behind the end of the run.

    Source: Hampel's identifier.
    """
    if window < LEAST_STEPS:
        raise ConfigError(f"window: found {window}, needs at least {LEAST_STEPS} steps")
    schedule = order.reading.schedule
    positions, losses = positions[later := positions >= schedule.consumed_samples], losses[later]
    if not len(positions):
        return
    last = schedule.step_of(int(positions[-1])) + 1
    try:
        check_steps(range(last), order.num_steps(), "losses")
    except IndexError as error:
        raise ConfigError(f"{error}; they are of another run") from error
    bounds = np.array([schedule.samples_before(step) for step in range(last + 1)])
    at = np.searchsorted(positions, bounds)  # step s has the losses at[s] up to at[s + 1]
    steps = np.flatnonzero(np.diff(at))
    means = np.add.reduceat(losses.astype(np.float64), at[steps]) / np.diff(at)[steps] if len(steps) else np.empty(0)
    for place, median, limit in _beyond_limit(means, window, threshold):
        step, first = int(steps[place]), int(steps[max(place - window, 0)])
        if stop_step is not None and step >= stop_step:
            return
        rows = slice(at[step], at[step + 1])
        before = slice(at[first], at[step])
        mean_of = mean_losses(order, positions[before], losses[before], median)
        reads = order.reading.readings(range(step, step + 1))
        present = np.isin(reads.position, positions[rows])
        reads = SampleReads(*(column[present] for column in reads))
        own = losses[rows][np.searchsorted(positions[rows], reads.position)]
        excess = own - mean_of[trace_origins(order.order, reads.sample).source]
        ranked = np.argsort(-np.nan_to_num(excess, nan=np.inf), kind="stable")
        reads = SampleReads(*(column[ranked] for column in reads))
        yield Spike(step, float(means[place]), median, limit, reads, own[ranked], excess[ranked])


def mean_losses(
    order: RunOrder, positions: Numbers, losses: NDArray[np.float32], otherwise: float
) -> NDArray[np.float64]:
    """Return the mean loss of each source, shape (number of sources,).

    Args:
        order: order of the run.
        positions: of samples, shape (n,).
        losses: loss of each.
        otherwise: value of a source without a loss.
    """
    sources = trace_origins(order.order, order.reading.samples_at(positions)).source
    count = np.bincount(sources, minlength=len(order.sources))
    known = np.nan_to_num(losses, posinf=0, neginf=0)
    means: NDArray[np.float64] = np.bincount(sources, known, len(order.sources)) / np.maximum(count, 1)
    means[count == 0] = otherwise
    return means


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
