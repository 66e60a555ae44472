"""PyTorch DataLoader over a dataset: resumable by consumed samples, with read-ahead and random access to steps.

Besides this module only `device_batches` imports torch here.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex, TypeVar

import binidx
from binidx.dataset.config import Split
from binidx.dataset.megatron_releases import parse_release_name
from binidx.dataset.rank_comparison import compare_with_ranks
from binidx.dataset.served import get_sequence_length, get_split, get_stored_order
from binidx.dataset.torch_bridge import check_topology, choose_topology, count_known_processes, missing_torch
from binidx.errors import ConfigError, FormatError, StorageError, check_option_names, trims_traceback, warn_once
from binidx.loader.collate import CollateForTrainer, WorkerBatch
from binidx.loader.dataset_protocols import (
    DatasetView,
    ShownLoader,
    batch_reader,
    digest_tokens,
    find_megatron_samples,
    is_full_validation,
    is_pure,
    remote_places,
)
from binidx.loader.loader_state import State, check_state, describe_walk, fingerprint, order_facts
from binidx.loader.losses import LossRecorder
from binidx.loader.monitoring import WAITS, watch_process
from binidx.loader.readahead import ReadAheadDataset
from binidx.loader.samplers import (
    DataloaderType,
    MegatronFullValidationSampler,
    MegatronPretrainingRandomSampler,
    PretrainingSampler,
    build_sampler,
    check_consumed_samples,
)
from binidx.loader.worker_usage import WorkerUsage
from binidx.storage.stats import Histograms, add_usage, find_histograms, note_seconds, span, usage, usage_since
from binidx.storage.threads import background
from binidx.storage.usage_report import log_report, rates, sum_usage

try:
    import torch
    from torch.utils.data import DataLoader

    from binidx.loader.device_batches import DeviceBatches, parse_device
except ModuleNotFoundError as error:
    raise missing_torch() from error

Batch = TypeVar("Batch")
logger = logging.getLogger(__name__)
INSTEAD = {
    "batch_size": "micro_batch_size=",
    "shuffle": "samples are shuffled; dataloader_type='cyclic' shuffles them anew each epoch",
    **dict.fromkeys(("sampler", "batch_sampler"), "binidx.megatron.MegatronPretrainingSampler in a torch DataLoader"),
    "drop_last": "a last batch that is not full is left out",
}
"""Options of torch's DataLoader that cannot be given here, and what to give instead."""


_loader_numbers: defaultdict[Split | None, Iterator[int]] = defaultdict(itertools.count)
"""Counters of the loaders of each split: a loader gets a number when it is first compared with other ranks' loaders."""


