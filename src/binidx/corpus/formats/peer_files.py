"""Shared parts of the readers and writers of other libraries' formats: options, files and streams of tokens."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import zstandard
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole, stream
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.publish import write_object

Tokens: TypeAlias = NDArray[Any]
"""Tokens of a document, shape (length,)."""

Files: TypeAlias = list[Location]
"""Folder, files or prefix that a writer wrote, for a reader."""

FILE_BYTES = 64 << 20
"""Bytes of a file to write after which the next one begins."""


@dataclass(frozen=True)
class PeerOptions:
    """Options of a reader or writer; those of `import_dataset`.

    Attributes:
        stored_dtype: type of the tokens, where the files do not record it.
        num_tokens: all tokens to write.
        watch: receiver of messages.
    """

    eod: int | None = None
    column: str | None = None
    stored_dtype: np.dtype[Any] | None = None
    num_tokens: int = 0
    watch: ProgressWatcher = field(default_factory=SilentWatcher)

    def required_dtype(self, subject: str) -> np.dtype[Any]:
        """Return the type of the tokens; raise ConfigError if it is not given."""
        if self.stored_dtype is None:
            raise ConfigError(f"stored_dtype: {subject} does not record it; give uint16, uint32 or another")
        return self.stored_dtype


def read_file(location: Location) -> memoryview:
    """Return all bytes of a file."""
    return read_whole(open_object(location, cache=False, codec="raw"))


def array_of(data: bytes | memoryview, dtype: str, location: Location, count: int = -1, offset: int = 0) -> Tokens:
    """Return an array in the bytes of a file; raise FormatError if they are too few."""
    try:
        return np.frombuffer(data, dtype, count, offset)
    except (ValueError, OverflowError) as error:
        raise FormatError(f"{location}: truncated: {error}") from error


@contextmanager
def inflate(uri: str, data: bytes | memoryview, compression: str) -> Iterator[Any]:
    """Open bytes compressed by "zstd" or "gz" as a file of the plain ones; errors of its reads become FormatError."""
    try:
        yield (zstandard.open if compression == "zstd" else gzip.open)(io.BytesIO(data))
    except (zstandard.ZstdError, zlib.error, EOFError, gzip.BadGzipFile, MemoryError) as error:
        raise FormatError(f"{uri}: damaged: {str(error) or 'inflates to more than memory can hold'}") from error


def read_tokens(location: Location, dtype: np.dtype[Any], start: int = 0) -> Iterator[Tokens]:
    """Yield the tokens of a flat file from a byte on, some MiB at a time."""
    reader, left = open_object(location, cache=False, codec="raw"), b""
    if (reader.size - start) % dtype.itemsize:
        raise FormatError(f"{location}: {reader.size - start} bytes of tokens, need a multiple of {dtype.itemsize}")
    for piece in stream(reader, start=start):
        data = left + bytes(piece)
        whole = len(data) - len(data) % dtype.itemsize
        yield np.frombuffer(data[:whole], dtype)
        left = data[whole:]


def split_stream(pieces: Iterable[Tokens], eod: int, *, begins: bool = False) -> Iterator[Tokens]:
    """Yield the documents of a stream of tokens, each with its EOD.

    Args:
        begins: whether an EOD is the first token of a document; else it is the last.
    """
    left: Tokens | None = None
    for piece in pieces:
        joined = piece if left is None else np.concatenate([left, piece])
        cuts = np.flatnonzero(joined == eod) + (not begins)
        *whole, left = np.split(joined, cuts[cuts > 0] if begins else cuts)
        yield from whole
    if left is not None and len(left):
        yield left


def split_at(pieces: Iterable[Tokens], lengths: Iterable[int]) -> Iterator[Tokens]:
    """Yield the documents of these lengths of a stream of tokens."""
    parts, left = iter(pieces), np.empty(0, np.int64)
    for length in lengths:
        held = [left]
        while sum(map(len, held)) < length:
            if (piece := next(parts, None)) is None:
                raise FormatError(f"tokens: end within a document (found {sum(map(len, held))}, need {length})")
            held.append(piece)
        joined = np.concatenate([each for each in held if len(each)] or [left])
        yield joined[:length]
        left = joined[length:]


def format_documents(documents: Iterable[Tokens], dtype: np.dtype[Any], lengths: list[int]) -> Iterator[bytes]:
    """Yield the bytes of each document in tokens of `dtype`; its length is appended to `lengths`."""
    for document in documents:
        lengths.append(len(document))
        yield document.astype(dtype, copy=False).tobytes()


def write_new(location: Location, pieces: Iterable[bytes | memoryview]) -> Location:
    """Write a file that must not exist, and return its location."""
    if object_exists(location):
        raise ObjectExistsError(f"{location}: exists; give another folder, or remove it")
    write_object(location, pieces)
    return location


def group_documents(documents: Iterable[Tokens]) -> Iterator[list[Tokens]]:
    """Yield runs of documents of about FILE_BYTES."""
    group, size = list[Tokens](), 0
    for document in documents:
        group.append(document)
        size += document.nbytes
        if size >= FILE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
