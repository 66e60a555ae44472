"""Texts with each character folded, and runs of blanks as one (`native/fold_text.c`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import items


@dataclass(frozen=True)
class FoldTable:
    """Fold of each code point.

    Args:
        pages: row in `folds` of each 256 code points, shape (4352,).
        folds: start in `data` of each code point's fold, its length before it; -1: it stays, shape (n, 256).
        data: the folds.
        longest: bytes of the longest fold.
    """

    pages: NDArray[np.int32]
    folds: NDArray[np.int32]
    data: NDArray[np.uint8]
    longest: int

    @classmethod
    def of(cls, folds: Mapping[int, bytes]) -> FoldTable:
        """Return the table of the code points that do not stay as they are."""
        starts, data = np.full(0x110000, -1, np.int32), bytearray()
        for code, fold in folds.items():
            starts[code] = len(data)
            data += bytes([len(fold)]) + fold
        rows, pages = np.unique(starts.reshape(-1, 256), axis=0, return_inverse=True)
        longest = max(map(len, folds.values()))
        return cls(pages.ravel().astype(np.int32), rows, np.frombuffer(bytes(data), np.uint8), longest)

    def begin(self) -> Any:
        """Return C's state of a text to fold; the table must outlive it."""
        pages, folds = items(self.pages, np.int32), items(self.folds, np.int32, 256)
        return ffi.new("binidx_folding *", {"pages": pages, "folds": folds, "bytes": items(self.data, np.uint8)})

    def fold(self, text: bytes) -> tuple[bytes, NDArray[np.int64]]:
        """Return a text folded, and for each of its bytes the byte of the text at which its character begins."""
        length = lib.binidx_fold_text(self.begin(), text, len(text), ffi.NULL, ffi.NULL)
        folded, origins = np.empty(length, np.uint8), np.empty(length, np.int64)
        out = items(folded, np.uint8, write=True), items(origins, np.int64, write=True)
        lib.binidx_fold_text(self.begin(), text, len(text), *out)
        return folded.tobytes(), origins
