"""Losses of a run: of steps, as a trainer exports them, or of samples, as a loader records them."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError, MissingDriverError
from binidx.order.order_protocols import Numbers
from binidx.run.global_order import SampleReads
from binidx.run.history import RunHistory
from binidx.run.provenance.spikes import RunLosses, mean_losses, read_run_losses
from binidx.run.run_order import RunOrder
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.stores.fsspec_store import list_stored_files

MEDIAN_WINDOW = 200
"""Steps before a step with whose losses those of its samples are compared, as by `binidx spikes`."""

STEP_COLUMNS = ("step", "_step", "iteration", "iter", "global_step")
LOSS_COLUMNS = ("loss", "lm loss", "train/loss", "loss/train", "value")
"""Names of a loss, the first preferred; then those that end so, of training before others."""

EVENT_FILE = "tfevents"
"""Part of the names of TensorBoard's files."""


@dataclass(frozen=True)
class LossCurve:
    """Losses of a run by step.

    Attributes:
        steps: steps, ascending, shape (n,).
        losses: the loss of each, shape (n,).
        runs: losses of the samples of each run; empty: not recorded.
    """

    steps: Numbers
    losses: NDArray[np.float64]
    runs: Sequence[RunLosses] = ()

    @classmethod
    def read(cls, places: Sequence[Location], history: RunHistory, file: str, first_number: int = 0) -> LossCurve:
        """Return the losses of a CSV file, of TensorBoard's event files, or of samples, whose mean is that of a step.

        Args:
            places: file whose name ends in .csv, event file or folder of some; or folder that `loader.record_losses`
                wrote, one for all runs or for each, the earliest first.
            history: the runs.
            file: path or URI of the file of the last run.
            first_number: number that the file gives step 0; Megatron's is 1.
        """
        for place in places[: len(places) == 1]:
            if place.uri.endswith(".csv"):
                return cls.of_file(place, first_number)
            names = [] if EVENT_FILE in place.name else sorted(list_stored_files(place.uri, place.options or {}))
            if EVENT_FILE in place.name or any(EVENT_FILE in name for name in names):
                events = [place / name for name in names if EVENT_FILE in name] or [place]
                return cls.of_scalars(place, read_scalars(events), first_number)
        runs = read_run_losses(history, [place.uri for place in places], file, None)
        return cls(np.concatenate([run.steps for run in runs]), np.concatenate([run.means for run in runs]), runs)

    @classmethod
    def of_file(cls, file: Location, first_number: int = 0) -> LossCurve:
        """Return the losses of a CSV file with a column of steps and one of losses: TensorBoard's, W&B's or any.

        Args:
            file: the file.
            first_number: as for `read`.

        Raises:
            FormatError: a column is missing, or a value is no number.
        """
        rows = list(csv.reader(io.StringIO(bytes(read_whole(open_object(file, cache=False))).decode("utf-8-sig"))))
        head = [name.strip().lower() for name in rows[0]] if rows else []
        step = next((head.index(name) for name in STEP_COLUMNS if name in head), None)
        name = _loss_name(head)
        if step is None or name is None:
            raise FormatError(f"{file}: found columns {head}, need one of {STEP_COLUMNS}, and one that ends in loss")
        loss = head.index(name)
        try:
            values = {int(float(row[step])): float(row[loss]) for row in rows[1:] if row and row[loss].strip()}
        except (ValueError, IndexError) as error:
            raise FormatError(f"{file}: {error}; need a number in both columns of each row") from None
        return cls.of_scalars(file, {name: values}, first_number)

    @classmethod
    def of_scalars(cls, place: Location, scalars: Mapping[str, Mapping[int, float]], first_number: int) -> LossCurve:
        """Return the losses among scalars.

        Args:
            place: their place, for messages.
            scalars: name -> number of a step -> value.
            first_number: as for `read`.
        """
        if (name := _loss_name(scalars)) is None:
            raise FormatError(f"{place}: found {', '.join(scalars) or 'no scalars'}, need a name that ends in loss")
        pairs = sorted((step - first_number, loss) for step, loss in scalars[name].items())
        return cls(np.array([step for step, _ in pairs], np.int64), np.array([loss for _, loss in pairs]))

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
        own = next((run for run in self.runs if run.order is order and len(run.positions)), None)
        if own is None:
            return None
        place = int(np.searchsorted(self.steps, step))
        window = self.steps[max(place - MEDIAN_WINDOW, 0) : place]
        first = int(window[0]) if len(window) else step
        before = [run.part(*np.searchsorted(run.steps, [first, step]).tolist()) for run in self.runs]
        median = float(np.median(self.losses[max(place - MEDIAN_WINDOW, 0) : place])) if len(window) else np.nan
        means = mean_losses(order, before, median, own.names)
        at = np.minimum(np.searchsorted(own.positions, reads.position), len(own.positions) - 1)
        losses = np.where(own.positions[at] == reads.position, own.losses[at], np.nan)
        excess = losses - means[order.sources_of(reads.sample)]
        return list(zip(losses.tolist(), excess.tolist(), strict=True))


