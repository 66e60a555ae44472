"""The only file of this layer that imports torch: arrays become tensors and samples, and whether there is a group."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tensor = torch.Tensor
Sample = dict[str, torch.Tensor | np.generic]


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(array)


def is_distributed() -> bool:
    """Whether `torch.distributed` has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size() -> int:
    """Processes in the group, or those that a launcher such as torchrun speaks of; 1 without either."""
    return torch.distributed.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


class Samples(list[Sample]):
    """The samples of a micro-batch, which need not be stacked again to be a batch.

    Args:
        samples: one dict a sample.
        columns: for each key the tensor whose rows the samples have, (B, ...), or the one that all of them share.
        shared: the keys whose tensor all samples share.
    """

    def __init__(
        self, samples: Iterable[Sample], columns: Mapping[str, Tensor], shared: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(samples)
        self.columns = columns
        self.shared = shared

    def stack(self) -> dict[str, Tensor]:
        """The batch, as torch's `default_collate` would make it."""
        return {
            name: column.expand(len(self), *column.shape).clone() if name in self.shared else column
            for name, column in self.columns.items()
        }
