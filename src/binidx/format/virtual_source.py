"""Virtual merge read from end to end, with the interface that `source.PairSource` has for a pair of files.

                 pair                    virtual merge: `virtual`
    index        PREFIX.idx              those of the parts, with their numbers shifted
    tokens       .bin, .bin.zst, plain   those of the parts, each up to its last token
    as stored    the same object         those of the parts; compressed ones under one table, as a merge writes them
    pieces       input of a merge        those of the parts

A command on a virtual merge therefore writes, byte for byte, what it writes for the dataset that `binidx merge` makes.
The joined `.idx` is computed while it is read:

    header        of all parts                             in memory
    lengths       those of the parts, unchanged
    pointers      those of the parts, each plus the bytes before its part
    bounds        0, then those of the parts without their first, each plus the sequences before its part
    modes         those of the parts
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.format.idx import HEADER, format_idx_header, get_idx_path
from binidx.format.index_stream import IndexStream
from binidx.format.prefix_listing import ListedPair, list_pairs
from binidx.format.source import Options, PairSource, absolute_uri
from binidx.format.virtual import VirtualParts, read_parts
from binidx.storage.adapters import InMemory, JoinedReader, LazyReader
from binidx.storage.codecs.seek_table import SeekTable, format_table
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.ranges import check_ranges
from binidx.storage.threads import OPENS
from binidx.storage.writing.concatenate import SourcePiece
from binidx.storage.writing.publish import object_exists

NUMBER_BYTES = 8


class ShiftedReader:
    """Reader of `count` int64 values of another reader from byte `start` on, each with `plus` added."""

    def __init__(self, reader: RangeReader, start: int, count: int, plus: int) -> None:
        self.uri, self.size = reader.uri, count * NUMBER_BYTES
        self.identity: Mapping[str, Any] = {}
        self._reader, self._start, self._plus = reader, start, plus

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        whole = [
            (first // NUMBER_BYTES * NUMBER_BYTES, -(-stop // NUMBER_BYTES) * NUMBER_BYTES) for first, stop in ranges
        ]
        found = self._reader.read([(self._start + first, self._start + stop) for first, stop in whole])
        shifted = [(np.frombuffer(view, "<i8") + self._plus).astype("<i8", copy=False).view(np.uint8) for view in found]
        return [
            each[first - low : stop - low].data
            for each, (first, stop), (low, _) in zip(shifted, ranges, whole, strict=True)
        ]


def concatenate_idx(uri: str, parts: Sequence[IndexStream], num_bytes: Sequence[int]) -> JoinedReader:
    """Return a reader of the `.idx` that a merge of the parts would write.

    Args:
        uri: name of the result, for errors.
        num_bytes: plain bytes of each part's tokens.

    Raises:
        FormatError: some parts have modes and others have none; parts without sequences fit either way.
    """
    readers, starts, sizes = zip(*_columns(uri, parts, num_bytes), strict=True)
    return JoinedReader(uri, readers, sizes, starts=starts)


def is_multimodal(parts: Sequence[IndexStream]) -> bool:
    """Return whether the sequences of all parts have modes.

    Raises:
        FormatError: those of some parts have modes and those of others have none.
    """
    some = [each for each in parts if each.num_sequences]
    for each in some:
        if each.multimodal != some[0].multimodal:
            which, other = (each, some[0]) if some[0].multimodal else (some[0], each)
            raise FormatError(f"{which.uri}: no modes, {other.uri} has them; needed all with or all without")
    return bool(some) and some[0].multimodal


def _columns(
    uri: str, parts: Sequence[IndexStream], num_bytes: Sequence[int]
) -> Iterator[tuple[RangeReader, int, int]]:
    """Yield reader, first byte and number of bytes of each piece, in order."""
    sequences, documents = [each.num_sequences for each in parts], [each.num_documents for each in parts]
    header = format_idx_header(parts[0].dtype, sum(sequences), sum(documents) + 1)
    yield InMemory(uri, header), 0, len(header)
    for each in parts:
        yield each.reader, HEADER.size, 4 * each.num_sequences
    for each, before in zip(parts, _sums(num_bytes), strict=False):
        pointers = ShiftedReader(each.reader, HEADER.size + 4 * each.num_sequences, each.num_sequences, before)
        yield pointers, 0, pointers.size
    yield InMemory(uri, bytes(NUMBER_BYTES)), 0, NUMBER_BYTES
    for each, before in zip(parts, _sums(sequences), strict=False):
        second = HEADER.size + 12 * each.num_sequences + NUMBER_BYTES
        bounds = ShiftedReader(each.reader, second, each.num_documents, before)
        yield bounds, 0, bounds.size
    if is_multimodal(parts):
        for each in parts:
            yield each.reader, each.size - each.num_sequences, each.num_sequences


def _sums(counts: Sequence[int]) -> list[int]:
    found: list[int] = np.cumsum([0, *counts], dtype=np.int64).tolist()
    return found


class VirtualSource:
    """Parts of a virtual merge as one dataset. Attributes and methods are those of `PairSource`.

    Attributes:
        opened: digest of the list, and bytes of all objects.
        codec: codec of what a merge would write; "raw" if the parts are `mixed`.
        mixed: whether some parts are compressed and others not.
        sums_uri: None, as a merge writes no checksums; each part is checked against its own.

    Raises:
        ObjectNotFoundError: a part is missing.
        ObjectChangedError: a part was replaced since it was listed.
        FormatError: a part has another dtype or count than listed, or modes where others have none.
    """

    sums_uri = None

    def __init__(self, prefix: str, parts: VirtualParts, options: Options) -> None:
        self.prefix, self.options, self.bin_uri, self._listed = prefix, options, parts.uri, parts
        found = list_pairs(parts.prefixes, options)
        self.parts = OPENS.map(lambda each: PairSource(each, options, listed=found.get(each)), parts.prefixes)
        self.num_parts = len(self.parts)
        self.uris = {absolute_uri(prefix)}.union(*(each.uris for each in self.parts))
        codecs = {each.codec for each in self.parts}
        self.mixed = len(codecs) > 1
        self.codec = "raw" if self.mixed else codecs.pop()
        parts.check([each.opened for each in self.parts])
        sizes = {end: sum(int(each.opened[end]["size"]) for each in self.parts) for end in ("bin", "idx")}
        marks = {end: {"size": size, "parts": parts.digest} for end, size in sizes.items()}
        self.opened: dict[str, Any] = {"uri": absolute_uri(prefix), **marks}
        item_bytes = np.dtype(parts.dtype).itemsize
        self._num_bytes = [each.tokens * item_bytes for each in parts.parts]

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """ObjectChangedError if a part was replaced since it was listed."""
        found = list_pairs(self._listed.prefixes, self.options)
        self._listed.check(OPENS.map(lambda each: each.identity(found.get(each.prefix)), self.parts))

    @property
    def checked_by(self) -> str | None:
        """Check of the tokens when they are read; "in part" if only some parts have one."""
        kinds = {each.checked_by for each in self.parts}
        return kinds.pop() if len(kinds) == 1 else "in part" if None in kinds else "checksums"

    @property
    def has_sums(self) -> bool:
        """True if some part has checksums."""
        return any(each.has_sums for each in self.parts)

    def plain_bytes(self) -> int:
        """Return the bytes of its tokens; FormatError if a part is too small."""
        found = OPENS.map(lambda each: each.plain_bytes(), self.parts)
        for part, size, needed in zip(self.parts, found, self._num_bytes, strict=True):
            if size < needed:
                raise FormatError(f"{part.bin_uri}: {size} bytes, {self.bin_uri} needs {needed}")
        return sum(self._num_bytes)

    @property
    def pairs(self) -> list[PairSource]:
        return self.parts

    def part_at(self, position: int) -> str:
        return self.parts[int(np.searchsorted(np.cumsum(self._num_bytes), position, "right"))].prefix

    def check_movable(self) -> None:
        """ConfigError if some parts are compressed and others not, so that they cannot be moved as they are stored."""
        if self.mixed:
            raise ConfigError(
                f"{self.bin_uri}: some parts are compressed and others not, needed all compressed or none; "
                f"binidx convert {self.prefix} TARGET --plain makes one dataset of them"
            )

    def open_index(self) -> IndexStream:
        return IndexStream(self.open_idx(mmap=False), self.bin_uri)

    def open_idx(self, *, mmap: bool = True) -> RangeReader:
        """Open the `.idx` that a merge would write."""
        opened = OPENS.map(lambda each: IndexStream(each.open_idx(mmap=mmap), get_idx_path(each.prefix)), self.parts)
        for index, part in zip(opened, self._listed.parts, strict=True):
            found, needed = (index.dtype.__name__, index.num_sequences), (self._listed.dtype, part.sequences)
            if found != needed:
                raise FormatError(f"{index.uri}: (dtype, sequences) are {found}, {self.bin_uri} needs {needed}")
        return concatenate_idx(self.bin_uri, opened, self._num_bytes)

    def open_stored(self) -> RangeReader:
        """Open the `.bin`, or `.bin.zst`, that a merge would write."""
        if self.codec == "raw":
            return self.open_plain()
        pieces = self.pieces(sum(self._num_bytes))
        seek_table = InMemory(self.bin_uri, concatenate_seek_tables(self.tables))
        pieces.append(SourcePiece(seek_table, 0, seek_table.size))
        readers, sizes = [each.reader for each in pieces], [each.num_bytes for each in pieces]
        return JoinedReader(self.bin_uri, readers, sizes, starts=[each.start for each in pieces])

    def open_plain(self) -> RangeReader:
        """Open the tokens as plain bytes; a part is opened when it is read."""
        self.plain_bytes()
        late = [LazyReader(each.bin_uri, each.plain_bytes(), each.open_plain) for each in self.parts]
        return JoinedReader(self.bin_uri, late, self._num_bytes)

    def has(self, suffix: str) -> bool:
        return object_exists(self.prefix + suffix, self.options)

    @functools.cached_property
    def tables(self) -> list[SeekTable]:
        return [table for each in OPENS.map(lambda each: each.tables, self.parts) for table in each]

    def pieces(self, plain_bytes: int) -> list[SourcePiece]:
        self.check_movable()
        stops = np.cumsum([0, *self._num_bytes], dtype=np.int64)
        wanted = np.clip(plain_bytes - stops[:-1], 0, self._num_bytes).tolist()
        # A compressed part without tokens may hold others, so its table is checked, too.
        both = zip(self.parts, wanted, strict=True)
        some = [(part, count) for part, count in both if count or part.codec != "raw"]
        found = OPENS.map(lambda each: each[0].pieces(each[1]), some)
        return [piece for each in found for piece in each]


def open_source(
    prefix: str | os.PathLike[str],
    options: Options = None,
    *,
    distrust_sums: bool = False,
    listed: ListedPair | None = None,
) -> PairSource | VirtualSource:
    """Open the dataset under a prefix: a pair of files, or a virtual merge.

    Raises:
        ObjectNotFoundError: there is neither.
        FormatError, ObjectChangedError: as `VirtualSource`.
    """
    name = os.fspath(prefix)
    try:
        return PairSource(name, options, distrust_sums=distrust_sums, listed=listed)
    except ObjectNotFoundError:
        parts = read_parts(name, options)
        if parts is None:
            raise
        return VirtualSource(name, parts, options)


def concatenate_seek_tables(tables: Sequence[SeekTable]) -> bytes:
    """Return the bytes of the seek table over the frames of all tables, one after the other."""
    stored = np.concatenate([each.stored_stops - each.stored_starts for each in tables])
    plain = np.concatenate([np.diff(each.plain_starts) for each in tables])
    return format_table(stored.astype(np.uint32), plain.astype(np.uint32))
