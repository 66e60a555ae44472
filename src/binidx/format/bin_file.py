"""The `.bin` of a prefix: the forms in which its tokens are stored, and how they are written; `pair` opens them.

    PREFIX.bin        plain tokens; used if a compressed object exists, too
    PREFIX.bin.zst    zstd segments: `storage.codecs.segments`
    PREFIX.bin.xxh3   checksums of the plain tokens: `storage.codecs.checksums`

Writing, invisible until `publish`:

    plain bytes ─┬─► segments, if the name ends in .bin.zst ─► the object
                 └─► a checksum for each 16 KiB ─► .bin.xxh3

`publish` first removes obsolete objects and whatever could be taken for the new tokens or their checksums; then the
object appears, then its checksums. The caller makes sure that no `.idx` exists in between.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterable, Mapping
from typing import Any

from binidx.errors import ConfigError
from binidx.format.idx import get_bin_path, get_idx_path
from binidx.format.idx_blocks import SpooledColumn
from binidx.storage.codecs.checksums import SUFFIX, BlockSums, format_sums_header
from binidx.storage.codecs.segments import check_level
from binidx.storage.interfaces import Bytes
from binidx.storage.open import CODECS, codec_of
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.publish import create_object, delete_object

Options = Mapping[str, Any] | None
SUFFIXES = [codec.suffix for codec in CODECS.values()]
"""Suffixes of the objects that hold tokens, the plain one first."""


def find_bin(path_prefix: str, storage_options: Options = None) -> str | None:
    """Return the URI of the object that holds the tokens of a prefix, or None."""
    uri = get_bin_path(path_prefix)
    return next((uri + suffix for suffix in SUFFIXES if object_exists(uri + suffix, storage_options)), None)


def did_you_mean(path_prefix: str) -> str:
    """Return advice for a prefix without an `.idx`: the local datasets whose names begin with it; else nothing."""
    path = local_path(path_prefix)
    if not path or os.path.exists(get_idx_path(path)):
        return ""
    found = sorted(glob.glob(f"{glob.escape(path)}*.idx"))[:3]
    return f"; did you mean {' or '.join(each.removesuffix('.idx') for each in found)}?" if found else ""


def superseded_objects(uri: str) -> list[str]:
    """Return the URIs of objects that become invalid when `uri` is written: other forms of its tokens, and checksums.

    Args:
        uri: URI of a `.bin`, compressed or not, or of an object of any other name.
    """
    prefix = strip_bin_suffix(uri)
    if prefix == uri:
        return [uri + SUFFIX]
    plain = get_bin_path(prefix)
    return [name for name in (*(plain + suffix for suffix in SUFFIXES), plain + SUFFIX) if name != uri]


def strip_bin_suffix(uri: str) -> str:
    """Return the prefix of a `.bin`, compressed or not; an object of any other name is its own prefix."""
    return uri.removesuffix(CODECS[codec_of(uri)].suffix).removesuffix(".bin")


class BinWriter:
    """Writer of one `.bin`, `.bin.zst`, or object of any other name.

    Args:
        level: compression level; None for the codec's default.
        checksums: whether to write checksums, too.

    Attributes:
        obsolete_uris: objects that `publish` removes first; the caller may append to it.

    Raises:
        ConfigError: a level for an object that is not compressed, or checksums for one that is.
    """

    def __init__(
        self, uri: str, storage_options: Options = None, *, level: int | None = None, checksums: bool = False
    ) -> None:
        self.uri, self.options = uri, storage_options
        self.obsolete_uris: list[str] = []
        compressed = codec_of(uri) != "raw"
        if level is not None and not compressed:
            raise ConfigError(f"{uri}: compression_level {level}, needed a name that ends in .bin.zst")
        if level is not None:
            check_level(level)
        if checksums and compressed:
            raise ConfigError(f"{uri}: checksums=True, needed a plain .bin; each compressed segment has its own")
        self._column = SpooledColumn("u8") if checksums else None
        self._sums = BlockSums(self._column.extend) if self._column is not None else None
        self._open = contextlib.ExitStack()
        stored = self._open.enter_context(create_object(uri, storage_options, before_publish=self._remove_obsolete))
        self._writer = self._open.enter_context(CODECS[codec_of(uri)].create(stored, level))

    def write(self, data: Bytes, /) -> int:
        if self._sums is not None:
            self._sums.feed(data)
        return self._writer.write(data)

    def publish(self) -> None:
        """Make the object visible, then its checksums."""
        if self._sums is None or self._column is None:
            self._open.close()
            return
        self._sums.finish()
        with create_object(self.uri + SUFFIX, self.options, before_publish=self._open.close) as writer:
            writer.write(format_sums_header(self._sums.size))
            for block in self._column.blocks():
                writer.write(block.tobytes())

    def abandon(self) -> None:
        """Remove the unpublished object and free memory; no effect after `publish`."""
        if self._column is not None:
            self._column.close()
        with contextlib.suppress(_Abandoned), self._open:
            raise _Abandoned

    def _remove_obsolete(self) -> None:
        delete_objects([*self.obsolete_uris, *superseded_objects(self.uri)], self.options)


def delete_objects(uris: Iterable[str], options: Options) -> None:
    """Delete objects in order; those that do not exist are skipped."""
    for uri in uris:
        delete_object(uri, options)


class _Abandoned(Exception):
    """Raised inside an unfinished write to remove it."""
