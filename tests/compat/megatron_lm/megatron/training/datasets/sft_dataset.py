"""A dataset that Megatron-LM has and ours has not, in the module that has the others of its kind."""

from __future__ import annotations

from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset


class SFTDataset(MegatronDataset):
    """Ours is served in its place."""


class MockSFTDataset(GPTDataset):
    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        raise NotImplementedError
