"""GPT samples: tokens, labels, loss mask and positions of S tokens, as tensors; and with padded documents.

a GPT sample         A A A B B B B B C C
padded to 4          A A A p B B B B B p p p C C p p          2 tokens for each of 2 context parallel ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.token_dataset import SourceTokens, fill_from_tokens
from binidx.dataset.torch_bridge import Sample, Samples, Tensor, as_tensor
from binidx.errors import ConfigError
from binidx.forks import cached_property
from binidx.native.gpt_samples import GPTRows, Recipe, Starts


@dataclass(frozen=True)
class GPTAssemble:
    """Function that makes GPT samples; C fills their rows. Implements `RowAssemble`.

    Args:
        rules: arguments of `Recipe`, by name.
        has_mask: whether samples have an attention mask.
        resets_mask: whether attention stays within documents.
        resets_positions: whether positions restart after each EOD.
    """

    rules: Mapping[str, Any]
    has_mask: bool
    resets_mask: bool
    resets_positions: bool

    @classmethod
    def of(cls, config: GPTDatasetConfig, pad: int, *, masks_ends: bool = False) -> GPTAssemble:
        """Return the function for the options of a config.

        Args:
            config: options of the samples, and the tokenizer.
            pad: id that fills short samples; -1 if there is none.
            masks_ends: whether the last token of each piece has no loss, as its label is of another document.

        Raises:
            ConfigError: the tokenizer has no EOD, and an option of the config needs it.
        """
        resets_mask = bool(config.create_attention_mask and config.reset_attention_mask)
        starts = Starts.AFTER_EOD if config.restarts_after_eod else Starts.EACH_SAMPLE
        eod = config.tokenizer.eod if config.needs_eod else 0
        if eod is None:
            raise ConfigError(
                f"{type(config.tokenizer).__name__}: has no eod, which eod_mask_loss, reset_position_ids and "
                "reset_attention_mask need; describe_tokenizer takes it as eod="
            )
        rules = {
            "sequence_length": config.sequence_length,
            "pad": pad,
            "eod": eod,
            "mask_eod": bool(config.eod_mask_loss),
            "starts": Starts.EACH_PIECE if config.inter_document_masking else starts,
            "add_extra_token": config.add_extra_token_to_sequence,
            "mask_ends": masks_ends,
        }
        has_mask = config.create_attention_mask and not config.inter_document_masking
        return cls(rules, has_mask, resets_mask, bool(config.reset_position_ids))

    def __reduce__(self) -> tuple[Any, ...]:
        return GPTAssemble, (self.rules, self.has_mask, self.resets_mask, self.resets_positions)  # no struct of C

    @cached_property
    def recipe(self) -> Recipe:
        """Rules by which the C extension turns stored tokens into rows of a batch."""
        return Recipe(**self.rules)

    @cached_property
    def shared_mask(self) -> Tensor:
        """Causal mask, shape (1, S, S), shared by all samples as in Megatron: it is too large to write anew."""
        return as_tensor(build_attention_mask(np.arange(self.recipe.sequence_length)))

    def __call__(self, tokens: SourceTokens) -> Sequence[Sample]:
        numbers = tokens.of.numbers
        # One sample is written without a batch axis: taking it out of a batch of one costs a quarter more.
        rows = GPTRows(self.recipe, None if len(numbers) == 1 else len(numbers))
        fill_from_tokens(rows, tokens, range(len(numbers)))
        if None in numbers:
            padding = [row for row, number in enumerate(numbers) if number is None]
            rows.loss_mask.reshape(len(numbers), -1)[padding] = 0.0
        return [self.finish_one(rows)] if len(numbers) == 1 else self.finish(rows)

    def finish(self, rows: GPTRows) -> Sequence[Sample]:
        columns: Any = self.finish_one(rows)
        return Samples(rows.num_rows, columns, () if self.resets_mask else ("attention_mask",))

    def finish_one(self, rows: GPTRows) -> Sample:
        """Return the tensors of filled rows by name, in Megatron's order."""
        columns: Sample = {"tokens": as_tensor(rows.tokens), "labels": as_tensor(rows.labels)}
        if self.has_mask:
            columns["attention_mask"] = (
                as_tensor(build_attention_mask(rows.positions)) if self.resets_mask else self.shared_mask
            )
            if self.resets_mask and not self.resets_positions:
                rows.positions[:] = np.arange(self.recipe.sequence_length)
        columns["loss_mask"], columns["position_ids"] = as_tensor(rows.loss_mask), as_tensor(rows.positions)
        if self.recipe.starts is Starts.EACH_PIECE:
            columns["cu_seqlens"], columns["max_seqlen"] = as_tensor(rows.cu_seqlens), as_tensor(rows.max_seqlen)
        return columns


def build_attention_mask(positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return masks of shape (..., 1, S, S), True where attention is *forbidden*: the future and other documents.

    Args:
        positions: position of each token in its document, shape (..., S): 0, 1, 2, …, from 0 again after each EOD.

    Source: Megatron Core, `_get_ltor_masks_and_position_ids`.
    """
    document = np.cumsum(positions == 0, axis=-1)[..., None, :]
    future = ~np.tri(positions.shape[-1], dtype=np.bool_)
    elsewhere: NDArray[np.bool_] = document[..., :, None] != document[..., None, :]
    return np.asarray(future | elsewhere)


TOKEN_KEYS = ("tokens", "labels", "loss_mask")


@dataclass(frozen=True)
class PaddedAssemble:
    """Function that makes GPT samples and pads their documents. Implements `RowAssemble`.

    Args:
        rows: makes the GPT samples.
        multiple: number of tokens of which each padded length is a multiple.
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
    """Return a GPT sample with each of its documents padded to a multiple of tokens, and the documents' lengths.

    Args:
        sample: with `cu_seqlens`, the bounds of its documents.
        multiple: number of tokens of which each padded length is a multiple.
    """
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
    return padded_sample | {name: as_tensor(counts.astype(np.int32)) for name, counts in lengths.items()}