def _loss_name(names: Iterable[str]) -> str | None:
    """Return the name of the losses of training among names of scalars; None if there is none."""
    plain = {name.lower().replace("_", " "): name for name in names}
    ends = [name for name in plain if name.endswith(LOSS_COLUMNS)]
    ends.sort(key=lambda name: ("train" not in name, "val" in name or "test" in name))
    return next((plain[name] for name in (*LOSS_COLUMNS, *ends) if name in plain), None)


def read_scalars(files: Sequence[Location]) -> dict[str, dict[int, float]]:
    """Return tag -> step -> value of TensorBoard's event files; a step that was logged again has its last value.

    Args:
        files: event files in the order of their times, as their names sort; the last may still be written.

    Raises:
        MissingDriverError: neither tensorboard nor tensorboardX is installed, which describe the messages.
        FormatError: a file is no event file.

    Source: TensorFlow's TFRecord: of each record its length, a checksum of that, the record, a checksum of it.
    """
    event_class = next(filter(None, map(_event_class, ("tensorboard.compat", "tensorboardX"))), None)
    if event_class is None:
        raise MissingDriverError("loss: event files need tensorboard or tensorboardX; pip install tensorboardX")
    scalars = defaultdict[str, dict[int, float]](dict)
    for file in files:
        data, at = bytes(read_whole(open_object(file, cache=False))), 0
        while (stop := at + 12 + int.from_bytes(data[at : at + 8], "little")) + 4 <= len(data):
            try:
                event = event_class.FromString(data[at + 12 : stop])
            except Exception as error:  # protobuf's DecodeError, whose module differs between its versions
                raise FormatError(f"{file}: byte {at:,}: no event ({error}); needs a file of TensorBoard") from error
            for value in event.summary.value:
                numbers = [value.simple_value] if value.HasField("simple_value") else _tensor_values(value.tensor)
                if len(numbers) == 1:
                    scalars[value.tag][event.step] = float(numbers[0])
            at = stop + 4
    return scalars


def _event_class(package: str) -> Any:
    """Return the class of TensorBoard's events in a package; None if it is not installed."""
    try:
        return import_module(f"{package}.proto.event_pb2").Event
    except ModuleNotFoundError:
        return None


def _tensor_values(tensor: Any) -> Sequence[float]:
    """Return the values of a tensor of float32 (DT_FLOAT, 1) or float64 (2), as TensorFlow 2 stores scalars."""
    if tensor.dtype not in (1, 2):
        return []
    listed: Sequence[float] = tensor.float_val or tensor.double_val
    return listed or np.frombuffer(tensor.tensor_content, f"<f{4 * tensor.dtype}").tolist()
