"""Masks and positions of one sample, from its tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def build_loss_mask(tokens: NDArray[np.int64], eod: int | None) -> NDArray[np.float32]:
    """1.0 where a loss counts, shape (S,): everywhere, or everywhere but on `eod` when one is given."""
    mask = np.ones(len(tokens), dtype=np.float32)
    if eod is not None:
        mask[tokens == eod] = 0.0
    return mask


def build_position_ids(tokens: NDArray[np.int64], eod: int | None) -> NDArray[np.int64]:
    """0, 1, 2, …, shape (S,); with an `eod`, starting again at 0 after each of it."""
    positions = np.arange(len(tokens), dtype=np.int64)
    if eod is None:
        return positions
    starts = np.zeros_like(positions)
    starts[1:] = np.where(tokens[:-1] == eod, positions[1:], 0)
    return np.asarray(positions - np.maximum.accumulate(starts))


def build_attention_mask(tokens: NDArray[np.int64], eod: int | None) -> NDArray[np.bool_]:
    """True where attention is *forbidden*, shape (1, S, S): the future and, with an `eod`, the documents before."""
    forbidden = ~np.tri(len(tokens), dtype=np.bool_)
    if eod is not None:
        document = np.zeros(len(tokens), dtype=np.int64)
        document[1:] = np.cumsum(tokens[:-1] == eod)
        forbidden |= document[:, None] != document[None, :]
    return forbidden[None]
