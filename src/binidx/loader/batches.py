"""What a loader gives, with a watch beside it: how long the trainer waited, and what was read for it.

Batches of samples that differ in length: bounds of sequences made equally many, or all in one row (THD).

    cu_seqlens of two rows       0 3 8        0 3 8 8       as Megatron's inter-document masking pads them:
                                 0 2 5 8      0 2 5 8       sequences of no tokens at the end

    samples of 2, 4 and 2        a a | b b b b | c c        one row, with where each begins and, without pads, ends

Source: ours; the keys of a packed row are those of Megatron-LM's packing scheduler.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from binidx.dataset.torch_bridge import as_tensor, reading_worker, shared_zeros
from binidx.storage.stats import NAMES, add_usage, log_report, since, usage


class Batches(Iterator[Any]):
    """The batches of one iteration.

    Args:
        batches: the DataLoader's own iterator.
        tally: where the waiting is counted; its line is logged when the batches end, or are dropped.
        served: called as each is handed over.
    """

    def __init__(self, batches: Iterator[Any], tally: Tally, served: Callable[[], object]) -> None:
        self._batches, self._tally, self._served = batches, tally, served
        self.num_batches = 0
        self.wait_seconds = 0.0
        """Spent in `next` so far: what a trainer waited."""
        weakref.finalize(self, tally.end)

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._tally.end()
            raise
        waited = time.perf_counter() - began
        self.num_batches += 1
        self.wait_seconds += waited
        self._tally.served(waited)
        self._served()
        return batch


class Tally:
    """Counts what is served into the process's `report`, and logs the line of this iteration at its end.

    Args:
        samples, tokens: of a batch.
        ledger: where workers write what they read.
    """

    def __init__(self, samples: int, tokens: int, ledger: Ledger | None) -> None:
        self._samples, self._tokens, self._ledger = samples, tokens, ledger
        self._pid, self._before, self._last = os.getpid(), usage(), time.perf_counter()
        self._open, self._any = True, False

    def served(self, waited: float) -> None:
        """One more batch, for which the trainer waited so many seconds."""
        now = time.perf_counter()
        seconds, self._last, self._any = now - self._last, now, True
        add_usage({"samples": self._samples, "tokens": self._tokens, "seconds": seconds, "wait_seconds": waited})
        if self._ledger is not None:
            add_usage(self._ledger.news())

    def end(self) -> None:
        """Once, and in the process that counted."""
        if self._open and self._any and os.getpid() == self._pid:
            log_report(since(self._before))
        self._open = False


class Ledger:
    """Counters in memory that a loader shares with its workers, a row for each; forked or pickled it is the same."""

    def __init__(self, num_workers: int) -> None:
        self._rows = shared_zeros(num_workers, len(NAMES))
        self._known = [0.0] * len(NAMES)
        self._before: tuple[int, dict[str, float]] | None = None

    def write(self) -> None:
        """In a worker: what this process counted since its first call."""
        if self._before is None or self._before[0] != os.getpid():
            self._before = os.getpid(), usage()
        counted = since(self._before[1])
        self._rows[reading_worker()[0]] = as_tensor(np.array([counted[name] for name in NAMES]))

    def news(self) -> dict[str, float]:
        """In the trainer: what the workers have written since the last call."""
        counted = self._rows.sum(dim=0).tolist()
        found = {name: now - was for name, now, was in zip(NAMES, counted, self._known, strict=True) if now != was}
        self._known = counted
        return found


LENGTHS = ("original_seq_len", "padded_seq_len")


def is_packable(samples: Sequence[Any]) -> bool:
    """Whether these are samples of a length of their own, which cannot be stacked."""
    return isinstance(samples[0], Mapping) and all(name in samples[0] for name in LENGTHS)


def pack_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of all samples: their tensors concatenated, each of shape (1, T).

    Besides `cu_seqlens`, the sum of the original lengths, and `cu_seqlens_padded`, where each begins, then T: int32,
    each of shape (1, B + 1); `max_seqlen`, with pads, int32 (1,); and a number a sample, shape (B,), where it has some.
    """
    original, padded = (np.concatenate([np.asarray(sample[name]) for sample in samples]) for name in LENGTHS)
    batch: dict[str, Any] = {}
    for name, value in samples[0].items():
        if name not in LENGTHS:
            values = [np.asarray(sample[name]) for sample in samples]
            batch[name] = as_tensor(np.concatenate(values)[None] if value.ndim else np.stack(values))
    batch["cu_seqlens"] = as_tensor(_bounds(original))
    batch["cu_seqlens_padded"] = as_tensor(_bounds(padded))
    batch["max_seqlen"] = as_tensor(padded.max(keepdims=True))
    return batch


def level(samples: Sequence[Any]) -> list[Any]:
    """The samples with equally many bounds of sequences, where they have bounds: the last one repeated."""
    if not isinstance(samples[0], Mapping) or "cu_seqlens" not in samples[0]:
        return [*samples]
    bounds = [np.asarray(sample["cu_seqlens"]) for sample in samples]
    most = max(map(len, bounds))
    even = [np.pad(each, (0, most - len(each)), mode="edge") for each in bounds]
    return [{**sample, "cu_seqlens": as_tensor(each)} for sample, each in zip(samples, even, strict=True)]


def _bounds(lengths: Any) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)[None]
