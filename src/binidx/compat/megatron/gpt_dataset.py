"""Stand-in for `megatron.core.datasets.gpt_dataset`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.compat.megatron.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from binidx.compat.megatron.indexed_dataset import IndexedDataset
from binidx.compat.megatron.megatron_dataset import MegatronDataset
from binidx.compat.megatron.serve import find_installed_release
from binidx.dataset import config as configs
from binidx.dataset.megatron import gpt, mock
from binidx.dataset.megatron.gpt import open_low_level_dataset
from binidx.dataset.megatron.mock import ComputedTokens
from binidx.dataset.megatron.mock import MockGPTLowLevelDataset as MockGPTLowLevelDataset
from binidx.dataset.megatron.ordered_dataset import SEVERAL, own_methods
from binidx.dataset.megatron_releases import RELEASES, Rule
from binidx.dataset.torch_bridge import Sample
from binidx.forks import cached_property
from binidx.format.tokens import StoredTokens, read_spans
from binidx.index.gpt_indices import ARRAYS
from binidx.order.gpt_order import GPTOrder, GPTRule, build_small_index, load_or_build_gpt_index
from binidx.order.source_order import SourceOrder

MADE_UP = ("sft_mock_dataset_config_json", "varlen_mock_dataset_config_json")


@dataclass(repr=False)
class GPTDatasetConfig(BlendedMegatronDatasetConfig, configs.GPTDatasetConfig):
    """binidx's config with Megatron's defaults: each sample has an attention mask unless the script disables it, and
    three flags must be given.

    Args:
        s3_cache_path, dynamic_context_parallel: names of `object_storage_cache_path` and `hybrid_context_parallel` in
            older and newer versions of Megatron.
    """

    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = True
    # Without words of `binidx.dataset.affects`: names of stored plans have these fields, and ranks compare them.
    s3_cache_path: str | None = None
    dynamic_context_parallel: bool = False

    def __post_init__(self) -> None:
        # Mock chats are Megatron's own classes, which read these fields.
        made_up = {name: getattr(self, name) for name in MADE_UP}
        vars(self).update(dict.fromkeys(MADE_UP))
        super().__post_init__()
        vars(self).update(made_up)
        self.hybrid_context_parallel = self.hybrid_context_parallel or self.dynamic_context_parallel
        # Without effect, but some users' datasets assert that it is given before they open an s3:// prefix.
        self.object_storage_cache_path = self.object_storage_cache_path or self.s3_cache_path or tempfile.gettempdir()


class GPTDataset(gpt.GPTDataset, MegatronDataset):
    """binidx's dataset with the methods that subclasses of Megatron's call or replace; a replaced method is used."""

    masks_and_position_ids_are_cached = False
    cached_attention_mask = cached_loss_mask = cached_position_ids = None

    def _open_order(self) -> SourceOrder:
        self.dataset = adapt(self.dataset)
        if not isinstance(self.source_request.rule, GPTRule):
            return super()._open_order()
        arrays = dict(zip(ARRAYS, self._build_document_sample_shuffle_indices(), strict=True))
        return GPTOrder(self._parameters, self._source, arrays, self._plan)

    @cached_property
    def masks_and_position_ids_are_cacheable(self) -> bool:
        """True if all samples have the same mask and positions."""
        config = self.config
        return not (config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: configs.GPTDatasetConfig) -> Any:
        """Open the `.bin`/`.idx` pair of a prefix as the stand-in `IndexedDataset`.

        Args:
            dataset_path: prefix, a path or any URI.
            config: options of the run.
        """
        return open_low_level_dataset(IndexedDataset, dataset_path, config)

    # Indices

    def _build_document_sample_shuffle_indices(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return document_index, sample_index and shuffle_index; they are cached only if the tokens are in a file."""
        where = self._parameters, self._source, self._plan
        arrays = load_or_build_gpt_index(*where, self._index_options) or build_small_index(*where)
        document_index, sample_index, shuffle_index = (arrays[name] for name in ARRAYS)
        return document_index, sample_index, shuffle_index

    def _get_num_tokens_per_epoch(self) -> int:
        return self.num_tokens // self._plan.num_epochs

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        return self._plan.num_epochs

    # Samples

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[Any, ...]:
        """Return the padded tokens of a sample and the numbers of their sequences; where 0.19 or later is installed
        also the lists of the lengths of their parts, without pads."""
        spans = self.spans(idx)
        length = self.config.sequence_length + self.config.add_extra_token_to_sequence
        [pieces] = read_spans([(self.dataset, np.array(spans, np.int64).reshape(-1, 3))])
        tokens = [np.empty(0, np.int64), *pieces]
        text = np.concatenate([*tokens, np.full(length, self._pad_token_id)], dtype=np.int64)[:length]
        numbers = np.array([sequence for sequence, _, _ in spans], np.int64)
        has_lengths = Rule.query_document_lengths in RELEASES[find_installed_release()]
        return (text, numbers, [count for _, _, count in spans]) if has_lengths else (text, numbers)

    @property
    def _is_queried(self) -> bool:
        return bool(own_methods(type(self), "_query_document_sample_shuffle_indices"))

    @property
    def reads_by_itself(self) -> bool:
        return self._is_queried or super().reads_by_itself

    def __getitem__(self, idx: Any) -> Any:
        if not self._is_queried or isinstance(idx, SEVERAL):
            return super().__getitem__(idx)
        text, _, *lengths = self._query_document_sample_shuffle_indices(idx or 0)
        ends = np.cumsum(lengths or [0])[:-1]
        return self.assemble(idx, np.split(np.asarray(text, np.int64), ends))

    def __getitems__(self, idxs: Sequence[int | None]) -> Sequence[Sample]:
        return [self[idx] for idx in idxs] if self._is_queried else super().__getitems__(idxs)


class MockGPTDataset(mock.MockGPTDataset, GPTDataset):
    """binidx's dataset under Megatron's name."""


def adapt(dataset: Any) -> Any:
    """Return a user's low-level dataset with binidx's interface; a binidx one, or another kind of object, as it is."""
    if not hasattr(dataset, "get") or not hasattr(dataset, "sequence_lengths"):
        return dataset
    ours = isinstance(dataset, StoredTokens | ComputedTokens) and not own_methods(type(dataset), "get")
    return dataset if ours else LowLevel(dataset)


class LowLevel(ComputedTokens):
    """User's low-level dataset with the interface of binidx's; all other attributes are those of the user's object.

    Args:
        own: the user's object, with `get(idx, offset, length)` and `sequence_lengths` (num_sequences,).
        lengths: the sequence lengths, if they are known.
    """

    def __init__(self, own: Any, lengths: NDArray[np.int32] | None = None) -> None:
        self.own = own
        if lengths is None:
            lengths = np.ascontiguousarray(own.sequence_lengths, np.int32)
        super().__init__(str(getattr(own, "path_prefix", type(own).__name__)), np.int64, lengths)

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # looked up while it is unpickled
            raise AttributeError(name)
        return getattr(self.own, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LowLevel, (self.own, self.sequence_lengths)  # unpickling must not open what the user's reads

    def __getitem__(self, idx: Any) -> Any:
        return self.own[idx]

    def get(self, idx: Any, offset: int = 0, length: int | None = None) -> Any:
        return self.own.get(idx, offset, length)

    def _compute(self, sequence: int, first: int, count: int) -> NDArray[Any]:
        return np.asarray(self.own.get(sequence, offset=first, length=count))
