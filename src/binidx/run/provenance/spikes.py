"""Steps whose loss is far above that of their mixture of sources, and the samples that made it so.

    L_i       loss of step i: mean of the losses recorded for its n_i samples, of which n_is are of source s
    m_s       median over steps of the mean loss that the samples of source s have in a step; over those of a stretch of
              at most 4,096 steps between two seams. A seam is the start of a stage, or of a run of another order
    E_i       sum over s of n_is m_s / n_i, less its mean over the steps of the stretch: loss that the mixture adds
    r_i       L_i - E_i
    M_i, D_i  median of r_j, and median of |r_j - M_i|, both over the window: the last `window` steps before step i that
              have losses, also of the runs before, since the last seam
    spike     neighbouring steps with L_i > E_i + M_i + k * 1.4826 * D_i, and above it by more than the resolution of
              float32; the first 10 steps after a seam are not judged
    excess    loss of a sample - mean loss of its source in the window of the first step of the spike

D_i (MAD) times 1.4826 estimates the standard deviation of normal noise, and a spike in the window moves neither median.
A loss that is no number is above every limit.

Source: Hampel's identifier (Davies and Gather, The identification of multiple outliers, JASA 88, 1993); E is ours.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.loader.losses import read_losses
from binidx.order.order_protocols import Numbers
from binidx.run.global_order import SampleReads
from binidx.run.history import RunHistory
from binidx.run.run_order import RunOrder
from binidx.run.schedule import check_steps
from binidx.storage.location import Location
from binidx.storage.ranges import cut

NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation: 1 / 0.6745."""

LEAST_STEPS = 10
"""Steps before a step without which it is not judged."""

NEVER = np.iinfo(np.int64).max

BLOCK = 4096
"""Steps whose windows are in memory together."""


@dataclass(frozen=True)
class Spike:
    """Neighbouring steps with a loss above their limit, and their samples by falling excess.

    Attributes:
        order: order of the run that trained them.
        step, last_step: numbers of the first and of the last of them.
        loss, expected, limit: mean loss of the step with the highest one; the loss that its mixture of sources has in
            the median of the steps before it; and its limit.
        reads: the recorded samples of all of these steps.
        losses, excess: loss of each, and what it has above the mean of its source; shape (n,).
    """

    order: RunOrder
    step: int
    last_step: int
    loss: float
    expected: float
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
        names: prefix of a source -> its name in the history, which copies of a dataset share; others have their prefix.
    """

    order: RunOrder
    steps: Numbers
    means: NDArray[np.float64]
    bounds: Numbers
    positions: Numbers
    losses: NDArray[np.float32]
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        order: RunOrder,
        positions: Numbers,
        losses: NDArray[np.float32],
        stop_step: int | None = None,
        names: Mapping[str, str] | None = None,
    ) -> RunLosses:
        """Return the losses of a run.

        Args:
            order: order of the run.
            positions, losses: as `read_losses` returns them; losses before the first step of the run are ignored.
            stop_step: first step whose losses are ignored: those of another run that went on from there, or of steps
                that were given up. None: all must be of the run.
            names: as for the class.

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
        return cls(order, steps + first, sums / np.diff(bounds), bounds, positions, losses, names or {})

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
    means, seams = np.concatenate([np.empty(0), *(run.means for run in runs)]), [0]
    for earlier, run, start in zip([*runs[:1], *runs], runs, starts, strict=False):
        seams += [start] * (run.order.order.identity != earlier.order.order.identity)
        seams += [start + place for place in np.searchsorted(run.steps, run.order.stage_starts).tolist()]
    places, added = np.arange(len(means)), _mixture_losses(runs, starts, seams)
    sizes = np.minimum(window, places - np.array(seams)[np.searchsorted(seams, places, side="right") - 1])
    middles, limits = added + _get_limits(means - added, sizes, window, threshold)
    above = np.flatnonzero(~(means <= limits) & (sizes >= LEAST_STEPS))
    for group in filter(len, np.split(above, 1 + np.flatnonzero((np.diff(above) > 1) | np.isin(above[1:], starts)))):
        stop, number = group[0], bisect_right(starts, group[0]) - 1
        first, last = (group[[0, -1]] - starts[number]).tolist()
        order, positions, losses = runs[number].part(first, last + 1)
        steps = range(int(runs[number].steps[first]), int(runs[number].steps[last]) + 1)
        reads = order.reading.readings(steps)
        reads = reads.at(np.isin(reads.position, positions))
        losses = losses[np.searchsorted(positions, reads.position)]
        before = [run.part(stop - sizes[stop] - start, stop - start) for run, start in zip(runs, starts, strict=False)]
        excess = losses - mean_losses(order, before, middles[stop], runs[0].names)[order.sources_of(reads.sample)]
        ranked, peak = np.argsort(-np.nan_to_num(excess, nan=np.inf), kind="stable"), group[np.argmax(means[group])]
        loss, middle, limit = np.array([means, middles, limits])[:, peak].tolist()
        yield Spike(order, steps[0], steps[-1], loss, middle, limit, reads.at(ranked), losses[ranked], excess[ranked])


