"""Stand-in for `megatron.core.datasets.blended_megatron_dataset_config`."""

from __future__ import annotations

from dataclasses import dataclass

from binidx.compat.megatron.serve import DEFAULTS, find_installed_release
from binidx.dataset import config
from binidx.dataset.config import convert_split_vector_to_split_matrix as convert_split_vector_to_split_matrix
from binidx.dataset.config import parse_and_normalize_split as parse_and_normalize_split


@dataclass(repr=False)
class BlendedMegatronDatasetConfig(config.BlendedMegatronDatasetConfig):
    """binidx's config; `install` supplies the options that scripts for Megatron cannot set."""

    def __post_init__(self) -> None:
        self.trust_cache = self.trust_cache or DEFAULTS.get("trust_cache")
        self.cache_small_indices = self.cache_small_indices or bool(DEFAULTS.get("cache_small_indices"))
        if self.megatron_samples == "main":
            self.megatron_samples = DEFAULTS.get("megatron_samples", "main") or find_installed_release()
        super().__post_init__()
