"""Samples of sentences with some of their tokens masked.

BERT    two runs of sentences; masked tokens are replaced, and are the labels
T5      n-grams are replaced by sentinels, and are the targets, each after its sentinel
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.dataset.affects import affects
from binidx.dataset.assemble.masking import MaskedAssemble, MaskedSpan, MaskedWordPieceDatasetConfig, concatenate_tokens
from binidx.dataset.config import check_given
from binidx.errors import ConfigError
from binidx.order.order_protocols import Numbers

BERT_SPECIALS = 3
"""Number of special tokens in a sample, `[cls] A [sep] B [sep]`."""


@dataclass(repr=False)
class BERTMaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Config of BERT samples: `MaskedWordPieceDatasetConfig` and one more option.

    Args:
        classification_head: True swaps the two runs of sentences in half of the samples, for a model to predict; each
            sample then has at least two sentences. Required.

    The other arguments are those of `MaskedWordPieceDatasetConfig`; `sequence_length` is at least 5 tokens.

    Raises:
        ConfigError: `classification_head` is missing, or `sequence_length` is too small.

    Source: Megatron Core, `BERTMaskedWordPieceDatasetConfig`. Difference: errors instead of assertions.
    """

    classification_head: bool | None = field(default=None, metadata=affects("order", "samples"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_given(self, "BERT", "classification_head")
        if self.sequence_length < BERT_SPECIALS + 2:
            raise ConfigError(
                f"sequence_length: found {self.sequence_length}, needs {BERT_SPECIALS + 2} or more for BERT"
            )


class BERTAssemble(MaskedAssemble):
    """Function that makes BERT samples, as `BERTMaskedWordPieceDataset` describes them."""

    def make(self, number: int | None, spans: Numbers, pieces: Sequence[NDArray[Any]]) -> dict[str, Any]:
        target, rng = self.begin(number)
        pivot, swapped = self._pivot(len(pieces), rng)
        runs = [concatenate_tokens(pieces[:pivot]), concatenate_tokens(pieces[pivot:])]
        if swapped:
            runs.reverse()
        bounds = trim(len(runs[0]), len(runs[1]), target, rng)
        first, second = (run[start:stop] for run, (start, stop) in zip(runs, bounds, strict=True))
        tokens = self._merge(first, second)
        text, positions, labels, _, _ = self.predict(tokens, target, rng)
        sample = self._make_rows(text, len(first) + 2, positions, labels)
        if number is None:
            sample["loss_mask"][:] = 0
        return {**sample, "is_random": int(swapped), "truncated": int(sum(map(len, runs)) > target)}

    def _merge(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
        cls, sep = np.array([[self.config.tokenizer.cls], [self.config.tokenizer.sep]], np.int64)
        return np.concatenate([cls, first, sep, *([second, sep] if len(second) else [])])

    def _pivot(self, num_sentences: int, rng: RandomState) -> tuple[int, bool]:
        """Return the number of the first sentence of run B, and whether runs A and B are swapped."""
        if not self.config.classification_head:
            return num_sentences, False
        pivot = int(rng.randint(low=1, high=num_sentences)) if num_sentences >= 3 else 1
        return pivot, bool(rng.random_sample() < 0.5)

    def _make_rows(
        self, text: list[int], num_first: int, positions: list[int], labels: list[int]
    ) -> dict[str, NDArray[Any]]:
        pad, length = self.pad, self.config.sequence_length
        rows = {name: np.full(length, fill, np.int64) for name, fill in
                (("text", pad), ("types", pad), ("labels", -1), ("padding_mask", 1), ("loss_mask", 0))}  # fmt: skip
        rows["text"][: len(text)] = text
        rows["types"][: len(text)] = 1
        rows["types"][:num_first] = 0
        rows["labels"][positions] = labels
        rows["loss_mask"][positions] = 1
        pads = rows["text"] == pad
        rows["padding_mask"][pads] = pad
        rows["text"][pads] = 0
        rows["labels"][rows["labels"] == pad] = 0
        return rows


def trim(num_first: int, num_second: int, target: int, rng: RandomState) -> list[tuple[int, int]]:
    """Return (start, stop) in each of two runs of tokens, trimmed to `target` tokens in all.

    Until they fit, the longer run loses a token at a random end.

    Args:
        num_first, num_second: numbers of tokens of the two runs.
        target: most tokens of both together.
        rng: a draw below 0.5 removes the first token of a run, another the last.
    """
    bounds = [[0, num_first], [0, num_second]]
    excess = num_first + num_second - target
    for draw in rng.random_sample(max(0, excess)).tolist():
        longer = bounds[0] if bounds[0][1] - bounds[0][0] > bounds[1][1] - bounds[1][0] else bounds[1]
        if draw < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return [(start, stop) for start, stop in bounds]


T5_SPECIALS = 2
"""Number of tokens that Megatron Core reserves for a bos and an eos."""


@dataclass(repr=False)
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """Config of T5 samples: `MaskedWordPieceDatasetConfig` and one more option.

    Args:
        sequence_length_decoder: number of tokens of the decoder's text. Required.

    The other arguments are those of `MaskedWordPieceDatasetConfig`; `sequence_length` is at least 4 tokens. The
    tokenizer also has `bos`, `eos`, and `additional_special_tokens_ids`: sentinels, as many as a sample has n-grams.

    Attributes:
        sequence_length_encoder: `sequence_length`.

    Raises:
        ConfigError: `sequence_length_decoder` or sentinels are missing, or `sequence_length` is too small.

    Source: Megatron Core, `T5MaskedWordPieceDatasetConfig`. Difference: errors instead of assertions.
    """

    sequence_length_encoder: int | None = field(init=False, default=None, metadata=affects("order", "samples"))
    sequence_length_decoder: int | None = field(default=None, metadata=affects("samples"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sequence_length_encoder = self.sequence_length
        check_given(self, "T5", "sequence_length_decoder")
        if self.sequence_length < T5_SPECIALS + 2:
            raise ConfigError(f"sequence_length: found {self.sequence_length}, needs {T5_SPECIALS + 2} or more for T5")
        if not len(self.tokenizer.additional_special_tokens_ids):
            raise ConfigError("tokenizer: found no additional_special_tokens_ids, T5 needs them as sentinels")


class T5Assemble(MaskedAssemble):
    """Function that makes T5 samples, as `T5MaskedWordPieceDataset` describes them."""

    def make(self, number: int | None, spans: Numbers, pieces: Sequence[NDArray[Any]]) -> dict[str, Any]:
        tokens = concatenate_tokens(pieces)
        target, rng = self.begin(number)
        text, _, _, _, ngrams = self.predict(tokens[:target], target, rng)
        encoder, decoder = self._divide(text, ngrams)
        sample = self._make_rows(encoder, decoder)
        if number is None:
            sample["loss_mask"][:] = 0
        return {**sample, "truncated": int(len(tokens) > target)}

    def _divide(self, text: list[int], ngrams: Sequence[MaskedSpan]) -> tuple[list[int], list[int]]:
        """Return the text with sentinels instead of n-grams, and the n-grams, each after its sentinel."""
        sentinels = self.config.tokenizer.additional_special_tokens_ids
        if len(ngrams) > len(sentinels):
            raise ConfigError(
                f"tokenizer: {len(sentinels)} additional_special_tokens_ids, a sample has {len(ngrams)} n-grams; add "
                "some, lower masking_probability, or allow longer n-grams"
            )
        encoder, decoder, start = [], [], 0
        for sentinel, (positions, tokens) in zip(sentinels, ngrams, strict=False):
            encoder += [*text[start : positions[0]], sentinel]
            decoder += [sentinel, *tokens]
            start = positions[-1] + 1
        return encoder + text[start:], decoder

    def _make_rows(self, encoder: list[int], decoder: list[int]) -> dict[str, NDArray[Any]]:
        pad, length, tokenizer = self.pad, self.config.sequence_length_decoder or 0, self.config.tokenizer
        if len(decoder) + 1 > length:
            raise ConfigError(
                f"sequence_length_decoder: found {length}, a sample needs {len(decoder) + 1}; "
                "or lower masking_probability"
            )
        text_enc, enc_mask = pad_tokens(encoder, self.config.sequence_length, pad)
        text_dec, dec_mask = pad_tokens([tokenizer.bos, *decoder], length, pad)
        labels = np.full(length, -1, np.int64)
        labels[: len(decoder) + 1] = [*decoder, tokenizer.eos]
        labels[labels == pad] = 0
        loss_mask = (np.arange(length) <= len(decoder)).astype(np.int64)
        sample = {"text_enc": text_enc, "text_dec": text_dec, "labels": labels, "loss_mask": loss_mask}
        return {**sample, "enc_mask": enc_mask, "dec_mask": dec_mask}


def pad_tokens(tokens: Sequence[int], length: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens, filled up to `length`, and their mask: both 0 in the filling and where a token is `pad`.

    Args:
        tokens: at most `length` of them.
        length: number of tokens of the result.
        pad: id of pads.
    """
    row = np.full(length, pad, np.int64)
    row[: len(tokens)] = tokens
    mask = (row != pad).astype(np.int64)
    return row * mask, mask
