"""Stand-in for `megatron.core.datasets.blended_dataset`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from binidx.dataset import blended


class BlendedDataset(blended.BlendedDataset, Dataset[Any]):
    """Our blend as a torch Dataset; indices come from Megatron's `_build_indices`, which a subclass may replace."""

    def _load_or_build(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        return self._build_indices()

    def _build_indices(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        return super()._load_or_build()
