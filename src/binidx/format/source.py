"""Pair of files opened to be read from end to end, by commands that process every token.

`virtual_source.VirtualSource` has the same interface for a virtual merge; `open_source` returns the one that exists.
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
from binidx.storage.requests.metadata import recorded_object
from binidx.storage.stores.identity import same_identity
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.concatenate import SourcePiece
from binidx.storage.writing.publish import object_exists, object_identity

Options = Mapping[str, Any] | None


class PairSource:
    """Pair of files under a prefix.

    Args:
        distrust_sums: its checksums are about to be replaced, so the tokens are not checked against them.
        listed: the pair as a list of its folder shows it, if such a list was made.

    Attributes:
        bin_uri: the object that holds its tokens.
        codec: the codec of that object.
        sums_uri: its checksums; None if there are none, or they are not trusted.
        opened: identities of both files when they were opened.
        uris: absolute URIs of the prefixes that are read, which must not be written meanwhile.

    Raises:
        ObjectNotFoundError: one of the two is missing.
    """

    num_parts, mixed = 0, False

    def __init__(
        self, prefix: str, options: Options, *, distrust_sums: bool = False, listed: ListedPair | None = None
    ) -> None:
        self.prefix, self.options, self.uris = prefix, options, {absolute_uri(prefix)}
        self._listed = listed
        found = get_bin_path(prefix) if listed else find_bin(prefix, options)
        if found is None:
            raise ObjectNotFoundError(f"{get_bin_path(prefix)}: no such object")
        self.bin_uri, self.codec = found, codec_of(found)
        sums_uri = found + SUFFIX
        has_sums = bool(listed.sums) if listed else self.codec == "raw" and object_exists(sums_uri, options)
        self.sums_uri = sums_uri if has_sums and not distrust_sums else None
        self.opened = self.identity(listed)

    def identity(self, listed: ListedPair | None = None) -> dict[str, Any]:
        """Return the identities of both files in JSON values: those of `listed` if given, else from the store now."""
        if listed:
            tokens, index = (dict(each.info.identity) for each in (listed.bin, listed.idx))
        else:
            tokens, index = (object_identity(uri, self.options) for uri in (self.bin_uri, get_idx_path(self.prefix)))
        return {"uri": absolute_uri(self.prefix), "bin": tokens, "idx": index}

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """ObjectChangedError if a file was replaced since it was opened.

        A writer removes the `.idx` first. If the `.idx` is the same before and after, the tokens read in between belong
        to it.

        Args:
            listed: the pair in a list of its folder made now; by default the store is asked.
        """
        now = self.identity(listed)
        if not all(same_identity(self.opened[end], now[end]) for end in ("idx", "bin")):
            raise ObjectChangedError(f"{self.prefix}: changed while it was read; run it again")

    @property
    def checked_by(self) -> str | None:
        """Check of the tokens when they are read: "checksums", "frames" (zstd's own), or None."""
        return "frames" if self.codec != "raw" else "checksums" if self.sums_uri else None

    @property
    def has_sums(self) -> bool:
        """True if trusted checksums exist."""
        return self.sums_uri is not None

    def plain_bytes(self) -> int:
        """Return the bytes of its tokens, bytes after the last sequence included."""
        return int(self.opened["bin"]["size"]) if self.codec == "raw" else self.tables[0].plain_bytes

    @property
    def pairs(self) -> list[PairSource]:
        """Pairs of files that the dataset consists of."""
        return [self]

    def part_at(self, position: int) -> str:
        """Return the prefix of the pair that holds a plain byte."""
        return self.prefix

    def check_movable(self) -> None:
        """ConfigError if the tokens cannot be moved as they are stored; those of a pair can."""

    def open_index(self) -> IndexStream:
        """Open the `.idx` as a stream."""
        return IndexStream(self.open_idx(mmap=False), get_idx_path(self.prefix))

    def open_idx(self, *, mmap: bool = True) -> RangeReader:
        """Open the `.idx`. Mapped pages count as memory of this process until other processes need them."""
        found = self._listed.idx if self._listed else recorded_object(get_idx_path(self.prefix), self.opened["idx"])
        return open_object(get_idx_path(self.prefix), storage_options=self.options, mmap=mmap, cache=False, found=found)

    def open_stored(self) -> RangeReader:
        """Open the tokens as they are stored; plain ones are checked against checksums, if there are any."""
        listed, sums = self._listed, None
        if self.sums_uri is not None:
            found_sums = listed.sums if listed else None
            sums = open_stored(self.sums_uri, storage_options=self.options, found=found_sums)
        found = listed.bin if listed else recorded_object(self.bin_uri, self.opened["bin"])
        tokens = open_stored(self.bin_uri, storage_options=self.options, found=found)
        return layered(tokens, self.options, sums=sums, cache=False)

    def has(self, suffix: str) -> bool:
        """Return whether a sidecar of this suffix, one of `SIDECARS`, exists."""
        return suffix in self._listed.sidecars if self._listed else object_exists(self.prefix + suffix, self.options)

    def open_plain(self) -> RangeReader:
        """Open the tokens as plain bytes."""
        return CODECS[self.codec].open(self.open_stored(), b"")

    @functools.cached_property
    def tables(self) -> list[SeekTable]:
        """Seek tables of a compressed dataset."""
        return [read_table(self.open_stored())]

    def pieces(self, plain_bytes: int) -> list[SourcePiece]:
        """Return the first `plain_bytes` of its tokens as stored; of a compressed dataset all its frames.

        Raises:
            FormatError: it is compressed and has another number of plain bytes.
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
        starts, stops = table.stored_starts, table.stored_stops
        breaks = np.flatnonzero(starts[1:] != stops[:-1])  # frames that follow each other are one piece
        firsts, lasts = np.append(starts[:1], starts[breaks + 1]), np.append(stops[breaks], stops[-1:])
        return [SourcePiece(reader, *piece) for piece in zip(firsts.tolist(), lasts.tolist(), strict=True)]


def absolute_uri(prefix: str) -> str:
    """Return a URI as it is, or the absolute path of a local one."""
    path = local_path(prefix)
    return prefix if path is None else os.path.abspath(path)
