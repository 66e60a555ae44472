"""Samples of masked datasets (`native/masked_mapping.c`), and packings (`native/best_fit.c`, `native/first_fit.c`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import MAX_COUNT, count, items, pointer, runnable


class MaskedDocuments:
    """Documents of a masked dataset, and which of them have samples, for C.

    Args:
        documents: first sequence of each document, then the end, shape (num_documents + 1,); may be unaligned.
        sequence_lengths: tokens of each sequence, shape (num_sequences,); may be unaligned.
        sequence_length: target tokens of a sample, at least 2.
        least: minimum sequences of a sample, at least 1.
        short_ratio: one sample in so many has a smaller target; 0: none has.
        titles: tokens of each document's title, shape (num_documents,) or more; if given, the samples are Megatron's
            blocks (`build_blocks_mapping`), whose target is shorter by the title.

    Raises:
        IndexBuildError: the bounds of a document fall, or leave the sequences.
    """

    def __init__(
        self,
        documents: NDArray[np.int64],
        sequence_lengths: NDArray[np.int32],
        *,
        sequence_length: int,
        least: int,
        short_ratio: int = 0,
        titles: NDArray[np.int32] | None = None,
    ) -> None:
        num_documents = max(len(documents) - 1, 0)
        if titles is not None and len(titles) < num_documents:
            raise ValueError(f"titles: {len(titles)}, needs one for each of {num_documents} documents")
        if not 2 <= sequence_length < 2**31:
            raise ValueError(f"sequence_length: {sequence_length}, needs 2 to 2**31 - 1")
        of_titles = ffi.NULL if titles is None else items(titles, np.int32)
        self._borrowed = pointer(documents, np.int64), pointer(sequence_lengths, np.int32), of_titles
        self.c = masked = ffi.new("binidx_masked *")
        masked.documents, masked.sequence_lengths, masked.titles = self._borrowed
        masked.num_documents, masked.num_sequences = num_documents, len(sequence_lengths)
        masked.sequence_length, masked.least = sequence_length, count("least", least, 1)
        masked.short_ratio = 0 if titles is not None else count("short_ratio", short_ratio)
        self._usable = np.empty(num_documents, np.uint32)
        counts = ffi.new("int64_t[3]")
        code = lib.binidx_usable_documents(self.c, items(self._usable, np.uint32, write=True), counts)
        if code == lib.BINIDX_BAD_DOCUMENT:
            found = documents[counts[0] : counts[0] + 2].tolist()
            needed = f"needs bounds that rise within {self.c.num_sequences} sequences"
            raise IndexBuildError(f"document {counts[0]}: sequences {found[0]} to {found[1]}, {needed}")

    @property
    def columns(self) -> int:
        """Number of columns of a row: 4 with titles, else 3."""
        return 4 if self.c.titles else 3

    def count(self, seed: int, num_epochs: int, num_samples: int) -> tuple[int, int]:
        """Return (samples, epochs) of the fewest whole epochs with `num_samples` samples, at most of `num_epochs`.

        Args:
            seed: seed of the samples' target lengths.
            num_epochs: most epochs to go through.
            num_samples: number of samples after which to stop.

        Raises:
            IndexBuildError: 2^53 samples or more.
        """
        epochs = ffi.new("int64_t *")
        asked = count("num_epochs", num_epochs), count("num_samples", num_samples)
        made = lib.binidx_count_masked(self.c, items(self._usable, np.uint32), generator(seed), *asked, epochs)
        if made >= MAX_COUNT:
            raise IndexBuildError(f"{epochs[0]} epochs of samples, needs less than 2**53 samples; ask for fewer epochs")
        return _checked(made), epochs[0]

    def fill(self, rows: NDArray[Any], seed: int, num_epochs: int) -> None:
        """Fill rows, uint32 or uint64, shape (num_samples, columns), with the samples that `count` counted.

        Args:
            rows: array to fill.
            seed: seed of the samples' target lengths.
            num_epochs: number of epochs, as `count` returned it.
        """
        if rows.dtype not in (np.uint32, np.uint64):
            raise TypeError(f"rows: {rows.dtype}, needs uint32 or uint64")
        if rows.dtype == np.uint32 and self.c.num_sequences >= 2**32:
            raise TypeError(f"rows: uint32, needs uint64 for {self.c.num_sequences} sequences")
        fill = lib.binidx_masked_rows_4 if rows.itemsize == 4 else lib.binidx_masked_rows_8
        out = items(rows, rows.dtype, self.columns, write=True)
        usable = items(self._usable, np.uint32)
        _checked(fill(self.c, usable, generator(seed), count("num_epochs", num_epochs), len(rows), out))


def shuffle_mapping_rows(rows: NDArray[Any], seed: int) -> None:
    """Shuffle rows of 12, 16, 24 or 32 bytes in place: Fisher-Yates with C++'s `mt19937_64(seed)`.

    Args:
        rows: C-contiguous, shape (num_samples, columns).
        seed: its low 64 bits are used.
    """
    out = items(rows, rows.dtype, rows.shape[1] if rows.ndim == 2 else 0, write=True)
    row_bytes = rows.itemsize * rows.shape[1]
    if row_bytes not in (12, 16, 24, 32):
        raise TypeError(f"rows: {row_bytes} bytes each, needs 12, 16, 24 or 32")
    rng = ffi.new("binidx_mt19937_64 *")
    lib.binidx_mt19937_64_seed(rng, seed % 2**64)
    lib.binidx_shuffle_rows(rng, out, len(rows), row_bytes)


def generator(seed: int) -> Any:
    """Return the state of C++'s `mt19937(seed)`, which uses the low 32 bits of the seed."""
    rng = ffi.new("binidx_mt19937 *")
    lib.binidx_mt19937_seed(rng, seed % 2**32, runnable(None))
    return rng


