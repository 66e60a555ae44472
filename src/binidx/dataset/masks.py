"""Attention masks. (Loss masks and positions come with the tokens: `native/gather.c`.)"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def build_attention_mask(positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """True where attention is *forbidden*, shape (..., 1, S, S): the future, and all before the last position 0.

    Args:
        positions: of each token in its document, shape (..., S): 0, 1, 2, … or starting again after each EOD.

    Source: Megatron Core, `_get_ltor_masks_and_position_ids`.
    """
    document = np.cumsum(positions == 0, axis=-1)[..., None, :]
    forbidden = ~np.tri(positions.shape[-1], dtype=np.bool_)
    elsewhere: NDArray[np.bool_] = document[..., :, None] != document[..., None, :]
    return np.asarray(forbidden | elsewhere)
