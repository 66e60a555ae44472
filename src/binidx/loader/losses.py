"""Losses of single samples, written by the ranks that have them, and read as one history of a run.

    FOLDER/losses-{nanoseconds since 1970}-{rank:05d}.parquet      rows of one writer, in the order of recording
        position int64     samples consumed before it, over all ranks: the same at any topology
        loss float32

A file appears whole, or not at all. A killed process loses the rows since its last file. The loader's `state_dict`
writes one, so a run that resumes from that state records the lost ones again. Of several losses of a position the one
in the newest file counts, so a replayed step replaces.

Cost: 4 to 6 bytes a sample, 3 to 30 us a micro-batch; a write of 2 to 35 ms on a disk for each 65,536 samples of a
rank, or ten minutes.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.loader.samplers import PretrainingSampler
from binidx.storage.adapters import ReadableFile, WritableFile
from binidx.storage.location import Location, Where
from binidx.storage.open import open_object
from binidx.storage.stores.fsspec_store import list_stored_files
from binidx.storage.threads import READS
from binidx.storage.writing.publish import create_object

Rows = list[tuple[int, Any]]
"""First position and losses of each call."""


@dataclass
class LossRecorder:
    """Writer of the losses of one rank; `close`, or the end of the process, writes the last ones.

    Args:
        folder: path or URI, the same for all ranks of a run and all its resumes; None: to record is an error.
        rank: number of this writer, different for all that write at the same time.
        most_rows, most_seconds: a file is written when it has so many samples, or when so much time has passed.

    Example:
        >>> recorder = LossRecorder("s3://runs/a/losses", rank=7)  # doctest: +SKIP
        >>> recorder.record(consumed_samples + 8 * rank, losses_of_the_micro_batch)  # doctest: +SKIP

    Source: ours.
    """

    folder: Where | None
    rank: int = 0
    most_rows: int = 1 << 16
    most_seconds: float = 600.0
    _rows: Rows = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._count, self._began = 0, time.monotonic()
        if self.folder is not None:
            self._place = Location.of(self.folder)
            weakref.finalize(self, _write_at_end, os.getpid(), self._place, self.rank, self._rows)

    def record(self, position: int, losses: Sequence[float] | Any) -> None:
        """Record the losses of samples at consecutive positions.

        Args:
            position: number of samples that were consumed before the first of them, over all ranks.
            losses: one of each sample, shape (n,): numbers, an array, or a tensor without a gradient, which is copied
                to the host when it is written.

        Raises:
            StorageError: a full file cannot be written.
        """
        self._rows.append((position, losses))
        self._count += len(losses)
        if self._count >= self.most_rows or time.monotonic() - self._began >= self.most_seconds:
            self.close()

    def record_batch(self, sampler: PretrainingSampler, consumed_samples: int, step: int | None, losses: Any) -> None:
        """Record the losses of a sampler's micro-batch.

        Args:
            sampler: sampler of the rank.
            consumed_samples: number of samples that were served so far, over all ranks.
            step: number of the micro-batch, from sample 0 on; None: the last one that was served.
            losses: as in `record`; a tensor is copied at once, without its gradient.

        Raises:
            ConfigError: there is no folder, or there are more or fewer losses than samples.
        """
        if self.folder is None:
            raise ConfigError("losses_to: found none, record_losses needs a folder; give it to the loader")
        if (count := len(losses)) != sampler.micro_batch_size:
            raise ConfigError(f"losses: found {count}, needs {sampler.micro_batch_size}, one of each sample")
        losses = losses.detach().float().clone() if _is_tensor(losses) else losses
        size = sampler.samples_per_step
        first = consumed_samples - size if step is None else step * size
        self.record(first + sampler.data_parallel_rank * sampler.micro_batch_size, losses)

    def close(self) -> None:
        """Write the rows that are not written yet."""
        if self._rows:
            _write(self._place, self.rank, self._rows)
        self._count, self._began = 0, time.monotonic()


def _is_tensor(losses: Any) -> bool:
    return type(losses).__module__ == "torch"


def _write_at_end(pid: int, *arguments: Any) -> None:
    if os.getpid() == pid and arguments[-1]:  # a forked worker has a copy of the rows
        _write(*arguments)


def _write(folder: Location, rank: int, rows: Rows) -> None:
    """Write rows as one file, and remove them from the list."""
    from binidx.format.arrow import pa, parquet

    losses = [np.asarray(values.cpu() if _is_tensor(values) else values, np.float32).reshape(-1) for _, values in rows]
    positions = [first + np.arange(len(own)) for (first, _), own in zip(rows, losses, strict=True)]
    table = pa.table({"position": np.concatenate(positions), "loss": np.concatenate(losses)})
    layout = {"column_encoding": {"position": "DELTA_BINARY_PACKED", "loss": "PLAIN"}, "compression": "none"}
    with create_object(folder / f"losses-{time.time_ns():020d}-{rank:05d}.parquet") as out:
        parquet.write_table(table, WritableFile(out), use_dictionary=False, **layout)
    rows.clear()


def read_losses(folder: Where) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the positions that have a loss, ascending, and the newest loss of each; arrays of shape (n,).

    Args:
        folder: as for `LossRecorder`.

    Raises:
        ObjectNotFoundError: the folder has no losses.
        FormatError: a file is no such file.
    """
    from binidx.format.arrow import pa, parquet

    place = Location.of(folder)
    names = sorted(name for name in list_stored_files(place.uri, place.options or {}) if name.startswith("losses-"))
    if not names:
        raise ObjectNotFoundError(f"{place}: no losses-*.parquet; loader.record_losses writes them")

    def read(name: str) -> list[NDArray[Any]]:
        try:
            table = parquet.read_table(ReadableFile(open_object(place / name, cache=False)))
            return [table[column].to_numpy() for column in ("position", "loss")]
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise FormatError(f"{place / name}: no losses ({error}); remove it") from error

    positions, losses = (np.concatenate(columns) for columns in zip(*READS.map(read, names), strict=True))
    newest, last = np.unique(positions[::-1], return_index=True)
    return newest, losses[::-1][last]
