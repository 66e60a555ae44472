"""What Megatron-LM's `build_pretraining_data_loader` does, for the run that nothing of ours takes part in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args
from torch.utils.data import DataLoader


class MegatronPretrainingSampler:
    def __init__(self, total: int, consumed: int, micro: int, rank: int, size: int) -> None:
        self.total, self.consumed, self.micro, self.rank, self.size = total, consumed, micro, rank, size

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.consumed, self.total - self.micro * self.size + 1, self.micro * self.size):
            first = start + self.rank * self.micro
            yield list(range(first, first + self.micro))


class MegatronPretrainingRandomSampler(MegatronPretrainingSampler):
    """With data sharding."""

    def __iter__(self) -> Iterator[list[int]]:
        step = self.micro * self.size
        epoch, place = divmod(self.consumed, self.total - self.total % step)
        share = self.total // step * self.micro
        order = torch.randperm(share, generator=torch.Generator().manual_seed(epoch)).tolist()[place // self.size :]
        for start in range(0, len(order) - self.micro + 1, self.micro):
            self.consumed += step
            yield [self.rank * share + each for each in order[start : start + self.micro]]


SAMPLERS = {"single": MegatronPretrainingSampler, "cyclic": MegatronPretrainingRandomSampler}


def build_pretraining_data_loader(dataset: Any, consumed_samples: int) -> Any:
    if dataset is None:
        return None
    args = get_args()
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    sampler = SAMPLERS[args.dataloader_type](len(dataset), consumed_samples, args.micro_batch_size, rank, size)
    return DataLoader(
        dataset, batch_sampler=sampler, num_workers=args.num_workers, persistent_workers=args.num_workers > 0
    )
