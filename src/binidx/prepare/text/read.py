"""Documents of a slice, in batches, from any input format; `FORMATS` is the table of formats.

for text, title in read_slice(piece, ["text", "title"]):     # a Batch for each key
    for problem in text.problems: ...                        # the same list in all batches of a row

The stored bytes of a slice of lines are read ahead of the parser, and only from the object that was planned:

local       1 MiB at a time, in the caller's thread: the kernel reads ahead
remote      4 MiB a request, 3 in flight: at 30 ms to the first byte and 100 MB/s a connection that is 175 MB/s, more
            than one of the two workers of a core tokenizes; 13 MiB of memory, and a fifth less CPU than at 2 MiB
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from binidx.errors import ConfigError, ObjectChangedError, redacted
from binidx.prepare.text.batch import Batch, Filters, Strings
from binidx.prepare.text.compressed_text import decompress_gzip, decompress_zstd, find_zstd_blocks
from binidx.prepare.text.csv_rows import parse_csv
from binidx.prepare.text.jsonl import Lines, ParseLines, group_lines, parse_json_lines, parse_lines, select_lines
from binidx.prepare.text.plain_text import parse_text_file, parse_text_lines
from binidx.prepare.text.rows import ByteStream, Pieces, Row, RowReader, batch_records
from binidx.prepare.text.slices import CUT_ANYWHERE, Extent, InputBlock, ReadRequest, Slice
from binidx.prepare.text.warc import parse_warc
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_stored
from binidx.storage.ranges import cut
from binidx.storage.threads import map_in_flight

LOCAL_BYTES = 1 << 20
REQUEST_BYTES = 4 << 20
BLOCKS_IN_FLIGHT = 3
LINE_BYTES = 64 << 10
"""Bytes past the end of a slice in its last request; the slice's last line mostly ends within them."""

BATCH_BYTES = 1 << 20
"""Plain bytes of a batch. Larger batches cost more: the kernel maps their buffers page by page each time."""

MAX_LINE_BYTES = 256 << 20
Batches = Iterator[tuple[list[Batch], list[Strings]]]


def read_slice(
    piece: Slice,
    keys: Sequence[str] = ("text",),
    *,
    id_key: str | None = None,
    filters: Filters | None = None,
    batch_bytes: int = BATCH_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    extent: Extent | None = None,
) -> Iterator[tuple[Batch, ...]]:
    """Yield the documents of a slice in order, with the rows that are not documents.

    Args:
        keys: JSON keys, or Parquet columns, of the texts.
        id_key: field whose value is returned in `Batch.ids`.
        filters: conditions on documents.
        batch_bytes: approximate plain bytes of a batch; a longer line has a batch of its own.
        max_line_bytes: limit of a line with its newline.
        extent: updated with the part of the input that was read.

    Returns:
        A batch for each key, in their order.

    Raises:
        ConfigError: no keys, or a field that is also a key.
        ObjectChangedError: the object is not the planned one.
        FormatError: damaged compression, or a Parquet file without these columns.
        StorageError: the store fails.
    """
    filters, extent = filters or Filters(), Extent() if extent is None else extent
    fields = list(dict.fromkeys([*([] if id_key is None else [id_key]), *filters.keep]))
    _check_names(keys, fields)
    location = Location(piece.uri, storage_options)
    request = ReadRequest(piece, keys, fields, batch_bytes, max_line_bytes, location, extent)
    for batches, columns in FORMATS[piece.format].read(request):
        by_name = dict(zip(fields, columns, strict=True))
        if id_key is not None:
            batches = [replace(batch, ids=by_name[id_key]) for batch in batches]
        chosen, dropped = filters.apply(batches[0], [by_name[name] for name in filters.keep])
        if dropped:
            batches = [replace(batch.select(chosen), dropped=batch.dropped + dropped) for batch in batches]
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


@contextmanager
def open_plain(
    piece: Slice, location: Location, extent: Extent
) -> Iterator[tuple[Iterable[bytes | memoryview], Callable[[], int]]]:
    """Open the plain bytes of a slice, and check at the end that the object did not change meanwhile.

    Args:
        piece: slice of a format with plain bytes (not Parquet, not Arrow).
        location: location of the object that contains the slice.
        extent: only its `end` is set, to the uncompressed size of the input, at the end and only if the end of the
            object was reached. The caller adds the rows with `extent.add`.

    Returns:
        The pieces, and a function that returns the number of stored bytes read since its last call, for a progress bar.

    Raises:
        ObjectChangedError: the object is not the planned version.
        FormatError: the compressed data is damaged.
        StorageError: the store failed.
    """
    decompress, before = FORMATS[piece.format].decompress, 0
    with closing(_stream_stored_bytes(piece, location)) as pieces:
        stored = _CountingIterator(pieces)
        plain = _CountingIterator(stored if decompress is None else decompress(stored, piece))

        def progress() -> int:
            nonlocal before
            # Without the end of the last line, which is in the next slice.
            count, before = -before, min(stored.num_bytes, piece.num_bytes)
            return count + before

        yield plain, progress
    if plain.exhausted and piece.stored + stored.num_bytes == piece.identity["size"]:
        extent.end = piece.first + plain.num_bytes
    piece.check_unmodified(location)


