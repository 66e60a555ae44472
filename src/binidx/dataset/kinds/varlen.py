"""Samples as long as their conversation, for packing across ranks (THD attention) instead of within rows of S tokens.

    tokens      C C C C C C E p p        shape (padded_seq_len,): a multiple of what context parallel ranks share
                |-- original --|

Source: Megatron-LM, `VarlenDataset`, whose packing scheduler takes these samples; `collate` makes one row of a batch.
Differences: any URI, and rows of several schemas in one file; a conversation that an EOD makes one
token too long is cut off, where Megatron's sample is longer than S.

GPT samples whose documents each fill a multiple of tokens, for THD attention under context parallelism.

    GPT sample     A A A B B B B B C C      S tokens in `GPTDataset`'s order
    here           A A A p B B B B B p p p C C p p      each to a multiple of 4: 2 for each of 2 ranks

Source: ours. Megatron-LM's `inter_document_masking` leaves documents as long as they are, which the ranks of a context
parallel group cannot share; its samples of chats, `VarlenDataset`, are padded so, and have these keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.kinds.chat import with_system
from binidx.dataset.kinds.sft import SFTDataset, ended, round_up
from binidx.dataset.megatron_dataset import Request
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import ConfigError
from binidx.format.indexed_dataset import IndexedDataset


class VarlenDataset(SFTDataset):
    """Chat samples, each one row of the file, tokenized whole.

    `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape (padded_seq_len,), at most
    `sequence_length` and its padding; `original_seq_len`, `padded_seq_len` int32, each of shape (1,). With
    `varlen_sbhd_validation` the four are of shape (S,), and the lengths are left out.
    """

    RECORDED_NAME: ClassVar[str] = "VarlenDataset"

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        found = self.dataset.conversation(self.row_of(idx), sequences[0])
        length, eod = self.config.sequence_length, self.config.tokenizer.eod
        both = np.stack(ended(*self.tokenized(found if isinstance(found, str) else with_system(found)), eod))
        if both.shape[1] == 1:
            both = np.full((2, 2), eod)  # of an empty text: one EOD that follows another
        elif both.shape[1] > length + 1:
            both = both[:, : length + 1]
            both[:, -1] = np.where(both[0, -1] == eod, both[:, -1], eod)
        original = both.shape[1] - 1
        rows = self.config.varlen_sbhd_validation
        padded = length if rows else round_up(original, self.config.padding_multiple)
        tokens, targets = np.pad(both, ((0, 0), (0, padded - original)), constant_values=self.pad)
        sample: Sample = {
            "tokens": as_tensor(tokens[:-1]),
            "labels": as_tensor(targets[1:]),
            "loss_mask": as_tensor(self.loss_mask(idx, targets[1:], np.arange(padded) < original)),
            "position_ids": as_tensor(np.arange(padded)),
        }
        if not rows:
            sample["original_seq_len"] = as_tensor(np.array([original], np.int32))
            sample["padded_seq_len"] = as_tensor(np.array([padded], np.int32))
        return sample


IN_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")


class VarlenGPTDataset(GPTDataset):
    """Samples as documents and their lengths; which tokens a sample has, and their order, is `GPTDataset`'s.

    `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape (T,), where T is the sum of
    `padded_seq_len`; `original_seq_len` and `padded_seq_len` int32, each of shape (n,) for the n documents in the
    sample. Pads are token 0 without loss, and count on in their document's positions. `collate` makes one row of a
    batch, with `cu_seqlens`.

    Raises:
        ConfigError: the config has no `inter_document_masking`, so documents would not be told apart.
    """

    RECORDED_NAME: ClassVar[str] = "VarlenGPTDataset"

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        if not config.inter_document_masking:
            raise ConfigError("inter_document_masking: found False, samples of documents need True")
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    def read_sample(self, idx: int | None) -> Sample:
        return apart(super().read_sample(idx), self.config.padding_multiple)

    @classmethod
    def read_batch(cls, requests: Sequence[Request], num_rows: int) -> Sequence[Sample]:
        multiples = [0] * num_rows
        for dataset, _, rows in requests:
            for row in rows:
                multiples[row] = dataset.config.padding_multiple
        return [*map(apart, super().read_batch(requests, num_rows), multiples)]


def apart(sample: Mapping[str, Any], multiple: int) -> Sample:
    """A sample with bounds of documents as one with documents padded, and their lengths."""
    bounds = np.unique(np.asarray(sample["cu_seqlens"]))
    original = np.diff(bounds)
    padded = -(-original // multiple) * multiple
    starts = np.cumsum(padded) - padded
    places = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], original)
    found: Sample = {}
    for name in IN_TOKENS:
        values = np.asarray(sample[name])
        spread = np.zeros(padded.sum(), values.dtype)
        spread[places] = values
        found[name] = as_tensor(spread)
    found["position_ids"] = as_tensor(np.arange(padded.sum()) - np.repeat(starts, padded))
    lengths = {"original_seq_len": original, "padded_seq_len": padded}
    return found | {name: as_tensor(each.astype(np.int32)) for name, each in lengths.items()}
