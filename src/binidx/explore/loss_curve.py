"""Losses of a run: of steps, as a trainer exports them, or of samples, as a loader records them."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.loader.losses import read_losses
from binidx.order.order_protocols import Numbers
from binidx.run.global_order import SampleReads
from binidx.run.provenance.contents import trace_origins
from binidx.run.provenance.run_order import RunOrder
from binidx.run.provenance.spikes import RunLosses, mean_losses
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole

WINDOW = 200
"""Steps before a step with whose losses those of its samples are compared, as by `binidx spikes`."""

STEP_COLUMNS = ("step", "_step", "iteration", "iter", "global_step")
LOSS_COLUMNS = ("loss", "lm loss", "train/loss", "value")


@dataclass(frozen=True)
class LossCurve:
    """Losses of a run by step.

    Attributes:
        steps: steps, ascending, shape (n,).
        losses: the loss of each, shape (n,).
        positions, of_positions: positions of samples, ascending, and the loss of each, shape (m,); None: not recorded.
    """

    steps: Numbers
    losses: NDArray[np.float64]
    positions: Numbers | None = None
    of_positions: NDArray[np.float32] | None = None

    @classmethod
    def read(cls, place: Location, order: RunOrder) -> LossCurve:
        """Return the losses of a CSV file, or of a folder that `loader.record_losses` wrote, whose steps are means.

        Args:
            place: file whose name ends in .csv, or folder.
            order: order of the run.
        """
        if place.uri.endswith(".csv"):
            return cls.of_file(place)
        found = RunLosses.of(order, *read_losses(place))
        return cls(found.steps, found.means, found.positions, found.losses)

    @classmethod
    def of_file(cls, file: Location) -> LossCurve:
        """Return the losses of a CSV file with a column of steps and one of losses: TensorBoard's, W&B's or any.

        Raises:
            FormatError: a column is missing, or a value is no number.
        """
        rows = list(csv.reader(io.StringIO(bytes(read_whole(open_object(file, cache=False))).decode("utf-8-sig"))))
        head = [name.strip().lower() for name in rows[0]] if rows else []
        step = next((head.index(name) for name in STEP_COLUMNS if name in head), None)
        loss = next((place for name in LOSS_COLUMNS for place, text in enumerate(head) if text.endswith(name)), None)
        if step is None or loss is None:
            raise FormatError(f"{file}: found columns {head}, need one of {STEP_COLUMNS} and one of {LOSS_COLUMNS}")
        try:
            pairs = [(float(row[step]), float(row[loss])) for row in rows[1:] if row and row[loss].strip()]
        except (ValueError, IndexError) as error:
            raise FormatError(f"{file}: {error}; need a number in both columns of each row") from None
        pairs.sort()
        return cls(np.array([int(step) for step, _ in pairs], np.int64), np.array([loss for _, loss in pairs]))

    def of_bins(self, bounds: Numbers) -> list[tuple[float, float, float] | None]:
        """Return the least, mean and largest loss of the steps in each bin; None of a bin without a loss."""
        places = np.searchsorted(self.steps, bounds)
        parts = [self.losses[first:stop] for first, stop in pairwise(places.tolist())]
        parts = [part[np.isfinite(part)] for part in parts]
        return [(float(part.min()), float(part.mean()), float(part.max())) if len(part) else None for part in parts]

    def of_samples(self, order: RunOrder, step: int, reads: SampleReads) -> list[tuple[float, float]] | None:
        """Return the loss of each read of a step, and its excess over the mean of its source in the steps before.

        Args:
            order: order of the run.
            step: the step.
            reads: reads of the step.

        Returns:
            A pair for each read, NaN where it has no loss; None if losses of samples are not recorded.
        """
        if self.positions is None or self.of_positions is None or not len(self.positions):
            return None
        place = int(np.searchsorted(self.steps, step))
        window = self.steps[max(place - WINDOW, 0) : place]
        first = int(window[0]) if len(window) else step
        bounds = [order.reading.schedule.samples_before(number) for number in (first, step)]
        before = slice(*np.searchsorted(self.positions, bounds).tolist())
        median = float(np.median(self.losses[max(place - WINDOW, 0) : place])) if len(window) else np.nan
        means = mean_losses(order, [(order, self.positions[before], self.of_positions[before])], median)
        at = np.minimum(np.searchsorted(self.positions, reads.position), len(self.positions) - 1)
        losses = np.where(self.positions[at] == reads.position, self.of_positions[at], np.nan)
        excess = losses - means[trace_origins(order.order, reads.sample).source]
        return list(zip(losses.tolist(), excess.tolist(), strict=True))
