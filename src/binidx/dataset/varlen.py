"""Samples as long as their conversation, for packing across ranks (THD attention) instead of within rows of S tokens.

    tokens      C C C C C C E p p        shape (padded_seq_len,): a multiple of what context parallel ranks share
                |-- original --|

Source: Megatron-LM, `VarlenDataset`, whose packing scheduler takes these samples; `collate` makes one row of a batch.
Differences: any URI, and rows of several schemas in one file; a conversation that an EOD makes one
token too long is cut off, where Megatron's sample is longer than S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.chat import with_system
from binidx.dataset.packing import ended, round_up
from binidx.dataset.sft import SFTDataset
from binidx.dataset.torch_bridge import Sample, as_tensor


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
