"""Arrays of an index while they are built: straight into the files they end in, where that can be.

    where           array                       is built in                         which is then
    a local disk    filled in order, or small   the mapped file, page cache         renamed
      enough to be  shuffled in place
    a local disk    shuffled in place, larger   anonymous memory                    written in order and given back
    remote          any                         a nameless file, in the index_dir   sent, and kept for the node
    any             of 256 KiB at most          anonymous memory                    written
    nowhere         any                         anonymous memory                    kept

Anonymous memory of a build for a local disk: nothing but the one array that is shuffled in place, if it is larger than
SHUFFLED_IN_FILE, and what the building function itself takes. Pages of a file that are dirtied at random, over and
over, are written to the disk as often, and the writer is made to wait: a shuffle of 4 GB took 70 s so, instead of 4.
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
from binidx.index.cache.index_files import npy_of, parse_npy
from binidx.index.cache.manifest import StoredArray
from binidx.storage.cache.layout import directory_of_index
from binidx.storage.interfaces import Writer
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import READ_AT_ONCE
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.publish import create_file, create_object
from binidx.storage.writing.upload import keep_sent, send_object

SHUFFLED_IN_FILE = 1 << 30


"""Bytes of the largest array that is shuffled inside its file; the kernel begins to write back at a tenth of memory."""


SENT_FROM_MEMORY = 64 << 20


BLOCK_BYTES = 16 << 20


MADV_POPULATE_WRITE = 23


"""All pages at once, 2 us each instead of 4 (Linux 5.14; elsewhere each comes when it is touched)."""


Arrays = dict[str, NDArray[Any]]


Build = Callable[["Building"], None]


class Building:
    """What a building function gets to put its arrays into.

    Args:
        uri_of: from a name to where its `.npy` goes; None keeps all in memory.
        storage_options: passed to fsspec.
        tell: called with `stored` when there is more of it.

    Attributes:
        arrays: those that are done, read-only.
        stored: what was published of each.
        failure: why one, or all together, were not; the arrays are right without it.
    """

    def __init__(
        self,
        uri_of: Callable[[str], str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        tell: Callable[[Mapping[str, StoredArray]], None] = lambda stored: None,
    ) -> None:
        self.uri_of, self.storage_options, self.tell = uri_of, storage_options, tell
        self.arrays: Arrays = {}
        self.stored: dict[str, StoredArray] = {}
        self.failure: Exception | None = None

    @contextlib.contextmanager
    def array(
        self, name: str, shape: tuple[int, ...], dtype: DTypeLike, *, in_order: bool = True
    ) -> Iterator[NDArray[Any]]:
        """An array to be filled in the block, and published at its end.

        Args:
            in_order: it is filled from one end to the other; False: here and there, over and over.

        Raises:
            IndexBuildError: it fits neither the disk nor memory.
        """
        if self.uri_of is None or self.failure:
            array = np.empty(shape, dtype)
            yield array
            self._keep(name, array)
            return
        npy, filled = npy_of(shape, dtype), False
        try:
            uri = self.uri_of(name)
            with _mapped_file(uri, npy.size, in_order, self._directory_here()) as mapped:
                # NumPy asks for huge pages where the memory is large.
                buffer = np.empty(npy.size, np.uint8).data if mapped is None else memoryview(mapped)
                array = npy.begin(buffer)
                yield array
                filled = True
                self._keep(name, array)
                if not self.failure:
                    digest, identity = self._finish(uri, name, buffer, mapped is None)
                    self.stored[name] = StoredArray(npy.dtype.str, npy.shape, npy.size, digest, identity)
                    self.tell(self.stored)
        except (OSError, NotImplementedError) as error:
            if not filled:
                raise
            self.failure = error

    @contextlib.contextmanager
    def scratch(self, size: int, dtype: DTypeLike) -> Iterator[NDArray[Any]]:
        """An array for the time of the block, shape (size,); a large one is page cache of a nameless file."""
        num_bytes = size * np.dtype(dtype).itemsize
        with contextlib.ExitStack() as stack:
            buffer = None
            if num_bytes > SENT_FROM_MEMORY:
                with contextlib.suppress(OSError):
                    buffer = stack.enter_context(_nameless(num_bytes, self._directory_here()))
            yield np.empty(size, dtype) if buffer is None else np.frombuffer(buffer, dtype)

    def _directory_here(self) -> str | None:
        """Where what is built for a store lies until it is sent: a disk of this node, and no file system in memory."""
        found = directory_of_index(ReadSettings.of(self.storage_options))
        return found[0] if found and os.path.isdir(found[0]) else None

    def _keep(self, name: str, array: NDArray[Any]) -> None:
        array.flags.writeable = False
        self.arrays[name] = array

    def _finish(self, uri: str, name: str, buffer: memoryview, in_memory: bool) -> tuple[str, dict[str, Any] | None]:
        """Send the bytes if they are not in place; returns their checksum, and the identity that the store gave."""
        path = local_path(uri)
        if path is None:
            identity = send_object(uri, buffer, self.storage_options)
            if kept := keep_sent(uri, buffer, identity, self.storage_options):
                # The copy that all processes of the node map; what it was built in goes.
                self._keep(name, parse_npy(kept))
            return xxhash.xxh3_64_hexdigest(buffer), identity
        if not in_memory:
            return xxhash.xxh3_64_hexdigest(buffer), None
        if len(buffer) <= READ_AT_ONCE:
            with create_object(uri, self.storage_options, durable=False) as out:
                return _write(out, buffer), None
        with create_file(path, len(buffer), durable=False) as file:
            digest = _write(file, buffer)
            mapped = file.map()
        # By its map and not by its name, which another builder may have taken.
        self._keep(name, parse_npy(memoryview(mapped)))
        return digest, None


def _write(out: Writer, buffer: memoryview) -> str:
    digest = xxhash.xxh3_64()
    for first in range(0, len(buffer), BLOCK_BYTES):
        block = buffer[first : first + BLOCK_BYTES]
        digest.update(block)
        out.write(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _mapped_file(uri: str, size: int, in_order: bool, directory: str | None) -> Iterator[mmap.mmap | None]:
    """The mapped file that it will be, or leaves from; None where memory is the place, or the disk has no room."""
    path = local_path(uri)
    with contextlib.ExitStack() as stack:
        mapped = None
        if _belongs_in_file(path, size, in_order):
            try:
                mapped = stack.enter_context(_placed(path, size) if path else _nameless(size, directory))
            except OSError as error:
                _check_memory(uri, size, error)
        if mapped is not None and size <= SHUFFLED_IN_FILE:
            with contextlib.suppress(OSError):
                mapped.madvise(MADV_POPULATE_WRITE)
        yield mapped


def _belongs_in_file(path: str | None, size: int, in_order: bool) -> bool:
    if path is None:
        return size > SENT_FROM_MEMORY
    return size > READ_AT_ONCE and (in_order or size <= SHUFFLED_IN_FILE)


@contextlib.contextmanager
def _placed(path: str, size: int) -> Iterator[mmap.mmap]:
    with create_file(path, size, durable=False) as file:
        yield file.map()


@contextlib.contextmanager
def _nameless(size: int, directory: str | None) -> Iterator[mmap.mmap]:
    """A mapped file that goes when its last array does."""
    with tempfile.TemporaryFile(buffering=0, dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        yield mmap.mmap(file.fileno(), size)


def _check_memory(uri: str, size: int, error: OSError) -> None:
    """Memory is the other place for an array that found none on the disk; the kernel would kill who takes too much."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
        if found and int(found[1]) * 1024 < size:
            available = int(found[1]) * 1024
            raise IndexBuildError(f"{uri}: {available} bytes of memory, needs {size}, or a disk: {error}") from error
