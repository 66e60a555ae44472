"""Megatron's constructor of T5 samples (`assemble.sentences`), and its attention masks for T5."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.random import RandomState

from binidx.dataset.assemble.sentences import T5_SPECIALS, T5Assemble, T5MaskedWordPieceDatasetConfig
from binidx.dataset.megatron.masked_sentences import MaskedWordPieceDataset
from binidx.dataset.token_dataset import Assemble
from binidx.dataset.torch_bridge import Tensor, as_tensor
from binidx.errors import ConfigError
from binidx.order.sequences import SentenceOrder


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
    engine = (*map(int, re.findall(r"\d+", test_te_version or read_engine_version())[:2]),)  # (1, 10) of "1.10.0+abc"
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

    def _open_order(self) -> SentenceOrder:
        return self._open_built_order(T5_SPECIALS, 1)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MaskedWordPieceDataset._key_config_attributes(), "sequence_length_decoder"]

    def _make_assemble(self) -> Assemble:
        return T5Assemble(self.config, self._pad_token_id, self._order, self._create_masked_lm_predictions)

    def _get_token_mask(self, numpy_random_state: RandomState) -> int | None:
        return int(self.config.tokenizer.mask)


Masks: TypeAlias = "tuple[Tensor, Tensor | None, Tensor | tuple[Tensor, Tensor]]"


def forbid_attention(queries: Tensor, keys: Tensor, *, future: bool = False) -> Tensor:
    """Return a mask (B, 1, query, key): True where query or key is no token or, with `future`, the key is later.

    Args:
        queries: tokens, shape (B, query); no token is one below 1.
        keys: tokens, shape (B, key).
        future: also forbid later keys.
    """
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
