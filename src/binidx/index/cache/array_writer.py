"""Arrays of an index while they are built: straight in the files they end in, where possible.

    index in        array                       is built in                         and then
    a local disk    filled in order, or small   the mapped file, page cache         renamed
      enough to be  shuffled in place
    a local disk    shuffled in place, larger   anonymous memory                    written in order, memory freed
    a store         any                         a nameless file, in the index_dir   sent, and cached for the node
    any             of 256 KiB at most          anonymous memory                    written
    no cache        any                         anonymous memory                    returned
    a full disk     of 64 MiB at most           anonymous memory                    returned; a larger one is an error

Anonymous memory of a build for a local disk: only the one array that is shuffled in place, if it is larger than
SHUFFLED_IN_FILE, and the memory of the building function itself. Pages of a file that are dirtied at random are written
to the disk again and again, and the kernel stops the writer meanwhile: a shuffle of 4 GB took 70 s so, instead of 4.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from binidx.errors import IndexBuildError
from binidx.forks import cached_property
from binidx.index.cache.index_files import Arrays, IndexFiles, NpyLayout, parse_npy
from binidx.index.cache.manifest import StoredArray
from binidx.index.documents import FEWER_SAMPLES, new_array
from binidx.storage.cache.block_files import directory_of_index
from binidx.storage.interfaces import Writer
from binidx.storage.location import Location
from binidx.storage.open import cache_whole
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import SMALL_FILE
from binidx.storage.writing.publish import create_file, create_object, send_object

SHUFFLED_IN_FILE = 1 << 30
"""Bytes of the largest array that is shuffled inside its file; the kernel begins to write back at a tenth of memory."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
HASHED_BYTES = 16 << 20


