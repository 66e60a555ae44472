"""From sample numbers to the rows of a micro-batch, in C.

    sample numbers ─ GPTIndex ─► spans ─ Sequences ─► byte ranges of the `.bin`        `native/locate.c`
    tokens in memory ─ Rows ─► tokens, labels, loss mask, positions                  `native/gather.c`
    both in one call, where the `.bin` is mapped: `Rows.read`                        `native/read_samples.c`

A batch is one block of memory. In several parts it costs more than all other work: memory freed in parts goes back to
the system, and the next batch faults in every page again, 27 us a sample of 4,096 tokens where filling it takes 3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import borrow, check_token, items, pointer, runnable

NUMBERS, GATHER = ffi.typeof("int64_t[]"), ffi.typeof("binidx_gather *")
FLOATS, SHORT = ffi.typeof("float *"), ffi.typeof("int32_t *")
SHUFFLE_DTYPES = (np.dtype(np.uint32), np.dtype(np.int64))
SAMPLE_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
NOT_HERE = int(lib.BINIDX_NOT_HERE)
OUT_OF_BOUNDS = "out of bounds of sample_index, document_index or the sequences"
PROBLEMS = {
    lib.BINIDX_BAD_TOKENS: "a sample is longer than a row and its extra token",
    lib.BINIDX_BAD_LENGTH: "a piece is not whole tokens",
    lib.BINIDX_BAD_DOCUMENT: "bounds or rows lead outside",
}


class Sequences:
    """Lengths and byte positions of the sequences of a `.bin`.

    Args:
        lengths: tokens of each sequence, shape (num_sequences,), int32; may be unaligned.
        pointers: first byte of each sequence, shape (num_sequences,), int64; may be unaligned.
        dtype_code, item_bytes: dtype and size of a token, as in an `.idx`.
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
        """Return byte ranges (start, stop), shape (n, 2), and the number of the first span that exceeds its sequence.

        That number is n if no span does.

        Args:
            spans: (sequence, first token, tokens), shape (n, 3); sequence -1 is the last one.
        """
        ranges = np.empty((len(spans), 2), np.int64)
        where = items(spans, np.int64, 3)
        right = lib.binidx_locate_spans(self.bound, where, len(spans), items(ranges, np.int64, 2, write=True))
        return ranges, int(right)


