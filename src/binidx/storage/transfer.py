"""Whole objects rather than ranges of them: into memory at once, or in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from binidx.json_models import JsonFile
from binidx.storage.backends import open_object
from binidx.storage.disk_cache import DiskCache
from binidx.storage.fsspec_object import MAX_REQUEST
from binidx.storage.local_file import LocalFile
from binidx.storage.ranges import RangeReader, cut

ROUND_BYTES = 64 << 20
"""Read at once, over several connections: what is in memory of an object that is streamed."""


def stream(reader: RangeReader, stop: int | None = None) -> Iterator[memoryview]:
    """The bytes of an object in order, up to `stop`, in views of up to 8 MiB and rounds of 64."""
    for around in cut((0, reader.size if stop is None else stop), ROUND_BYTES):
        yield from reader.read(cut(around, MAX_REQUEST))


def read_whole(reader: RangeReader) -> memoryview:
    """All bytes of an object: a view of the map when it lies on a disk, else of one buffer filled part by part."""
    if isinstance(reader, (LocalFile, DiskCache)):
        return reader.read([(0, reader.size)])[0]
    buffer, filled = memoryview(bytearray(reader.size)), 0
    for part in stream(reader):
        buffer[filled : filled + len(part)] = part
        filled += len(part)
    return buffer.toreadonly()


def read_document(file: JsonFile[Any], uri: str, storage_options: Mapping[str, Any] | None) -> bytes:
    """Return all bytes of a file that must fit into memory, past every cache.

    Raises:
        BinidxError: the file's own error, if it is too large to be of this kind.
        ObjectNotFoundError: there is no such file.
    """
    reader = open_object(uri, storage_options=storage_options, cache=False)
    file.check_size(reader.size, uri)
    return bytes(read_whole(reader))
