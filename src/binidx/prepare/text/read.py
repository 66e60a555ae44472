"""Documents of a slice, in batches, from any input format; `FORMATS` is the table of formats.

for text, title in read_slice(piece, ["text", "title"]):     # a Batch for each key
    for problem in text.problems: ...                        # the same list in all batches of a row

The stored bytes of a slice of lines are read ahead of the parser, and only from the object that was planned:

local       1 MiB at a time, in the caller's thread: the kernel reads ahead
remote      2 MiB a request, 4 in flight: at 30 ms to the first byte and 100 MB/s a connection that is 165 MB/s, more
            than one of the two workers of a core tokenises; 9 MiB of memory
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from binidx.errors import ConfigError, ObjectChangedError, redacted
from binidx.prepare.text.batch import Batch, Filters, Strings
from binidx.prepare.text.decompress import decompress_gzip, decompress_zstd, find_zstd_blocks
from binidx.prepare.text.jsonl import LineReader, Lines, group_lines, select_lines
from binidx.prepare.text.slices import (
    GZIP,
    JSONL,
    PARQUET,
    ZSTD,
    Extent,
    InputBlock,
    ReadRequest,
    Slice,
    check_identity,
    check_unmodified,
)
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_stored
from binidx.storage.ranges import cut
from binidx.storage.requests.head import recorded_object
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.copy import map_in_flight

Options = Mapping[str, Any] | None
LOCAL_BYTES = 1 << 20
REQUEST_BYTES = 2 << 20
IN_FLIGHT = 4
LINE_BYTES = 64 << 10
"""Bytes past the end of a slice in its last request; the slice's last line mostly ends there."""

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
    fields = list(dict.fromkeys([*([] if id_key is None else [id_key]), *filters.keep]))
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
        chosen, dropped = filters.apply(batches[0], [by_name[name] for name in filters.keep])
        if dropped:
            batches = [replace(each.select(chosen), dropped=each.dropped + dropped) for each in batches]
        yield tuple(batches)


def _check_names(keys: Sequence[str], fields: Sequence[str]) -> None:
    if isinstance(keys, str) or not keys or len(set(keys)) < len(keys):
        raise ConfigError(f"keys: invalid (found {keys!r}, need a list of one or more, none twice)")
    if both := set(keys) & set(fields):
        raise ConfigError(f"{both.pop()}: both a text and a field; give it as one of them")


class _CountingIterator:
    """Iterator over pieces that counts their bytes.

    Attributes:
        num_bytes: bytes of all pieces so far.
        exhausted: True after the last piece.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces, self.num_bytes, self.exhausted = pieces, 0, False

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for piece in self._pieces:
            self.num_bytes += len(piece)
            yield piece
        self.exhausted = True


def read_lines(
    piece: Slice, batch_bytes: int, max_line_bytes: int, options: Options, extent: Extent
) -> Iterator[tuple[Lines, int]]:
    """Yield runs of lines of a slice, with the stored bytes read for each; the arguments are those of `ReadRequest`."""
    decompress, before = FORMATS[piece.format].decompress, 0
    with closing(_stream_stored_bytes(piece, options)) as pieces:
        stored = _CountingIterator(pieces)
        plain = _CountingIterator(stored if decompress is None else decompress(stored, piece))
        for lines in group_lines(select_lines(plain, piece.first, piece.last), batch_bytes, max_line_bytes):
            done = min(stored.num_bytes, piece.num_bytes)  # without the end of the last line in the next slice
            yield lines, done - before
            before = done
    if plain.exhausted and piece.stored + stored.num_bytes == piece.identity["size"]:
        extent.end = piece.first + plain.num_bytes
    check_unmodified(piece)


def _read_json_lines(request: ReadRequest) -> Batches:
    limits, reader = (request.batch_bytes, request.max_line_bytes), LineReader(request)
    for lines, num_bytes in read_lines(request.piece, *limits, request.options, request.extent):
        yield reader.read(lines, num_bytes)


def _stream_stored_bytes(piece: Slice, options: Options) -> Generator[bytes | memoryview]:
    """Yield the stored bytes from the slice's start to the end of the object; close the generator to stop earlier."""
    path = local_path(piece.uri)
    if path is None:
        yield from _stream_object(piece, options)
        return
    check_identity(piece, open_stored(path).identity)
    with open(path, "rb", buffering=0) as file:
        file.seek(piece.stored)
        while data := file.read(LOCAL_BYTES):
            yield data


def _stream_object(piece: Slice, options: Options) -> Generator[memoryview]:
    try:
        # Requests are pinned to the version in the plan, so no HEAD request is needed.
        reader = open_stored(piece.uri, storage_options=options, found=recorded_object(piece.uri, piece.identity))
        check_identity(piece, reader.identity)
        stop = min(piece.stored + piece.num_bytes + LINE_BYTES, reader.size)
        ranges = cut((piece.stored, stop), REQUEST_BYTES)
        with closing(map_in_flight(lambda each: reader.read([each])[0], ranges, IN_FLIGHT)) as responses:
            yield from responses
        for each in cut((stop, reader.size), REQUEST_BYTES):  # only if the slice's last line is long
            yield reader.read([each])[0]
    except ObjectChangedError as error:
        raise ObjectChangedError(
            f"{redacted(piece.uri)}: changed since it was planned; plan it again ({error})"
        ) from error


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
    read: Callable[[ReadRequest], Batches] = _read_json_lines


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
