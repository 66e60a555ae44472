"""A micro-batch out of pieces of stored tokens: `native/gather.c`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import items
from binidx.native.cpu import runnable

ANYWHERE = (1 << 63) - 1

PROBLEMS = {
    lib.BINIDX_BAD_TOKENS: "one is longer, beyond its extra token",
    lib.BINIDX_BAD_LENGTH: "a piece is not whole tokens",
    lib.BINIDX_BAD_DOCUMENT: "bounds or rows lead outside",
}


@dataclass(frozen=True)
class Pieces:
    """Stored tokens in memory: piece i is the bytes `base + ranges[i]`, shape (n, 2); `owner` keeps them there."""

    owner: Any
    base: int
    ranges: NDArray[np.int64]


def mapped_pieces(view: memoryview, ranges: NDArray[np.int64], *, advise: bool) -> tuple[Pieces, int]:
    """Pieces of one mapping, and their bytes in all; the disk is asked for them at once: `native/read_ahead.c`.

    Args:
        view: the whole mapping.
        ranges: (first byte, end) of each piece, shape (n, 2).
        advise: false for memory that no disk stands behind.

    Raises:
        ValueError: a range leaves the mapping.
    """
    owner = ffi.from_buffer(view)
    base = _address(owner)
    count = lib.binidx_read_ahead(base, len(view), items(ranges, np.int64), len(ranges), PAGESIZE if advise else 0)
    if count < 0:
        raise ValueError(f"ranges {ranges.tolist()}: one leaves a mapping of {len(view)} bytes")
    return Pieces(owner, base, ranges), int(count)


def placed_pieces(owner: Any, places: NDArray[np.int64]) -> tuple[Pieces, int]:
    """Pieces at these addresses, shape (n, 2), in files that `owner` keeps mapped, read ahead as above; their bytes."""
    count = lib.binidx_read_ahead(0, ANYWHERE, items(places, np.int64), len(places), PAGESIZE)
    return Pieces(owner, 0, places), int(count)


def scattered_pieces(views: Sequence[memoryview]) -> Pieces:
    """Pieces that were read one by one."""
    owners = [ffi.from_buffer(view) for view in views]
    starts = np.array([_address(owner) for owner in owners], np.int64)
    lengths = np.array([len(view) for view in views], np.int64)
    return Pieces(owners, 0, np.stack([starts, starts + lengths], axis=1))


def _address(owner: Any) -> int:
    return int(ffi.cast("intptr_t", owner))


@dataclass
class GPTOutputs:
    """Where the rows of a micro-batch go, each (B, S); `positions` only where they start again after an EOD."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    positions: NDArray[np.int64] | None


def gather_samples(
    pieces: Pieces,
    bounds: NDArray[np.int64],
    rows: NDArray[np.int64],
    out: GPTOutputs,
    *,
    dtype_code: int,
    item_bytes: int,
    pad: int,
    eod: int,
    mask_eod: bool,
    level: int | None = None,
) -> None:
    """Fill `out[rows]` with tokens, labels, loss mask and positions.

    Args:
        pieces: stored tokens, n of them.
        bounds: sample b has pieces bounds[b] up to bounds[b + 1], shape (B + 1,).
        rows: row of the outputs for each sample, shape (B,).
        dtype_code, item_bytes: of the stored tokens, as in an `.idx`.
        pad: fills what a sample lacks; wherever it stands there is no loss, and token 0 in its place.
        eod: positions start again after it; no loss on it with `mask_eod`.

    Raises:
        IndexBuildError: a sample is longer than a row and its extra token, or bounds, rows or pieces are impossible.
    """
    _check(bounds, rows, out)
    g = ffi.new("binidx_gather *")  # borrows every pointer below, which live until the return
    keep = [items(array, np.int64) for array in (pieces.ranges, bounds, rows)]
    g.base, (g.ranges, g.bounds, g.rows) = pieces.base, keep
    g.num_samples, g.sequence_length, g.item_bytes = len(rows), out.tokens.shape[1], item_bytes
    g.pad, g.eod, g.dtype, g.mask_eod = pad, eod, dtype_code, mask_eod
    g.num_pieces, g.num_rows = len(pieces.ranges), len(out.tokens)
    tokens, labels = items(out.tokens, np.int64, write=True), items(out.labels, np.int64, write=True)
    loss_mask = items(out.loss_mask, np.float32, write=True)
    positions = ffi.NULL if out.positions is None else items(out.positions, np.int64, write=True)
    g.tokens, g.labels, g.loss_mask, g.positions = tokens, labels, loss_mask, positions
    code = lib.binidx_gather_samples(g, runnable(level))
    if code < 0:
        raise IndexBuildError(f"samples of {out.tokens.shape[1]} tokens: {PROBLEMS[code]}")


def _check(bounds: NDArray[np.int64], rows: NDArray[np.int64], out: GPTOutputs) -> None:
    """The arrays fit each other; what is in them C checks."""
    shape = out.tokens.shape
    others = [out.labels.shape, out.loss_mask.shape, *([] if out.positions is None else [out.positions.shape])]
    if len(shape) != 2 or shape[1] < 1 or any(other != shape for other in others):
        raise ValueError(f"outputs of shapes {[shape, *others]}, need one (B, S)")
    if len(bounds) != len(rows) + 1 or out.loss_mask.dtype != np.float32:
        raise ValueError(f"{len(rows)} rows with {len(bounds)} bounds, loss mask {out.loss_mask.dtype}")