def read_lines(
    piece: Slice, batch_bytes: int, max_line_bytes: int, location: Location, extent: Extent
) -> Iterator[tuple[Lines, int]]:
    """Read the lines of a slice in runs of whole lines.

    Args:
        piece: slice of a format of LINES.
        batch_bytes: approximate uncompressed bytes of a run; a run is longer if a line does not fit.
        max_line_bytes: limit of a line with its newline. A longer line is a run without data, and `too_long` has its
            length.
        location, extent: as in `open_plain`, which also says what is raised.

    Returns:
        Pairs of a run of lines and the number of stored bytes read since the previous pair.
    """
    with open_plain(piece, location, extent) as (plain, progress):
        for lines in group_lines(select_lines(plain, piece.first, piece.last), batch_bytes, max_line_bytes):
            yield lines, progress()


def _read_parsed_lines(request: ReadRequest, parse: ParseLines = parse_json_lines) -> Batches:
    limits, reader = (request.batch_bytes, request.max_line_bytes), RowReader(request, ("line", 1))
    for lines, num_bytes in read_lines(request.piece, *limits, request.location, request.extent):
        yield reader.make_batches(parse_lines(lines, request, parse), num_bytes)


def _read_parsed_records(request: ReadRequest, parse: Callable[[ReadRequest, ByteStream], Iterator[Row]]) -> Batches:
    with open_plain(request.piece, request.location, request.extent) as (plain, progress):
        yield from batch_records(request, parse(request, ByteStream(plain)), progress)


def _stream_stored_bytes(piece: Slice, location: Location) -> Generator[bytes | memoryview]:
    """Yield the stored bytes from the slice's start to the end of the object; close the generator to stop earlier."""
    path = location.local_path
    if path is None:
        yield from _stream_object(piece, location)
        return
    piece.check_identity(open_stored(location).identity)
    with open(path, "rb", buffering=0) as file:
        file.seek(piece.stored)
        while data := file.read(LOCAL_BYTES):
            yield data


def _stream_object(piece: Slice, location: Location) -> Generator[memoryview]:
    try:
        # Requests are pinned to the version in the plan, so no HEAD request is needed.
        reader = open_stored(location, identity=piece.identity)
        piece.check_identity(reader.identity)
        stop = min(piece.stored + piece.num_bytes + LINE_BYTES, reader.size)
        ranges = cut((piece.stored, stop), REQUEST_BYTES)
        with closing(map_in_flight(lambda block: reader.read([block])[0], ranges, BLOCKS_IN_FLIGHT)) as responses:
            yield from responses
        for block in cut((stop, reader.size), REQUEST_BYTES):  # only if the slice's last line is long
            yield reader.read([block])[0]
    except ObjectChangedError as error:
        raise ObjectChangedError(
            f"{redacted(piece.uri)}: changed since it was planned; plan it again ({error})"
        ) from error


def _reader(name: str) -> Any:
    """Return a module beside this one, imported only when needed: pyarrow takes a moment, and may be missing."""
    from binidx.prepare.text import arrow_reader, parquet_reader

    return {"arrow": arrow_reader, "parquet": parquet_reader}[name]


@dataclass(frozen=True)
class InputFormat:
    """Row of the table of input formats.

    Attributes:
        suffixes: ends of object names; empty: only `format` names it.
        find_blocks: returns the blocks at which an object can be cut; None: the format has none.
        decompress: yields plain bytes from stored ones; None: the format is stored plain, or has no plain bytes.
        read: yields the batches of a slice.
        in_folders: whether the files of a folder with these suffixes are inputs.
    """

    suffixes: tuple[str, ...]
    find_blocks: Callable[[RangeReader], tuple[InputBlock, ...]] | None = None
    decompress: Callable[[Pieces, Slice], Iterator[Any]] | None = None
    read: Callable[[ReadRequest], Batches] = _read_parsed_lines
    in_folders: bool = True


TEXT_FORMATS = {
    "jsonl": InputFormat((".jsonl", ".json", ".ndjson")),
    "csv": InputFormat((".csv",), read=partial(_read_parsed_records, parse=parse_csv), in_folders=False),
    "txt": InputFormat((), read=partial(_read_parsed_lines, parse=parse_text_lines)),
    "txt-file": InputFormat((), read=partial(_read_parsed_records, parse=parse_text_file)),
    "warc": InputFormat((".warc", ".wet"), read=partial(_read_parsed_records, parse=parse_warc)),
}
"""Formats of plain bytes, each also compressed by gzip and zstd."""


def _compressed(name: str, row: InputFormat) -> dict[str, InputFormat]:
    gz, zst = (tuple(suffix + end for suffix in row.suffixes) for end in (".gz", ".zst"))
    blocks = find_zstd_blocks if name in CUT_ANYWHERE else None
    return {
        name: row,
        f"{name}.gz": replace(row, suffixes=gz, decompress=decompress_gzip),
        f"{name}.zst": replace(row, suffixes=zst, find_blocks=blocks, decompress=decompress_zstd),
    }


FORMATS: dict[str, InputFormat] = {
    **{key: value for name, row in TEXT_FORMATS.items() for key, value in _compressed(name, row).items()},
    "parquet": InputFormat(
        (".parquet",),
        lambda reader: _reader("parquet").parquet_blocks(reader),
        read=lambda request: _reader("parquet").read_parquet(request),
    ),
    "arrow": InputFormat((".arrow",), read=lambda request: _reader("arrow").read_arrow_rows(request)),
}
"""Name of an input format -> its functions. A new format is a module with these functions and a row here."""
