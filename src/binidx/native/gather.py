"""Rows of a micro-batch, filled by C: `native/gather.c` from pieces in memory, `native/read_samples.c` from a map.

A batch is one block of memory. In several parts it costs more than all the rest: what is freed in parts goes back to
the system, and the next batch faults in every page again, 27 us a sample of 4,096 tokens where filling it takes 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import check_token, items, runnable
from binidx.native.locate import NUMBERS, Orders
from binidx.native.pieces import Pieces

GATHER, FLOATS, SHORT = ffi.typeof("binidx_gather *"), ffi.typeof("float *"), ffi.typeof("int32_t *")


NOT_HERE = int(lib.BINIDX_NOT_HERE)


PROBLEMS = {
    lib.BINIDX_BAD_TOKENS: "one is longer, beyond its extra token",
    lib.BINIDX_BAD_LENGTH: "a piece is not whole tokens",
    lib.BINIDX_BAD_DOCUMENT: "bounds or rows lead outside",
}


class Starts(IntEnum):
    """Where the positions of a sample start again from 0."""

    EACH_SAMPLE = lib.BINIDX_EACH_SAMPLE
    AFTER_EOD = lib.BINIDX_AFTER_EOD
    EACH_PIECE = lib.BINIDX_EACH_PIECE


class Recipe:
    """What is made of stored tokens.

    Args:
        sequence_length: S.
        pad: fills what a sample lacks; wherever it stands there is no loss, and token 0 in its place.
        eod: no loss on it with `mask_eod`; positions start again after it with `AFTER_EOD`.
        starts: where positions start; with EACH_PIECE the bounds of pieces come too.
        add_extra_token: whether a whole sample has S + 1 tokens.
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
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length: {sequence_length}, needs at least 1")
        self.sequence_length, self.starts = sequence_length, starts
        self.bound = g = ffi.new(GATHER)
        g.sequence_length, g.pad, g.eod, g.mask_eod = sequence_length, pad, eod, mask_eod
        g.starts, g.extra = starts, add_extra_token


class Rows:
    """The outputs of a micro-batch, B rows, to be filled dataset by dataset; a subclass says which they are.

    Args:
        recipe: what the samples are made by.
        num_rows: B.
    """

    def __init__(self, recipe: Recipe, num_rows: int) -> None:
        self.recipe, self.num_rows = recipe, num_rows
        self.bound = ffi.new(GATHER, recipe.bound[0])
        self.bound.num_rows = num_rows

    def read(
        self, orders: Orders, about: Any, served: Sequence[int], rows: Sequence[int], level: int | None = None
    ) -> int:
        """Fill `rows` with samples of a map, `about` being its `taking`; returns the ranges they were read in.

        NOT_HERE, and nothing was filled, where some of the bytes are not in memory: `PlacedBlocks`.

        Raises:
            IndexBuildError: something is out of bounds; `Orders.spans` and `Sequences.locate` say what.
        """
        g, numbers, count = self._for(rows), ffi.new(NUMBERS, served), len(rows)
        pieces = room = orders.pieces_per_sample * count
        while pieces >= room:
            room = pieces + 1
            scratch = ffi.new(NUMBERS, 2 * count + 1 + 5 * room)
            pieces = lib.binidx_read_samples(orders.bound, numbers, about, g, scratch, room, runnable(level))
        orders.pieces_per_sample = max(orders.pieces_per_sample, -(-pieces // max(count, 1)))
        if pieces != NOT_HERE:
            self._check(pieces)
        return int(pieces)

    def fill(
        self,
        pieces: Pieces,
        bounds: NDArray[np.int64],
        rows: Sequence[int],
        *,
        dtype_code: int,
        item_bytes: int,
        level: int | None = None,
    ) -> None:
        """Fill `rows` with samples of pieces.

        Args:
            pieces: stored tokens, n of them.
            bounds: sample b has pieces bounds[b] up to bounds[b + 1], shape (B + 1,).
            rows: of the outputs, one for each sample, B of them.
            dtype_code, item_bytes: of the stored tokens, as in an `.idx`.

        Raises:
            IndexBuildError: a sample is longer than a row and its extra token; or impossible bounds, rows or pieces.
        """
        if len(bounds) != len(rows) + 1:
            raise ValueError(f"{len(rows)} rows with {len(bounds)} bounds")
        check_token(dtype_code, item_bytes)
        g, keep = self._for(rows), (items(pieces.ranges, np.int64, 2), items(bounds, np.int64))
        g.base, (g.ranges, g.bounds), g.num_pieces = 0, keep, len(pieces.ranges)
        g.item_bytes, g.dtype = item_bytes, dtype_code
        self._check(lib.binidx_gather_samples(g, runnable(level)))

    def _for(self, rows: Sequence[int]) -> Any:
        self.places = ffi.new(NUMBERS, list(rows))
        self.bound.rows, self.bound.num_samples = self.places, len(rows)
        return self.bound

    def _check(self, code: int) -> None:
        if code < 0:
            raise IndexBuildError(f"samples of {self.recipe.sequence_length} tokens: {PROBLEMS[code]}")


class GPTRows(Rows):
    """Tokens, labels and positions int64 and loss mask float32, each (B, S).

    With positions that start in each piece, also int32: `cu_seqlens` (B, S + 1), where they start and then S, and
    `max_seqlen` (B,), tokens of the longest. All in one block, by C's order of words from large to small.

    Args:
        num_rows: B; None is one row, and the arrays have no first axis.
    """

    def __init__(self, recipe: Recipe, num_rows: int | None) -> None:
        super().__init__(recipe, 1 if num_rows is None else num_rows)
        rows, length, pieces = self.num_rows, recipe.sequence_length, recipe.starts is Starts.EACH_PIECE
        lead, cells = () if num_rows is None else (num_rows,), rows * length
        block = np.empty(28 * cells + (4 * (cells + 2 * rows) if pieces else 0), np.uint8)
        self.tokens: NDArray[np.int64] = np.ndarray((*lead, length), np.int64, block)
        self.labels: NDArray[np.int64] = np.ndarray((*lead, length), np.int64, block, 8 * cells)
        self.positions: NDArray[np.int64] = np.ndarray((*lead, length), np.int64, block, 16 * cells)
        self.loss_mask: NDArray[np.float32] = np.ndarray((*lead, length), np.float32, block, 24 * cells)
        g = self.bound
        words = g.tokens = ffi.from_buffer(NUMBERS, block)
        g.labels, g.positions, g.loss_mask = words + cells, words + 2 * cells, ffi.cast(FLOATS, words + 3 * cells)
        self.block = words
        if pieces:
            self.cu_seqlens: NDArray[np.int32] = np.ndarray((*lead, length + 1), np.int32, block, 28 * cells)
            self.max_seqlen: NDArray[np.int32] = np.ndarray(lead, np.int32, block, 32 * cells + 4 * rows)
            g.cu_seqlens = ffi.cast(SHORT, ffi.cast(FLOATS, words) + 7 * cells)
            g.max_seqlen = g.cu_seqlens + cells + rows


class TextRows(Rows):
    """Tokens and the one after, int32, (B, S + 1); pads as they are."""

    def __init__(self, recipe: Recipe, num_rows: int) -> None:
        super().__init__(recipe, num_rows)
        self.text: NDArray[np.int32] = np.empty((num_rows, recipe.sequence_length + 1), np.int32)
        self.bound.text = self.block = items(self.text, np.int32, recipe.sequence_length + 1, write=True)
