"""Stand-in for `megatron.core.datasets.helpers`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.compat.megatron.helpers_cpp import build_blending_indices as build_blending_indices
from binidx.compat.megatron.helpers_cpp import build_blocks_mapping as build_blocks_mapping
from binidx.compat.megatron.helpers_cpp import build_exhaustive_blending_indices as build_exhaustive_blending_indices
from binidx.compat.megatron.helpers_cpp import build_mapping as build_mapping
from binidx.compat.megatron.helpers_cpp import build_sample_idx_int32 as build_sample_idx_int32
from binidx.compat.megatron.helpers_cpp import build_sample_idx_int64 as build_sample_idx_int64


def build_sample_idx(
    sizes: NDArray[np.int32],
    document_indices: NDArray[np.int32],
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> NDArray[Any]:
    """Adapt `build_sample_index`; int32 rows, or int64 if they need it."""
    return build_sample_idx_int32(
        sizes,
        document_indices,
        sequence_length,
        num_epochs,
        tokens_per_epoch,
        drop_last_partial_sequence,
        int(add_extra_token_to_sequence),
    )
