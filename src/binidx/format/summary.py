"""Summary of a dataset from a few dozen bytes of it, without reading an array of its `.idx`.

    header                      dtype, number of sequences and documents         34 bytes
    pointer of sequence i       bytes, and so tokens, before sequence i           8 bytes for each i
    last pointer and length     number of tokens                                 12 bytes

Pointers are a running sum, so the tokens of any run of sequences, such as a split, follow from two of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from binidx.errors import FormatError, ObjectNotFoundError
from binidx.format.bin_file import open_bin, open_listed_bin
from binidx.format.idx import HEADER, get_idx_path, parse_idx_counts
from binidx.format.prefix_listing import ListedPair
from binidx.format.virtual import get_parts_path, read_parts
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_stored
from binidx.storage.vectored_reads import as_block_reader

Options = Mapping[str, Any] | None
SEGMENT_BYTES = 64 << 10
"""Assumed segment size of compressed parts, which are not opened."""


@dataclass(frozen=True)
class DatasetSummary:
    """Sizes and counts of the dataset under one prefix.

    Attributes:
        idx_bytes: bytes of the `.idx`; of all parts of a virtual merge.
        plain_bytes: bytes of the tokens.
        stored_bytes: bytes of the object that holds them; fewer if it is compressed.
        block_bytes: bytes that are read to get one byte: a block of checksums or a zstd frame; 1 without them.
        compressed, checked: how the tokens are stored.
        identities: of both objects, "idx" and "bin"; empty for a virtual merge.
        num_parts: parts of a virtual merge, else 0.
        idx: opened reader of the `.idx`.
    """

    prefix: str
    num_sequences: int
    num_documents: int | None
    num_tokens: int
    item_bytes: int
    idx_bytes: int
    plain_bytes: int
    stored_bytes: int
    block_bytes: int = 1
    compressed: bool = False
    checked: bool = False
    identities: Mapping[str, Any] = field(default_factory=dict)
    num_parts: int = 0
    idx: RangeReader | None = field(default=None, repr=False, compare=False)

    def tokens_before(self, sequences: Sequence[int], storage_options: Options = None) -> list[int]:
        """Return the number of tokens before each of these sequences; `num_sequences` stands for the end.

        Raises:
            FormatError: the pointers are not those of any lengths.
            StorageError: they cannot be read.
        """
        inside = sorted({each for each in sequences if 0 < each < self.num_sequences})
        known = {0: 0, self.num_sequences: self.num_tokens, **self._read_bounds(inside, storage_options)}
        return [known[each] for each in sequences]

    def _read_bounds(self, inside: Sequence[int], options: Options) -> dict[int, int]:
        if not inside:
            return {}
        if self.idx is None:
            return _bounds_in_parts(self.prefix, inside, options)
        first = HEADER.size + 4 * self.num_sequences
        found = self.idx.read([(first + 8 * each, first + 8 * each + 8) for each in inside])
        bounds = {each: _int(view) // self.item_bytes for each, view in zip(inside, found, strict=True)}
        if [*bounds.values()] != sorted(bounds.values()) or not 0 <= bounds[inside[-1]] <= self.num_tokens:
            raise FormatError(f"{self.idx.uri}: pointers {bounds} fall, or leave {self.num_tokens} tokens")
        return bounds


def read_summary(prefix: str, storage_options: Options = None, listed: ListedPair | None = None) -> DatasetSummary:
    """Read the summary of a pair of files, or of a virtual merge.

    Args:
        listed: the pair as a list of its folder shows it, if such a list was made.

    Raises:
        ObjectNotFoundError: there is neither.
        FormatError: a header breaks a rule.
    """
    try:
        return _read_pair(prefix, storage_options, listed)
    except ObjectNotFoundError:
        virtual = _read_virtual(prefix, storage_options)
        if virtual is None:
            raise
        return virtual


def _read_pair(prefix: str, options: Options, listed: ListedPair | None) -> DatasetSummary:
    uri = get_idx_path(prefix)
    idx = open_stored(uri, storage_options=options, found=listed.idx if listed else None)
    header = idx.read([(0, min(HEADER.size, idx.size))])[0]
    dtype, num_sequences, num_bounds, _ = parse_idx_counts(header, idx.size, uri=uri)
    if listed:
        tokens = open_listed_bin(prefix, listed.bin, listed.sums, storage_options=options, cache=False)
    else:
        tokens = open_bin(prefix, storage_options=options, cache=False)
    item_bytes = np.dtype(dtype).itemsize
    num_tokens = _all_tokens(idx, num_sequences, item_bytes)
    if num_tokens * item_bytes > tokens.size:
        raise FormatError(f"{tokens.uri}: {tokens.size} bytes, its .idx needs {num_tokens * item_bytes}")
    blocks = as_block_reader(tokens)
    compressed = blocks is not None and blocks.codec != "raw"
    return DatasetSummary(
        prefix,
        num_sequences,
        num_bounds - 1,
        num_tokens,
        item_bytes,
        idx.size,
        tokens.size,
        blocks.stored_bytes if blocks else tokens.size,
        blocks.block_bytes if blocks else 1,
        compressed,
        blocks is not None and not compressed,
        {"idx": dict(idx.identity), "bin": dict(tokens.identity)},
        idx=idx,
    )


def _read_virtual(prefix: str, options: Options) -> DatasetSummary | None:
    parts = read_parts(prefix, options)
    if parts is None:
        return None
    item_bytes, num_tokens = np.dtype(parts.dtype).itemsize, sum(part.tokens for part in parts.parts)
    sizes = {end: sum(int(getattr(part, end)["size"]) for part in parts.parts) for end in ("idx", "bin")}
    num_sequences = sum(part.sequences for part in parts.parts)
    return DatasetSummary(
        prefix,
        num_sequences,
        None,
        num_tokens,
        item_bytes,
        sizes["idx"],
        num_tokens * item_bytes,
        sizes["bin"],
        block_bytes=SEGMENT_BYTES if sizes["bin"] < num_tokens * item_bytes else 1,
        compressed=sizes["bin"] < num_tokens * item_bytes,
        num_parts=len(parts.parts),
    )


def _bounds_in_parts(prefix: str, inside: Sequence[int], options: Options) -> dict[int, int]:
    parts = read_parts(prefix, options)
    if parts is None:
        raise ObjectNotFoundError(f"{get_parts_path(prefix)}: no such object")
    firsts = [*accumulate((part.sequences for part in parts.parts), initial=0)]
    before = [*accumulate((part.tokens for part in parts.parts), initial=0)]
    found = {}
    for each in inside:
        place = bisect_right(firsts, each) - 1
        within = read_summary(parts.prefixes[place], options).tokens_before([each - firsts[place]], options)
        found[each] = before[place] + within[0]
    return found


def _all_tokens(idx: RangeReader, num_sequences: int, item_bytes: int) -> int:
    if not num_sequences:
        return 0
    length, pointer = HEADER.size + 4 * (num_sequences - 1), HEADER.size + 12 * num_sequences - 8
    found = idx.read([(length, length + 4), (pointer, pointer + 8)])
    return _int(found[1]) // item_bytes + _int(found[0])


def _int(view: memoryview) -> int:
    return int.from_bytes(view, "little", signed=True)
