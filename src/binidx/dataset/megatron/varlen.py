"""Samples of their own length, padded to a multiple of tokens, for packing across ranks (THD attention).

    VarlenDataset, a conversation    C C C C C C E p p          shape (padded_seq_len,)
                                     |-- original --|

    VarlenGPTDataset                 A A A p B B B B B p p p C C p p      documents, each padded to a multiple of 4:
    its GPT sample                   A A A B B B B B C C                  2 tokens for each of 2 context parallel ranks

`collate` of the loader makes one row of a batch, with `cu_seqlens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.chat import IGNORE, add_system_message
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.megatron.sft import SFTDataset, append_eod, round_up
from binidx.dataset.token_dataset import SourceTokens
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.errors import ConfigError
from binidx.index.cache.index_files import Arrays
from binidx.native.gpt_samples import GPTRows, Recipe


class VarlenDataset(SFTDataset):
    """Chat samples of their own length: each is one row of the file, tokenized whole.

    A sample is a dict of tensors: `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape
    (padded_seq_len,), at most `sequence_length` and its padding; `original_seq_len` and `padded_seq_len` int32, each of
    shape (1,). With `varlen_sbhd_validation` the first four have shape (S,), and there are no lengths; `padding_mask`,
    bool (S,), is True at pads. Pads are recognised by position alone: the pad id in a conversation is trained on. With
    `megatron_samples="0.16.1"` it is not, unless it is another special token, too, and there is no `padding_mask`.

    Args:
        dataset: the chat file.
        dataset_path: its URI; part of the identity.
        indices: rows of the split, shape (num_in_split,) int32.
        num_samples: number of samples; None is one epoch.
        index_split: the split.
        config: `GPTDatasetConfig` or `SFTDatasetConfig`.

    Raises:
        ConfigError: masks or resets of positions are requested, which these samples do not have.
        IndexBuildError: samples are requested of a split without rows.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(binidx.VarlenDataset, [1000, 0, 0], lambda: True, config)
        >>> train, _, _ = builder.build()

    Source: Megatron-LM's branch dev, `VarlenDataset`; main and 0.16.1 have none. Differences: any URI, and rows of
    several schemas in one file; a conversation that its EOD makes one token too long is truncated, where Megatron-LM's
    sample is longer than S; a text of one EOD becomes an EOD that predicts another, where Megatron-LM's is empty.
    """

    RECORDED_NAME: ClassVar[str] = "VarlenDataset"

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """Return the sample made of a row.

        Args:
            idx: number of the sample; None is sample 0 without loss.
            sequences: the bytes of its row.

        Returns:
            The dict described at the class.

        Raises:
            FormatError: the row is not a JSON object of a known schema.
        """
        conversation = self.dataset.parse(self.find_row(idx), sequences[0])
        length, eod = self.config.sequence_length, self.config.tokenizer.eod
        both = np.stack(append_eod(*self._tokenize(add_system_message(conversation)), eod))
        if both.shape[1] == 1:
            both = np.full((2, 2), eod)  # an empty text becomes an EOD that predicts another
        elif both.shape[1] > length + 1:
            both = both[:, : length + 1]
            both[:, -1] = np.where(both[0, -1] == eod, both[:, -1], eod)
        original = both.shape[1] - 1
        has_lengths = not self.config.varlen_sbhd_validation
        padded = round_up(original, self.config.padding_multiple) if has_lengths else length
        tokens, targets = np.pad(both, ((0, 0), (0, padded - original)), constant_values=self.pad)
        sample: Sample = {
            "tokens": as_tensor(tokens[:-1]),
            "labels": as_tensor(targets[1:]),
            "loss_mask": as_tensor(self._loss_mask(idx, targets[1:], np.arange(padded) < original)),
            "position_ids": as_tensor(np.arange(padded)),
        }
        if not has_lengths and self.config.megatron_samples == "main":
            sample["padding_mask"] = as_tensor(np.arange(padded) >= original)
        if has_lengths:
            sample["original_seq_len"] = as_tensor(np.array([original], np.int32))
            sample["padded_seq_len"] = as_tensor(np.array([padded], np.int32))
        return sample

    @property
    def _masked_id(self) -> int:
        return IGNORE if self.config.megatron_samples == "main" else super()._masked_id


TOKEN_KEYS = ("tokens", "labels", "loss_mask")


class VarlenGPTDataset(GPTDataset):
    """GPT samples as padded documents and their lengths; the tokens and their order are those of `GPTDataset`.

    A sample is a dict of tensors: `tokens`, `labels`, `position_ids` int64 and `loss_mask` float32, each of shape (T,),
    where T is the sum of `padded_seq_len`; `original_seq_len` and `padded_seq_len` int32, each of shape (n,) for the n
    documents of the sample. Pads are token 0 without loss; positions continue through the pads of a document.

    The constructor has the arguments of `GPTDataset`. `padding_multiple` of the config is the multiple of tokens.

    Raises:
        ConfigError: the config has no `inter_document_masking`, without which samples have no documents.

    Example:
        >>> builder = binidx.BlendedMegatronDatasetBuilder(
        ...     binidx.VarlenGPTDataset, [1000, 0, 0], lambda: True, config  # inter_document_masking=True
        ... )
        >>> train, _, _ = builder.build()

    Source: ours. Megatron-LM's `inter_document_masking` does not pad documents, so the ranks of a context parallel
    group cannot share them; its `VarlenDataset` of chats pads in this way and has these keys.
    """

    RECORDED_NAME: ClassVar[str] = "VarlenGPTDataset"

    def _load_or_build(self) -> Arrays:
        if not self.config.inter_document_masking:
            raise ConfigError("inter_document_masking: found False, samples of documents need True")
        return super()._load_or_build()

    @property
    def assemble_function(self) -> Any:
        return VarlenAssemble(GPTAssemble.of(self.config, self._pad_token_id), self.config.padding_multiple)


@dataclass(frozen=True)
class VarlenAssemble:
    """Function that makes GPT samples and pads their documents. Implements `RowAssemble`.

    Args:
        rows: makes the GPT samples.
        multiple: multiple of tokens.
    """

    rows: GPTAssemble
    multiple: int

    @property
    def recipe(self) -> Recipe:
        return self.rows.recipe

    def __call__(self, tokens: SourceTokens) -> Sequence[Sample]:
        return [pad_documents(sample, self.multiple) for sample in self.rows(tokens)]

    def finish(self, rows: GPTRows) -> Sequence[Sample]:
        return [pad_documents(sample, self.multiple) for sample in self.rows.finish(rows)]

    def finish_one(self, rows: GPTRows) -> Sample:
        return pad_documents(self.rows.finish_one(rows), self.multiple)


def pad_documents(sample: Mapping[str, Any], multiple: int) -> Sample:
    """Return a GPT sample with each of its documents padded to a multiple of tokens, and the documents' lengths."""
    bounds = np.unique(np.asarray(sample["cu_seqlens"]))
    original = np.diff(bounds)
    padded = -(-original // multiple) * multiple
    starts = np.cumsum(padded) - padded
    positions = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], original)
    padded_sample: Sample = {}
    for name in TOKEN_KEYS:
        values = np.asarray(sample[name])
        spread = np.zeros(padded.sum(), values.dtype)
        spread[positions] = values
        padded_sample[name] = as_tensor(spread)
    padded_sample["position_ids"] = as_tensor(np.arange(padded.sum()) - np.repeat(starts, padded))
    lengths = {"original_seq_len": original, "padded_seq_len": padded}
    return padded_sample | {name: as_tensor(each.astype(np.int32)) for name, each in lengths.items()}
