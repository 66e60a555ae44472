"""Stand-in for `megatron.training.datasets.sft_dataset`."""

from __future__ import annotations

from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.assemble.chat import IGNORE
from binidx.dataset.assemble.chat import SFTLowLevelDataset as SFTLowLevelDataset
from binidx.dataset.config import padding_multiple
from binidx.dataset.megatron import sft

IGNORE_INDEX = IGNORE


class SFTDataset(sft.SFTDataset, MegatronDataset):
    """binidx's dataset under Megatron's name, with a method that Megatron's subclasses call."""

    def _calculate_padding_divisor(self) -> int:
        fields = vars(self.config)
        return padding_multiple(
            self.config, hybrid=any(fields.get(f"{name}_context_parallel") for name in ("hybrid", "dynamic"))
        )
