"""`.npy` files as bytes: what numpy.save writes, around an array that lies in the file itself.

offset  bytes  field
0       8      magic `\x93NUMPY`, version 1.0
8       2      u16 H, bytes of the header
10      H      a Python literal: {'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }, spaces, a newline
10+H    ...    the array; 10+H is a multiple of 64, so it is aligned

The files of one index in its directory: what is read is checked against the manifest, what is written replaces.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from binidx.errors import FormatError, ObjectChangedError, StorageError
from binidx.format.ranged_arrays import RangedArray, beneath_copy, open_in_ranges
from binidx.index.cache.manifest import MANIFEST_FILE, Manifest, StoredArray, format_manifest, parse_manifest
from binidx.storage.open import Keep, open_kept, open_object, read_whole
from binidx.storage.requests.head import Found, find_object, recorded_object
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import Threads
from binidx.storage.vectored_reads import read_many
from binidx.storage.writing.publish import create_object, join_uri, put_if_absent, read_small

# As numpy.save writes it: to evaluate the literal, as NumPy does, takes 35 us.
HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|][a-z]\d+)', 'fortran_order': False, "
    rb"'shape': \((\d+,(?: \d+(?:, \d+)*)?|)\), \} *\n",
    re.S,
)


@dataclass(frozen=True)
class Npy:
    """The file of an array of this shape and dtype.

    header: its first bytes.
    size: bytes of the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def header(self) -> bytes:
        out = io.BytesIO()
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(out, described)
        return out.getvalue()

    @property
    def size(self) -> int:
        return len(self.header) + prod(self.shape) * self.dtype.itemsize

    def begin(self, buffer: memoryview) -> NDArray[Any]:
        """The array in a buffer of `size` bytes, whose header is written; what it holds is what the buffer held."""
        header = self.header
        buffer[: len(header)] = header
        return np.frombuffer(buffer, self.dtype, prod(self.shape), len(header)).reshape(self.shape)


def npy_of(shape: tuple[int, ...], dtype: DTypeLike) -> Npy:
    return Npy(shape, np.dtype(dtype))


def parse_npy(buffer: memoryview) -> NDArray[Any]:
    """The array in the bytes of a `.npy` file as numpy.save writes it, without a copy; ValueError for other bytes."""
    dtype, shape, offset = parse_npy_header(buffer)
    return np.frombuffer(buffer, dtype, prod(shape), offset).reshape(shape)


