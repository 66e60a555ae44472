"""Search for patterns in the text or in the tokens of documents (`native/find_patterns.c`, `native/scan_tokens.c`),
and texts with each character folded, and runs of blanks as one (`native/fold_text.c`)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import borrow, items


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


PADDING = 16
"""Bytes after the last token of a table, which C copies with it."""

TEXT_BYTES = 128 << 10
"""Bytes of text that are searched together, so that they are in a core's own cache."""

LEAST_STRIDE = 4
"""Symbols from one sample to the next for which blocks have 16 bytes."""

MOST_BLOCKS = 1 << 18
"""Blocks of all patterns: the bits of their hashes stay in a core's own cache."""


@dataclass(frozen=True)
class TokenTable:
    """Bytes of each token.

    Args:
        data: bytes of all tokens by their ids, and `PADDING` more, shape (n,).
        offsets: start of each token, then the end of the last, shape (vocab_size + 1,).
    """

    data: NDArray[np.uint8]
    offsets: NDArray[np.int32]

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> TokenTable:
        """Return the table of tokens in the order of their ids."""
        offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int32)
        return cls(np.frombuffer(b"".join([*tokens, bytes(PADDING)]), np.uint8), offsets)

    def decode(self, ids: Sequence[int]) -> bytes:
        """Return the text of some tokens."""
        data = self.data.tobytes()
        return b"".join(data[self.offsets[number] : self.offsets[number + 1]] for number in ids)


@dataclass(frozen=True)
class FoldedTokens:
    """Tokens of a table, each folded by itself.

    Args:
        table: with which they are folded.
        tokens: their folded bytes.
        kinds: bits of each: 1 begins with a blank, 2 ends with one, 4 empty, 8 ends within a character, shape (n,).
    """

    table: FoldTable
    tokens: TokenTable
    kinds: NDArray[np.uint8]

    @classmethod
    def of(cls, table: FoldTable, tokens: TokenTable) -> FoldedTokens:
        """Return the tokens of a table, folded."""
        folding, data = table.begin(), items(tokens.data, np.uint8)
        buffer = bytearray(table.longest * int(np.diff(tokens.offsets).max(initial=0)))
        out, folded, kinds = borrow(buffer, "uint8_t[]"), list[bytes](), bytearray()
        for start, stop in itertools.pairwise(tokens.offsets.tolist()):
            length = lib.binidx_fold_text(folding, data + start, stop - start, out, ffi.NULL)
            folded.append(token := bytes(buffer[:length]))
            ends = token.startswith(b" "), token.endswith(b" "), not token, folding.num_part > 0
            kinds.append(sum(bit << place for place, bit in enumerate(ends)))
            folding.num_part = folding.blank = 0
        return cls(table, TokenTable.of(folded), np.frombuffer(bytes(kinds), np.uint8))


