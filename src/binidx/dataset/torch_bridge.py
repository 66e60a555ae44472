"""The only file of this layer that imports torch: arrays become tensors, and whether a process group exists."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def as_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(array)


def is_distributed() -> bool:
    """Whether `torch.distributed` has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size() -> int:
    """Processes in the group, or those that a launcher such as torchrun speaks of; 1 without either."""
    return torch.distributed.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


Sample = dict[str, torch.Tensor | np.generic]
