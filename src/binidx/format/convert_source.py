"""What a convert reads, and how it is to be stored at the target.

source       target            what is sent                                   after a break
.bin         .bin              its bytes                                      goes on
.bin.zst     .bin.zst          its bytes; with a level they are packed anew   goes on; packed anew
.bin.zst     .bin   (plain)    the plain bytes                                goes on
.bin         .bin.zst          the plain bytes, compressed on the way         compressed anew
.bin.xxh3    .bin.xxh3         its bytes, or sums of what was sent            goes on; summed anew
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.format.bin_object import find_bin
from binidx.format.idx import SequenceIndex, get_bin_path, get_idx_path
from binidx.format.pair import open_pair
from binidx.storage import filesystem
from binidx.storage.backends import layered, open_stored
from binidx.storage.checksums import SUFFIX
from binidx.storage.publish import object_exists, object_identity
from binidx.storage.ranges import RangeReader
from binidx.storage.segment_writer import check_level
from binidx.storage.segments import CODECS, codec_of
from binidx.storage.settings import OURS

Options = Mapping[str, Any] | None


@dataclass(frozen=True)
class Way:
    """How tokens are to be stored.

    Attributes:
        codec: a row of `segments.CODECS`; None: as at the source.
        level: of compression; None: the codec's own, and what is compressed already stays as it is.
        checksums: whether sums are to be taken; they come along in any case where the source has some.
    """

    codec: str | None = None
    level: int | None = None
    checksums: bool = False

    def check(self) -> None:
        """ConfigError where these contradict each other."""
        if self.level is not None:
            check_level(self.level)
        if self.level is not None and self.codec != "zstd":
            raise ConfigError(f"compression level {self.level}: needed to compress, or no level")
        if self.checksums and self.codec == "zstd":
            raise ConfigError("checksums: needed a plain .bin; each compressed segment has its own")


class Source:
    """The dataset under a prefix, as objects to be read.

    Args:
        distrust_sums: its checksums are about to be replaced, so nothing is checked against them.

    Attributes:
        bin_uri: of the object that holds its tokens.
        codec: how it is stored.
        sums_uri: of its checksums; None: there are none, or they are not trusted.

    Raises:
        ObjectNotFoundError: there are no tokens under this prefix.
    """

    def __init__(self, prefix: str, options: Options, *, distrust_sums: bool = False) -> None:
        self.prefix, self.options = prefix, options
        found = find_bin(prefix, options)
        if found is None:
            raise ObjectNotFoundError(f"{get_bin_path(prefix)}: no such object")
        self.bin_uri, self.codec = found, codec_of(found)
        sums_uri = found + SUFFIX
        has_sums = self.codec == "raw" and not distrust_sums and object_exists(sums_uri, options)
        self.sums_uri = sums_uri if has_sums else None

    def identity(self) -> dict[str, Any]:
        """What identifies it now, in JSON values."""
        return {
            "uri": place_of(self.prefix),
            "bin": object_identity(self.bin_uri, self.options),
            "idx": object_identity(get_idx_path(self.prefix), self.options),
        }

    def check(self) -> SequenceIndex:
        """Its index; FormatError if it is no sound dataset."""
        options = self.options
        if self.sums_uri is None:
            options = {**(options or {}), OURS: {**(options or {}).get(OURS, {}), "verify": False}}
        return open_pair(self.prefix, cache=False, storage_options=options).index

    def open(self, uri: str) -> RangeReader:
        """One of its objects as it is stored; its plain `.bin` is checked where it has checksums."""
        sums = None
        if self.sums_uri is not None and uri == self.bin_uri:
            sums = open_stored(self.sums_uri, storage_options=self.options)
        return layered(open_stored(uri, storage_options=self.options), sums=sums, cache=False)

    def open_plain(self) -> RangeReader:
        """Its tokens."""
        return CODECS[self.codec].open(self.open(self.bin_uri), b"")


def place_of(prefix: str) -> str:
    """The URI, or the whole path of a local one: equal for equal places."""
    path = filesystem.local_path(prefix)
    return prefix if path is None else os.path.abspath(path)
