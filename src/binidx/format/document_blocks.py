"""Neighbouring documents of an `.idx` that are read together, and items in batches of limited size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from binidx.storage.interfaces import Range


@dataclass(frozen=True, eq=False)
class DocumentBlock:
    """Neighbouring documents.

    Attributes:
        first: number of the first document.
        bounds: first sequence of each document, then the end, shape (num_documents + 1,).
        lengths: tokens of each sequence of these documents, shape (num_sequences,).
        modes: mode of each sequence of these documents; None in a dataset of text.
        start: number of tokens in the `.bin` before the first document.
    """

    first: int
    bounds: NDArray[np.int64]
    lengths: NDArray[np.int32]
    modes: NDArray[np.int8] | None
    start: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def token_bounds(self) -> NDArray[np.int64]:
        """Return the position in the `.bin`, in tokens, of each document, then the end, shape (num_documents + 1,)."""
        ends = np.cumsum(np.concatenate([[self.start], self.lengths]), dtype=np.int64)
        positions: NDArray[np.int64] = ends[self.bounds - self.bounds[0]]
        return positions


def batch_by_size(bounds: NDArray[np.int64], most: int) -> Iterator[Range]:
    """Yield runs (first, stop) of neighbouring items, each of at most `most` units in all, or of one larger item.

    Args:
        bounds: unit at which each item begins, then the end, shape (num_items + 1,).
    """
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = int(np.searchsorted(bounds, bounds[first] + most, "right")) - 1
        stop = max(first + 1, min(stop, last))
        yield first, stop
        first = stop
