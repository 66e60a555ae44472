"""T5 samples: sentences with n-grams replaced by sentinels, and these n-grams as targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.affects import affects
from binidx.dataset.assemble.masking import MaskedAssemble, MaskedSpan, MaskedWordPieceDatasetConfig, concatenate_tokens
from binidx.dataset.config import check_given
from binidx.errors import ConfigError
from binidx.order.order_protocols import Numbers

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