def _checked(made: int) -> int:
    if made < 0:
        raise IndexBuildError("masked samples: the documents changed while they were read; start again")
    return made


def best_fit(lengths: NDArray[np.int32], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack pieces into bins by best fit, decreasing: bin b gets pieces[bounds[b] : bounds[b + 1]], longest first.

    Uses 40 bytes of memory a piece.

    Args:
        lengths: tokens of each piece, 1 to capacity, shape (n,).
        capacity: tokens of a bin.

    Returns:
        bounds, shape (num_bins + 1,), and pieces, shape (n,).

    Raises:
        IndexBuildError: a piece has no tokens, or more than the capacity.
    """
    heads, following = np.empty(count("capacity", capacity, 1) + 1, np.int64), np.empty(len(lengths), np.int64)
    return _pack(lib.binidx_best_fit, lengths, capacity, {
        "next": following, "heads": heads, "open": np.empty((capacity >> 6) + 1, np.uint64),
    })  # fmt: skip


def first_fit(lengths: NDArray[np.int32], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack pieces into bins by first fit: bin b gets pieces[bounds[b] : bounds[b + 1]], in their order.

    Uses 29 bytes of memory a piece. Arguments, result and errors are those of `best_fit`.
    """
    rooms = np.zeros(int(lib.binidx_first_fit_nodes(len(lengths))), np.int32)
    return _pack(lib.binidx_first_fit, lengths, count("capacity", capacity, 1), {"rooms": rooms})


def _pack(
    fit: Callable[[Any], int], lengths: NDArray[np.int32], capacity: int, scratch: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack pieces by the C function `fit`, which uses the `scratch` arrays; return bounds and pieces."""
    pieces, bin_of, bounds = (np.empty(len(lengths) + extra, np.int64) for extra in (0, 0, 1))
    packing = ffi.new("binidx_packing *", {
        "lengths": items(lengths, np.int32), "num_pieces": len(lengths), "capacity": capacity,
        "pieces": items(pieces, np.int64), "bounds": items(bounds, np.int64), "bin_of": items(bin_of, np.int64),
        **{name: items(array, array.dtype) for name, array in scratch.items()},
    })  # fmt: skip
    num_bins = fit(packing)
    if num_bins < 0:
        found = f"pieces of {lengths.min()} to {lengths.max()} tokens"
        raise IndexBuildError(f"packing: {found}, a bin needs 1 to {capacity}")
    return bounds[: num_bins + 1], pieces
