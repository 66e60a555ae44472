"""Documents of a slice, in batches, from any input format; `FORMATS` is the table of formats.

for text, title in read_slice(piece, ["text", "title"]):     # a Batch for each key
    for problem in text.problems: ...                        # the same list in all batches of a row
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from binidx.errors import ConfigError
from binidx.prepare.text.batch import Batch, Filters, Strings
from binidx.prepare.text.decompress import decompress_gzip, decompress_zstd, find_zstd_blocks
from binidx.prepare.text.jsonl import LineReader, group_lines, select_lines
from binidx.prepare.text.slices import GZIP, JSONL, PARQUET, ZSTD, Extent, InputBlock, Slice
from binidx.prepare.text.stored_bytes import Options, ReadRequest, check_unmodified, stream_stored_bytes
from binidx.storage.interfaces import RangeReader

BATCH_BYTES = 1 << 20
"""Larger batches cost more: the kernel maps their buffers page by page each time."""

MAX_LINE_BYTES = 256 << 20
Batches = Iterator[tuple[list[Batch], list[Strings]]]
Pieces = Iterable[bytes | memoryview]


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
    """Yield the documents of a slice in order, with the rows that are not documents.

    Args:
        keys: of the texts.
        id_key: field whose value is returned beside each document.
        filters: conditions on documents.
        batch_bytes: approximate plain bytes of a batch; a longer line has a batch of its own.
        max_line_bytes: limit of a line with its newline.
        extent: updated with the part of the input that was read.

    Returns:
        A batch for each key, in their order.

    Raises:
        ConfigError: no keys, a field that is also a key, or no bytes for a batch or a line.
        ObjectChangedError: the object is not the planned one.
        FormatError: damaged compression, or not a Parquet file with these columns.
        StorageError: the store fails.
    """
    filters, extent = filters or Filters(), Extent() if extent is None else extent
    fields = list(dict.fromkeys([*([] if id_key is None else [id_key]), *filters.fields]))
    _check_names(keys, fields)
    if min(batch_bytes, max_line_bytes) < 1:
        raise ConfigError(
            f"batch_bytes, max_line_bytes: too small (found {batch_bytes}, {max_line_bytes}, need 1 or more)"
        )
    request = ReadRequest(piece, keys, fields, batch_bytes, max_line_bytes, storage_options, extent)
    for batches, columns in FORMATS[piece.format].read(request):
        by_name = dict(zip(fields, columns, strict=True))
        if id_key is not None:
            batches = [replace(each, ids=by_name[id_key]) for each in batches]
        chosen, dropped = filters.apply(batches[0], [by_name[name] for name in filters.fields])
        if dropped:
            batches = [replace(each.select(chosen), dropped=each.dropped + dropped) for each in batches]
        yield tuple(batches)


def _check_names(keys: Sequence[str], fields: Sequence[str]) -> None:
    if isinstance(keys, str) or not keys or len(set(keys)) < len(keys):
        raise ConfigError(f"keys: invalid (found {keys!r}, need a list of one or more, none twice)")
    if both := set(keys) & set(fields):
        raise ConfigError(f"{both.pop()}: both a text and a field; give it as one of them")


class CountingIterator:
    """Iterator over pieces that counts their bytes.

    Attributes:
        num_bytes: bytes of all pieces so far.
        exhausted: True after the last piece.
    """

    def __init__(self, pieces: Pieces, limit: int = sys.maxsize) -> None:
        self._pieces, self._limit, self._reported = pieces, limit, 0
        self.num_bytes, self.exhausted = 0, False

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for piece in self._pieces:
            self.num_bytes += len(piece)
            yield piece
        self.exhausted = True

    def advance(self) -> int:
        """Return the bytes since the last call; over all calls at most `limit`."""
        before, self._reported = self._reported, min(self.num_bytes, self._limit)
        return self._reported - before


def _read_lines(request: ReadRequest) -> Batches:
    piece, extent = request.piece, request.extent
    reader = LineReader(piece, request.keys, request.fields, request.max_line_bytes, extent)
    with closing(stream_stored_bytes(piece, request.options)) as pieces:
        stored = CountingIterator(pieces, piece.num_bytes)
        plain = CountingIterator(decompress_slice(stored, piece))
        lines = select_lines(plain, piece.first, piece.last)
        for batches, columns in reader.batches(group_lines(lines, request.batch_bytes, request.max_line_bytes)):
            num_bytes = stored.advance()
            yield [replace(each, num_bytes=num_bytes) for each in batches], columns
    if plain.exhausted and piece.stored + stored.num_bytes == piece.identity["size"]:
        extent.end = piece.first + plain.num_bytes
    check_unmodified(piece)


def decompress_slice(pieces: Pieces, piece: Slice) -> Pieces:
    """Return the plain bytes of a slice of lines."""
    decompress = FORMATS[piece.format].decompress
    return pieces if decompress is None else decompress(pieces, piece)


def _decompress_frames(pieces: Pieces, piece: Slice) -> Iterator[bytes]:
    sizes = None if piece.last is None else (piece.num_bytes, piece.last - piece.first)
    return decompress_zstd(pieces, piece.uri, sizes)


def _read_parquet(request: ReadRequest) -> Batches:
    from binidx.prepare.text.parquet_reader import read_parquet

    return read_parquet(request)


def _parquet_blocks(reader: RangeReader) -> tuple[InputBlock, ...]:
    from binidx.prepare.text.parquet_reader import parquet_blocks

    return parquet_blocks(reader)


@dataclass(frozen=True)
class InputFormat:
    """Row of the table of input formats.

    Attributes:
        suffixes: ends of object names.
        find_blocks: returns the blocks at which an object can be cut; None: the format has none.
        decompress: returns plain lines from stored bytes; None: the format is stored plain, or has no lines.
        read: reads a slice.
    """

    suffixes: tuple[str, ...]
    find_blocks: Callable[[RangeReader], tuple[InputBlock, ...]] | None = None
    decompress: Callable[[Pieces, Slice], Iterator[Any]] | None = None
    read: Callable[[ReadRequest], Batches] = _read_lines


_LINES = (".jsonl", ".json", ".ndjson")

FORMATS = {
    JSONL: InputFormat(_LINES),
    GZIP: InputFormat(
        tuple(f"{each}.gz" for each in _LINES), None, lambda pieces, piece: decompress_gzip(pieces, piece.uri)
    ),
    ZSTD: InputFormat(tuple(f"{each}.zst" for each in _LINES), find_zstd_blocks, _decompress_frames),
    PARQUET: InputFormat((".parquet",), _parquet_blocks, None, _read_parquet),
}
"""Name of an input format -> its row. A new format is a module with its functions and a row here."""
