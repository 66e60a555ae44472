"""Datasets that draw random numbers per sample: the same numbers for the same sample and epoch, in any worker."""

from __future__ import annotations

from typing import Any, ClassVar

from binidx.dataset.torch_bridge import seed_generators, shared_zeros


class RandomSeedDataset:
    """A map dataset that seeds torch, NumPy and random with seed + epoch + number before it reads a sample.

    For augmentation in datasets of your own; ours draw from the sample's number alone. The "cyclic" sampler says which
    epoch it is, through memory that workers share.

    Args:
        dataset: its `__getitem__` may draw from the global generators.
        seed: of epoch 0, as `random_seed` of the config.

    Source: Megatron-LM, `RandomSeedDataset`; there a persistent worker never hears of a new epoch, and draws that of
    the first again.
    """

    RECORDED_NAME: ClassVar[str] = "RandomSeedDataset"

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.base_seed = dataset, seed
        self._epoch = shared_zeros(1)

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Called by the sampler when an epoch begins."""
        self._epoch[0] = epoch

    def __getitem__(self, idx: int) -> Any:
        seed_generators(self.base_seed + int(self._epoch[0]) + int(idx))
        return self.dataset[idx]