def build_pretraining_data_loader(
    dataset: Any,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int | None = None,
    data_parallel_size: int | None = None,
    *,
    dataloader_type: DataloaderType = "single",
    data_sharding: bool = True,
    surplus_batches: bool = False,
    num_workers: int = 0,
    look_ahead: int | None = None,
    device: Any = None,
    group: Any = None,
    losses_to: str | os.PathLike[str] | None = None,
    **dataloader_options: Any,
) -> PretrainingLoader[Any] | None:
    """Return a loader of the micro-batches of this rank, from `consumed_samples` on.

    For a validation split whose config has `full_validation`, the loader serves all its samples, one at a time, from
    the first on, as in Megatron-LM.

    Args:
        dataset: a dataset built by `BlendedMegatronDatasetBuilder`, or any map-style dataset; None returns None.
        consumed_samples: samples served before, over all ranks: the whole state.
        micro_batch_size: samples of a batch, B.
        data_parallel_rank: this rank. Required if several processes run, since only the caller knows which ranks share
            their data: `find_topology` returns both, for a `DeviceMesh`, Megatron's `parallel_state`, or all processes.
            0 otherwise.
        data_parallel_size: number of ranks; required as the rank is; 1 otherwise.
        dataloader_type: "single" keeps the dataset's order, "cyclic" permutes it anew each epoch.
        data_sharding: for "cyclic": each rank permutes its own share of the samples.
        surplus_batches: for "cyclic" without `data_sharding`: Megatron-LM's epochs of unequal length on different
            ranks.
        num_workers: worker processes that read; 0 reads in this process.
        look_ahead: batches to read ahead, 0 for none. None reads ahead if bytes are remote, as many batches as waiting
            shows to be needed, within 128 MiB. A number also applies to a user's own dataset, whose samples must then
            be functions of their number, since threads read them out of order.
        device: device of the batches, such as "cuda": a batch is copied to it as int32, some batches before the trainer
            takes it, and becomes tensors there (`DeviceBatches`). None: batches are in memory.
        group: process group whose ranks train on the same batches, such as the tensor-parallel one: its first rank
            reads, the others receive. None: this rank reads.
        losses_to: folder of the losses that `record_losses` writes, the same for all ranks.
        dataloader_options: further arguments of torch's DataLoader. Memory is pinned where there is a GPU.

    Returns:
        A DataLoader of dicts of tensors, (B, S) each, that saves and loads its state and gives any step by its number.
        Its `len()` is the micro-batches of this rank in a whole pass over the dataset, as of any DataLoader. (Those of
        the samplers are samples, as in Megatron-LM.)

    Raises:
        ConfigError: a list of validation sets, a rank missing where several processes run, or arguments that the
            sampler rejects.

    Example:
        >>> loader = binidx.build_pretraining_data_loader(train, consumed_samples=0, micro_batch_size=8)
        >>> batch = next(iter(loader))  # batch["tokens"]: int64, (8, S)

    Source: Megatron-LM, whose globals are arguments here; read-ahead, state and steps by number are ours.
    """
    if dataset is None:
        return None
    dataset = DatasetView.unwrap(dataset)
    if wrong := [f"{name} ({INSTEAD[name]})" for name in dataloader_options if name in INSTEAD]:
        raise ConfigError(f"loader: found {', '.join(wrong)}; its sampler decides these")
    counts = {"micro_batch_size": micro_batch_size, "num_workers": num_workers, "look_ahead": look_ahead}
    counts |= {"data_parallel_rank": data_parallel_rank, "data_parallel_size": data_parallel_size}
    for name, count in counts.items():
        if not isinstance(count, SupportsIndex | None):
            raise ConfigError(f"{name}: found {count!r}, needs a whole number")
    if num_workers is None or num_workers < 0:
        raise ConfigError(f"num_workers: found {num_workers}, needs a whole number of at least 0")
    known = [*inspect.signature(DataLoader).parameters, *inspect.signature(build_pretraining_data_loader).parameters]
    check_option_names("loader", dataloader_options, known, "help(binidx.build_pretraining_data_loader) has all")
    if isinstance(dataset, list | tuple) and any(get_split(member) for member in dataset):
        raise ConfigError(f"dataset: found a list of {len(dataset)} datasets, needs one; make a loader for each")
    topology = micro_batch_size, *check_topology(data_parallel_rank, data_parallel_size)
    sampler: PretrainingSampler = (
        MegatronFullValidationSampler(len(dataset), *topology[1:])
        if is_full_validation(dataset)
        else build_sampler(dataloader_type, dataset, consumed_samples, *topology, data_sharding, surplus_batches)
    )
    if not sampler.num_batches:
        numbers = sampler.total_samples, sampler.samples_per_step
        logger.warning("the loader serves no batch: %d samples of the dataset fill no step of %d", *numbers)
    defaults = {
        "num_workers": num_workers,
        "collate_fn": CollateForTrainer(),
        "pin_memory": torch.cuda.is_available() and device is None,
        "persistent_workers": num_workers > 0,
    }
    places = {"look_ahead": look_ahead, "device": device, "group": group, "losses_to": losses_to}
    return PretrainingLoader(dataset, batch_sampler=sampler, **places, **{**defaults, **dataloader_options})


