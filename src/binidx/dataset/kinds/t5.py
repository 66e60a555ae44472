"""T5's samples: sentences with n-grams taken out, and these n-grams to say.

The attention masks that T5 takes, by what computes the attention.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.dataset.config import Split
from binidx.dataset.kinds.masked_sentences import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig, must_be_given
from binidx.dataset.kinds.masking import Span, join
from binidx.dataset.torch_bridge import Tensor, as_tensor
from binidx.errors import ConfigError
from binidx.format.indexed_dataset import IndexedDataset

SPECIALS = 2


"""Tokens that Megatron keeps free for a bos and an eos."""


@dataclass
class T5MaskedWordPieceDatasetConfig(MaskedWordPieceDatasetConfig):
    """What T5 samples need to know besides.

    Args:
        sequence_length_decoder: tokens of the decoder; must be given.

    The tokenizer also gives `bos`, `eos`, and `additional_special_tokens_ids`, as many as a sample has n-grams.

    Attributes:
        sequence_length_encoder: `sequence_length`.
    """

    sequence_length_encoder: int | None = field(init=False, default=None)
    sequence_length_decoder: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sequence_length_encoder = self.sequence_length
        must_be_given(self, "sequence_length_decoder")
        if self.sequence_length < SPECIALS + 2:
            raise ConfigError(f"sequence_length: found {self.sequence_length}, needs {SPECIALS + 2} or more for T5")
        if not len(self.tokenizer.additional_special_tokens_ids):
            raise ConfigError("tokenizer: found no additional_special_tokens_ids, T5 puts them in the place of n-grams")


def config_attention_mask(
    encoder_tokens: Tensor,
    decoder_tokens: Tensor,
    encoder_mask: Tensor,
    decoder_mask: Tensor,
    use_local: bool = False,
    test_te_version: str | None = None,
) -> Masks:
    """The masks of encoder, decoder and between them, True where attention is forbidden unless they are given ones.

        Megatron's own layers                        (B, 1, query, key) each, the decoder's also of the future
        Transformer Engine from 1.10 on              (B, 1, 1, key), None, and a pair of these
        from 1.7, neither flash nor fused; before    (B, 1, query, key), None, (B, 1, query, key)

    Args:
        encoder_tokens, decoder_tokens: shape (B, length); tokens of 1 and more are seen.
        encoder_mask, decoder_mask: of the samples, `enc_mask` and `dec_mask`.
        use_local: Megatron's own layers.
        test_te_version: by default the version that is installed.

    Raises:
        ConfigError: flash or fused attention is asked of a Transformer Engine before 1.7, or none is installed.

    Source: Megatron Core, `T5MaskedWordPieceDataset.config_attention_mask`.
    """
    full = forbidden(encoder_tokens, encoder_tokens), forbidden(decoder_tokens, encoder_tokens)
    if use_local:
        return full[0], forbidden(decoder_tokens, decoder_tokens, future=True), full[1]
    engine = release(test_te_version or installed())
    fast = [name for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if os.environ.get(name) == "1"]
    if engine < (1, 7) and fast:
        raise ConfigError(f"{fast[0]}: found 1, Transformer Engine before 1.7 needs 0; or install a later one")
    if engine < (1, 10) and not fast:
        return full[0], None, full[1]
    keys = encoder_mask.unsqueeze(1).unsqueeze(1), decoder_mask.unsqueeze(1).unsqueeze(1)
    return keys[0], None, (keys[1], keys[0])


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """Samples of T5: in each of the texts a sentinel stands where the other one has an n-gram.

    A sample is a dict of int64 arrays: `text_enc` and `enc_mask` of shape (S,), `text_dec`, `labels`, `loss_mask` and
    `dec_mask` of shape (sequence_length_decoder,), padded with 0 (labels with -1); the masks are 1 at tokens. And an
    int: `truncated`, whether sentences were cut to fit.

    Raises:
        ConfigError: of a sample: it has more n-grams than there are sentinels, or more tokens for the decoder than fit.

    Source: Megatron Core, `T5MaskedWordPieceDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "T5MaskedWordPieceDataset"

    config: T5MaskedWordPieceDatasetConfig
    config_class = T5MaskedWordPieceDatasetConfig
    config_attention_mask = staticmethod(config_attention_mask)

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: T5MaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self.sample_index = self._build_sample_index(config.sequence_length - SPECIALS, 1)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "sequence_length_decoder"]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> dict[str, Any]:
        """The sample of these sentences."""
        tokens = join(sequences)
        with self.draws(idx) as (target, rng):
            text, _, _, _, spans = self._create_masked_lm_predictions(tokens[:target], target, rng)
        encoder, decoder = self._divide(text, spans)
        sample = self._pad(encoder, decoder)
        if idx is None:
            sample["loss_mask"][:] = 0
        return {**sample, "truncated": int(len(tokens) > target)}

    def _divide(self, text: list[int], spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """The text without its n-grams, and the n-grams; sentinels tell where one is."""
        sentinels = self.config.tokenizer.additional_special_tokens_ids
        if len(spans) > len(sentinels):
            raise ConfigError(
                f"tokenizer: {len(sentinels)} additional_special_tokens_ids, a sample has {len(spans)} n-grams; needs "
                "more of them, a lower masking_probability, or longer n-grams"
            )
        encoder, decoder, place = [], [], 0
        for sentinel, (positions, tokens) in zip(sentinels, spans, strict=False):
            encoder += [*text[place : positions[0]], sentinel]
            decoder += [sentinel, *tokens]
            place = positions[-1] + 1
        return encoder + text[place:], decoder

    def _pad(self, encoder: list[int], decoder: list[int]) -> dict[str, NDArray[Any]]:
        pad, length, tokenizer = self._pad_token_id, self.config.sequence_length_decoder or 0, self.config.tokenizer
        if len(decoder) + 1 > length:
            raise ConfigError(
                f"sequence_length_decoder: found {length}, a sample needs {len(decoder) + 1}; "
                "or lower the masking_probability"
            )
        text_enc, enc_mask = padded(encoder, self.config.sequence_length, pad)
        text_dec, dec_mask = padded([tokenizer.bos, *decoder], length, pad)
        labels = np.full(length, -1, np.int64)
        labels[: len(decoder) + 1] = [*decoder, tokenizer.eos]
        labels[labels == pad] = 0
        loss_mask = np.zeros(length, np.int64)
        loss_mask[: len(decoder) + 1] = 1
        return {
            "text_enc": text_enc,
            "text_dec": text_dec,
            "labels": labels,
            "loss_mask": loss_mask,
            "enc_mask": enc_mask,
            "dec_mask": dec_mask,
        }

    def _get_token_mask(self, numpy_random_state: RandomState) -> int | None:
        mask: int = self.config.tokenizer.mask
        return mask


def padded(tokens: Sequence[int], length: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens and zeros behind them, and a mask, 1 where a token is that is not the pad."""
    row = np.full(length, pad, np.int64)
    row[: len(tokens)] = tokens
    mask = (row != pad).astype(np.int64)
    return row * mask, mask


Masks: TypeAlias = "tuple[Tensor, Tensor | None, Tensor | tuple[Tensor, Tensor]]"


def forbidden(queries: Tensor, keys: Tensor, *, future: bool = False) -> Tensor:
    """True where one of the two is no token, or the key comes later; shape (B, 1, query, key)."""
    seen = (queries >= 1).unsqueeze(2) & (keys >= 1).unsqueeze(1)
    if future:
        seen = seen & as_tensor(np.tri(queries.shape[1], keys.shape[1], dtype=np.bool_)).to(seen.device)
    return (~seen).unsqueeze(1)


def installed() -> str:
    """The version of Transformer Engine."""
    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        raise ConfigError(
            "attention mask: no Transformer Engine is installed; give use_local=True without one"
        ) from None


def release(text: str) -> tuple[int, ...]:
    """(1, 10) of "1.10.0+abc"."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
