"""The face to torch: a DataLoader over a dataset, resumed by the samples consumed. No other file here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from binidx.dataset.torch_bridge import Samples, world_size
from binidx.errors import ConfigError
from binidx.loader.batches import Batches, Ledger, Tally
from binidx.loader.look_ahead import LookAhead, is_ours, is_remote
from binidx.loader.samplers import DataloaderType, PretrainingSampler, build_sampler


def build_pretraining_data_loader(
    dataset: Any,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int | None = None,
    data_parallel_size: int | None = None,
    *,
    dataloader_type: DataloaderType = "single",
    data_sharding: bool = True,
    num_workers: int = 0,
    look_ahead: int | None = None,
    **dataloader_options: Any,
) -> DataLoader[Any] | None:
    """Micro-batches of this rank, from `consumed_samples` on.

    Args:
        dataset: what `BlendedMegatronDatasetBuilder` built; None gives None.
        consumed_samples: samples served before, over all ranks: all the state there is.
        micro_batch_size: samples per batch.
        data_parallel_rank, data_parallel_size: this rank, and how many there are. Needed under torch.distributed, where
            only the caller knows which ranks share their data; otherwise 0 of 1.
        dataloader_type: "single" keeps the dataset's order, "cyclic" permutes it anew each epoch.
        data_sharding: for "cyclic", whether each rank keeps to its own share.
        num_workers: processes that read; 0 reads here. With workers the "cyclic" sampler is ahead of what was served by
            the batches in flight: count the samples that arrive, and make a new loader to go on from there.
        look_ahead: batches to read before they are asked for, 0 none; None: where bytes are remote, as many as waiting
            shows to be needed, within 128 MiB. A number also for datasets of your own kind: then their samples must be
            functions of their number, as threads ask for them out of turn.
        dataloader_options: more for torch's DataLoader. Memory is pinned where there is a GPU.

    Returns:
        A DataLoader of dicts of tensors, (B, S) each. `len()` of it is Megatron's: samples, not batches.

    Source: Megatron-LM, `build_pretraining_data_loader`; the arguments it takes from its globals are arguments here.
    """
    if dataset is None:
        return None
    if isinstance(dataset, list):
        raise ConfigError(f"dataset: found a list of {len(dataset)} validation sets, needs one; make a loader for each")
    rank, size = _topology(data_parallel_rank, data_parallel_size)
    sampler = build_sampler(dataloader_type, dataset, consumed_samples, micro_batch_size, rank, size, data_sharding)
    defaults = {"collate_fn": collate, "pin_memory": torch.cuda.is_available(), "persistent_workers": num_workers > 0}
    options = {"num_workers": num_workers, **defaults, **dataloader_options}
    return PretrainingLoader(dataset, batch_sampler=sampler, look_ahead=look_ahead, **options)


class PretrainingLoader(DataLoader[Any]):
    """torch's DataLoader, which reads ahead, counts what the trainer waits, and says so at the end of an iteration.

    Args:
        dataset, batch_sampler: one of our samplers over the dataset.
        look_ahead: as in `build_pretraining_data_loader`.
        options: torch's.

    An iteration without workers has a `LookAhead` of its own; with workers each of them has one, and keeps it if they
    are persistent.
    """

    def __init__(
        self, dataset: Any, *, batch_sampler: PretrainingSampler, look_ahead: int | None = None, **options: Any
    ) -> None:
        if look_ahead is not None and look_ahead < 0:
            raise ConfigError(f"look_ahead: found {look_ahead}, needs a number of batches, 0 for none, or None")
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self._looks_ahead = (is_remote(dataset) and is_ours(dataset)) if look_ahead is None else look_ahead > 0
        self._num_ahead = look_ahead
        self._option_names = [*options]
        self._ledger: Ledger | None = None
        self._reader: DataLoader[Any] | None = None

    def __iter__(self) -> Any:
        sampler: Any = self.batch_sampler
        samples = sampler.micro_batch_size
        tokens = samples * getattr(getattr(self.dataset, "config", None), "sequence_length", 0)
        batches = iter(self._reading()) if self._looks_ahead else super().__iter__()
        return Batches(batches, Tally(samples, tokens, self._ledger))

    def _reading(self) -> DataLoader[Any]:
        """The loader over the dataset that looks ahead; the same one as long as its workers stay."""
        if self._reader is None or not self.persistent_workers:
            sampler: Any = self.batch_sampler
            self._ledger = Ledger(self.num_workers) if self.num_workers else None
            ahead: Any = LookAhead(self.dataset, sampler, num_batches=self._num_ahead, ledger=self._ledger)
            options = {name: getattr(self, name) for name in self._option_names}
            reader: DataLoader[Any] = DataLoader(ahead, batch_sampler=sampler, **options)
            if not self.persistent_workers:
                return reader
            self._reader = reader
        return self._reader


def collate(samples: Sequence[Any]) -> Any:
    """The batch of some samples: as it is where they are the rows of one already, else stacked by torch."""
    return samples.stack() if isinstance(samples, Samples) else default_collate(list(samples))


def _topology(rank: int | None, size: int | None) -> tuple[int, int]:
    if (rank is None or size is None) and world_size() > 1:
        raise ConfigError(
            f"data_parallel_rank, data_parallel_size: found {rank}, {size} in a group of {world_size()} processes; "
            "give both, or every rank would read the same samples"
        )
    return rank or 0, 1 if size is None else size
