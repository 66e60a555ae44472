"""Spans of many datasets as pieces of memory for C: what is mapped as it lies, the rest read at the same time.

A reader may offer `pieces(ranges)`: where ranges, shape (n, 2), are in memory already, or None where they are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from binidx.format.indexed_dataset import IndexedDataset
from binidx.native.pieces import Pieces, scattered_pieces
from binidx.storage.vectored import read_many


def read_pieces(requests: Sequence[tuple[IndexedDataset, NDArray[np.int64]]]) -> list[Pieces]:
    """The tokens of each dataset's spans, shape (n, 3), where they are in memory.

    Raises:
        ValueError: a span leaves its sequence.
    """
    located = [(dataset.bin_reader, dataset.locate_all(spans)) for dataset, spans in requests]
    mapped: list[Pieces | None] = [
        reader.pieces(ranges) if hasattr(reader, "pieces") else None for reader, ranges in located
    ]
    missing = [
        (reader, list(map(tuple, ranges.tolist())))
        for (reader, ranges), here in zip(located, mapped, strict=True)
        if here is None
    ]
    views = iter(read_many(missing) if missing else [])
    return [scattered_pieces(next(views)) if here is None else here for here in mapped]
