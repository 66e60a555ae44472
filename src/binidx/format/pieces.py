"""Spans of many datasets as pieces of memory for C: a mapped `.bin` as it lies, others read at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from binidx import native
from binidx.format.indexed_dataset import IndexedDataset
from binidx.native.gather import Pieces, scattered_pieces
from binidx.storage.local_file import LocalFile
from binidx.storage.vectored import read_many


def read_pieces(requests: Sequence[tuple[IndexedDataset, NDArray[np.int64]]]) -> list[Pieces]:
    """The tokens of each dataset's spans, shape (n, 3), where they are in memory.

    Raises:
        ValueError: a span leaves its sequence.
    """
    located = [(dataset.bin_reader, locate(dataset, spans)) for dataset, spans in requests]
    remote = [
        (reader, list(map(tuple, found.tolist()))) for reader, found in located if not isinstance(reader, LocalFile)
    ]
    views = iter(read_many(remote) if remote else [])
    return [
        reader.pieces(ranges) if isinstance(reader, LocalFile) else scattered_pieces(next(views))
        for reader, ranges in located
    ]


def locate(dataset: IndexedDataset, spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ranges in bytes, shape (n, 2): `dataset.locate` for arrays."""
    index = dataset.index
    ranges, right = native.locate_spans(index.sequence_lengths, index.sequence_pointers, spans, index.dtype_size)
    if right < len(spans):
        sequence, first, count = spans[right].tolist()
        raise ValueError(f"{dataset.path_prefix}: {count} tokens from {first} of sequence {sequence}, which has fewer")
    return ranges