class ArrayWriter:
    """Allocator of the arrays of an index, which publishes each complete array; implements `ArrayAllocator`.

    Args:
        files: of the index; None keeps all arrays in memory.
        shuffled_in_file: bytes of the largest array that is shuffled inside its file.
        in_memory: bytes of the largest array for a store, or for a time, that is kept in memory.

    Attributes:
        arrays: the complete arrays by name, read-only.
        stored: manifest entries of the published arrays.
        failure: error that kept an array, or the index, from being published; the arrays are right all the same.
    """

    def __init__(
        self, files: IndexFiles | None = None, *, shuffled_in_file: int = SHUFFLED_IN_FILE, in_memory: int = 64 << 20
    ) -> None:
        self.files, self._shuffled_in_file, self._in_memory = files, shuffled_in_file, in_memory
        self.arrays: Arrays = {}
        self.stored: dict[str, StoredArray] = {}
        self.failure: Exception | None = None

    @cached_property
    def _directory(self) -> str | None:
        """This node's directory of index files; None if they are kept in memory."""
        return directory_of_index(self.files.directory.settings if self.files else ReadSettings.of(None))

    @contextlib.contextmanager
    def array(
        self, name: str, shape: tuple[int, ...], dtype: DTypeLike, *, in_order: bool = True
    ) -> Iterator[NDArray[Any]]:
        """Yield an array to fill in the block, and publish it at the end of the block; see `ArrayAllocator`.

        Raises:
            IndexBuildError: the array fits neither the disk nor memory; or it is large, does not fit the disk, and
            index files in memory were not asked for (`index_dir`).
        """
        if self.files is None:
            yield (array := new_array(name, shape, dtype))
            self._add(name, array)
            return
        npy, file, filled = NpyLayout(shape, dtype), self.files.array_file(name), False
        check = partial(self._check_wanted_in_memory, file, npy.size)
        if self.failure:
            check(self.failure)
            yield (array := new_array(name, shape, dtype))
            self._add(name, array)
            return
        try:
            with self._map_file(file, npy.size, in_order, check) as mapped:
                # NumPy asks for huge pages where the memory is large.
                buffer = new_array(name, (npy.size,), np.uint8).data if mapped is None else memoryview(mapped)
                array = npy.begin(buffer)
                yield array
                filled = True
                self._add(name, array)
                if not self.failure:
                    digest, identity = self._publish(file, name, buffer, mapped is None)
                    self.stored[name] = StoredArray(npy.dtype.str, npy.shape, npy.size, digest, identity)
        except (OSError, NotImplementedError) as error:
            if not filled:
                raise
            if file.local_path is not None:
                check(error)
            self.failure = error

    @contextlib.contextmanager
    def scratch(self, size: int, dtype: DTypeLike) -> Iterator[NDArray[Any]]:
        """Yield an array of shape (size,) for the time of the block; a large one is mapped from an unnamed file.

        Args:
            size: number of elements.
            dtype: of the elements; their values are undefined.
        """
        num_bytes = size * np.dtype(dtype).itemsize
        with contextlib.ExitStack() as stack:
            buffer = None
            if num_bytes > self._in_memory:
                with contextlib.suppress(OSError, OverflowError):
                    buffer = stack.enter_context(_map_nameless_file(num_bytes, self._local_directory()))
            yield new_array("blend", (size,), dtype) if buffer is None else np.frombuffer(buffer, dtype)

    @contextlib.contextmanager
    def _map_file(self, file: Location, size: int, in_order: bool, check: Any) -> Iterator[mmap.mmap | None]:
        """Yield the mapped file to build an array in; None if it is to be built in memory, or if the disk is full.

        Args:
            check: called with the error of a disk; raises if the array is not to be built in memory instead.
        """
        path, in_order = file.local_path, in_order or size <= self._shuffled_in_file
        with contextlib.ExitStack() as stack:
            mapped = None
            if size > self._in_memory if path is None else size > SMALL_FILE and in_order:
                try:
                    if path is None:
                        mapped = stack.enter_context(_map_nameless_file(size, self._local_directory()))
                    else:
                        mapped = stack.enter_context(create_file(path, size, durable=False)).map()
                except (OSError, OverflowError) as error:
                    check(error)
                    _check_memory(file, size, error)
            yield mapped

    def _local_directory(self) -> str | None:
        """Return this node's directory of index files, where arrays for a store are built; None if it is missing."""
        return self._directory if self._directory and os.path.isdir(self._directory) else None

    def _check_wanted_in_memory(self, file: Location, size: int, error: Exception | None) -> None:
        """Raise IndexBuildError if the disk is full for a large array, and memory was not asked for.

        Each process of the node would build one of its own.
        """
        causes = [cause for cause in (error, error and error.__cause__) if isinstance(cause, OSError)]
        reason = next((cause.strerror for cause in causes if cause.errno in FULL), None)
        if self._directory is None or size <= self._in_memory or reason is None:
            return
        path, directory = file.local_path, self._local_directory() or tempfile.gettempdir()
        place = directory if path is None else os.path.dirname(os.path.abspath(path))
        space = f"need {size:,}"
        with contextlib.suppress(OSError):
            space = f"found {shutil.disk_usage(place).free:,} bytes free, {space}"
        raise IndexBuildError(
            f"{file}: no room in {place} ({reason}; {space}); make room, or name another path_to_cache, or for indices "
            "in a store a larger BINIDX_INDEX_DIR. BINIDX_INDEX_DIR=off builds it in the memory of each process"
        ) from error

    def _add(self, name: str, array: NDArray[Any]) -> None:
        array.flags.writeable = False
        self.arrays[name] = array

    def _publish(
        self, file: Location, name: str, buffer: memoryview, in_memory: bool
    ) -> tuple[str, dict[str, Any] | None]:
        """Publish the bytes of a `.npy` file, unless they are in their local file already.

        Returns:
            The checksum of the bytes, and the identity of the object; None for a local file.
        """
        path = file.local_path
        if path is None:
            identity = send_object(file, buffer)
            if copy := cache_whole(file, buffer, identity):
                # All processes of the node map this copy; the buffer is freed.
                self._add(name, parse_npy(copy))
            return xxhash.xxh3_64_hexdigest(buffer), identity
        if not in_memory:
            return xxhash.xxh3_64_hexdigest(buffer), None
        if len(buffer) <= SMALL_FILE:
            with create_object(file, durable=False) as out:
                return _write_hashed(out, buffer), None
        with create_file(path, len(buffer), durable=False) as staged:
            digest = _write_hashed(staged, buffer)
            mapped = staged.map()
        # By its map and not by its name, which another builder may have taken.
        self._add(name, parse_npy(memoryview(mapped)))
        return digest, None


def build_in_memory(build: Callable[[ArrayWriter], None]) -> Arrays:
    """Return the arrays that `build` fills, of an index that is not cached."""
    build(writer := ArrayWriter())
    return writer.arrays


def _write_hashed(out: Writer, buffer: memoryview) -> str:
    digest = xxhash.xxh3_64()
    for first in range(0, len(buffer), HASHED_BYTES):
        block = buffer[first : first + HASHED_BYTES]
        digest.update(block)
        out.write(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _map_nameless_file(size: int, directory: str | None) -> Iterator[mmap.mmap]:
    """Yield a mapped file without a name, which is removed when its last array is freed."""
    with tempfile.TemporaryFile(buffering=0, dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        yield mmap.mmap(file.fileno(), size)


def _check_memory(location: Location, size: int, error: Exception) -> None:
    """Raise IndexBuildError where memory is too small for an array that the disk has no space for.

    Without this check the kernel would kill a process that takes too much.
    """
    with contextlib.suppress(OSError):
        line = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        if line and (available := int(line[1]) * 1024) < size:
            raise IndexBuildError(
                f"{location}: found {available} bytes of memory, need {size}, or a disk: {error}; {FEWER_SAMPLES}"
            ) from error
