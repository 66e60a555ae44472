"""The face to torch: a DataLoader over a dataset, resumed by the samples consumed. No other file here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from binidx.dataset.torch_bridge import Samples, world_size
from binidx.errors import ConfigError
from binidx.loader.samplers import DataloaderType, build_sampler


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
    return DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, **{**defaults, **dataloader_options})


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
