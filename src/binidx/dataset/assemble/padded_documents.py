"""GPT samples whose documents are padded to a multiple of tokens, for context parallel ranks that share them.

a GPT sample         A A A B B B B B C C
padded to 4          A A A p B B B B B p p p C C p p          2 tokens for each of 2 ranks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.token_dataset import SourceTokens
from binidx.dataset.torch_bridge import Sample, as_tensor
from binidx.native.gpt_samples import GPTRows, Recipe

TOKEN_KEYS = ("tokens", "labels", "loss_mask")


@dataclass(frozen=True)
class PaddedAssemble:
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
