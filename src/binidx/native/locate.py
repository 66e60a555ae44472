"""From samples to spans, and from spans to bytes: `native/locate.c`. What C reads is bound once, and asked often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import check_token, items, pointer

NUMBERS = ffi.typeof("int64_t[]")


ASTRAY = "lead outside sample_index, document_index or the sequences"


SHUFFLED = (np.dtype(np.uint32), np.dtype(np.int64))


ROWS = (np.dtype(np.int32), np.dtype(np.int64))


class Sequences:
    """Where the sequences of a `.bin` lie.

    Args:
        lengths: tokens of each, shape (num_sequences,) int32; may be unaligned.
        pointers: first byte of each, int64; may be unaligned.
        dtype_code, item_bytes: of the tokens, as in an `.idx`.
    """

    def __init__(
        self, lengths: NDArray[np.int32], pointers: NDArray[np.int64], *, dtype_code: int, item_bytes: int
    ) -> None:
        if len(lengths) != len(pointers):
            raise ValueError(f"{len(lengths)} lengths of sequences with {len(pointers)} pointers")
        check_token(dtype_code, item_bytes)
        self.dtype_code, self.item_bytes = dtype_code, item_bytes
        self.bound = ffi.new("binidx_sequences *")
        self.keep = pointer(lengths, np.int32), pointer(pointers, np.int64)  # the struct only borrows them
        self.bound.lengths, self.bound.pointers = self.keep
        self.bound.num_sequences, self.bound.item_bytes, self.bound.dtype = len(lengths), item_bytes, dtype_code

    def locate(self, spans: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Ranges (start, stop) in bytes, shape (n, 2), and the first span that leaves its sequence, or n.

        Args:
            spans: (sequence, first token, tokens), shape (n, 3); sequence -1 is the last one.
        """
        ranges = np.empty((len(spans), 2), np.int64)
        where = items(spans, np.int64, 3)
        right = lib.binidx_locate_spans(self.bound, where, len(spans), items(ranges, np.int64, 2, write=True))
        return ranges, int(right)


class Orders:
    """The orders of a GPT dataset over its sequences.

    Args:
        shuffle_index: rows of sample_index in the order they are served, shape (num_served,), uint32 or int64.
        sample_index: shape (num_samples + 1, 2), int32 or int64.
        document_index: shape (num_documents,).
        sequences: that document_index names.
        add_extra_token: whether a sample holds the first token of the next one.
    """

    def __init__(
        self,
        shuffle_index: NDArray[Any],
        sample_index: NDArray[Any],
        document_index: NDArray[np.int32],
        sequences: Sequences,
        *,
        add_extra_token: bool,
    ) -> None:
        if shuffle_index.dtype not in SHUFFLED or sample_index.dtype not in ROWS:
            found = f"shuffle_index of {shuffle_index.dtype}, sample_index of {sample_index.dtype}"
            raise TypeError(f"{found}; needs uint32 or int64, and int32 or int64")
        self.arrays = shuffle_index, sample_index, document_index
        self.sequences, self.add_extra_token = sequences, add_extra_token
        self.pieces_per_sample = 16
        self.bound = bound = ffi.new("binidx_orders *")
        served = items(shuffle_index, shuffle_index.dtype)
        self.keep = served, items(sample_index, sample_index.dtype, 2), items(document_index, np.int32)
        bound.shuffle_index, bound.sample_index, bound.document_index = self.keep
        bound.num_served, bound.num_documents = len(shuffle_index), len(document_index)
        bound.num_samples = max(len(sample_index) - 1, 0)
        bound.wide_shuffle, bound.wide_rows = shuffle_index.itemsize == 8, sample_index.itemsize == 8
        bound.extra, bound.sequences = add_extra_token, sequences.bound[0]

    def spans(self, served: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The spans of tokens that samples are made of.

        Args:
            served: samples in the order they are served, B of them; -1 is the last one.

        Returns:
            Spans (sequence, first token, tokens), shape (n, 3); bounds, shape (B + 1,), the first of each sample.

        Raises:
            IndexError: there is no such sample.
            IndexBuildError: the indices do not belong together.
        """
        rows, bounds = self._counted(np.asarray(served, np.int64).reshape(-1))
        spans = np.empty((int(bounds[-1]), 3), np.int64)
        where = items(spans, np.int64, 3, write=True)
        if lib.binidx_sample_spans(self.bound, items(rows, np.int64), len(rows), where) < 0:
            raise IndexBuildError(f"rows {rows.tolist()}: {ASTRAY}")
        return spans, bounds

    def ends(
        self, served: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """The sequences that samples are made of, without a look at their lengths: 30 ns a sample.

        Returns:
            bounds, shape (B + 1,), of each sample's sequences; their numbers, shape (n,); the first token of each
            sample in its first sequence, and one after its last token in its last, shape (B,).

        Raises:
            IndexError: there is no such sample.
            IndexBuildError: the indices do not belong together.
        """
        rows, bounds = self._counted(np.asarray(served, np.int64).reshape(-1))
        sequences, starts, stops = (np.empty(count, np.int32) for count in (int(bounds[-1]), len(rows), len(rows)))
        out = (items(each, np.int32, write=True) for each in (sequences, starts, stops))
        lib.binidx_sample_ends(self.bound, items(rows, np.int64), len(rows), items(bounds, np.int64), *out)
        return bounds, sequences, starts, stops

    def _counted(self, served: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row of each sample, and the bounds of its spans."""
        count = len(served)
        rows, bounds = np.empty(count, np.int64), np.empty(count + 1, np.int64)
        served = np.ascontiguousarray(served)
        known = lib.binidx_served_rows(self.bound, items(served, np.int64), count, items(rows, np.int64, write=True))
        if known < count:
            raise IndexError(f"sample {served[known]}, there are {self.bound.num_served}")
        where = items(bounds, np.int64, write=True)
        if lib.binidx_count_spans(self.bound, items(rows, np.int64), count, where) < 0:
            raise IndexBuildError(f"rows {rows.tolist()}: {ASTRAY}")
        return rows, bounds
