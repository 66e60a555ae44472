"""Losses of single samples, written by the ranks that have them, and read as one history of a run.

    FOLDER/losses-{nanoseconds since 1970}-{rank:05d}.parquet      rows of one writer, in the order of recording
        position int64     samples consumed before it, over all ranks: the same at any topology
        loss float32

A file appears whole, or not at all; its time is that of its last row, so one that is written again replaces itself. The
times of a recorder only grow, also while its clock is set back. A thread, which exists from the first recorded row on,
writes a file for each 65,536 samples of a rank, and a minute after the last one. It also writes the rows of a recorder
that is garbage, again each minute while the store fails: a finalizer, which may run in the thread that would send the
request, only leaves a token. The end of the process waits at most ten seconds for it. A process that a signal kills
loses the rows of the last minute; `close` and the loader's `state_dict` write them, so a run that resumes from that
state records the lost ones again. Of several losses of a position the one in the newest file counts, so a replayed step
replaces.

Cost: 4 to 6 bytes a sample, 3 to 30 us a micro-batch; 2 to 35 ms of the thread for a file on a disk.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.torch_bridge import copy_to_host
from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.loader.samplers import PretrainingSampler
from binidx.storage.adapters import ReadableFile
from binidx.storage.effects import Steps, WriteObject, blocking
from binidx.storage.location import Location, Where
from binidx.storage.open import open_object
from binidx.storage.stores.fsspec_store import list_stored_files
from binidx.storage.threads import READS, background


@dataclass
class LossRecorder:
    """Recorder of the losses of one rank. A thread writes them; `close`, or the end of the process, the last ones.

    Args:
        folder: path or URI, the same for all ranks of a run and all its resumes; None: to record is an error.
        rank: number of this writer, different for all that write at the same time.
        most_rows, most_seconds: a file is written when it has so many samples, and so often. A file that cannot be
            written is logged, and its rows go to the next one.

    Example:
        >>> recorder = LossRecorder("s3://runs/a/losses", rank=7)  # doctest: +SKIP
        >>> recorder.record(consumed_samples + 8 * rank, losses_of_the_micro_batch)  # doctest: +SKIP

    Source: ours.
    """

    folder: Where | None
    rank: int = 0
    most_rows: int = 1 << 16
    most_seconds: float = 60.0
    _background, _process, _clock = staticmethod(background), staticmethod(os.getpid), staticmethod(time.time_ns)

    def __post_init__(self) -> None:
        self._place: Any = self.folder is not None and Location.of(self.folder)
        self._pid = 0  # of the process whose rows these are

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.rank, self.most_rows, self.most_seconds)  # rows stay with their recorder

    def record(self, position: int, losses: Sequence[float] | Any) -> None:
        """Record the losses of samples at consecutive positions.

        Args:
            position: number of samples that were consumed before the first of them, over all ranks.
            losses: one of each sample, shape (n,): numbers, an array, or a tensor, which is copied to the host.

        Raises:
            ConfigError: there is no folder, or the losses have another shape.
        """
        if self.folder is None:
            raise ConfigError("losses_to: found none, record_losses needs a folder; give it to the loader")
        writer = self._background("binidx-losses", is_early=True)
        if self._pid != self._process():  # a forked child has a copy of the rows
            self._pid, self._num_samples, self._rows, self._time = self._process(), 0, list[Any](), 0
            self._write = functools.partial(_write, self._place, self.rank, self._rows, threading.RLock())
            writer.add(self, self._write, self.most_seconds)
        copied, wait = copy_to_host(losses)
        if copied.ndim != 1:
            raise ConfigError(f"losses: found shape {(*copied.shape,)}, needs (n,), one of each sample")
        self._time = max(self._clock(), self._time + 1)  # also while the clock is set back
        self._rows.append((position, copied, wait, self._time))
        self._num_samples += len(losses)
        if self._num_samples % self.most_rows < len(losses):
            writer.tokens.put(self._write)

    def record_batch(self, sampler: PretrainingSampler, consumed_samples: int, step: int | None, losses: Any) -> None:
        """Record the losses of a sampler's micro-batch.

        Args:
            sampler: sampler of the rank.
            consumed_samples: number of samples that were served so far, over all ranks.
            step: number of the micro-batch, from sample 0 on; None: the last one that was served.
            losses: as in `record`.

        Raises:
            ConfigError: there is no folder, or there are more or fewer losses than samples.
        """
        if (count := len(losses)) != sampler.micro_batch_size:
            raise ConfigError(f"losses: found {count}, needs {sampler.micro_batch_size}, one of each sample")
        size = sampler.samples_per_step
        first = consumed_samples - size if step is None else step * size
        self.record(first + sampler.data_parallel_rank * sampler.micro_batch_size, losses)

    def close(self) -> None:
        """Write the rows that are not written yet; more may be recorded afterwards.

        Raises:
            StorageError: they cannot be written; the next file has them.
        """
        if self._pid == self._process():
            self._write()


@blocking
def _write(folder: Location, rank: int, rows: list[Any], writing: Any) -> Steps[None]:
    """Write rows as one file, if there are any, and remove them from the list.

    Args:
        rows: position, losses, the function that awaits them, and the time, of each call.
        writing: lock of the list, since `close` waits for a file that the thread writes. The handler of a signal may
            call `close` within it, so it is reentrant.
    """
    from binidx.format.arrow import pa, parquet

    with writing:
        if not (taken := [*rows]):
            return
        try:
            del rows[: len(taken)]
            for *_, wait, _ in taken:
                wait()
            losses = [np.asarray(own).reshape(-1) for _, own, *_ in taken]
            positions = [first + np.arange(len(own)) for (first, *_), own in zip(taken, losses, strict=True)]
            table = pa.table({"position": np.concatenate(positions), "loss": np.concatenate(losses)})
            layout = {"column_encoding": {"position": "DELTA_BINARY_PACKED", "loss": "PLAIN"}, "compression": "none"}
            parquet.write_table(table, file := pa.BufferOutputStream(), use_dictionary=False, **layout)
            name = f"losses-{taken[-1][-1]:020d}-{rank:05d}.parquet"
            # Not patient: the next file has the rows, and `close` waits for this one.
            yield from WriteObject(folder / name, file.getvalue(), durable=True, patient=False)
        except BaseException:
            rows[:0] = taken  # the next file has them
            raise


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
