"""A slice as batches of documents: the one entry for all formats.

for text, title in read_slice(piece, ["text", "title"]):     one Batch for each key
    for problem in text.problems: ...                        said once: it is the same list in both
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from binidx.errors import ConfigError
from binidx.text.batch import Batch, Strings
from binidx.text.decompress import gunzipped, unzstd
from binidx.text.extent import Extent
from binidx.text.filters import Filters, only, only_strings
from binidx.text.jsonl import LineReader
from binidx.text.lines import own_bytes, whole_lines
from binidx.text.slices import GZIP, JSONL, PARQUET, ZSTD, Slice
from binidx.text.stored import Options, check_read, stored_pieces

BATCH_BYTES = 1 << 20
"""Larger ones cost more: their buffers come from the kernel page by page each time."""

MAX_LINE_BYTES = 256 << 20


def read_slice(
    piece: Slice,
    keys: Sequence[str] = ("text",),
    *,
    id_key: str | None = None,
    filters: Filters | None = None,
    batch_bytes: int = BATCH_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
    storage_options: Options = None,
    extent: Extent | None = None,
) -> Iterator[tuple[Batch, ...]]:
    """The documents of a slice in order, and the rows that are none.

    Args:
        keys: of the texts.
        id_key: a field to give along, if it is there.
        filters: which documents are wanted.
        batch_bytes: plain bytes of a batch, about; a longer line has one of its own.
        max_line_bytes: what a line and its newline may have.
        extent: is told what was read.

    Returns:
        A batch for each key, in their order.

    Raises:
        ConfigError: no keys, a field that is one of them, or no bytes for a batch or a line.
        ObjectChangedError: the object is not the one that was planned.
        FormatError: it cannot be decompressed, or is no parquet file with these columns.
        StorageError: it cannot be read.
    """
    wanted, extent = filters or Filters(), Extent() if extent is None else extent
    fields = list(dict.fromkeys([*([] if id_key is None else [id_key]), *wanted.fields]))
    _check_names(keys, fields)
    if min(batch_bytes, max_line_bytes) < 1:
        raise ConfigError(f"batch_bytes, max_line_bytes: found {batch_bytes}, {max_line_bytes}, needed 1 or more")
    if piece.format == PARQUET:
        from binidx.text.parquet import read_parquet

        found = read_parquet(piece, keys, fields, batch_bytes, storage_options, extent)
    else:
        found = _read_lines(piece, keys, fields, batch_bytes, max_line_bytes, storage_options, extent)
    for batches, columns in found:
        yield _filtered(batches, dict(zip(fields, columns, strict=True)), id_key, wanted)


def _check_names(keys: Sequence[str], fields: Sequence[str]) -> None:
    if isinstance(keys, str) or not keys or len(set(keys)) < len(keys):
        raise ConfigError(f"keys: found {keys!r}, needed a list of one or more, none twice")
    if both := set(keys) & set(fields):
        raise ConfigError(f"{both.pop()}: found as a text and as a field, needed one of them")


def _read_lines(
    piece: Slice,
    keys: Sequence[str],
    fields: Sequence[str],
    batch_bytes: int,
    max_line_bytes: int,
    options: Options,
    extent: Extent,
) -> Iterator[tuple[list[Batch], list[Strings]]]:
    reader = LineReader(piece, keys, fields, max_line_bytes, extent)
    with closing(stored_pieces(piece, options)) as stored:
        counted = Counted(stored, piece.num_bytes)
        plain = Counted(PLAIN[piece.format](counted, piece), sys.maxsize)
        own = own_bytes(plain, piece.first, piece.last)
        for batches, columns in reader.batches(whole_lines(own, batch_bytes, max_line_bytes)):
            taken = counted.taken()
            yield [each.with_counts(num_bytes=taken) for each in batches], columns
    if plain.ended and piece.stored + counted.given == piece.identity["size"]:
        extent.end = piece.first + plain.given
    check_read(piece)


class Counted:
    """Pieces, and how many bytes of them were given since it was asked last; `most` in all.

    Attributes:
        given: bytes that were given in all.
        ended: there are no more.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview], most: int) -> None:
        self._pieces, self._most, self._told = pieces, most, 0
        self.given, self.ended = 0, False

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for piece in self._pieces:
            self.given += len(piece)
            yield piece
        self.ended = True

    def taken(self) -> int:
        now = min(self.given, self._most)
        count, self._told = now - self._told, now
        return count


def _filtered(
    batches: Sequence[Batch], fields: dict[str, Strings], id_key: str | None, filters: Filters
) -> tuple[Batch, ...]:
    stay, dropped = filters.wanted(batches[0], [fields[name] for name in filters.fields])
    ids = None if id_key is None else fields[id_key]
    if dropped:
        batches = [only(each, stay, dropped) for each in batches]
        ids = ids and only_strings(ids, stay)
    return tuple(each.with_counts(ids=ids) for each in batches)


def _frames(pieces: Iterable[bytes | memoryview], piece: Slice) -> Iterable[bytes]:
    told = None if piece.last is None else (piece.num_bytes, piece.last - piece.first)
    return unzstd(pieces, piece.uri, told)


PLAIN: dict[str, Callable[[Iterable[bytes | memoryview], Slice], Iterable[Any]]] = {
    JSONL: lambda pieces, piece: pieces,
    GZIP: lambda pieces, piece: gunzipped(pieces, piece.uri),
    ZSTD: _frames,
}
"""format -> plain bytes of what is stored"""
