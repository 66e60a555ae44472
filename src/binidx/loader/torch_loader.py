"""Where a loader is: one integer, and a fingerprint of the order that it counts in.

    {"consumed_samples": 4194304, "fingerprint": "7adca21e0c51d6f3"}

A fingerprint is that of the samples, not of the files: data that moved or was copied has the same, data that was
written anew, another seed, split, weight or sequence length has another. Nor does it know how many samples a run was
asked for, as long as these come in the same order.

The face to torch: a DataLoader over a dataset, resumed by the samples consumed. No other file here imports torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from binidx.dataset.megatron_dataset import recorded_name
from binidx.dataset.torch_bridge import Samples, world_size
from binidx.errors import ConfigError
from binidx.loader import batches
from binidx.loader.batches import Batches, Ledger, Tally
from binidx.loader.readahead import ReadAheadDataset, is_ours, readahead_queue_of, reads_remotely
from binidx.loader.samplers import (
    DataloaderType,
    MegatronFullValidationSampler,
    MegatronPretrainingRandomSampler,
    PretrainingSampler,
    build_sampler,
    is_validated_in_full,
)

State = dict[str, Any]


class LoaderPosition:
    """How far a loader's iterations are: what was served, where its sampler may be ahead of that.

    Args:
        sampler: as it is before the first iteration.
    """

    def __init__(self, sampler: PretrainingSampler) -> None:
        self.sampler = sampler
        self.consumed_samples = sampler.consumed_samples

    def begin(self) -> int:
        """A new iteration; returns the samples of a micro-batch."""
        if isinstance(self.sampler, MegatronPretrainingRandomSampler):
            self.sampler.consumed_samples = self.consumed_samples
        self.consumed_samples = self.sampler.consumed_samples
        return self.sampler.micro_batch_size

    def served(self) -> None:
        """One more step: a micro-batch of every rank. The last may be short, but there is nothing after it."""
        self.consumed_samples += self.sampler.micro_batch_size * self.sampler.data_parallel_size

    def move_to(self, consumed_samples: int) -> None:
        """The next iteration begins there."""
        self.sampler.consumed_samples = self.consumed_samples = consumed_samples


def state_of(dataset: Any, sampler: PretrainingSampler, consumed_samples: int) -> State:
    """What a loader goes on from, in JSON values."""
    return {"consumed_samples": consumed_samples, "fingerprint": fingerprint_of(dataset, sampler)}


def consumed_of(state: Mapping[str, Any], dataset: Any, sampler: PretrainingSampler) -> int:
    """The consumed samples of a state that is this loader's.

    Raises:
        ConfigError: it is no state, or counts in another order.
    """
    try:
        consumed, theirs = int(state["consumed_samples"]), state["fingerprint"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"resume: found {state!r}, needs what state_dict() of a loader gave") from error
    ours = fingerprint_of(dataset, sampler)
    if theirs != ours:
        raise ConfigError(
            f"resume: state is for fingerprint {theirs}, this loader is {ours}; check data, split, weights, seed and "
            "sequence length, and for a cyclic loader its micro_batch_size and data_parallel_size, as they are part "
            f"of its order. If you know better, give consumed_samples={consumed} itself"
        )
    return consumed


def fingerprint_of(dataset: Any, sampler: PretrainingSampler) -> str:
    """Of the order in which all ranks together are served, 16 hex digits."""
    text = json.dumps([_order_of(dataset), _walk_of(sampler)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _order_of(dataset: Any) -> Any:
    """What the samples of a dataset depend on; of a kind that does not say, its name and length."""
    known = getattr(dataset, "order_identity", None)
    return [recorded_name(type(dataset)), len(dataset)] if known is None else known


def _walk_of(sampler: PretrainingSampler) -> Any:
    """What a sampler's order depends on: nothing for the one that goes straight on, on any number of ranks."""
    if not isinstance(sampler, MegatronPretrainingRandomSampler):
        return "single"
    topology = sampler.total_samples, sampler.micro_batch_size, sampler.data_parallel_size
    return ["cyclic", *topology, sampler.data_sharding, sampler.surplus_batches]


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
    **dataloader_options: Any,
) -> PretrainingLoader | None:
    """Micro-batches of this rank, from `consumed_samples` on.

    Of a valid split whose config has `full_validation`: all its samples, one at a time, from the first on, as in
    Megatron-LM.

    Args:
        dataset: what `BlendedMegatronDatasetBuilder` built; None gives None.
        consumed_samples: samples served before, over all ranks: all the state there is.
        micro_batch_size: samples per batch.
        data_parallel_rank, data_parallel_size: this rank, and how many there are. Needed under torch.distributed, where
            only the caller knows which ranks share their data; otherwise 0 of 1.
        dataloader_type: "single" keeps the dataset's order, "cyclic" permutes it anew each epoch.
        data_sharding: for "cyclic", whether each rank keeps to its own share.
        surplus_batches: for "cyclic" without `data_sharding`, Megatron's epochs of unequal length on different ranks.
        num_workers: processes that read; 0 reads here.
        look_ahead: batches to read before they are asked for, 0 none; None: where bytes are remote, as many as waiting
            shows to be needed, within 128 MiB. A number also for datasets of your own kind: then their samples must be
            functions of their number, as threads ask for them out of turn.
        dataloader_options: more for torch's DataLoader. Memory is pinned where there is a GPU.

    Returns:
        A DataLoader of dicts of tensors, (B, S) each, which saves and loads its state, and gives any step by its
        number. `len()` of it is Megatron's: samples, not batches.

    Source: Megatron-LM, `build_pretraining_data_loader`; the arguments it takes from its globals are arguments here.
    """
    if dataset is None:
        return None
    if isinstance(dataset, list):
        raise ConfigError(f"dataset: found a list of {len(dataset)} validation sets, needs one; make a loader for each")
    rank, size = _topology(data_parallel_rank, data_parallel_size)
    topology = micro_batch_size, rank, size
    sampler: PretrainingSampler = (
        MegatronFullValidationSampler(len(dataset), rank, size)
        if is_validated_in_full(dataset)
        else build_sampler(dataloader_type, dataset, consumed_samples, *topology, data_sharding, surplus_batches)
    )
    defaults = {"collate_fn": collate, "pin_memory": torch.cuda.is_available(), "persistent_workers": num_workers > 0}
    options = {"num_workers": num_workers, **defaults, **dataloader_options}
    return PretrainingLoader(dataset, batch_sampler=sampler, look_ahead=look_ahead, **options)