class GPTIndex:
    """The three index arrays of a GPT dataset, which translate samples into spans of its sequences.

    Args:
        shuffle_index: rows of sample_index in serving order, shape (num_served,), uint32 or int64.
        sample_index: shape (num_samples + 1, 2), int32 or int64.
        document_index: shape (num_documents,), int32.
        sequences: the sequences that document_index refers to.
        add_extra_token: whether a sample includes the first token of the next one.
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
        if shuffle_index.dtype not in SHUFFLE_DTYPES or sample_index.dtype not in SAMPLE_DTYPES:
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
        """Return the spans of tokens of samples.

        Args:
            served: positions in serving order, shape (B,); -1 is the last sample.

        Returns:
            Spans (sequence, first token, tokens), shape (n, 3), and bounds, shape (B + 1,): sample b has the spans
            bounds[b] up to bounds[b + 1].

        Raises:
            IndexError: a position is out of range.
            IndexBuildError: the arrays contradict each other.
        """
        rows, bounds = self._counted(np.asarray(served, np.int64).reshape(-1))
        spans = np.empty((int(bounds[-1]), 3), np.int64)
        where = items(spans, np.int64, 3, write=True)
        if lib.binidx_sample_spans(self.bound, items(rows, np.int64), len(rows), where) < 0:
            raise IndexBuildError(f"rows {rows.tolist()}: {OUT_OF_BOUNDS}")
        return spans, bounds

    def ends(
        self, served: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return the sequences of samples without reading sequence lengths: 30 ns a sample.

        Args:
            served: positions in serving order, shape (B,); -1 is the last sample.

        Returns:
            Bounds of each sample's sequences, shape (B + 1,); the sequence numbers, shape (n,); for each sample the
            first token in its first sequence, and one past the last token in its last sequence, both (B,).

        Raises:
            IndexError: a position is out of range.
            IndexBuildError: the arrays contradict each other.
        """
        rows, bounds = self._counted(np.asarray(served, np.int64).reshape(-1))
        sequences, starts, stops = (np.empty(count, np.int32) for count in (int(bounds[-1]), len(rows), len(rows)))
        out = (items(array, np.int32, write=True) for array in (sequences, starts, stops))
        lib.binidx_sample_ends(self.bound, items(rows, np.int64), len(rows), items(bounds, np.int64), *out)
        return bounds, sequences, starts, stops

    def _counted(self, served: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row of each sample in sample_index, and the bounds of its spans."""
        count = len(served)
        rows, bounds = np.empty(count, np.int64), np.empty(count + 1, np.int64)
        served = np.ascontiguousarray(served)
        valid = lib.binidx_served_rows(self.bound, items(served, np.int64), count, items(rows, np.int64, write=True))
        if valid < count:
            raise IndexError(f"sample {served[valid]}: out of range (there are {self.bound.num_served})")
        where = items(bounds, np.int64, write=True)
        if lib.binidx_count_spans(self.bound, items(rows, np.int64), count, where) < 0:
            raise IndexBuildError(f"rows {rows.tolist()}: {OUT_OF_BOUNDS}")
        return rows, bounds


class Starts(IntEnum):
    """Rule by which the position ids of a sample restart from 0."""

    EACH_SAMPLE = lib.BINIDX_EACH_SAMPLE
    AFTER_EOD = lib.BINIDX_AFTER_EOD
    EACH_PIECE = lib.BINIDX_EACH_PIECE


class Recipe:
    """Rules by which stored tokens become a row of a batch.

    Args:
        sequence_length: S.
        pad: fills short samples; every pad has no loss and becomes token 0.
        eod: end-of-document token; without loss if `mask_eod`, and positions restart after it with `AFTER_EOD`.
        starts: where positions restart; with EACH_PIECE the rows also have the bounds of pieces.
        add_extra_token: whether a full sample has S + 1 tokens.
        mask_ends: whether the last token of each piece has no loss, as its label is of another document.
    """

    def __init__(
        self,
        sequence_length: int,
        *,
        pad: int,
        eod: int = 0,
        mask_eod: bool = False,
        starts: Starts = Starts.EACH_SAMPLE,
        add_extra_token: bool = True,
        mask_ends: bool = False,
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length: too small (found {sequence_length}, need at least 1)")
        self.sequence_length, self.starts = sequence_length, starts
        self.bound = g = ffi.new(GATHER)
        g.sequence_length, g.pad, g.eod, g.mask_eod = sequence_length, pad, eod, mask_eod
        g.starts, g.extra, g.mask_ends = starts, add_extra_token, mask_ends


class Rows:
    """The B rows of a micro-batch, filled dataset by dataset; a subclass allocates the output arrays.

    Args:
        recipe: rules of the rows.
        num_rows: B.
    """

    def __init__(self, recipe: Recipe, num_rows: int) -> None:
        self.recipe, self.num_rows = recipe, num_rows
        self.bound = ffi.new(GATHER, recipe.bound[0])
        self.bound.num_rows = num_rows

    def read(
        self, index: GPTIndex, about: Any, served: Sequence[int], rows: Sequence[int], level: int | None = None
    ) -> int:
        """Fill `rows` with samples of a mapped `.bin`, in one call of C.

        This takes 8 us a sample of a micro-batch; with spans, ranges and views in Python it would be 25.

        Args:
            about: C struct of the mapped `.bin`, which `MappedReader.read_into` passes to its callback.
            served: positions of the samples in serving order.
            rows: the row of each sample.

        Returns:
            The number of ranges read; NOT_HERE, with nothing written, if some bytes are not in memory.

        Raises:
            IndexBuildError: an index is out of bounds; `GPTIndex.spans` and `Sequences.locate` find which.
        """
        g, numbers, count = self._bind_rows(rows), ffi.new(NUMBERS, served), len(rows)
        pieces = capacity = index.pieces_per_sample * count
        while pieces >= capacity:
            capacity = pieces + 1
            scratch = ffi.new(NUMBERS, 2 * count + 1 + 5 * capacity)
            pieces = lib.binidx_read_samples(index.bound, numbers, about, g, scratch, capacity, runnable(level))
        index.pieces_per_sample = max(index.pieces_per_sample, -(-pieces // max(count, 1)))
        if pieces != NOT_HERE:
            self._check(pieces)
        return int(pieces)

    def read_spans(
        self, sequences: Sequences, about: Any, spans: NDArray[np.int64], bounds: NDArray[np.int64], rows: Sequence[int]
    ) -> int:
        """Fill `rows` with the spans of samples of a mapped `.bin`, in one call of C.

        Args:
            sequences: the sequences of the spans.
            about: as for `read`.
            spans: (sequence, first token, tokens), shape (n, 3).
            bounds: sample b has the spans bounds[b] up to bounds[b + 1], shape (B + 1,).
            rows: the row of each sample.

        Returns:
            As `read`.

        Raises:
            IndexBuildError: a span leaves its sequence, or a sample is longer than a row.
        """
        g, ranges = self._bind_rows(rows), ffi.new(NUMBERS, 2 * len(spans))
        g.bounds = own_bounds = items(bounds, np.int64)  # the struct only borrows them
        where = items(spans, np.int64, 3)
        code = lib.binidx_read_spans(sequences.bound, where, len(spans), about, g, ranges, runnable(None))
        del own_bounds
        if code != NOT_HERE:
            self._check(code)
        return int(code)

    def fill(
        self,
        pieces: Sequence[NDArray[Any] | memoryview],
        bounds: NDArray[np.int64],
        rows: Sequence[int],
        *,
        dtype_code: int,
        item_bytes: int,
        level: int | None = None,
    ) -> None:
        """Fill `rows` with samples whose tokens are in memory.

        Args:
            pieces: stored tokens, n contiguous buffers.
            bounds: sample b has the pieces bounds[b] up to bounds[b + 1], shape (B + 1,).
            rows: the row of each sample, B of them.
            dtype_code, item_bytes: dtype and size of a stored token, as in an `.idx`.

        Raises:
            IndexBuildError: a sample is longer than a row and its extra token; or impossible bounds, rows or pieces.
        """
        if len(bounds) != len(rows) + 1:
            raise ValueError(f"bounds: wrong number (found {len(bounds)}, need {len(rows) + 1} for {len(rows)} rows)")
        check_token(dtype_code, item_bytes)
        buffers = [borrow(piece) for piece in pieces]  # C borrows them
        starts = np.array([int(ffi.cast("intptr_t", buffer)) for buffer in buffers], np.int64)
        ranges = np.stack([starts, starts + np.array([piece.nbytes for piece in pieces], np.int64)], axis=1)
        g, keep = self._bind_rows(rows), (items(ranges, np.int64, 2), items(bounds, np.int64))
        g.base, (g.ranges, g.bounds), g.num_pieces = 0, keep, len(pieces)
        g.item_bytes, g.dtype = item_bytes, dtype_code
        self._check(lib.binidx_gather_samples(g, runnable(level)))

    def _bind_rows(self, rows: Sequence[int]) -> Any:
        self.places = ffi.new(NUMBERS, list(rows))
        self.bound.rows, self.bound.num_samples = self.places, len(rows)
        return self.bound

    def _check(self, code: int) -> None:
        if code < 0:
            raise IndexBuildError(f"samples of {self.recipe.sequence_length} tokens: {PROBLEMS[code]}")


class GPTRows(Rows):
    """Rows of GPT samples: tokens, labels and positions int64, loss mask float32, each of shape (B, S).

    With positions that restart at each piece, also int32: `cu_seqlens` (B, S + 1), the starts of pieces and then S, and
    `max_seqlen` (B,), tokens of the longest piece. All arrays are in one block of memory.

    Args:
        num_rows: B; None is one row whose arrays have no batch axis.
    """

    def __init__(self, recipe: Recipe, num_rows: int | None) -> None:
        super().__init__(recipe, 1 if num_rows is None else num_rows)
        rows, length, pieces = self.num_rows, recipe.sequence_length, recipe.starts is Starts.EACH_PIECE
        lead, cells = () if num_rows is None else (num_rows,), rows * length
        block = take_block(28 * cells + (4 * (cells + 2 * rows) if pieces else 0))
        self.tokens: NDArray[np.int64] = np.ndarray((*lead, length), np.int64, block)
        self.labels: NDArray[np.int64] = np.ndarray((*lead, length), np.int64, block, 8 * cells)
        self.positions: NDArray[np.int64] = np.ndarray((*lead, length), np.int64, block, 16 * cells)
        self.loss_mask: NDArray[np.float32] = np.ndarray((*lead, length), np.float32, block, 24 * cells)
        g = self.bound
        words = g.tokens = borrow(block, NUMBERS)
        g.labels, g.positions, g.loss_mask = words + cells, words + 2 * cells, ffi.cast(FLOATS, words + 3 * cells)
        self.block = words
        if pieces:
            self.cu_seqlens: NDArray[np.int32] = np.ndarray((*lead, length + 1), np.int32, block, 28 * cells)
            self.max_seqlen: NDArray[np.int32] = np.ndarray(lead, np.int32, block, 32 * cells + 4 * rows)
            g.cu_seqlens = ffi.cast(SHORT, ffi.cast(FLOATS, words) + 7 * cells)
            g.max_seqlen = g.cu_seqlens + cells + rows


UNCLEARED = ffi.new_allocator(should_clear_after_alloc=False)
FREE_BYTES = 32 << 20
"""Bytes of freed blocks that a process keeps for the next batches."""

_free_blocks: dict[int, list[Any]] = defaultdict(list)
"""Bytes -> blocks of that size which no array uses any more, as cdata."""


def take_block(num_bytes: int) -> NDArray[np.uint8]:
    """Return a block of memory; when its last array is gone, it is kept for the next block of this size.

    glibc returns such blocks of threads to the system, and filling new pages costs twice as much as the rows: 8 us a
    sample of 4,096 tokens.
    """
    try:
        memory = _free_blocks[num_bytes].pop()
    except IndexError:  # another thread may have taken the last one
        memory = UNCLEARED("char[]", num_bytes)

    # At exit this runs when the names of the module are gone.
    def keep(memory: Any, blocks: dict[int, list[Any]] = _free_blocks, most: int = FREE_BYTES) -> None:
        if sum(size * len(free) for size, free in [*blocks.items()]) + num_bytes > most:
            blocks.clear()
        if num_bytes <= most:
            blocks[num_bytes].append(memory)

    return np.frombuffer(ffi.buffer(ffi.gc(memory, keep), num_bytes), np.uint8)


class TextRows(Rows):
    """Rows of tokens alone: `text`, int32, shape (B, S + 1); pads keep their id."""

    def __init__(self, recipe: Recipe, num_rows: int) -> None:
        super().__init__(recipe, num_rows)
        self.text: NDArray[np.int32] = np.empty((num_rows, recipe.sequence_length + 1), np.int32)
        self.bound.text = self.block = items(self.text, np.int32, recipe.sequence_length + 1, write=True)
