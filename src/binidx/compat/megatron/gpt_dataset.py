"""Stand-in for `megatron.core.datasets.gpt_dataset`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from binidx.compat.megatron.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from binidx.compat.megatron.indexed_dataset import IndexedDataset
from binidx.compat.megatron.low_level import LowLevel, adapt
from binidx.compat.megatron.megatron_dataset import _PAD_TOKEN_ID as _PAD_TOKEN_ID
from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.compat.megatron.object_storage_utils import ObjectStorageConfig as ObjectStorageConfig
from binidx.compat.megatron.object_storage_utils import is_object_storage_path as is_object_storage_path
from binidx.compat.megatron.utils import Split
from binidx.dataset import config as configs
from binidx.dataset import gpt
from binidx.dataset.gpt import build_attention_mask, open_low_level_dataset
from binidx.dataset.kinds import mock
from binidx.dataset.kinds.mock import MockGPTLowLevelDataset as MockGPTLowLevelDataset
from binidx.dataset.megatron_dataset import Request
from binidx.dataset.torch_bridge import Sample
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_files import Arrays
from binidx.index.document_sample import build_document_index
from binidx.index.gpt_indices import ARRAYS, build_shuffle_index
from binidx.storage.cache.layout import directory_of_index
from binidx.storage.settings import ReadSettings

logger = logging.getLogger(__name__)


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig, configs.GPTDatasetConfig):
    """Our config with Megatron's defaults: each sample has an attention mask unless the script disables it.

    Args:
        s3_cache_path, dynamic_context_parallel: names of `object_storage_cache_path` and `hybrid_context_parallel` in
            older and newer versions of Megatron.
    """

    create_attention_mask: bool = True
    s3_cache_path: str | None = None
    dynamic_context_parallel: bool = False

    def __post_init__(self) -> None:
        # Mock chats are Megatron's own classes, which read these fields.
        made_up = {name: getattr(self, name) for name in MADE_UP}
        vars(self).update(dict.fromkeys(MADE_UP))
        super().__post_init__()
        vars(self).update(made_up)
        self.hybrid_context_parallel = self.hybrid_context_parallel or self.dynamic_context_parallel
        # Some users' datasets assert that it is given before they open an s3:// prefix.
        self.object_storage_cache_path = self.object_storage_cache_path or self.s3_cache_path or index_directory()


def index_directory() -> str:
    """Return the directory for copies of remote `.idx` files."""
    found = directory_of_index(ReadSettings.of(None))
    return found[0] if found else tempfile.gettempdir()


MADE_UP = ("sft_mock_dataset_config_json", "varlen_mock_dataset_config_json")


class GPTDataset(gpt.GPTDataset, MegatronDataset):
    """Our dataset with the methods that subclasses of Megatron's call and replace; replaced ones make the samples."""

    takes_a_range = True

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: configs.GPTDatasetConfig,
    ) -> None:
        reset = config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss
        self.masks_and_position_ids_are_cacheable = not any(reset)
        self.masks_and_position_ids_are_cached = False
        self.cached_attention_mask = self.cached_loss_mask = self.cached_position_ids = None
        super().__init__(adapt(indexed_dataset), dataset_path, indexed_indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: configs.GPTDatasetConfig) -> IndexedDataset:
        """Open the pair of a prefix as the stand-in class."""
        return open_low_level_dataset(IndexedDataset, dataset_path, config)

    # Indices

    def _load_or_build(self) -> Arrays:
        return dict(zip(ARRAYS, self._build_document_sample_shuffle_indices(), strict=True))

    def _build_document_sample_shuffle_indices(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return document_index, sample_index and shuffle_index; not cached for a user's low-level dataset."""
        if isinstance(self.dataset, LowLevel):
            self._build(writer := ArrayWriter())
            arrays = writer.arrays
        else:
            arrays = super()._load_or_build()
        document_index, sample_index, shuffle_index = (arrays[name] for name in ARRAYS)
        return document_index, sample_index, shuffle_index

    def _get_num_tokens_per_epoch(self) -> int:
        return self.num_tokens // self._plan.num_epochs

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        return self._plan.num_epochs

    # Samples

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the padded tokens of a sample and the numbers of their sequences."""
        spans = self.spans(idx)
        length = self.config.sequence_length + self.config.add_extra_token_to_sequence
        tokens = [np.empty(0, np.int64), *self.dataset.read(spans)]
        text = np.concatenate([*tokens, np.full(length, self._pad_token_id)], dtype=np.int64)[:length]
        return text, np.array([sequence for sequence, _, _ in spans], np.int64)

    @classmethod
    def _is_queried(cls) -> bool:
        mine: Any = GPTDataset._query_document_sample_shuffle_indices
        return cls._query_document_sample_shuffle_indices is not mine

    @classmethod
    def _is_customized(cls) -> bool:
        return super()._is_customized() or cls._is_queried()

    @classmethod
    def read_batch(cls, requests: Sequence[Request], num_rows: int) -> Sequence[Sample]:
        if not cls._is_queried():
            return super().read_batch(requests, num_rows)
        batch: list[Sample] = [{}] * num_rows
        for dataset, idxs, rows in requests:
            for idx, row in zip(idxs, rows, strict=True):
                text, _ = dataset._query_document_sample_shuffle_indices(idx or 0)
                batch[row] = dataset.assemble(idx, [np.asarray(text, np.int64)])
        return batch


class MockGPTDataset(GPTDataset, mock.MockGPTDataset):
    """Our dataset under Megatron's name."""

    takes_a_range = True

    def __init__(
        self,
        dataset: MockGPTLowLevelDataset,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: configs.GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        return MockGPTLowLevelDataset(config.tokenizer)


def _build_document_index(
    documents: NDArray[Any], num_epochs: int, numpy_random_state: Any, separate_final_epoch: bool
) -> NDArray[np.int32]:
    """Adapt `build_document_index`, which takes any generator with `shuffle`."""
    return build_document_index(documents, num_epochs, numpy_random_state, separate_final_epoch)


def _build_shuffle_index(num_samples: int, total_size: int, numpy_random_state: Any) -> NDArray[Any]:
    """Adapt `build_shuffle_index`, which takes any generator with `shuffle`."""
    return build_shuffle_index(num_samples, total_size, numpy_random_state)


def _get_ltor_masks_and_position_ids(
    data: torch.Tensor,
    eod_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    create_attention_mask: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return masks and positions of S tokens: attention (1, S, S) or None, loss (S,), positions (S,)."""
    is_eod = data.reshape(-1) == eod_token
    positions = torch.arange(len(is_eod), device=data.device)
    # The start of each token's document: one after the EOD before it.
    ends = torch.where(is_eod, positions + 1, 0).cumsum(0).new_zeros(len(is_eod))
    ends[1:] = torch.cummax(torch.where(is_eod, positions + 1, 0), 0).values[:-1]
    in_document = positions - ends
    loss_mask = torch.ones(len(is_eod), dtype=torch.float, device=data.device)
    if eod_mask_loss:
        loss_mask[is_eod] = 0.0
    attention_mask = None
    if create_attention_mask:
        chosen = in_document if reset_attention_mask else positions
        attention_mask = torch.from_numpy(build_attention_mask(chosen.cpu().numpy())).to(data.device)
    return attention_mask, loss_mask, in_document if reset_position_ids else positions