class PretrainingLoader(DataLoader[Any]):
    """torch's DataLoader, which knows how far it is, reads ahead, and counts what the trainer waits.

        loader[41_200]              this rank's micro-batch of that step of the whole run
        loader.consumed_samples     served so far over all ranks, what workers hold ready not counted
        loader.state_dict()         for a checkpoint; the same on every rank, so one of them may save it
        loader.load_state_dict(s)   the next iteration goes on from there, on any number of ranks

    Args:
        dataset, batch_sampler: one of our samplers over the dataset.
        look_ahead: as in `build_pretraining_data_loader`.
        options: torch's.

    A "single" loader begins every iteration where it was made, or loaded, to begin; a "cyclic" one goes on from what
    was served. An iteration without workers has a `LookAhead` of its own; with workers each of them has one, and keeps
    it if they are persistent.
    """

    def __init__(
        self, dataset: Any, *, batch_sampler: PretrainingSampler, look_ahead: int | None = None, **options: Any
    ) -> None:
        if look_ahead is not None and look_ahead < 0:
            raise ConfigError(f"look_ahead: found {look_ahead}, needs a number of batches, 0 for none, or None")
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self._looks_ahead = (reads_remotely(dataset) and is_ours(dataset)) if look_ahead is None else look_ahead > 0
        self._num_ahead = look_ahead
        self._option_names = [*options]
        self._ledger: Ledger | None = None
        self._reader: DataLoader[Any] | None = None
        self._place = LoaderPosition(batch_sampler)

    def __iter__(self) -> Any:
        samples = self._place.begin()
        tokens = samples * getattr(getattr(self.dataset, "config", None), "sequence_length", 0)
        batches = iter(self._reading()) if self._looks_ahead else super().__iter__()
        return Batches(batches, Tally(samples, tokens, self._ledger), self._place.served)

    def __getitem__(self, step: int) -> Any:
        """The micro-batch of this rank at a step of the whole run, counted from sample 0; read now, on its own.

        Raises:
            IndexError: the run has no such step.
        """
        assert self.collate_fn is not None
        return self.collate_fn(readahead_queue_of(self.dataset)(self._place.sampler.batch(step)))

    @property
    def consumed_samples(self) -> int:
        """Samples served so far, over all ranks; set it, and the next iteration begins there."""
        return self._place.consumed_samples

    @consumed_samples.setter
    def consumed_samples(self, value: int) -> None:
        self._place.move_to(value)
        self._reader = None  # its workers look ahead from where it was

    def state_dict(self) -> State:
        """Where it is, in JSON values: `consumed_samples` and the fingerprint of the order that they count in."""
        return state_of(self.dataset, self._place.sampler, self.consumed_samples)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that a loader of the same order gave; from the next iteration on.

        Raises:
            ConfigError: it is of another order, or none.
        """
        self.consumed_samples = consumed_of(state, self.dataset, self._place.sampler)

    def _reading(self) -> DataLoader[Any]:
        """The loader over the dataset that looks ahead; the same one as long as its workers stay."""
        if self._reader is None or not self.persistent_workers:
            sampler: Any = self.batch_sampler
            self._ledger = Ledger(self.num_workers) if self.num_workers else None
            ahead: Any = ReadAheadDataset(self.dataset, sampler, num_batches=self._num_ahead, ledger=self._ledger)
            options = {name: getattr(self, name) for name in self._option_names}
            reader: DataLoader[Any] = DataLoader(ahead, batch_sampler=sampler, **options)
            if not self.persistent_workers:
                return reader
            self._reader = reader
        return self._reader


def collate(samples: Sequence[Any]) -> Any:
    """The batch of some samples: as it is where they are the rows of one already, else stacked by torch.

    Samples of unequal length are one row, and bounds of sequences are made equally many: `loader.uneven`.
    """
    if isinstance(samples, Samples):
        return samples.stack()
    return batches.pack_samples(samples) if batches.is_packable(samples) else default_collate(batches.level(samples))


def _topology(rank: int | None, size: int | None) -> tuple[int, int]:
    if (rank is None or size is None) and world_size() > 1:
        raise ConfigError(
            f"data_parallel_rank, data_parallel_size: found {rank}, {size} in a group of {world_size()} processes; "
            "give both, or every rank would read the same samples"
        )
    return rank or 0, 1 if size is None else size
