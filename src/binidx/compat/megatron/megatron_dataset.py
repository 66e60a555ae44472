"""Stand-in for `megatron.core.datasets.megatron_dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch.utils.data import Dataset

from binidx.dataset.megatron import megatron_dataset
from binidx.dataset.torch_bridge import Sample
from binidx.format.indexed_dataset import Span


class MegatronDataset(megatron_dataset.MegatronDataset, Dataset[Any]):
    """binidx's base class as a torch Dataset; a subclass needs only Megatron's methods `__len__` and `__getitem__`."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        raise NotImplementedError

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        raise NotImplementedError

    def spans(self, idx: int | None) -> list[Span]:
        raise NotImplementedError(f"{type(self).__name__}: has neither __getitem__ nor spans and assemble")

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        raise NotImplementedError(f"{type(self).__name__}: has neither __getitem__ nor spans and assemble")
