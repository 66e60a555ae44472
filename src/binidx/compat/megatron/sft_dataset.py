"""Stands in for `megatron.training.datasets.sft_dataset`."""

from __future__ import annotations

from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.dataset import sft
from binidx.dataset.packing import IGNORE
from binidx.dataset.sft import SFTLowLevelDataset as SFTLowLevelDataset

IGNORE_INDEX = IGNORE


class SFTDataset(sft.SFTDataset, MegatronDataset):
    """Ours."""
