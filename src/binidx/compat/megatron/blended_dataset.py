"""Stand-in for `megatron.core.datasets.blended_dataset`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from binidx.compat.megatron.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig,
)
from binidx.compat.megatron.megatron_dataset import MegatronDataset as MegatronDataset
from binidx.compat.megatron.utils import normalize as normalize
from binidx.dataset import blended

logger = logging.getLogger(__name__)

_VERBOSE = False


class BlendedDataset(blended.BlendedDataset, Dataset[Any]):
    """Our blend as a torch Dataset; indices come from Megatron's `_build_indices`, which a subclass may replace."""

    def _load_or_build(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        return self._build_indices()

    def _build_indices(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        return super()._load_or_build()
