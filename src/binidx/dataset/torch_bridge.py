"""Tensors, samples and process groups: the only module of this layer that imports torch.

torch is imported when the first tensor is made: reading the order of samples alone does not cost that second.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


Tensor: TypeAlias = "torch.Tensor"
GroupStore: TypeAlias = "Store"
Sample: TypeAlias = "dict[str, torch.Tensor | np.generic]"


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    import torch

    return torch.from_numpy(array)


def is_distributed() -> bool:
    """Return whether `torch.distributed` has a process group; False if torch was never imported."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size() -> int:
    """Return the size of the process group, or WORLD_SIZE of a launcher such as torchrun; 1 without either."""
    if is_distributed():
        import torch.distributed

        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the rank of this process in the group, or RANK of a launcher; 0 without either."""
    if is_distributed():
        import torch.distributed

        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def group_store(name: str) -> tuple[GroupStore, int, int] | None:
    """Return the process group's key-value store for keys of this name, this rank, and the number of ranks.

    None if there are no other ranks, or no store, as with MPI.
    """
    if not is_distributed():
        return None
    import torch.distributed

    if torch.distributed.get_world_size() == 1:
        return None
    from torch.distributed import distributed_c10d  # missing in a torch without distributed

    try:
        # torch has no public function for it.
        store = distributed_c10d.PrefixStore(name, distributed_c10d._get_default_store())
    except Exception:
        return None
    return store, torch.distributed.get_rank(), torch.distributed.get_world_size()


def reading_worker() -> tuple[int, int]:
    """Return the number of this DataLoader worker and of all workers; (0, 1) in the trainer's process."""
    if "torch" not in sys.modules:
        return 0, 1
    import torch.utils.data

    worker = torch.utils.data.get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, NumPy and random."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def shared_zeros(*shape: int) -> torch.Tensor:
    """Return float64 zeros in memory shared with workers, forked or spawned."""
    import torch

    zeros = torch.zeros(*shape, dtype=torch.float64)
    zeros.share_memory_()  # type: ignore[no-untyped-call]
    return zeros


class Samples(Sequence["Sample"]):
    """Samples of a micro-batch that are rows of shared tensors, so that stacking them costs nothing.

    Args:
        num_samples: B.
        columns: for each key a tensor of shape (B, ...), or one that all samples share.
        shared: keys of the tensors that all samples share.
        numbers: for each further key one number per sample, shape (B,), served as NumPy scalars.
    """

    def __init__(
        self,
        num_samples: int,
        columns: Mapping[str, Tensor],
        shared: Collection[str] = (),
        numbers: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self.num_samples = num_samples
        self.columns = columns
        self.shared = shared
        self.numbers = numbers or {}

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            start, stop, step = row.indices(len(self))
            return self.part(start, stop) if step == 1 else [self[each] for each in range(start, stop, step)]
        if not -len(self) <= row < len(self):
            raise IndexError(f"sample {row}: out of range (there are {len(self)})")
        sample: Sample = {name: numbers[row] for name, numbers in self.numbers.items()}
        for name, column in self.columns.items():
            sample[name] = column if name in self.shared else column[row]
        return sample

    def part(self, start: int, stop: int) -> Samples:
        """Return the samples of consecutive rows, over the same memory."""
        rows = slice(start, max(start, stop))
        columns = {name: each if name in self.shared else each[rows] for name, each in self.columns.items()}
        numbers = {name: each[rows] for name, each in self.numbers.items()}
        return Samples(len(range(len(self))[rows]), columns, self.shared, numbers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the samples, without tensors that all share."""
        own = [column.nbytes for name, column in self.columns.items() if name not in self.shared]
        return sum(own) + sum(numbers.nbytes for numbers in self.numbers.values())

    def stack(self) -> dict[str, Tensor]:
        """Return the batch that torch's `default_collate` would make."""
        batch = {name: as_tensor(numbers) for name, numbers in self.numbers.items()}
        for name, column in self.columns.items():
            batch[name] = column.expand(len(self), *column.shape).clone() if name in self.shared else column
        return batch