def parse_npy_header(buffer: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """dtype, shape and first byte of the array; ValueError where these are not the first bytes of such a file."""
    found = HEADER.match(buffer[:4096])
    if not found or found.end() != 10 + int.from_bytes(found[1], "little"):
        raise ValueError(f"a .npy that numpy.save did not write: begins with {bytes(buffer[:80])!r}")
    shape = tuple(int(size) for size in found[3].split(b",") if size.strip())
    return np.dtype(found[2].decode()), shape, found.end()


DESCRIPTION, MANIFEST = "description.txt", "binidx.json"


SMALL_BYTES = 64 << 10


HEADER_BYTES = 128


"""Header of a `.npy` that numpy.save writes for up to three dimensions."""


LEFT_SECONDS = 3600.0


STAGING_FILE = re.compile(
    r"[0-9a-f]{32}-.*\.(npy|json|json-claim|json-claim-after-[^.]*|txt)(\.[0-9a-f]{32}\.tmp){1,2}"
)


"""Twice `.tmp`: a whole file that is to be linked to a name is itself written beside its own."""


@dataclass(frozen=True)
class IndexFiles:
    """`{directory}/{name}-{suffix}`: Megatron's names, and a manifest of ours.

    Args:
        directory: URI; made where the store knows directories.
        name: `{hash}-{class}-{split}`.
        storage_options: passed to fsspec.
    """

    directory: str
    name: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def uri(self, suffix: str) -> str:
        return join_uri(self.directory, f"{self.name}-{suffix}")

    def array_uri(self, name: str) -> str:
        return self.uri(f"{name}.npy")

    def named(self, name: str) -> IndexFiles:
        """Those of another index in this directory."""
        return replace(self, name=name)

    def read(self, suffix: str, cache: Keep = False, found: Found | None = None) -> memoryview:
        reader = open_object(self.uri(suffix), storage_options=self.storage_options, cache=cache, found=found)
        return read_whole(reader)

    def write(self, suffix: str, data: bytes) -> None:
        with create_object(self.uri(suffix), self.storage_options, durable=False) as out:
            out.write(data)

    def read_manifest(self) -> Manifest | None:
        """None: there is none.

        Raises:
            FormatError: it is not as we wrote it.
            StorageError: it cannot be read.
        """
        data = self.read_small(MANIFEST)
        return None if data is None else parse_manifest(data, self.uri(MANIFEST))

    def read_small(self, suffix: str) -> bytes | None:
        """All of a file, where the store can in one request; None: there is none."""
        uri = self.uri(suffix)
        if local_path(uri) is not None:
            return read_small(uri)
        found = find_object(uri, self.storage_options, end_bytes=SMALL_BYTES)
        if found is None:
            return None
        if len(found.end) == found.info.size:
            return found.end
        MANIFEST_FILE.check_size(found.info.size, uri)
        return bytes(read_whole(open_object(uri, storage_options=self.storage_options, cache=False, found=found)))

    def _read_stored(self, suffix: str, stored: StoredArray) -> memoryview:
        """Without asking for the object first where the manifest knows it. (A copy of a cache has other ETags.)"""
        if (found := recorded_object(self.uri(suffix), stored.identity)) is not None:
            with contextlib.suppress(ObjectChangedError):
                return self.read(suffix, cache="disk", found=found)
        return self.read(suffix, cache="disk")

    def bring(self, name: str, stored: StoredArray) -> None:
        """Let an array come to this node, whose processes will want it; nothing where it is not kept here."""
        copy = open_kept(self.array_uri(name), stored.identity, self.storage_options)
        if copy is not None:
            read_whole(copy)

    def publish_manifest(self, manifest: Manifest) -> None:
        """Make the arrays count. Of equal ones the first to say so stays; what says anything else is replaced."""
        data = format_manifest(manifest)
        try:
            if put_if_absent(self.uri(MANIFEST), data, self.storage_options):
                return
            standing = self.read_manifest()
        except (FormatError, StorageError, NotImplementedError):
            standing = None  # broken, or a store that knows no conditions
        if standing is None or not _same_index(standing, manifest):
            self.write(MANIFEST, data)

    def remove_leftovers(self) -> None:
        """Remove staging files that killed builders left in a local directory more than an hour ago; never raises.

        Once a process and directory, after the manifest was written: the hour is counted by the clock of its file
        system. A builder that was stopped for so long finds its file gone: it warns that its index is not cached, and
        serves the right arrays. In a store an unfinished upload is invisible, and left to the bucket's rule
        (AbortIncompleteMultipartUpload).
        """
        path = local_path(self.uri(MANIFEST))
        if path is not None:
            with contextlib.suppress(OSError):
                _remove_leftovers(os.path.dirname(os.path.abspath(path)), os.getpid(), os.stat(path).st_mtime)

    def read_arrays(self, arrays: Mapping[str, StoredArray]) -> dict[str, NDArray[Any]]:
        """The arrays as they were published; remote ones at the same time.

        Raises:
            FormatError: another one, or not all of it.
            StorageError: it cannot be read.
        """
        if local_path(self.directory) is not None:
            return {name: self.read_array(name, stored) for name, stored in arrays.items()}
        pending = {name: _submit(partial(self.read_array, name, stored)) for name, stored in arrays.items()}
        return {name: each.result() for name, each in pending.items()}

    def read_array(self, name: str, stored: StoredArray) -> NDArray[Any]:
        content = self._read_stored(f"{name}.npy", stored)
        found = len(content), xxhash.xxh3_64_hexdigest(content)
        if found != (stored.bytes, stored.xxh3_64):
            needed = f"needed {stored.bytes} and {stored.xxh3_64}"
            raise FormatError(f"{self.array_uri(name)}: {found[0]} bytes with XXH3 {found[1]}, {needed}")
        return parse_npy(content)

    def open_arrays(self, names: Sequence[str]) -> tuple[Manifest, dict[str, RangedArray]] | None:
        """The manifest and its arrays, to be read by ranges; None where nothing proves that they belong together.

        The checksum of an array proves nothing before all of it is read. The proof is

            remote    the manifest names the object that took the array's bytes (its ETag): each request says If-Match
            local     both are the same before and after they are opened, and no array changed after the manifest

        so there is none for a copied cache, and in a store that does not identify the object it took.

        Raises:
            FormatError: the manifest is not as it was written, or an array is not as it says.
            ObjectChangedError: an array is not the object that the manifest names.
            StorageError: the store refuses.
        """
        local = local_path(self.directory) is not None
        before = self._marks(names) if local else []
        manifest = self.read_manifest()
        if manifest is None:
            return None
        arrays = {}
        for name in names:
            found = recorded_object(self.array_uri(name), manifest.arrays[name].identity)
            if found is None and not local:
                return None
            arrays[name] = self._open_array(name, manifest.arrays[name], found)
        if local and not (before and before == self._marks(names) and _is_last(before)):
            return None
        _check_headers(arrays)
        return manifest, arrays

    def _open_array(self, name: str, stored: StoredArray, found: Found | None) -> RangedArray:
        uri, dtype = self.array_uri(name), np.dtype(stored.dtype)
        reader = open_in_ranges(uri, self.storage_options, found=found)
        if reader.size != stored.bytes:
            raise FormatError(f"{uri}: {reader.size} bytes, needed {stored.bytes}")
        return RangedArray(reader, stored.bytes - prod(stored.shape) * dtype.itemsize, dtype, stored.shape)

    def _marks(self, names: Sequence[str]) -> list[tuple[int, int, int]]:
        """Inode, size and ctime of the local manifest and arrays; empty where one is missing."""
        uris = [self.uri(MANIFEST), *map(self.array_uri, names)]
        try:
            found = [os.stat(str(local_path(uri))) for uri in uris]
        except OSError:
            return []
        return [(each.st_ino, each.st_size, each.st_ctime_ns) for each in found]


def _is_last(marks: Sequence[tuple[int, int, int]]) -> bool:
    return all(each[2] < marks[0][2] for each in marks[1:])


def _check_headers(arrays: Mapping[str, RangedArray]) -> None:
    """Check the headers in one round trip; its requests raise ObjectChangedError for an array that was replaced."""
    readers = [beneath_copy(each.reader) for each in arrays.values()]
    headers = read_many([(each, [(0, min(HEADER_BYTES, each.size))]) for each in readers])
    for (name, array), [header] in zip(arrays.items(), headers, strict=True):
        found = parse_npy_header(header)
        if found != (array.dtype, array.shape, array.offset):
            raise FormatError(f"{array.reader.uri}: {name} is {found}, needed {array.dtype, array.shape, array.offset}")


_submit = Threads("binidx-index", lambda: 16).submit


def _same_index(one: Manifest, other: Manifest) -> bool:
    def what(manifest: Manifest) -> Any:
        digests = {name: (each.bytes, each.xxh3_64) for name, each in manifest.arrays.items()}
        return manifest.fingerprint, manifest.content, manifest.order, digests

    return bool(what(one) == what(other))


def _remove_leftovers(directory: str, pid: int, now: float) -> None:
    done = _directories_done(pid)
    if directory in done:
        return
    done.add(directory)
    for name in filter(STAGING_FILE.fullmatch, os.listdir(directory)):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime < now - LEFT_SECONDS:
                os.unlink(path)


@lru_cache(maxsize=1)
def _directories_done(pid: int) -> set[str]:
    """Of this process; a fork has its own."""
    return set()
