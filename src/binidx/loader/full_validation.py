"""Validation on all samples of a dataset, each once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from binidx.dataset.split import Split
from binidx.loader.samplers import MegatronPretrainingSampler


class MegatronFullValidationSampler(MegatronPretrainingSampler):
    """Every sample once, from the first on, one at a time: rank r takes r, r + P, ...

    `len()` is the number of batches of this rank. A rank may have one less than another: a trainer that counts steps
    takes the most of any rank, and lets the others begin again.

    Source: Megatron-LM, `MegatronFullValidationSampler`.
    """

    def __init__(self, total_samples: int, data_parallel_rank: int, data_parallel_size: int) -> None:
        super().__init__(total_samples, 0, 1, data_parallel_rank, data_parallel_size, drop_last=False)

    def __len__(self) -> int:
        return len(range(self.data_parallel_rank, self.total_samples, self.data_parallel_size))

    def draw(self, consumed_samples: int) -> Iterator[list[int]]:
        return filter(None, super().draw(consumed_samples))

    def batch(self, step: int) -> list[int]:
        if not -len(self) <= step < len(self):
            raise IndexError(f"step {step}: rank {self.data_parallel_rank} has {len(self)}")
        return [self.data_parallel_rank + step % len(self) * self.data_parallel_size]


def is_validated_in_full(dataset: Any) -> bool:
    """Whether it is a valid split, or a blend of some, whose config has `full_validation`."""
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    return split is Split.valid and bool(getattr(getattr(dataset, "config", None), "full_validation", False))
