"""Stand-in for `megatron.core.datasets.helpers_cpp`: binidx's C core with Megatron's arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.index.blend import build_blend_index, build_exhaustive_blend_index
from binidx.index.document_sample import build_sample_index
from binidx.index.masked_samples import build_blocks_mapping as build_blocks_mapping
from binidx.index.masked_samples import build_mapping as build_mapping


def build_sample_idx_int32(
    sizes: NDArray[np.int32],
    document_idx: NDArray[np.int32],
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
) -> NDArray[np.int32]:
    """Return the sample index by `build_sample_index`, which takes the number of tokens in all epochs.

    Args:
        sizes: number of tokens of each sequence, shape (num_sequences,).
        document_idx: sequence numbers in reading order over all epochs, shape (E·D,).
        seq_length: tokens of a sample, S.
        num_epochs: E.
        tokens_per_epoch: number of tokens of one epoch.
        drop_last_partial_sequence: whether the tokens after the last full sample are dropped.
        add_extra_token_to_sequence: 1 if a sample includes the first token of the next one, else 0.
    """
    rows: NDArray[Any] = build_sample_index(
        sizes,
        np.ascontiguousarray(document_idx, np.int32),
        seq_length,
        num_epochs * int(tokens_per_epoch),
        add_extra_token=bool(add_extra_token_to_sequence),
        drop_last_partial=drop_last_partial_sequence,
    )
    return rows


def build_sample_idx_int64(*arguments: Any, **named: Any) -> NDArray[np.int64]:
    """Return the result of `build_sample_idx_int32` as int64."""
    return build_sample_idx_int32(*arguments, **named).astype(np.int64)


def build_blending_indices(
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    weights: Any,
    num_datasets: int,
    size: int,
    verbose: bool,
) -> None:
    """Fill the first two arrays by `build_blend_index`; `num_datasets` and `verbose` have no effect.

    Args:
        dataset_index: filled with the dataset of each sample, shape (size,).
        dataset_sample_index: filled with the number of each sample in its dataset, shape (size,).
        weights: share of each dataset, shape (num_datasets,), float64.
        num_datasets: number of datasets.
        size: number of samples.
        verbose: ignored.
    """
    build_blend_index(weights, size, out=(dataset_index, dataset_sample_index))


def build_exhaustive_blending_indices(
    dataset_index: NDArray[np.int16], dataset_sample_index: NDArray[np.int64], sizes: Any, num_datasets: int
) -> None:
    """Fill the first two arrays by `build_exhaustive_blend_index`; `num_datasets` has no effect.

    Args:
        dataset_index: filled with the dataset of each sample, shape (sum of `sizes`,).
        dataset_sample_index: filled with the number of each sample in its dataset, of that shape.
        sizes: number of samples of each dataset, shape (num_datasets,), int64.
        num_datasets: number of datasets.
    """
    build_exhaustive_blend_index(sizes, out=(dataset_index, dataset_sample_index))
