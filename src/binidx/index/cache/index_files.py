"""Files of one index in its directory: Megatron's `.npy` names, and the manifest of this library.

Arrays are checked against the manifest when they are read, and replace what is there when they are written. A `.npy`
file has the bytes that numpy.save writes, and its array is parsed without a copy:

    offset  bytes  field
    0       8      magic `\\x93NUMPY`, version 1.0
    8       2      u16 H, bytes of the header
    10      H      a Python literal: {'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }, spaces, a newline
    10+H    ...    the array; 10+H is a multiple of 64, so it is aligned
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from binidx.errors import ConfigError, FormatError, ObjectChangedError
from binidx.index.cache.manifest import ALGORITHM, UNNUMBERED, Manifest, StoredArray, parse_manifest
from binidx.storage.cache.seals import Seal, find_seal
from binidx.storage.interfaces import FileVersion
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.ranged_arrays import RangedArray, open_cached_in_blocks
from binidx.storage.ranges import read_many, stored_reader
from binidx.storage.requests.remote_object import Found, read_small, recorded_object
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import write_object

Arrays = dict[str, NDArray[Any]]

DESCRIPTION, MANIFEST = "description.txt", "binidx.json"

# As numpy.save writes it: evaluating the literal, as NumPy does, takes 35 us.
NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|][a-z]\d+)', 'fortran_order': False, "
    rb"'shape': \((\d+,(?: \d+(?:, \d+)*)?|)\), \} *\n",
    re.S,
)
HEADER_BYTES = 128
"""Size of the `.npy` header that numpy.save writes for up to three dimensions."""

LEFT_SECONDS = 3600.0
STAGING_FILE = re.compile(
    r"[0-9a-f]{32}-.*\.(npy|json|json-claim|json-claim-after-[^.]*|txt)(\.[0-9a-f]{32}\.tmp){1,2}"
)
"""Names of staging files. `.tmp` occurs twice if the file that is to be linked to a name was itself being written."""


class NpyLayout:
    """Layout of a `.npy` file: its header, and its size.

    Attributes:
        header: first bytes of the file.
        size: size of the file in bytes.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        out = io.BytesIO()
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(out, described)
        self.header = out.getvalue()
        self.size = len(self.header) + prod(shape) * self.dtype.itemsize

    def begin(self, buffer: memoryview) -> NDArray[Any]:
        """Write the header into a buffer of `size` bytes; return the array after it, a view of the buffer."""
        buffer[: len(self.header)] = self.header
        return np.frombuffer(buffer, self.dtype, prod(self.shape), len(self.header)).reshape(self.shape)


def hash_npy(array: NDArray[Any]) -> str:
    """Return the XXH3 of the `.npy` file of an array, as a manifest has it, in one pass over the array."""
    digest = xxhash.xxh3_64(NpyLayout(array.shape, array.dtype).header)
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def parse_npy(buffer: memoryview) -> NDArray[Any]:
    """Return the array in the bytes of a `.npy` file, without a copy.

    Raises:
        ValueError: numpy.save does not write such bytes.
    """
    dtype, shape, offset = parse_npy_header(buffer)
    return np.frombuffer(buffer, dtype, prod(shape), offset).reshape(shape)


