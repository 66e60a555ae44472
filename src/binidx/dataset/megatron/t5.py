"""T5 samples: sentences with n-grams replaced by sentinels, and these n-grams as targets; attention masks for T5."""

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

from binidx.dataset.assemble.masking import MaskedSpan, concatenate_tokens
from binidx.dataset.megatron.masked_sentences import MaskedWordPieceDataset, MaskedWordPieceDatasetConfig, check_given
from binidx.dataset.torch_bridge import Tensor, as_tensor
from binidx.errors import ConfigError

SPECIALS = 2
"""Number of tokens that Megatron Core reserves for a bos and an eos."""


@dataclass
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

    sequence_length_encoder: int | None = field(init=False, default=None)
    sequence_length_decoder: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sequence_length_encoder = self.sequence_length
        check_given(self, "sequence_length_decoder")
        if self.sequence_length < SPECIALS + 2:
            raise ConfigError(f"sequence_length: found {self.sequence_length}, needs {SPECIALS + 2} or more for T5")
        if not len(self.tokenizer.additional_special_tokens_ids):
            raise ConfigError("tokenizer: found no additional_special_tokens_ids, T5 needs them as sentinels")


def config_attention_mask(
    encoder_tokens: Tensor,
    decoder_tokens: Tensor,
    encoder_mask: Tensor,
    decoder_mask: Tensor,
    use_local: bool = False,
    test_te_version: str | None = None,
) -> Masks:
    """Return the attention masks of the encoder, of the decoder, and between them.

        Megatron Core's own layers             (B, 1, query, key) each; the decoder's also masks the future
        Transformer Engine before 1.10, with
        neither flash nor fused attention      (B, 1, query, key), None, (B, 1, query, key)
        Transformer Engine otherwise           (B, 1, 1, key), None, and such masks of decoder and encoder as a pair

    Args:
        encoder_tokens: shape (B, encoder length); tokens below 1 are masked.
        decoder_tokens: shape (B, decoder length); tokens below 1 are masked.
        encoder_mask: `enc_mask` of the samples, shape (B, encoder length).
        decoder_mask: `dec_mask` of the samples, shape (B, decoder length).
        use_local: for Megatron Core's own layers.
        test_te_version: version of Transformer Engine, by default the installed one.

    Returns:
        Three masks of the shapes above: bool, True where attention is forbidden; those of shape (B, 1, 1, key) are the
        given masks.

    Raises:
        ConfigError: flash or fused attention is on with a Transformer Engine before 1.7, or there is no Engine.

    Source: Megatron Core, `T5MaskedWordPieceDataset.config_attention_mask`.
    """
    full = forbid_attention(encoder_tokens, encoder_tokens), forbid_attention(decoder_tokens, encoder_tokens)
    if use_local:
        return full[0], forbid_attention(decoder_tokens, decoder_tokens, future=True), full[1]
    engine = parse_release(test_te_version or read_engine_version())
    fast = [name for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if os.environ.get(name) == "1"]
    if engine < (1, 7) and fast:
        raise ConfigError(f"{fast[0]}: found 1, Transformer Engine before 1.7 needs 0; or install a later one")
    if engine < (1, 10) and not fast:
        return full[0], None, full[1]
    keys = encoder_mask.unsqueeze(1).unsqueeze(1), decoder_mask.unsqueeze(1).unsqueeze(1)
    return keys[0], None, (keys[1], keys[0])