class TokenSearch:
    """Search through the documents of one dataset after another, in one thread.

    Args:
        patterns: bytes to find, none of them empty; of stored tokens as they are stored if there is no table.
        dtype: of the stored tokens.
        table: text of the tokens; None: the tokens themselves are searched.
        folded: the same tokens folded: folded texts are searched, for folded patterns.

    Raises:
        ValueError: an empty pattern, none, or one that is not whole tokens.
    """

    def __init__(
        self, patterns: Sequence[bytes], dtype: Any, table: TokenTable | None = None, folded: FoldedTokens | None = None
    ) -> None:
        item_bytes, count = np.dtype(dtype).itemsize, len(patterns)
        unit = 1 if table is not None else item_bytes
        lengths = [len(pattern) for pattern in patterns]
        if not lengths or min(lengths) < 1 or any(length % unit for length in lengths):
            raise ValueError(f"patterns: found lengths {sorted(set(lengths))[:3]}, need multiples of {unit} above 0")
        window = _choose_window(count, min(lengths), unit)
        bounds, text = np.cumsum([0, *lengths], dtype=np.int64), np.frombuffer(b"".join(patterns), np.uint8)
        blocks = np.empty((2, 1 << (window["bits"] - 3)), np.uint8)
        scratch = blocks, np.empty(1 << window["head_bits"], np.int32), np.empty(count, np.int32)
        self._patterns = ffi.new("binidx_patterns *", {
            "bytes": items(text, np.uint8), "bounds": items(bounds, np.int64), "num_patterns": count, "unit": unit,
            "longest": max(lengths), **window, "sampled": items(blocks[0], np.uint8),
            "ends": items(blocks[1], np.uint8),
            "heads": items(scratch[1], np.int32), "next": items(scratch[2], np.int32),
        })  # fmt: skip
        assert lib.binidx_index_patterns(self._patterns) == count
        self._hits, rows = np.empty((count + 4096, 4), np.int64), np.zeros(count, np.int64)
        longest = 0 if table is None else int(np.diff(table.offsets).max(initial=0))
        if folded is not None:
            longest = (longest + 3) * folded.table.longest
        room = max(TEXT_BYTES, 2 * (max(lengths) + longest + PADDING))
        buffer = np.empty(room, np.uint8)
        self._scan = ffi.new("binidx_scan *", {
            "patterns": self._patterns, "longest_token": longest, "item_bytes": item_bytes, "room": room,
            "text": items(buffer, np.uint8), "hits": borrow(self._hits, "int64_t[]"),
            "room_hits": len(self._hits), "rows": items(rows, np.int64),
        })  # fmt: skip
        if table is not None:
            self._scan.bytes, self._scan.offsets = items(table.data, np.uint8), items(table.offsets, np.int32)
            is_signed = np.dtype(dtype).kind == "i"
            self._scan.vocab_size = min(len(table.offsets) - 1, 1 << (8 * item_bytes - is_signed))
        if folded is not None:
            self._scan.folding = self._folding = folded.table.begin()
            self._scan.kinds, self._scan.folded = items(folded.kinds, np.uint8), items(folded.tokens.data, np.uint8)
            self._scan.folded_offsets = items(folded.tokens.offsets, np.int32)
        self._keep = table, folded, bounds, text, scratch, rows, buffer

    def scan(self, tokens: memoryview, bounds: NDArray[np.int64], *, is_open: bool) -> NDArray[np.int64]:
        """Return the patterns in documents: rows (document, pattern, matches, first byte in the text), shape (n, 4).

        Args:
            tokens: bytes of stored tokens.
            bounds: start of each document in these tokens, then the end of the last, shape (num_documents + 1,).
                If the last call was `is_open`, document 0 continues the last one of that call.
            is_open: whether the last document continues in the next call.

        Raises:
            IndexError: a token is not in the table; its argument is the number of the token.
        """
        item_bytes = self._scan.item_bytes
        if bounds[0] < 0 or bounds[-1] * item_bytes > len(tokens) or (np.diff(bounds) < 0).any():
            raise ValueError(f"bounds: {bounds[0]} to {bounds[-1]}, need rising ones in {len(tokens)} bytes")
        data, first, found = borrow(tokens), 0, [np.empty((0, 4), np.int64)]
        while True:
            rest = np.ascontiguousarray(bounds[first:])
            done = lib.binidx_scan_documents(self._scan, data, items(rest, np.int64), len(rest) - 1, is_open)
            if done < 0:
                self._scan.held = self._scan.before = self._scan.num_hits = 0
                raise IndexError(self._scan.bad_token)
            hits = self._hits[: self._scan.num_hits].copy()
            hits[:, 0] += first
            found.append(hits)
            self._scan.num_hits, first = 0, first + done
            if first == len(bounds) - 1:
                return np.concatenate(found)


def _choose_window(count: int, shortest: int, unit: int) -> dict[str, int]:
    """Return the window, the block and the hash for `count` patterns of at least `shortest` bytes."""
    whole = min(shortest, 8) // unit * unit  # the blocks of 8 bytes of text are common, those of 16 rare
    block = 16 if (shortest - 16) // unit + 1 >= LEAST_STRIDE or not whole else whole
    stride = max(min((shortest - block) // unit + 1, MOST_BLOCKS // count), 1)
    window = block + (stride - 1) * unit
    sizes = {"bits": min(max((count * stride).bit_length() + 3, 15), 26), "head_bits": max(count.bit_length() + 1, 4)}
    return {"window": window, "block": block, "stride": stride, **sizes}
