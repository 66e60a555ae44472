"""Arrays of an index while they are built: straight in the files they end in, where possible.

    index in        array                       is built in                         and then
    a local disk    filled in order, or small   the mapped file, page cache         renamed
      enough to be  shuffled in place
    a local disk    shuffled in place, larger   anonymous memory                    written in order, memory freed
    a store         any                         a nameless file, in the index_dir   sent, and cached for the node
    any             of 256 KiB at most          anonymous memory                    written
    no cache        any                         anonymous memory                    returned

Anonymous memory of a build for a local disk: only the one array that is shuffled in place, if it is larger than
SHUFFLED_IN_FILE, and the memory of the building function itself. Pages of a file that are dirtied at random are written
to the disk again and again, and the kernel stops the writer meanwhile: a shuffle of 4 GB took 70 s so, instead of 4.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from binidx.errors import IndexBuildError
from binidx.index.cache.index_files import Arrays, NpyLayout, parse_npy
from binidx.index.cache.manifest import StoredArray
from binidx.storage.cache.block_files import directory_of_index
from binidx.storage.interfaces import Writer
from binidx.storage.open import cache_whole
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import READ_AT_ONCE
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.publish import create_file, create_object, send_object

SHUFFLED_IN_FILE = 1 << 30
"""Bytes of the largest array that is shuffled inside its file; the kernel begins to write back at a tenth of memory."""

SENT_FROM_MEMORY = 64 << 20
BLOCK_BYTES = 16 << 20


class ArrayWriter:
    """Allocator of the arrays of an index, which publishes each complete array; implements `ArrayAllocator`.

    Args:
        array_uri: returns the URI of the `.npy` file of the array with a given name; None keeps all arrays in memory.
        storage_options: passed to fsspec.

    Attributes:
        arrays: the complete arrays by name, read-only.
        stored: manifest entries of the published arrays.
        failure: error that kept an array, or the index, from being published; the arrays are right all the same.
    """

    def __init__(
        self, array_uri: Callable[[str], str] | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self.array_uri, self.storage_options = array_uri, storage_options
        self.arrays: Arrays = {}
        self.stored: dict[str, StoredArray] = {}
        self.failure: Exception | None = None

    @contextlib.contextmanager
    def array(
        self, name: str, shape: tuple[int, ...], dtype: DTypeLike, *, in_order: bool = True
    ) -> Iterator[NDArray[Any]]:
        """Yield an array to fill in the block, and publish it at the end of the block; see `ArrayAllocator`.

        Raises:
            IndexBuildError: the array fits neither the disk nor memory.
        """
        if self.array_uri is None or self.failure:
            array = np.empty(shape, dtype)
            yield array
            self._add(name, array)
            return
        npy, filled = NpyLayout(shape, dtype), False
        try:
            uri = self.array_uri(name)
            with _map_file(uri, npy.size, in_order, self._local_directory()) as mapped:
                # NumPy asks for huge pages where the memory is large.
                buffer = np.empty(npy.size, np.uint8).data if mapped is None else memoryview(mapped)
                array = npy.begin(buffer)
                yield array
                filled = True
                self._add(name, array)
                if not self.failure:
                    digest, identity = self._publish(uri, name, buffer, mapped is None)
                    self.stored[name] = StoredArray(npy.dtype.str, npy.shape, npy.size, digest, identity)
        except (OSError, NotImplementedError) as error:
            if not filled:
                raise
            self.failure = error

    @contextlib.contextmanager
    def scratch(self, size: int, dtype: DTypeLike) -> Iterator[NDArray[Any]]:
        """Yield an array of shape (size,) for the time of the block; a large one is mapped from an unnamed file."""
        num_bytes = size * np.dtype(dtype).itemsize
        with contextlib.ExitStack() as stack:
            buffer = None
            if num_bytes > SENT_FROM_MEMORY:
                with contextlib.suppress(OSError):
                    buffer = stack.enter_context(_map_nameless_file(num_bytes, self._local_directory()))
            yield np.empty(size, dtype) if buffer is None else np.frombuffer(buffer, dtype)

    def _local_directory(self) -> str | None:
        """Return this node's directory of index files, where arrays for a store are built; None if it is missing."""
        found = directory_of_index(ReadSettings.of(self.storage_options))
        return found[0] if found and os.path.isdir(found[0]) else None

    def _add(self, name: str, array: NDArray[Any]) -> None:
        array.flags.writeable = False
        self.arrays[name] = array

    def _publish(self, uri: str, name: str, buffer: memoryview, in_memory: bool) -> tuple[str, dict[str, Any] | None]:
        """Publish the bytes of a `.npy` file, unless they are in their local file already.

        Returns:
            The checksum of the bytes, and the identity of the object; None for a local file.
        """
        path = local_path(uri)
        if path is None:
            identity = send_object(uri, buffer, self.storage_options)
            if copy := cache_whole(uri, buffer, identity, self.storage_options):
                # All processes of the node map this copy; the buffer is freed.
                self._add(name, parse_npy(copy))
            return xxhash.xxh3_64_hexdigest(buffer), identity
        if not in_memory:
            return xxhash.xxh3_64_hexdigest(buffer), None
        if len(buffer) <= READ_AT_ONCE:
            with create_object(uri, self.storage_options, durable=False) as out:
                return _write_hashed(out, buffer), None
        with create_file(path, len(buffer), durable=False) as file:
            digest = _write_hashed(file, buffer)
            mapped = file.map()
        # By its map and not by its name, which another builder may have taken.
        self._add(name, parse_npy(memoryview(mapped)))
        return digest, None


def _write_hashed(out: Writer, buffer: memoryview) -> str:
    digest = xxhash.xxh3_64()
    for first in range(0, len(buffer), BLOCK_BYTES):
        block = buffer[first : first + BLOCK_BYTES]
        digest.update(block)
        out.write(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _map_file(uri: str, size: int, in_order: bool, directory: str | None) -> Iterator[mmap.mmap | None]:
    """Yield the mapped file to build an array in; None if it is to be built in memory, or if the disk is full."""
    path = local_path(uri)
    in_file = (
        size > SENT_FROM_MEMORY if path is None else size > READ_AT_ONCE and (in_order or size <= SHUFFLED_IN_FILE)
    )
    with contextlib.ExitStack() as stack:
        mapped = None
        if in_file:
            try:
                if path is None:
                    mapped = stack.enter_context(_map_nameless_file(size, directory))
                else:
                    mapped = stack.enter_context(create_file(path, size, durable=False)).map()
            except OSError as error:
                _check_memory(uri, size, error)
        yield mapped


@contextlib.contextmanager
def _map_nameless_file(size: int, directory: str | None) -> Iterator[mmap.mmap]:
    """Yield a mapped file without a name, which is removed when its last array is freed."""
    with tempfile.TemporaryFile(buffering=0, dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        yield mmap.mmap(file.fileno(), size)


def _check_memory(uri: str, size: int, error: OSError) -> None:
    """Raise IndexBuildError where memory is too small for an array that the disk has no space for.

    Without this check the kernel would kill a process that takes too much.
    """
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        if found and (available := int(found[1]) * 1024) < size:
            raise IndexBuildError(
                f"{uri}: found {available} bytes of memory, need {size}, or a disk: {error}"
            ) from error
