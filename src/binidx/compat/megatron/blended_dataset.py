"""Stand-in for `megatron.core.datasets.blended_dataset`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from binidx.dataset.megatron import blended


class BlendedDataset(blended.BlendedDataset, Dataset[Any]):
    """binidx's blend as a torch Dataset; its indices come from `_build_indices`, as in Megatron, for subclasses."""

    def _load_or_build(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        return self._build_indices()

    def _build_indices(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        return super()._load_or_build()
