"""The stored bytes of a slice in order, read ahead of who uses them.

local       1 MiB at a time, in the caller's thread: the kernel reads ahead
remote      2 MiB a request, 4 in flight: at 30 ms to the first byte and 100 MB/s a connection that is 165 MB/s, more
            than one of the two workers of a core tokenises; 9 MiB of memory. 1.5 ms of CPU a MB with its lines
            parsed, of the 6 that a job takes with the fastest engine on words that it has met

A slice as batches of documents: the one entry for all formats.

for text, title in read_slice(piece, ["text", "title"]):     one Batch for each key
    for problem in text.problems: ...                        said once: it is the same list in both
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from binidx.errors import ConfigError, ObjectChangedError, redacted
from binidx.prepare.text.batch import Batch, Filters, Strings, only, only_strings
from binidx.prepare.text.decompress import gunzipped, unzstd
from binidx.prepare.text.jsonl import LineReader, own_bytes, whole_lines
from binidx.prepare.text.slices import GZIP, JSONL, PARQUET, ZSTD, Extent, Slice
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_stored
from binidx.storage.ranges import cut
from binidx.storage.requests.head import recorded_object
from binidx.storage.stores.identity import same_identity
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.copy import map_in_flight

LOCAL_BYTES = 1 << 20


REQUEST_BYTES = 2 << 20


IN_FLIGHT = 4


LINE_BYTES = 64 << 10


"""Read past the end of a slice with its last request: where its last line ends, mostly."""


Options = Mapping[str, Any] | None


def stored_pieces(piece: Slice, options: Options = None) -> Generator[bytes | memoryview]:
    """What is stored from the slice's first byte to the end of the object: close it when you have what you need.

    Raises:
        ObjectChangedError: the object is not the one that was planned.
        StorageError: it cannot be read.
    """
    path = local_path(piece.uri)
    return _of_file(piece, path) if path is not None else _as_planned(piece, options)


def check_same(piece: Slice, now: Mapping[str, Any]) -> None:
    """ObjectChangedError unless it is what was planned."""
    if not same_identity(piece.identity, now):
        was, found = (", ".join(f"{k} {v}" for k, v in each.items()) for each in (piece.identity, now))
        uri = redacted(piece.uri)
        raise ObjectChangedError(f"{uri}: changed since it was planned ({was}, now {found}); plan it again")


def check_read(piece: Slice) -> None:
    """ObjectChangedError if a local file was written to while it was read; what is remote is pinned as it is read."""
    path = local_path(piece.uri)
    if path is not None and os.path.exists(path):
        check_same(piece, file_identity(os.stat(path)))


def file_identity(found: os.stat_result) -> dict[str, Any]:
    """As `LocalFile.identity`."""
    return {"size": found.st_size, "mtime": found.st_mtime}


def _of_file(piece: Slice, path: str) -> Generator[bytes]:
    opened = open_stored(path)
    check_same(piece, opened.identity)  # type: ignore[attr-defined]
    with open(path, "rb", buffering=0) as file:
        file.seek(piece.stored)
        while data := file.read(LOCAL_BYTES):
            yield data


def _as_planned(piece: Slice, options: Options) -> Generator[memoryview]:
    try:
        yield from _of_store(piece, options)
    except ObjectChangedError as error:
        uri = redacted(piece.uri)
        raise ObjectChangedError(f"{uri}: changed since it was planned; plan it again ({error})") from error


def _of_store(piece: Slice, options: Options) -> Generator[memoryview]:
    # The plan knows the object: requests are pinned to that one, and it need not be asked for first.
    reader = open_stored(piece.uri, storage_options=options, found=recorded_object(piece.uri, piece.identity))
    check_same(piece, reader.identity)  # type: ignore[attr-defined]
    stop = min(piece.stored + piece.num_bytes + LINE_BYTES, reader.size)
    ranges = cut((piece.stored, stop), REQUEST_BYTES)
    with closing(map_in_flight(lambda where: reader.read([where])[0], ranges, IN_FLIGHT)) as read:
        yield from read
    yield from _further(reader, stop)


def _further(reader: RangeReader, start: int) -> Iterator[memoryview]:
    """One request after the other, each twice as long."""
    step = 4 * LINE_BYTES
    while start < reader.size:
        stop = min(start + step, reader.size)
        yield reader.read([(start, stop)])[0]
        start, step = stop, min(2 * step, REQUEST_BYTES)


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
        from binidx.prepare.text.parquet_reader import read_parquet

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
        counted = CountedPieces(stored, piece.num_bytes)
        plain = CountedPieces(PLAIN[piece.format](counted, piece), sys.maxsize)
        own = own_bytes(plain, piece.first, piece.last)
        for batches, columns in reader.batches(whole_lines(own, batch_bytes, max_line_bytes)):
            taken = counted.taken()
            yield [each.with_counts(num_bytes=taken) for each in batches], columns
    if plain.ended and piece.stored + counted.given == piece.identity["size"]:
        extent.end = piece.first + plain.given
    check_read(piece)


class CountedPieces:
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
