"""JSON Lines at any URI, read row by row: only the positions of lines are in memory.

    row      a line that is not blank                 rows 0 to S - 1
    starts   first byte of each line, int64           12 bytes a row, found in one pass over the file,
    lengths  its bytes, int32                         and cached beside it

For the datasets above, a row is a sequence of bytes, so rows are read as tokens are: a batch in one vectored read,
ahead of the trainer if the file is in a store.

Cost: one read of the file, a second a gigabyte from a disk; none once the positions are cached.

Source: ours. Megatron-LM loads the file into a table of Hugging Face `datasets`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.megatron.ordered_dataset import current_build
from binidx.errors import FormatError
from binidx.format.idx import SequenceIndex, little_endian
from binidx.format.tokens import SequencesInFiles
from binidx.index.cache.array_writer import ArrayWriter, build_in_memory
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import Arrays, IndexFiles
from binidx.storage.location import Location
from binidx.storage.open import codec_of, open_object, stream
from binidx.storage.ranges import version_marks
from binidx.storage.requests.remote_object import object_identity

ARRAYS = ("starts", "lengths")
NEWLINE = 10
HUB_NAME = re.compile(r"[\w.-]+/(?!.*\.json)[\w.-]+")
SHORTEST_ROW = 2
"""Bytes of `{}`; shorter lines count as blank."""

UNCACHED_LINES_BYTES = 4 << 20
"""Size of a file up to which its lines are found faster than a cache of them is opened."""

Lines = tuple[NDArray[np.int64], NDArray[np.int32]]


class JsonLines(SequencesInFiles):
    """Rows of a file of JSON objects, one a line.

    Args:
        uri: URI of the file; a `.zst` of frames with a seek table is decompressed.
        path_to_cache: folder of cached line positions; by default `{uri}.lines/`. Files of up to 4 MiB are not cached.
        mmap: map a local file.
        storage_options: passed to fsspec.

    Raises:
        ObjectNotFoundError: there is no such file.
        FormatError: a line of 2 GiB or more, Parquet, a name of the Hugging Face Hub, or a file without random access:
            gzip, or zstd without a seek table.
        ObjectChangedError: the file was replaced while it was opened; or, at the first use, after it was pickled.
    """

    _pickled = ("path_prefix", "path_to_cache", "mmap", "storage_options", "_opened")

    def __init__(
        self,
        uri: str,
        *,
        path_to_cache: str | None = None,
        mmap: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if uri.endswith(".gz"):
            raise FormatError(f"{uri}: gzip has no random access; unpack it, or compress it as zstd frames (t2sz)")
        if uri.endswith(".parquet") or (HUB_NAME.fullmatch(uri) and not os.path.exists(uri)):
            kind = "Parquet" if uri.endswith(".parquet") else "a name of the Hugging Face Hub"
            raise FormatError(f"{uri}: {kind}, needs JSON Lines; datasets.load_dataset(...).to_json(FILE) writes them")
        self.path_prefix = uri
        self.path_to_cache, self.mmap, self.storage_options = path_to_cache, mmap, storage_options
        self._open()

    def _open(self) -> None:
        opened = {"": object_identity(self.location)}
        self._check_pickled(opened)
        codec = codec_of(self.path_prefix, end="")
        self._opened = opened
        self.bin_reader = open_object(self.location, mmap=self.mmap, codec=codec)
        self._check_marks(version_marks(self.bin_reader))
        lines = self._load_lines()
        starts, lengths = lines["starts"], lines["lengths"]
        documents, self.dtype = np.arange(len(starts) + 1, dtype=np.int64), little_endian(np.uint8)
        self.index = SequenceIndex(np.uint8, lengths, starts, documents, None, int(lengths.sum(dtype=np.int64)))

    def __getitem__(self, idx: Any) -> Any:
        """Return the parsed row `idx`, or a list of the parsed rows of a slice."""
        if isinstance(idx, slice):
            rows = range(len(self))[idx]
            lines = self.read((row, 0, self.index.sequence_lengths.item(row)) for row in rows)
            return [self.parse(row, line) for row, line in zip(rows, lines, strict=True)]
        return self.parse(int(idx), self.get(idx))

    def parse(self, row: int, line: NDArray[np.uint8]) -> Any:
        """Return the object in the bytes of a row.

        Args:
            row: number of the row, for errors.
            line: its bytes, shape (n,).

        Raises:
            FormatError: the line is not a JSON object.
        """
        try:
            fields = json.loads(line.tobytes())
        except ValueError as error:
            raise FormatError(f"{self.describe_row(row)}: no JSON object: {error}") from error
        if not isinstance(fields, dict):
            raise FormatError(f"{self.describe_row(row)}: {type(fields).__name__}, needs a JSON object in each line")
        return fields

    def describe_row(self, row: int) -> str:
        """Return the position of a row, for error messages."""
        return f"{self.path_prefix}, row {row} at byte {self.index.sequence_pointers[row]}"

    def _load_lines(self) -> Arrays:
        if self.bin_reader.size <= UNCACHED_LINES_BYTES:
            return build_in_memory(self._build)
        name = f"{hashlib.md5(self.path_prefix.encode(), usedforsecurity=False).hexdigest()}-JsonLines"
        directory = Location(self.path_to_cache or f"{self.path_prefix}.lines", self.storage_options)
        cache = IndexCache(IndexFiles(directory, name), context=current_build())
        description, fingerprint = f"lines of {self.path_prefix}\n", {"object": self._opened[""]}
        return cache.load_or_build(description, fingerprint, ARRAYS, self._build)

    def _build(self, writer: ArrayWriter) -> None:
        arrays: Sequence[NDArray[Any]] = find_lines(stream(self.bin_reader), self.path_prefix)
        for name, lines in zip(ARRAYS, arrays, strict=True):
            with writer.array(name, lines.shape, lines.dtype) as array:
                array[:] = lines


def find_lines(blocks: Iterable[memoryview], uri: str) -> Lines:
    """Return the first byte and the length, without newline, of each line of SHORTEST_ROW bytes or more.

    Args:
        blocks: content of the file, block by block.
        uri: name of the file in errors.

    Returns:
        int64 and int32 arrays, each of shape (num_lines,).

    Raises:
        FormatError: a line of 2 GiB or more.
    """
    ends, size = [], 0
    for block in blocks:
        ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == NEWLINE) + size)
        size += len(block)
    stops = np.concatenate([*ends, [size]]).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1])
    lengths = stops - starts
    if lengths.max() > np.iinfo(np.int32).max:
        raise FormatError(f"{uri}: a line of {lengths.max()} bytes, needs less than 2 GiB; is it JSON Lines?")
    rows = lengths >= SHORTEST_ROW
    return starts[rows], lengths[rows].astype(np.int32)
