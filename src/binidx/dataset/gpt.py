"""GPT samples: S + 1 tokens cut from the shuffled, concatenated sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.masks import build_attention_mask, build_loss_mask, build_position_ids
from binidx.dataset.megatron_dataset import MegatronDataset
from binidx.dataset.split import Split
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import IndexBuildError
from binidx.format.indexed_dataset import IndexedDataset, Span
from binidx.index.cache import IndexCache
from binidx.index.document import build_document_index
from binidx.index.epochs import EpochPlan, plan_epochs
from binidx.index.sample import build_sample_index
from binidx.index.shuffle import build_shuffle_index
from binidx.native import RandomState
from binidx.storage.publish import join_uri

ARRAYS = ("document_index", "sample_index", "shuffle_index")


class GPTDataset(MegatronDataset):
    """Samples of `sequence_length` tokens and their labels, in Megatron Core's order.

        sample i  ─ shuffle_index ─►  rows j and j+1 of sample_index: where it starts and ends in document_index
                  ─ document_index ─►  spans of sequences  ─ .bin ─►  tokens

    A sample is a dict of tensors, each of shape (S,): `tokens`, `labels`, `position_ids` int64, `loss_mask` float32,
    and `attention_mask` bool (1, S, S) on request, True where attention is forbidden.

    Raises:
        IndexBuildError: the split has no tokens, and samples were asked of it (Megatron loops for ever).

    Source: Megatron Core, `GPTDataset`. Differences: counts stay integers (its count of a partial last sample goes
    through float32), a stale index cache is rebuilt instead of served, and the loss mask of a padded sample stays its
    own (when Megatron serves a padded sample first, it keeps that mask for all others).
    """

    config: GPTDatasetConfig
    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        arrays = self._cache().load_or_build(self.unique_description, self._fingerprint(), ARRAYS, self._build)
        self.document_index, self.sample_index, self.shuffle_index = (arrays[name] for name in ARRAYS)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Sequences: GPT divides by sequence, not by document."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        """Open the `.bin`/`.idx` pair under a prefix, at any URI."""
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files, storage_options=config.storage_options)

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    # Indices

    def _drop_last_partial(self) -> bool:
        return self.index_split is not Split.valid or self.config.drop_last_partial_validation_sequence

    def _cache(self) -> IndexCache:
        directory = self.config.path_to_cache or join_uri(
            self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices"
        )
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        return IndexCache(directory, name, self.config.storage_options)

    def _fingerprint(self) -> dict[str, Any]:
        """What the arrays depend on and Megatron's hash forgets."""
        return {
            **self.dataset.identity,
            "indices_digest": hashlib.blake2b(self.indices.tobytes(), digest_size=16).hexdigest(),
            "add_extra_token_to_sequence": self.config.add_extra_token_to_sequence,
            "drop_last_partial_sequence": self._drop_last_partial(),
        }

    def _build(self) -> dict[str, NDArray[Any]]:
        plan = self._plan()
        rng = RandomState(self.config.random_seed)
        documents = build_document_index(self.indices, plan.num_epochs, rng, plan.separate_final_epoch)
        samples = build_sample_index(
            self.dataset.sequence_lengths,
            documents,
            self.config.sequence_length,
            plan.num_tokens,
            add_extra_token=self.config.add_extra_token_to_sequence,
            drop_last_partial=self._drop_last_partial(),
        )
        shuffled = build_shuffle_index(plan.num_samples_shuffled_first, plan.num_samples, rng)
        return dict(zip(ARRAYS, (documents, samples, shuffled), strict=True))

    def _plan(self) -> EpochPlan:
        tokens_per_epoch = int(np.sum(self.dataset.sequence_lengths[self.indices], dtype=np.int64))
        try:
            return plan_epochs(
                tokens_per_epoch,
                self.config.sequence_length,
                self.num_samples,
                add_extra_token=self.config.add_extra_token_to_sequence,
                drop_last_partial=self._drop_last_partial(),
            )
        except IndexBuildError as error:
            raise IndexBuildError(
                f"{self.dataset_path}, {self.index_split.name} split of {len(self.indices)} sequences: {error}"
            ) from None

    # Samples

    def spans(self, idx: int | None) -> list[Span]:
        """(sequence, first token, tokens) of each piece; `idx` counts in shuffled order, None is sample 0."""
        row = int(self.shuffle_index[0 if idx is None else idx])
        (first, first_token), (last, last_token) = self.sample_index[row : row + 2].tolist()
        sequences = self.document_index[first : last + 1]
        counts = self.dataset.sequence_lengths[sequences].tolist()
        starts = [first_token] + [0] * (last - first)
        counts[0] -= first_token
        counts[-1] = last_token + self.config.add_extra_token_to_sequence - starts[-1]
        return list(zip(sequences.tolist(), starts, counts, strict=True))

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """Tokens and labels, padded to S, with masks and positions."""
        tokens, labels = self._tokens_and_labels(self._text(sequences))
        masks = self._masks_and_positions(tokens)
        self._hide_pads(tokens, labels, masks["loss_mask"])
        if idx is None:
            masks["loss_mask"][:] = 0.0
        return {name: as_tensor(array) for name, array in {"tokens": tokens, "labels": labels, **masks}.items()}

    def _text(self, sequences: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
        text = np.empty(self.config.sequence_length + self.config.add_extra_token_to_sequence, dtype=np.int64)
        filled = sum(map(len, sequences))
        np.concatenate(sequences, out=text[:filled], casting="unsafe")
        text[filled:] = self._pad_token_id
        return text

    def _hide_pads(self, tokens: NDArray[np.int64], labels: NDArray[np.int64], loss_mask: NDArray[np.float32]) -> None:
        # An embedding has no row -1, so pads are read as token 0, and their loss is masked. Samples without a pad are
        # nearly all: looking first costs a tenth of writing through masks that are all False.
        for ids in (labels, tokens):
            pads = ids == self._pad_token_id
            if np.count_nonzero(pads):
                ids[pads] = 0
                if ids is labels:
                    loss_mask[pads] = 0.0

    def _tokens_and_labels(self, text: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self.config.add_extra_token_to_sequence:
            return text[:-1].copy(), text[1:].copy()
        return text, np.append(text[1:], self._pad_token_id)

    def _masks_and_positions(self, tokens: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        config = self.config
        eod = config.tokenizer.eod if config.eod_mask_loss or config.reset_position_ids else None
        masks: dict[str, NDArray[Any]] = {}
        if config.create_attention_mask:
            masks["attention_mask"] = self._attention_mask(tokens)
        masks["loss_mask"] = build_loss_mask(tokens, eod if config.eod_mask_loss else None)
        masks["position_ids"] = build_position_ids(tokens, eod) if config.reset_position_ids else self._positions
        return masks

    def _attention_mask(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        if self.config.reset_attention_mask:
            return build_attention_mask(tokens, self.config.tokenizer.eod)
        return self._causal_mask

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        return build_position_ids(np.zeros(self.config.sequence_length, dtype=np.int64), None)

    @cached_property
    def _causal_mask(self) -> NDArray[np.bool_]:
        # One for all samples, as the positions above and as in Megatron: S x S bytes are too many to make each time.
        return build_attention_mask(np.zeros(self.config.sequence_length, dtype=np.int64), None)
