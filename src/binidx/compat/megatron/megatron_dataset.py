"""Stand-in for `megatron.core.datasets.megatron_dataset`."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from binidx.dataset.megatron import megatron_dataset


class MegatronDataset(megatron_dataset.MegatronDataset, Dataset[Any]):
    """binidx's base class as a torch Dataset; a subclass needs only Megatron's methods `__len__` and `__getitem__`."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        raise NotImplementedError

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        raise NotImplementedError
