"""The reading order of documents over all epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.documents import Documents, check_documents, fill
from binidx.native import RandomState


def build_document_index(
    documents: Documents,
    num_epochs: int,
    rng: RandomState,
    separate_final_epoch: bool,
    *,
    out: NDArray[np.int32] | None = None,
    threads: int = 1,
) -> NDArray[np.int32]:
    """`documents` once an epoch, all epochs shuffled together; a separate final one is shuffled for itself, behind.

    Memory: the index, 4 * num_epochs * num_documents bytes, is written in its place and shuffled there; nothing else is
    made. NumPy asks for huge pages for a new one; where `out` lies in a mapped file it is page cache.

    Args:
        documents: numbers of the exposed sequences, shape (num_documents,); any integers that int32 holds, or a range.
        num_epochs: at least 1.
        rng: draws one shuffle, or two when the final epoch is separate and not the only one.
        separate_final_epoch: keep the last epoch behind the others.
        out: where the index goes, contiguous int32 of its shape; a new array by default.
        threads: so many put the numbers there; one shuffles them.

    Returns:
        Shape (num_epochs * num_documents,): sequence numbers.

    Raises:
        IndexBuildError: num_epochs is below 1, a document number is negative or beyond int32, or `out` does not fit.

    Source: Megatron Core, _build_document_index, which goes by 16 more bytes a document and epoch.
    """
    if num_epochs < 1:
        raise IndexBuildError(f"document index: {num_epochs} epochs, needs at least 1")
    check_documents(documents)
    index = out_or_empty(out, num_epochs * len(documents), np.int32)
    for epoch in index.reshape(num_epochs, -1):
        fill(epoch, documents, threads)
    last = len(documents) if separate_final_epoch and num_epochs > 1 else 0
    rng.shuffle(index[: len(index) - last])
    rng.shuffle(index[len(index) - last :])
    return index


def out_or_empty(out: NDArray[Any] | None, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """`out` if it is a contiguous array of that size and dtype, a new one for None."""
    if out is None:
        return np.empty(size, dtype)
    if out.shape != (size,) or out.dtype != dtype or not out.flags.c_contiguous:
        raise IndexBuildError(f"out: shape {out.shape} of {out.dtype}, needs contiguous ({size},) of {np.dtype(dtype)}")
    return out