def parse_npy_header(buffer: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return dtype, shape and offset of the array of a `.npy` file, from the first bytes of the file.

    Raises:
        ValueError: numpy.save does not write such bytes.
    """
    header = NPY_HEADER.match(buffer[:4096])
    if not header or header.end() != 10 + int.from_bytes(header[1], "little"):
        raise ValueError(f"no .npy of numpy.save (found {bytes(buffer[:80])!r})")
    shape = tuple(int(size) for size in header[3].split(b",") if size.strip())
    return np.dtype(header[2].decode()), shape, header.end()


@dataclass(frozen=True)
class IndexFiles:
    """Files of one index, `{directory}/{name}-{suffix}`.

    A version with other algorithms than UNNUMBERED writes `{directory}/{name}-{ALGORITHM}-{suffix}`, so that it and the
    version before it replace no file of each other.

    Args:
        directory: created where the store has directories.
        name: `{hash}-{class}-{split}`.
    """

    directory: Location
    name: str

    def file(self, suffix: str) -> Location:
        """Return the location of a file of this version."""
        number = "" if ALGORITHM == UNNUMBERED else f"-{ALGORITHM}"
        return self.directory / f"{self.name}{number}-{suffix}"

    def array_file(self, name: str) -> Location:
        return self.file(f"{name}.npy")

    def read_small(self, suffix: str) -> bytes | None:
        """Return a small file, read in one request; None if it does not exist."""
        return read_small(self.file(suffix), patient=False)  # as a start can do without a cached index

    def write(self, suffix: str, data: bytes) -> None:
        write_object(self.file(suffix), [data], durable=False, patient=False)

    def read_manifest(self) -> Manifest | None:
        """Return the manifest; None if it does not exist.

        Raises:
            FormatError: it is damaged.
            StorageError: it cannot be read.
        """
        file = self.file(MANIFEST)
        data = read_small(file, patient=False)
        return None if data is None else parse_manifest(data, file.uri)

    def remove_staging_files(self) -> None:
        """Remove files that killed builders left in a local directory more than an hour ago; never raises.

        Call it after a file was written to the directory, since the hour is counted by the clock of its file system;
        only the first call of a process for a directory has an effect. A builder that was stopped for so long finds
        its file gone: it logs a warning that its index is not cached, and serves the right arrays. In a store an
        unfinished upload is invisible, and left to the bucket's rule (AbortIncompleteMultipartUpload).
        """
        path = self.directory.local_path
        if path is not None:
            with contextlib.suppress(OSError):
                _remove_staging_files(os.path.abspath(path), os.getpid())

    def read_arrays(self, arrays: Mapping[str, StoredArray]) -> Arrays:
        """Return the published arrays; remote ones are fetched concurrently.

        Raises:
            FormatError: an array has other bytes than the published ones.
            StorageError: an array cannot be read.
        """
        if self.directory.local_path is not None:
            return {name: self.read_array(name, stored) for name, stored in arrays.items()}
        pending = {name: OPENS.submit(partial(self.read_array, name, stored)) for name, stored in arrays.items()}
        return {name: array.result() for name, array in pending.items()}

    def read_array(self, name: str, stored: StoredArray) -> NDArray[Any]:
        """Return one published array; raise the errors of `read_arrays`.

        Args:
            name: of the array.
            stored: its entry in the manifest.
        """
        cached, file = None, self.array_file(name)
        # No HEAD where the manifest has its identity. (A copy of a cache has other ETags.)
        if (identity := recorded_object(file.uri, stored.identity)) is not None:
            with contextlib.suppress(ObjectChangedError):
                cached = read_cached(file, identity)
        content, seal = cached or read_cached(file)
        found = len(content), seal.recall(lambda: xxhash.xxh3_64_hexdigest(content))
        if found != (stored.bytes, stored.xxh3_64):
            needed = f"need {stored.bytes} with {stored.xxh3_64}"
            raise FormatError(f"{file}: found {found[0]} bytes with XXH3 {found[1]}, {needed}")
        return parse_npy(content)

    def open_arrays(self, names: Sequence[str]) -> tuple[Manifest, dict[str, RangedArray]] | None:
        """Open the arrays to read ranges of them; return None if there is no proof that they belong to the manifest.

        The checksum of an array proves nothing before all of it is read. The proof is

            remote    the manifest names the object that has the array's bytes, by its ETag; requests have If-Match
            local     manifest and arrays are the same files before and after they are opened, the manifest the newest

        so there is none for a copied cache, and in a store that does not return an identity of a written object.

        Raises:
            FormatError: the manifest is damaged, or an array has another header or size than in the manifest.
            ObjectChangedError: an array is not the object that the manifest names.
            StorageError: the store refuses a request.
        """
        local = self.directory.local_path is not None
        before = self._local_versions(names) if local else []
        manifest = self.read_manifest()
        if manifest is None:
            return None
        arrays = {}
        for name in names:
            stored = manifest.arrays[name]
            recorded = recorded_object(self.array_file(name).uri, stored.identity)
            if recorded is None and not local:
                return None
            reader, dtype = open_cached_in_blocks(self.array_file(name), recorded), np.dtype(stored.dtype)
            if reader.size != stored.bytes:
                raise FormatError(f"{self.array_file(name)}: found {reader.size} bytes, need {stored.bytes}")
            data_start = stored.bytes - prod(stored.shape) * dtype.itemsize
            arrays[name] = RangedArray(reader, data_start, dtype, stored.shape)
        if local:
            written_last = all(array.ctime < before[0].ctime for array in before[1:])
            if not before or before != self._local_versions(names) or not written_last:
                return None
        # The `.npy` headers, in one round trip.
        readers = [stored_reader(array.reader) for array in arrays.values()]
        headers = read_many([(reader, [(0, min(HEADER_BYTES, reader.size))]) for reader in readers])
        for (name, array), [header] in zip(arrays.items(), headers, strict=True):
            found, needed = parse_npy_header(header), (array.dtype, array.shape, array.offset)
            if found != needed:
                problem = f"{name} differs from its manifest (found {found}, need {needed})"
                raise FormatError(f"{array.reader.uri}: {problem}")
        return manifest, arrays

    def _local_versions(self, names: Sequence[str]) -> list[FileVersion]:
        """Return the versions of the local manifest and arrays; an empty list if one is missing."""
        versions = [file.local_version() for file in (self.file(MANIFEST), *map(self.array_file, names))]
        present = [version for version in versions if version is not None]
        return present if len(present) == len(versions) else []


def read_cached(file: Location, found: Found | None = None) -> tuple[memoryview, Seal]:
    """Return the bytes of an array's file, cached in the index directory of this node, and the seal of their XXH3.

    Args:
        file: of the array.
        found: the object to read, if it is known; that saves a HEAD.
    """
    reader = open_object(file, cache="disk", found=found)
    content = read_whole(reader)
    return content, find_seal(reader, file, "xxh3_64")  # of what is mapped now


@lru_cache(maxsize=64)
def _remove_staging_files(directory: str, pid: int) -> None:
    # A file was just written here, so the directory's time is that of its file system's clock now.
    oldest = os.stat(directory).st_mtime - LEFT_SECONDS
    for name in filter(STAGING_FILE.fullmatch, os.listdir(directory)):
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError):
            if os.stat(path).st_mtime < oldest:
                os.unlink(path)


def describe(identifiers: OrderedDict[str, Any]) -> str:
    """Return the text that Megatron hashes for the names of indices."""
    compact = json.dumps(identifiers, default=_identify)
    try:
        # The text of json.dumps(indent=4), in C: of a blend of 1,000 prefixes in 40 ms instead of 130.
        return msgspec.json.format(compact, indent=4)
    except msgspec.DecodeError:  # of NaN, which JSON has not
        return json.dumps(identifiers, indent=4, default=_identify)


def _identify(thing: Any) -> Any:
    try:
        return thing.unique_identifiers
    except AttributeError:
        raise ConfigError(
            f"{type(thing).__name__}: has no unique_identifiers, which the names of indices need; "
            "give the tokenizer an OrderedDict of that name"
        ) from None


@dataclass(frozen=True)
class IndexName:
    """Name of an index in a cache.

    Attributes:
        files: its files, whether or not they exist.
        description: text that Megatron hashes for their names.
    """

    files: IndexFiles
    description: str

    @classmethod
    def of(cls, directory: Location, kind: str, split: str, identifiers: OrderedDict[str, Any]) -> IndexName:
        """Return the name that follows from identifiers.

        Args:
            directory: folder of the index.
            kind: recorded name of the class of the index.
            split: name of the split.
            identifiers: values by name, in the order that is hashed.
        """
        description = describe(identifiers)
        return cls(IndexFiles(directory, f"{digest(description)}-{kind}-{split}"), description)


def digest(description: str) -> str:
    """Return the md5, in hex, with which Megatron begins the names of indices."""
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()


def recorded_name(kind: type) -> str:
    """Return the name of a class in indices, orders and loader states.

    Classes of this library fix that name as `RECORDED_NAME`, so that renaming a class loses no cache. A user's subclass
    has its own name, as in Megatron Core.
    """
    return str(vars(kind).get("RECORDED_NAME", kind.__name__))
