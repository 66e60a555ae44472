"""The attention masks that T5 takes, by what computes the attention."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias

import numpy as np

from binidx.dataset.torch_bridge import Tensor, as_tensor
from binidx.errors import ConfigError

Masks: TypeAlias = "tuple[Tensor, Tensor | None, Tensor | tuple[Tensor, Tensor]]"


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
