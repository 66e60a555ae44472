"""Stand-in for `megatron.training.datasets.sft_dataset`."""

from __future__ import annotations

from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.kinds import sft
from binidx.dataset.kinds.chat import IGNORE
from binidx.dataset.kinds.sft import SFTLowLevelDataset as SFTLowLevelDataset

IGNORE_INDEX = IGNORE


class SFTDataset(sft.SFTDataset, MegatronDataset):
    """binidx's dataset under Megatron's name."""
