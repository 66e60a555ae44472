"""The reading order of documents over all epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.native import RandomState


def build_document_index(
    documents: NDArray[np.int32], num_epochs: int, rng: RandomState, separate_final_epoch: bool
) -> NDArray[np.int32]:
    """`documents` once an epoch, all epochs shuffled together; a separate final one is shuffled for itself, behind.

    Args:
        documents: numbers of the exposed sequences, shape (num_documents,); any integers that int32 holds.
        num_epochs: at least 1.
        rng: draws one shuffle, or two when the final epoch is separate and not the only one.
        separate_final_epoch: keep the last epoch behind the others.

    Returns:
        Shape (num_epochs * num_documents,): sequence numbers. Nothing larger is made on the way.

    Raises:
        IndexBuildError: num_epochs is below 1, or a document number is negative or beyond int32.

    Source: Megatron Core, _build_document_index.
    """
    if num_epochs < 1:
        raise IndexBuildError(f"document index: {num_epochs} epochs, needs at least 1")
    index = np.empty((num_epochs, len(documents)), np.int32)
    index[:] = _as_int32(documents)
    shuffled_together = num_epochs - 1 if separate_final_epoch and num_epochs > 1 else num_epochs
    for epochs in (index[:shuffled_together], index[shuffled_together:]):
        rng.shuffle(epochs.reshape(-1))  # a view: both are whole rows
    return index.reshape(-1)


def _as_int32(documents: NDArray[Any]) -> NDArray[np.int32]:
    """The same numbers as int32, if they are sequence numbers that it holds."""
    if documents.ndim != 1 or documents.dtype.kind not in "iu":
        raise IndexBuildError(f"documents: {documents.ndim}-D {documents.dtype}, needs 1-D integers")
    low, high = (int(documents.min()), int(documents.max())) if len(documents) else (0, 0)
    if low < 0 or high > np.iinfo(np.int32).max:
        raise IndexBuildError(f"documents: numbers from {low} to {high}, needs 0 to {np.iinfo(np.int32).max}")
    return documents.astype(np.int32, copy=False)
