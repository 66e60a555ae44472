"""A pair of files as objects that are read from end to end: what convert, merge and all that look at every token open.

`virtual_source.open_source` tells whether a pair or a virtual merge lies under a prefix; the two are the same from then
on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.format.bin_file import find_bin
from binidx.format.idx import get_bin_path, get_idx_path
from binidx.format.index_stream import IndexStream
from binidx.format.prefix_listing import ListedPair
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.codecs.seek_table import SeekTable
from binidx.storage.codecs.segments import CODECS, codec_of, read_table
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import layered, open_object, open_stored
from binidx.storage.requests.head import recorded_object
from binidx.storage.stores.identity import same_identity
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.concatenate import SourcePiece
from binidx.storage.writing.publish import object_exists, object_identity

Options = Mapping[str, Any] | None


class PairSource:
    """The pair of files under a prefix.

    Args:
        distrust_sums: its checksums are about to be replaced, so nothing is checked against them.
        listed: the pair, where a list of its folder has shown it.

    Attributes:
        bin_uri: of the object that holds its tokens.
        codec: how it is stored.
        sums_uri: of its checksums; None: there are none, or they are not trusted.
        opened: what identified it then.
        places: that it must not be written to while it is read: `place_of`.

    Raises:
        ObjectNotFoundError: one of the two is missing.
    """

    num_parts, mixed = 0, False

    def __init__(
        self, prefix: str, options: Options, *, distrust_sums: bool = False, listed: ListedPair | None = None
    ) -> None:
        self.prefix, self.options, self.places = prefix, options, {place_of(prefix)}
        self._told = told = listed
        found = get_bin_path(prefix) if told else find_bin(prefix, options)
        if found is None:
            raise ObjectNotFoundError(f"{get_bin_path(prefix)}: no such object")
        self.bin_uri, self.codec = found, codec_of(found)
        sums_uri = found + SUFFIX
        has_sums = bool(told.sums) if told else self.codec == "raw" and object_exists(sums_uri, options)
        self.sums_uri = sums_uri if has_sums and not distrust_sums else None
        self.opened = self.identity(listed)

    def identity(self, listed: ListedPair | None = None) -> dict[str, Any]:
        """Identities of both files, in JSON values: those of `listed` if given, else asked from the store now."""
        if listed:
            return {
                "uri": place_of(self.prefix),
                "bin": dict(listed.bin.info.identity),
                "idx": dict(listed.idx.info.identity),
            }
        return {
            "uri": place_of(self.prefix),
            "bin": object_identity(self.bin_uri, self.options),
            "idx": object_identity(get_idx_path(self.prefix), self.options),
        }

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """ObjectChangedError unless both files are still those that were opened.

        Whoever replaces a dataset removes its `.idx` first. So if that is the same before and after, the tokens read in
        between were its own.

        Args:
            listed: the pair in a list of its folder made now; by default the store is asked.
        """
        now = self.identity(listed)
        if not all(same_identity(self.opened[end], now[end]) for end in ("idx", "bin")):
            raise ObjectChangedError(f"{self.prefix}: changed while it was read; run it again")

    @property
    def checked_by(self) -> str | None:
        """What its bytes are compared with when they are read: "checksums", "frames" (zstd's own), or None."""
        return "frames" if self.codec != "raw" else "checksums" if self.sums_uri else None

    @property
    def has_sums(self) -> bool:
        """Whether checksums lie beside it."""
        return self.sums_uri is not None

    def plain_bytes(self) -> int:
        """Bytes of its tokens, and of what follows them."""
        return int(self.opened["bin"]["size"]) if self.codec == "raw" else self.tables[0].plain_bytes

    @property
    def pairs(self) -> list[PairSource]:
        """The pairs of files that it is made of."""
        return [self]

    def part_at(self, place: int) -> str:
        """The prefix of what holds a plain byte."""
        return self.prefix

    def check_movable(self) -> None:
        """Any store may move it as it is."""

    def open_index(self) -> IndexStream:
        """Its `.idx`, from front to back."""
        return IndexStream(self.open_idx(mmap=False), get_idx_path(self.prefix))

    def open_idx(self, *, mmap: bool = True) -> RangeReader:
        """Its `.idx`; mapped, its pages count as memory of this process until others need them."""
        found = self._told.idx if self._told else recorded_object(get_idx_path(self.prefix), self.opened["idx"])
        return open_object(get_idx_path(self.prefix), storage_options=self.options, mmap=mmap, cache=False, found=found)

    def open_stored(self) -> RangeReader:
        """Its tokens as they are stored; a plain `.bin` is checked where it has checksums."""
        told, sums = self._told, None
        if self.sums_uri is not None:
            sums = open_stored(self.sums_uri, storage_options=self.options, found=told.sums if told else None)
        found = told.bin if told else recorded_object(self.bin_uri, self.opened["bin"])
        tokens = open_stored(self.bin_uri, storage_options=self.options, found=found)
        return layered(tokens, sums=sums, cache=False)

    def has(self, end: str) -> bool:
        """Whether this sidecar stands beside it: one of `SIDECARS`."""
        return end in self._told.sidecars if self._told else object_exists(self.prefix + end, self.options)

    def open_plain(self) -> RangeReader:
        """Its tokens."""
        return CODECS[self.codec].open(self.open_stored(), b"")

    @functools.cached_property
    def tables(self) -> list[SeekTable]:
        """Of a compressed one, where its frames lie."""
        return [read_table(self.open_stored())]

    def pieces(self, plain_bytes: int) -> list[SourcePiece]:
        """The first so many bytes of its tokens, as they are stored; of a compressed one all, without its table.

        Raises:
            FormatError: it is compressed, and holds others.
        """
        reader = self.open_stored()
        if self.codec == "raw":
            return [SourcePiece(reader, 0, plain_bytes)] if plain_bytes else []
        (table,) = self.tables
        if table.plain_bytes != plain_bytes:
            raise FormatError(
                f"{self.bin_uri}: holds bytes past its last token, needed none to be moved compressed; "
                "binidx convert --plain first"
            )
        return [SourcePiece(reader, start, stop) for start, stop in _runs(table.stored_starts, table.stored_stops)]


def place_of(prefix: str) -> str:
    """The URI, or the whole path of a local one: equal for equal places."""
    path = local_path(prefix)
    return prefix if path is None else os.path.abspath(path)


def _runs(starts: Any, stops: Any) -> list[tuple[int, int]]:
    """Frames that follow each other, as ranges of bytes."""
    if not len(starts):
        return []
    breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
    firsts, lasts = starts[np.concatenate([[0], breaks])], stops[np.concatenate([breaks - 1, [len(stops) - 1]])]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