def _mixture_losses(runs: Sequence[RunLosses], starts: Sequence[int], seams: Sequence[int]) -> NDArray[np.float64]:
    """Return the loss that the mixture of sources of each step adds to the mean, shape (number of steps,).

    Args:
        runs, starts: losses of runs, and the place of the first step of each among the steps of all.
        seams: places with which stretches of one blend begin.
    """
    num_steps, sizes = starts[-1], np.concatenate([np.empty(0, np.int64), *(np.diff(run.bounds) for run in runs)])
    added = np.zeros(num_steps)
    for first, stop in pairwise(sorted({*seams, *range(0, num_steps, BLOCK), num_steps})):
        parts = [run.part(first - start, stop - start) for run, start in zip(runs, starts, strict=False)]
        sources = np.concatenate([order.sources_of(order.reading.samples_at(rows)) for order, rows, _ in parts])
        losses = np.concatenate([part[2] for part in parts])
        steps = np.repeat(np.arange(stop - first), sizes[first:stop])
        known, levels = np.isfinite(losses), np.zeros(int(sources.max()) + 1)
        keys, rows = np.unique(sources[known] * (stop - first) + steps[known], return_inverse=True)
        of_steps = np.bincount(rows, losses[known]) / np.bincount(rows)
        present, begins = np.unique(keys // (stop - first), return_index=True)
        levels[present] = [np.median(own) for own in np.split(of_steps, begins)[1:]]
        added[first:stop] = np.bincount(steps, levels[sources]) / sizes[first:stop]
        added[first:stop] -= added[first:stop].mean()
    return added


def mean_losses(
    order: RunOrder,
    parts: Iterable[tuple[RunOrder, Numbers, NDArray[np.float32]]],
    otherwise: float,
    names: Mapping[str, str],
) -> NDArray[np.float64]:
    """Return the mean loss of each source of an order, shape (number of sources,).

    Args:
        order: the order.
        parts: orders of runs, positions of samples, shape (n,), and the loss of each.
        otherwise: value of a source without a loss.
        names: as for `RunLosses`.
    """
    sums, counts = Counter[str](), Counter[str]()
    for each, positions, losses in parts:
        sources = each.sources_of(each.reading.samples_at(positions[np.isfinite(losses)]))
        known = np.bincount(sources, losses[np.isfinite(losses)], len(each.sources)).tolist()
        for source, total, count in zip(each.sources, known, np.bincount(sources, minlength=len(known)), strict=True):
            name = names.get(source.prefix, source.prefix)
            sums[name] += total
            counts[name] += int(count)
    own = [names.get(source.prefix, source.prefix) for source in order.sources]
    return np.array([sums[name] / counts[name] if counts[name] else otherwise for name in own], np.float64)


def _get_limits(residuals: NDArray[np.float64], sizes: Numbers, window: int, threshold: float) -> NDArray[np.float64]:
    """Return the median of the residuals in the window of each step, and the limit of its own, shape (2, n).

    Args:
        residuals: loss of each step without what its mixture adds, shape (n,).
        sizes: number of steps in the window of each step, shape (n,).
        window: the largest number of steps in a window.
        threshold: k.
    """
    padded, found = np.concatenate([np.full(window, np.nan), residuals]), [np.empty((2, 0))]
    for rows in (slice(*block) for block in cut((0, len(residuals)), BLOCK)):
        views = np.lib.stride_tricks.sliding_window_view(padded, window)[rows]  # those before each value
        views = np.where(np.arange(window) < window - sizes[rows, None], np.nan, views)
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of windows without a number
            median = np.nanmedian(views, axis=1)
            deviation = np.nanmedian(np.abs(views - median[:, None]), axis=1)
        resolution = np.finfo(np.float32).eps * np.abs(median)
        found.append(np.stack([median, median + threshold * NORMAL * deviation + resolution]))
    return np.concatenate(found, axis=1)


def read_run_losses(
    history: RunHistory, folders: Sequence[str | None], file: str, before_step: int | None
) -> list[RunLosses]:
    """Return the recorded losses of the runs of a history, each of the steps that it trained.

    Args:
        history: the runs.
        folders: folder of the losses of each run, or one for all; None: `losses` beside its file.
        file: path or URI of the file of the last run.
        before_step: first step that is not looked at; None: all are.

    Raises:
        ConfigError: another number of folders, or runs that wrote losses of the same positions into one folder.
        ObjectNotFoundError: no run has losses.
    """
    files = [name or file for name in history.files]
    runs, missing = list[tuple[str, RunLosses]](), list[ObjectNotFoundError]()
    if len(folders) not in (1, len(files)):
        raise ConfigError(f"losses: found {len(folders)} folders, needs one, or one of each of {len(files)} runs")
    for number, (run, name) in enumerate(zip(history.runs, files, strict=True)):
        limits = [before_step, *(later.first_step for later in history.runs[number + 1 : number + 2])]
        stop = min((step for step in limits if step is not None), default=None)
        beside = f"{name.rpartition('/')[0] or '.'}/losses"
        place = Location(folders[min(number, len(folders) - 1)] or beside, run.config.storage_options)
        try:
            if stop is None or stop > run.first_step:
                found = RunLosses.of(history.order_of(run), *read_losses(place), stop, history.joined.names)
                runs.append((place.absolute, found))
        except ObjectNotFoundError as error:
            way = "the loader with losses_to= and record_losses writes them; --losses names their folder"
            missing.append(ObjectNotFoundError(f"{error}; {way}"))
    for (folder, earlier), (other, later) in combinations([run for run in runs if len(run[1].steps)], 2):
        if folder == other and max(earlier.positions[0], later.positions[0]) <= min(
            earlier.positions[-1], later.positions[-1]
        ):
            raise ConfigError(
                f"losses: {folder}: two runs of the history wrote losses of the same positions, one over the other; "
                f"record those of each run in a folder of its own"
            )
    if missing and not runs:
        raise missing[0]
    return [losses for _, losses in runs]