class PretrainingLoader(ShownLoader, DataLoader[Batch]):
    """torch's DataLoader with a state, read-ahead, random access to steps, and counters of the trainer's waiting.

        loader[41_200]              this rank's micro-batch of that step of the whole run
        loader.consumed_samples     samples served so far over all ranks, without the batches that workers hold
        loader.state_dict()         state for a checkpoint; equal on every rank, so one of them may save it
        loader.load_state_dict(s)   the next iteration continues at state s, on any number of ranks
        len(loader)                 micro-batches of this rank in a whole pass; the same at every `consumed_samples`

    Args:
        dataset: a map-style dataset.
        batch_sampler: one of the samplers of this package over the dataset.
        look_ahead, device, group, losses_to: as in `build_pretraining_data_loader`.
        options: further arguments of torch's DataLoader.

    A "single" loader begins every iteration at the position with which it was made or loaded; a "cyclic" one continues
    after the last batch served. Without workers, each iteration reads ahead anew; with workers, each worker reads ahead
    for itself, across iterations if workers are persistent. Forked workers ignore Ctrl-C: only this process handles it.

    Under torch.distributed, with several data-parallel ranks, `load_state_dict` and the first iteration after it raise
    PeerError if this rank's order, data, position or batch size is not that of the other ranks.

    Raises:
        ConfigError: a negative `look_ahead`.

    Source: ours.
    """

    chosen_by = ""
    """Source of the rank if the user gave no number: "mesh", or "processes", of which no groups may appear later."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_sampler: PretrainingSampler,
        look_ahead: int | None = None,
        device: Any = None,
        group: Any = None,
        losses_to: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if look_ahead is not None and look_ahead < 0:
            raise ConfigError(f"look_ahead: found {look_ahead}, needs a number of batches, 0 for none, or None")
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        by_itself = look_ahead is None and bool(remote_places(dataset)) and is_pure(dataset)
        self._reads_ahead = by_itself or bool(look_ahead)
        self._look_ahead, self._group = look_ahead, group
        self._device = None if device is None else parse_device(device)
        self._losses = LossRecorder(losses_to, batch_sampler.data_parallel_rank)
        self._option_names = [*options]
        self._worker_usage: WorkerUsage | None = None
        self._reader: DataLoader[Any] | None = None
        self._sampler = batch_sampler
        self._consumed_samples = batch_sampler.consumed_samples
        self._name, self._num_positions, self._is_compared, self._order_facts = "", 0, False, dict[str, State]()
        self._usage_before = usage()

    def __len__(self) -> int:
        return self._sampler.num_batches

    @trims_traceback
    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch names its own class
        self._compare_with_ranks()
        if isinstance(self._sampler, MegatronPretrainingRandomSampler):
            self._sampler.consumed_samples = self._consumed_samples
        self._consumed_samples = self._sampler.consumed_samples
        samples = self._sampler.micro_batch_size
        counts = {"samples": samples, "tokens": samples * get_sequence_length(self.dataset)}
        counts |= {"samples_ahead": -samples} if self._reads_ahead else {}
        if self._device is None and self._group is None:
            batches = self._start_reading()
        else:
            batches = DeviceBatches(self._read_if_taken(), self._device or "cpu", group=self._group)
        return Batches(batches, counts, self._count_batch, pin=self.pin_memory)

    @trims_traceback
    def __getitem__(self, step: int) -> Batch:
        """Read and return the micro-batch of this rank at a step of the whole run, without read-ahead or workers.

        Args:
            step: number of the step, counted from the start of the run; `consumed_samples` has no effect on it.

        Returns:
            The same batch that an iteration over the loader returns at this step.

        Raises:
            IndexError: the run has no such step.
        """
        assert self.collate_fn is not None
        batch: Batch = self.collate_fn(batch_reader(self.dataset)(self._sampler.batch(step)))
        return batch if self._device is None else next(DeviceBatches([batch], self._device))

    def record_losses(self, step: int | None, losses: Any) -> None:
        """Record the loss of each sample of a micro-batch of this rank; the last record of a step counts.

        Args:
            step: the micro-batch, as in `loader[step]`; None: the one that was served last.
            losses: one of each sample, shape (B,).

        Raises:
            ConfigError: the loader has no `losses_to`, or the number of losses is not that of the samples.
        """
        self._losses.record_batch(self._sampler, self._consumed_samples, step, losses)

    def close(self) -> None:
        """Write the recorded losses that are not written yet, as before a preemption; the loader goes on.

        Raises:
            StorageError: they cannot be written; the next file has them.
        """
        self._losses.close()

    def metrics(self, since: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return what this process has served, read and paid since the loader was made, for dashboards.

        Reads are counted by process, with those of other loaders in it; of workers only if these read ahead.

        Args:
            since: earlier metrics of this loader: the result is of the time since them, with ratios.

        Returns:
            Sums: samples, tokens, samples_ahead (read and not served), seconds, wait_seconds (of the trainer),
            requests, retries, hedges, refused (with 429 or 503), bytes_moved, bytes_wanted (of stores), bytes_local,
            memory_hits, memory_misses, disk_hits, disk_misses (chunks of caches), throttled_seconds (in which requests
            waited for the rate of a store), throttled_allowed, throttled_served, dollars (list price of the requests).
            With `since` also ratios, 0 if nothing happened: tokens_per_second, wait_share, memory_hit_rate,
            disk_hit_rate, request_limit and goodput (requests a second of the throttled node: allowed, and answered).

        Example:
            >>> loader.metrics(since=before)["tokens_per_second"]

        Source: ours.
        """
        sums = sum_usage(usage_since(self._usage_before))
        if since is None:
            return sums
        sums = {name: count - since[name] for name, count in sums.items()}
        return sums | rates(sums)

    def histograms(self) -> Histograms:
        """Return histograms of the seconds for which this process waited.

        Returns:
            By kind and bucket ("" if the kind has none): request (at most 256 KiB) and large_request of each bucket,
            local_read, cache_read (that waited for a disk), cache_write, next (batch). Each has `count`, `counts` (by
            `binidx.storage.stats.BOUNDS`), and sums: `loader.histograms()["next", ""].seconds`, `bytes`.

        Source: Prometheus.
        """
        return find_histograms(usage())

    @property
    def consumed_samples(self) -> int:
        """Number of samples served so far, over all ranks. The next iteration begins at the number that is set."""
        return self._consumed_samples

    @consumed_samples.setter
    def consumed_samples(self, value: int) -> None:
        value = check_consumed_samples(value, self._sampler.max_consumed_samples)
        self._sampler.consumed_samples = self._consumed_samples = value
        self._reader = None  # its workers read ahead from the old position
        self._num_positions, self._is_compared = self._num_positions + 1, False

    def state_dict(self) -> State:
        """Return the state in JSON values: `consumed_samples`, and the fingerprint of the order that it counts in.

        Also `total_samples`, the samples of the dataset; `facts`, by which a refusal names what differs; `order`, the
        identity of the run that a baked one stores; and `tokens`, the digests of the tokens of each dataset, if there
        are any; `megatron_samples`, the release of Megatron, if samples depend on it; `library`, the version of binidx,
        which is never compared. Recorded losses of this rank are written before, since a run that resumes from the
        state does not record them again.
        """
        self._losses.close()
        sampler, order = self._sampler, get_stored_order(self.dataset)
        digest = fingerprint(self.dataset, sampler)
        if digest not in self._order_facts:  # which a third of a state's time went into, of a blend of 40 datasets
            self._order_facts = {digest: order_facts(self.dataset, sampler)}
        state: State = {"consumed_samples": self.consumed_samples, "fingerprint": digest}
        state |= {"total_samples": sampler.total_samples, "library": binidx.__version__}
        state |= {"facts": {**self._order_facts[digest]}, **({} if order is None else {"order": order})}
        if release := find_megatron_samples(self.dataset):
            state["megatron_samples"] = parse_release_name(release)
        try:
            tokens = digest_tokens(self.dataset)
        except (FormatError, StorageError) as error:
            logger.warning("the state of the loader does not cover its tokens: %s", error)
            tokens = []
        return {**state, "tokens": tokens} if any(tokens) else state

    @trims_traceback
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, from the next iteration on.

        Args:
            state: returned by `state_dict` of a loader of the same order, on any number of ranks.

        Raises:
            ConfigError: not a state, one of another order or of other tokens, or one beyond the last sample.
            PeerError: another rank loads another state.
        """
        self.consumed_samples = check_state(state, self.dataset, self._sampler)
        self._compare_with_ranks()

    def _compare_with_ranks(self) -> None:
        """Raise PeerError if another rank's loader has another order, data, position or batch size.

        Compares once for each position at which an iteration is to begin.
        """
        sampler = self._sampler
        rank = sampler.data_parallel_rank, sampler.data_parallel_size
        if self.chosen_by == "processes" and choose_topology() != rank:
            made = f"loader: was made for rank {rank[0]} of {rank[1]}, before groups of ranks were made"
            raise ConfigError(f"{made}; make it after them, with mesh= or data_parallel_rank and data_parallel_size")
        if sampler.data_parallel_size == 1:
            if not self.chosen_by and (count := count_known_processes()) > 1:  # the group may be younger
                way = "which is right only if they are one replica of the model (tensor, pipeline or context parallel)"
                text = f"found 1 in a group of {count} processes: all of them read the same samples, {way}"
                warn_once("data_parallel_size", text)
        elif not self._is_compared:
            split = get_split(self.dataset)
            self._name = self._name or f"loader/{split}/{next(_loader_numbers[split])}"
            fields: dict[str, Any] = {"consumed_samples": self._consumed_samples, "walk": describe_walk(sampler)}
            fields |= {"samples_per_step": sampler.samples_per_step, "order": get_stored_order(self.dataset)}
            subject, name = f"loader of {sampler.total_samples} samples", f"{self._name}/{self._num_positions}"
            compare_with_ranks(subject, name, fields, {"dataset": self.dataset}, rank)
            self._is_compared = True

    def _count_batch(self) -> None:
        if self._worker_usage is not None:
            add_usage(self._worker_usage.read_new())
        # The last step of a sampler may be short, but nothing follows it.
        self._consumed_samples += self._sampler.samples_per_step

    def _start_reading(self) -> Iterator[Any]:
        starts = not self.persistent_workers or (self._reader if self._reads_ahead else self._iterator) is None
        if isinstance(self.collate_fn, CollateForTrainer) and starts:
            about = self._sampler.micro_batch_size, get_sequence_length(self.dataset)
            self.collate_fn = CollateForTrainer.for_workers(self.num_workers, self.prefetch_factor or 0, *about)
        with _deferred_interrupt() if starts and self.num_workers else contextlib.nullcontext():
            return iter(self._open_reader()) if self._reads_ahead else super().__iter__()

    def _read_if_taken(self) -> Iterator[Any]:
        """Yield the batches; reading starts with the first, so not on a rank that receives them."""
        yield from self._start_reading()

    def _open_reader(self) -> DataLoader[Any]:
        """Return the DataLoader over the read-ahead dataset; the same one while its workers persist."""
        if self._reader is not None:
            return self._reader
        sampler: Any = self._sampler
        self._worker_usage = WorkerUsage(self.num_workers, remote_places(self.dataset)) if self.num_workers else None
        on_batch = bool if self._worker_usage is None else self._worker_usage.write
        ahead: Any = ReadAheadDataset(self.dataset, sampler, num_batches=self._look_ahead, on_batch=on_batch)
        options = {name: getattr(self, name) for name in self._option_names}
        reader: DataLoader[Any] = DataLoader(ahead, batch_sampler=sampler, **options)
        self._reader = reader if self.persistent_workers else None
        return reader


class Batches(Iterator[Any]):
    """Iterator over the batches of one iteration of a loader, which counts them in the process's `report`.

    The report of the iteration is logged when the batches end, or soon after this iterator is dropped.

    Args:
        batches: the DataLoader's own iterator.
        counts: `samples` and `tokens` of a batch.
        on_batch: called after each batch.
        pin: whether the memory of a batch that came as a block is pinned; torch does so with others.
    """

    def __init__(
        self, batches: Iterator[Any], counts: Mapping[str, float], on_batch: Callable[[], object], *, pin: bool
    ) -> None:
        self._batches, self._counts, self._on_batch = batches, counts, on_batch
        self._pin = pin and torch.cuda.is_available()
        self._before, self._last = usage(), time.perf_counter()
        watch_process()
        self._close: Callable[[], object] | None = None

    @trims_traceback
    def __next__(self) -> Any:
        began = WAITS[self] = time.perf_counter()
        try:
            batch = next(self._batches) if self._close else span("binidx.first_batch")(next)(self._batches)
            if isinstance(batch, WorkerBatch):
                batch = batch.unpack(pin=self._pin)
        except StopIteration:
            if self._close is not None:
                self._close()
            raise
        finally:
            del WAITS[self]
        last, self._last = self._last, time.perf_counter()
        add_usage({**self._counts, "seconds": self._last - last, "wait_seconds": self._last - began})
        note_seconds("next", self._last - began)
        before = self._before
        self._close = self._close or background().add(self, lambda: log_report(usage_since(before)))
        self._on_batch()
        return batch


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Handle a Ctrl-C that comes in this block at its end; processes that are forked in it ignore Ctrl-C.

    An interrupt within `os.fork` is lost, since Python ignores what its hooks of a fork raise, and one between the fork
    and the end of `Process.start` leaves a worker that ends seconds after the trainer.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # ignored, the system's own, or not ours to set
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        signal.raise_signal(signal.SIGINT)