class T5MaskedWordPieceDataset(MaskedWordPieceDataset):
    """T5 samples: the encoder's text has sentinels instead of n-grams, the decoder's text is the n-grams after them.

    A sample is a dict of int64 arrays, padded with 0 (labels with -1), and an int; D is `sequence_length_decoder`:

        text_enc        (S,) tokens of the encoder
        text_dec        (D,) tokens of the decoder
        labels          (D,) the next tokens of the decoder
        loss_mask       (D,) 1 at labels
        enc_mask        (S,) 1 at tokens
        dec_mask        (D,) 1 at tokens
        truncated       1 if sentences were cut to fit

    Args:
        indexed_dataset: the `.bin`/`.idx` pair, a sequence per sentence.
        dataset_path: its prefix, as given by the user; part of the identity.
        indexed_indices: documents of the split, shape (num_in_split,) int32.
        num_samples: minimum number of samples; None is one epoch.
        index_split: the split.
        config: `T5MaskedWordPieceDatasetConfig`.

    Raises:
        IndexBuildError: samples are requested of a split that has none.
        ConfigError: raised by a sample with more n-grams than sentinels, or more tokens than the decoder has.

    Source: Megatron Core, `T5MaskedWordPieceDataset`; the differences are those of `MaskedWordPieceDataset`.
    """

    RECORDED_NAME: ClassVar[str] = "T5MaskedWordPieceDataset"

    config: T5MaskedWordPieceDatasetConfig
    config_class = T5MaskedWordPieceDatasetConfig
    config_attention_mask = staticmethod(config_attention_mask)

    def _load_index(self) -> None:
        self.sample_index = self._build_sample_index(self.config.sequence_length - SPECIALS, 1)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "sequence_length_decoder"]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> dict[str, Any]:
        """Return the sample made of the given sentences.

        Args:
            idx: number of the sample; None is sample 0 without loss.
            sequences: its sentences, each shape (num_tokens,).

        Returns:
            The dict described at the class.

        Raises:
            ConfigError: more n-grams than sentinels, or more tokens than the decoder has.
        """
        tokens = concatenate_tokens(sequences)
        target, rng = self._begin_sample(idx)
        text, _, _, _, spans = self._create_masked_lm_predictions(tokens[:target], target, rng)
        encoder, decoder = self._divide(text, spans)
        sample = self._pad(encoder, decoder)
        if idx is None:
            sample["loss_mask"][:] = 0
        return {**sample, "truncated": int(len(tokens) > target)}

    def _divide(self, text: list[int], spans: Sequence[MaskedSpan]) -> tuple[list[int], list[int]]:
        """Return the text with sentinels instead of n-grams, and the n-grams, each after its sentinel."""
        sentinels = self.config.tokenizer.additional_special_tokens_ids
        if len(spans) > len(sentinels):
            raise ConfigError(
                f"tokenizer: {len(sentinels)} additional_special_tokens_ids, a sample has {len(spans)} n-grams; add "
                "some, lower masking_probability, or allow longer n-grams"
            )
        encoder, decoder, start = [], [], 0
        for sentinel, (positions, tokens) in zip(sentinels, spans, strict=False):
            encoder += [*text[start : positions[0]], sentinel]
            decoder += [sentinel, *tokens]
            start = positions[-1] + 1
        return encoder + text[start:], decoder

    def _pad(self, encoder: list[int], decoder: list[int]) -> dict[str, NDArray[Any]]:
        pad, length, tokenizer = self._pad_token_id, self.config.sequence_length_decoder or 0, self.config.tokenizer
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

    def _get_token_mask(self, numpy_random_state: RandomState) -> int | None:
        mask: int = self.config.tokenizer.mask
        return mask


def pad_tokens(tokens: Sequence[int], length: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens, filled up to `length`, and their mask: both 0 in the filling and where a token is `pad`."""
    row = np.full(length, pad, np.int64)
    row[: len(tokens)] = tokens
    mask = (row != pad).astype(np.int64)
    return row * mask, mask


Masks: TypeAlias = "tuple[Tensor, Tensor | None, Tensor | tuple[Tensor, Tensor]]"


def forbid_attention(queries: Tensor, keys: Tensor, *, future: bool = False) -> Tensor:
    """Return a mask (B, 1, query, key): True where query or key is no token or, with `future`, the key is later."""
    seen = (queries >= 1).unsqueeze(2) & (keys >= 1).unsqueeze(1)
    if future:
        seen = seen & as_tensor(np.tri(queries.shape[1], keys.shape[1], dtype=np.bool_)).to(seen.device)
    return (~seen).unsqueeze(1)


def read_engine_version() -> str:
    """Return the version of the installed Transformer Engine; raise ConfigError if there is none."""
    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        raise ConfigError("attention mask: Transformer Engine is not installed; give use_local=True") from None


def parse_release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (1, 10) for "1.10.0+abc"."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
