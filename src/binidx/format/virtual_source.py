"""A virtual merge as objects that are read from end to end, as `source` has them of a pair of files.

                 pair                    virtual merge: `virtual`
    index        PREFIX.idx              of the parts, with their numbers shifted: `joined_idx`
    tokens       .bin, .bin.zst, plain   of the parts, each up to its last token: `storage.joined`
    as stored    the same object         of the parts; compressed ones under one table, as a merge writes them
    pieces       what a store moves      those of the parts

`open_source` tells which of the two lies under a prefix, so whoever asks it takes both. The two are the same from then
on: what is made of a virtual merge is, byte for byte, what is made of the dataset that `binidx merge` writes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.format.idx import get_idx_path
from binidx.format.index_stream import IndexStream
from binidx.format.joined_idx import join_idx
from binidx.format.listed import Listed, list_pairs
from binidx.format.source import Options, Source, place_of
from binidx.format.virtual import Parts, read_parts, together
from binidx.storage.join_plan import Piece, num_bytes
from binidx.storage.joined import InMemory, Joined, Late
from binidx.storage.publish import object_exists
from binidx.storage.ranges import RangeReader
from binidx.storage.seek_table import SeekTable, format_table


class VirtualSource:
    """The parts of a virtual merge as one dataset.

    Attributes:
        opened: the list's digest, and the bytes of all objects.
        codec: of what a merge of them would write; "raw" where they are `mixed`.
        mixed: some are compressed, others not.
        sums_uri: None, as a merge leaves checksums behind; each part is checked where it has some.

    Raises:
        ObjectNotFoundError: a part is missing.
        ObjectChangedError: it is not the one that was listed.
        FormatError: it has another dtype or count than the list says, or modes where others have none.
    """

    sums_uri = None

    def __init__(self, prefix: str, parts: Parts, options: Options) -> None:
        self.prefix, self.options, self.bin_uri, self._listed = prefix, options, parts.uri, parts
        found = list_pairs(parts.prefixes, options)
        self.parts = together(lambda each: Source(each, options, listed=found.get(each)), parts.prefixes)
        self.num_parts = len(self.parts)
        self.places = {place_of(prefix)}.union(*(each.places for each in self.parts))
        codecs = {each.codec for each in self.parts}
        self.mixed = len(codecs) > 1
        self.codec = "raw" if self.mixed else codecs.pop()
        parts.check([each.opened for each in self.parts])
        sizes = {end: sum(int(each.opened[end]["size"]) for each in self.parts) for end in ("bin", "idx")}
        marks = {end: {"size": size, "parts": parts.digest} for end, size in sizes.items()}
        self.opened: dict[str, Any] = {"uri": place_of(prefix), **marks}
        item_bytes = np.dtype(parts.dtype).itemsize
        self._num_bytes = [each.tokens * item_bytes for each in parts.parts]

    def check_unchanged(self, listed: Listed | None = None) -> None:
        """ObjectChangedError unless every part is still the one that was listed."""
        found = list_pairs(self._listed.prefixes, self.options)
        self._listed.check(together(lambda each: each.identity(found.get(each.prefix)), self.parts))

    @property
    def checked_by(self) -> str | None:
        """As of a `Source`; "in part" where that is so of some parts only."""
        kinds = {each.checked_by for each in self.parts}
        return kinds.pop() if len(kinds) == 1 else "in part" if None in kinds else "checksums"

    @property
    def has_sums(self) -> bool:
        """Whether checksums lie beside some part."""
        return any(each.has_sums for each in self.parts)

    def plain_bytes(self) -> int:
        """Bytes of its tokens; FormatError where a part lacks some."""
        found = together(lambda each: each.plain_bytes(), self.parts)
        for part, size, needed in zip(self.parts, found, self._num_bytes, strict=True):
            if size < needed:
                raise FormatError(f"{part.bin_uri}: {size} bytes, {self.bin_uri} needs {needed}")
        return sum(self._num_bytes)

    @property
    def pairs(self) -> list[Source]:
        """As of a `Source`."""
        return self.parts

    def part_at(self, place: int) -> str:
        """The prefix of the part that holds a plain byte."""
        return self.parts[int(np.searchsorted(np.cumsum(self._num_bytes), place, "right"))].prefix

    def check_movable(self) -> None:
        """ConfigError unless it can be moved as it is stored."""
        if self.mixed:
            raise ConfigError(
                f"{self.bin_uri}: some parts are compressed and others not, needed all compressed or none; "
                f"binidx convert {self.prefix} TARGET --plain makes one dataset of them"
            )

    def open_index(self) -> IndexStream:
        return IndexStream(self.open_idx(mmap=False), self.bin_uri)

    def open_idx(self, *, mmap: bool = True) -> RangeReader:
        """The `.idx` that a merge would write."""
        opened = together(lambda each: IndexStream(each.open_idx(mmap=mmap), get_idx_path(each.prefix)), self.parts)
        for index, part in zip(opened, self._listed.parts, strict=True):
            found, needed = (index.dtype.__name__, index.num_sequences), (self._listed.dtype, part.sequences)
            if found != needed:
                raise FormatError(f"{index.uri}: (dtype, sequences) are {found}, {self.bin_uri} needs {needed}")
        return join_idx(self.bin_uri, opened, self._num_bytes)

    def open_stored(self) -> RangeReader:
        """The `.bin`, or `.bin.zst`, that a merge would write."""
        if self.codec == "raw":
            return self.open_plain()
        pieces = self.pieces(sum(self._num_bytes))
        pieces.append(Piece(None, data=join_tables(self.tables)))
        readers = [each.reader or InMemory(self.bin_uri, each.data) for each in pieces]
        return Joined(self.bin_uri, readers, [*map(num_bytes, pieces)], starts=[each.start for each in pieces])

    def open_plain(self) -> RangeReader:
        """Its tokens; a part is opened when it is read."""
        self.plain_bytes()
        late = [Late(each.bin_uri, each.plain_bytes(), each.open_plain) for each in self.parts]
        return Joined(self.bin_uri, late, self._num_bytes)

    def has(self, end: str) -> bool:
        """As of a `Source`; it stands under the prefix of the list."""
        return object_exists(self.prefix + end, self.options)

    @functools.cached_property
    def tables(self) -> list[SeekTable]:
        return [table for each in together(lambda each: each.tables, self.parts) for table in each]

    def pieces(self, plain_bytes: int) -> list[Piece]:
        """As of a `Source`.

        Raises:
            ConfigError: some parts are compressed, and others not.
        """
        self.check_movable()
        stops = np.cumsum([0, *self._num_bytes], dtype=np.int64)
        wanted = np.clip(plain_bytes - stops[:-1], 0, self._num_bytes).tolist()
        # A compressed one without tokens is asked, too: it may hold others, which its table would tell of.
        both = zip(self.parts, wanted, strict=True)
        some = [(part, count) for part, count in both if count or part.codec != "raw"]
        found = together(lambda each: each[0].pieces(each[1]), some)
        return [piece for each in found for piece in each]


def open_source(
    prefix: str | os.PathLike[str],
    options: Options = None,
    *,
    distrust_sums: bool = False,
    listed: Listed | None = None,
) -> Source | VirtualSource:
    """The dataset under a prefix, whichever way it lies there.

    Raises:
        ObjectNotFoundError: there is none.
        FormatError, ObjectChangedError: as `VirtualSource`.
    """
    name = os.fspath(prefix)
    try:
        return Source(name, options, distrust_sums=distrust_sums, listed=listed)
    except ObjectNotFoundError:
        parts = read_parts(name, options)
        if parts is None:
            raise
        return VirtualSource(name, parts, options)


def join_tables(tables: Sequence[SeekTable]) -> bytes:
    """The seek table over the frames of all, one after the other."""
    stored = np.concatenate([each.stored_stops - each.stored_starts for each in tables])
    plain = np.concatenate([np.diff(each.plain_starts) for each in tables])
    return format_table(stored.astype(np.uint32), plain.astype(np.uint32))
