"""Stored bytes of a slice in order, read ahead of the parser, and only from the object that was planned.

local       1 MiB at a time, in the caller's thread: the kernel reads ahead
remote      2 MiB a request, 4 in flight: at 30 ms to the first byte and 100 MB/s a connection that is 165 MB/s, more
            than one of the two workers of a core tokenises; 9 MiB of memory
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from binidx.errors import ObjectChangedError, redacted
from binidx.prepare.text.slices import Extent, Slice
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_stored
from binidx.storage.ranges import cut
from binidx.storage.requests.head import recorded_object
from binidx.storage.stores.identity import same_identity
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import map_in_flight

Options = Mapping[str, Any] | None
LOCAL_BYTES = 1 << 20
REQUEST_BYTES = 2 << 20
IN_FLIGHT = 4
LINE_BYTES = 64 << 10
"""Bytes past the end of a slice in its last request; the slice's last line mostly ends there."""


@dataclass(frozen=True)
class ReadRequest:
    """Arguments of an input format's reader.

    Attributes:
        piece: slice to read.
        keys: of the texts.
        fields: further columns to return, for ids and filters.
        batch_bytes: approximate plain bytes of a batch; a longer line has a batch of its own.
        max_line_bytes: limit of a line with its newline.
        options: storage options.
        extent: updated with the part of the input that was read.
    """

    piece: Slice
    keys: Sequence[str]
    fields: Sequence[str]
    batch_bytes: int
    max_line_bytes: int
    options: Options
    extent: Extent


def stream_stored_bytes(piece: Slice, options: Options = None) -> Generator[bytes | memoryview]:
    """Yield the stored bytes from the slice's start to the end of the object; close the generator to stop earlier.

    Raises:
        ObjectChangedError: the object is not the planned one.
        StorageError: the store fails.
    """
    path = local_path(piece.uri)
    return _stream_file(piece, path) if path is not None else _stream_object(piece, options)


def check_identity(piece: Slice, identity: Mapping[str, Any]) -> None:
    """Raise ObjectChangedError unless this is the identity of the planned object."""
    if not same_identity(piece.identity, identity):
        planned, found = (", ".join(f"{k} {v}" for k, v in each.items()) for each in (piece.identity, identity))
        raise ObjectChangedError(
            f"{redacted(piece.uri)}: changed since it was planned (found {found}, need {planned}); plan it again"
        )


def check_unmodified(piece: Slice) -> None:
    """Raise ObjectChangedError if a local file was modified during the read; remote reads are pinned to a version."""
    path = local_path(piece.uri)
    if path is not None and os.path.exists(path):
        check_identity(piece, file_identity(os.stat(path)))


def file_identity(status: os.stat_result) -> dict[str, Any]:
    """Return the identity of a local file, as its reader has it."""
    return {"size": status.st_size, "mtime": status.st_mtime}


def _stream_file(piece: Slice, path: str) -> Generator[bytes]:
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
        yield from _stream_rest(reader, stop)
    except ObjectChangedError as error:
        raise ObjectChangedError(
            f"{redacted(piece.uri)}: changed since it was planned; plan it again ({error})"
        ) from error


def _stream_rest(reader: RangeReader, start: int) -> Iterator[memoryview]:
    """Send one request after the other, each twice as long: the end of the slice's last line is near."""
    step = 4 * LINE_BYTES
    while start < reader.size:
        stop = min(start + step, reader.size)
        yield reader.read([(start, stop)])[0]
        start, step = stop, min(2 * step, REQUEST_BYTES)
