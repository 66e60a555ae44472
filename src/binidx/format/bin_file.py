"""The `.bin` of a prefix: find and open its tokens in whichever form they are stored, and write them.

    PREFIX.bin        plain tokens; used if a compressed object exists, too
    PREFIX.bin.zst    zstd segments: `storage.codecs.segments`
    PREFIX.bin.xxh3   checksums of the plain tokens: `storage.codecs.checksums`

Remote objects are looked up at the same time, so that the two that mostly do not exist cost no round trip. Local files
are checked only on demand (BINIDX_VERIFY=1): a warm sample of 8 KiB takes 2 us, checking its blocks would take 10.

Writing, invisible until `publish`:

    plain bytes ─┬─► segments, if the name ends in .bin.zst ─► the object
                 └─► a checksum for each 16 KiB ─► .bin.xxh3

`publish` first removes obsolete objects and whatever could be taken for the new tokens or their checksums; then the
object appears, then its checksums. The caller makes sure that no `.idx` exists in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

from binidx.errors import ConfigError, ObjectNotFoundError, StorageError
from binidx.format.idx import get_bin_path
from binidx.format.idx_blocks import SpooledColumn
from binidx.format.prefix_listing import ListedPair
from binidx.storage.codecs.checksums import SUFFIX, BlockSums, format_sums_header
from binidx.storage.codecs.segments import CODECS, TAIL_BYTES, check_level, codec_of
from binidx.storage.interfaces import Bytes, RangeReader
from binidx.storage.open import layered, open_stored
from binidx.storage.requests.metadata import find_object, is_absent
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import REQUESTS
from binidx.storage.writing.publish import create_object, delete_object, object_exists

Options = Mapping[str, Any] | None
SUFFIXES = [codec.suffix for codec in CODECS.values()]
"""Suffixes of the objects that hold tokens, the plain one first."""


def open_bin(
    path_prefix: str,
    *,
    mmap: bool = True,
    cache: bool | None = None,
    listed: ListedPair | None = None,
    storage_options: Options = None,
) -> RangeReader:
    """Open the tokens of a prefix as plain bytes.

    Args:
        mmap, cache: as in `open_object`.
        listed: the pair as a list of its folder shows it, if such a list was made.

    Raises:
        ObjectNotFoundError: there is no `.bin`, plain or compressed; or no checksums, which
            `storage_options={"binidx": {"verify": True}}` or BINIDX_VERIFY=1 require.
        FormatError: the object is not stored as its name says, or the checksums are of another size.
    """
    uri, verify = get_bin_path(path_prefix), ReadSettings.of(storage_options).verify
    if listed:
        stored = _StoredBin(open_stored(uri, storage_options=storage_options, found=listed.bin))
        if listed.sums and verify is not False:
            sums = open_stored(uri + SUFFIX, storage_options=storage_options, found=listed.sums)
            stored = replace(stored, sums=sums)
    elif local_path(uri) is None:
        stored = _find_remote(uri, verify is not False, storage_options)
    else:
        stored = _find_local(path_prefix, mmap, bool(verify), storage_options)
    if verify and stored.codec == "raw" and stored.sums is None:
        needed = "BINIDX_VERIFY=1 needs it, binidx convert --checksums writes it"
        raise ObjectNotFoundError(f"{uri}{SUFFIX}: no such object; {needed}")
    return layered(stored.reader, storage_options, sums=stored.sums, codec=stored.codec, end=stored.end, cache=cache)


def find_bin(path_prefix: str, storage_options: Options = None) -> str | None:
    """Return the URI of the object that holds the tokens of a prefix, or None."""
    uri = get_bin_path(path_prefix)
    return next((uri + suffix for suffix in SUFFIXES if object_exists(uri + suffix, storage_options)), None)


def superseded_objects(uri: str) -> list[str]:
    """Return the objects that become invalid when `uri` is written: other forms of its tokens, and checksums.

    Args:
        uri: of a `.bin`, compressed or not, or of an object of any other name.
    """
    prefix = strip_bin_suffix(uri)
    if prefix == uri:
        return [uri + SUFFIX]
    plain = get_bin_path(prefix)
    return [name for name in (*(plain + suffix for suffix in SUFFIXES), plain + SUFFIX) if name != uri]


def strip_bin_suffix(uri: str) -> str:
    """Return the prefix of a `.bin`, compressed or not; an object of any other name is its own prefix."""
    return uri.removesuffix(CODECS[codec_of(uri)].suffix).removesuffix(".bin")


@dataclass(frozen=True)
class _StoredBin:
    """Opened object with its codec, its checksums if they are to be checked, and its last bytes if they are known."""

    reader: RangeReader
    codec: str = "raw"
    sums: RangeReader | None = None
    end: bytes = b""


def _find_local(path_prefix: str, mmap: bool, verify: bool, options: Options) -> _StoredBin:
    uri = get_bin_path(path_prefix)
    name = find_bin(path_prefix, options) or uri
    has_sums = verify and name == uri and object_exists(uri + SUFFIX)
    sums = open_stored(uri + SUFFIX, mmap=mmap) if has_sums else None
    return _StoredBin(open_stored(name, storage_options=options, mmap=mmap), codec_of(name), sums)


def _find_remote(uri: str, verify: bool, options: Options) -> _StoredBin:
    """Look up all objects at the same time; only the plain `.bin` decides whether a compressed one is used."""

    def find(suffix: str, codec: str = "raw", end_bytes: int = 0) -> _StoredBin | None:
        found = find_object(uri + suffix, options, end_bytes=end_bytes)
        if found is None:
            return None
        return _StoredBin(open_stored(uri + suffix, storage_options=options, found=found), codec, end=found.end)

    compressed = REQUESTS.submit(lambda: find(CODECS["zstd"].suffix, "zstd", TAIL_BYTES))
    sums = REQUESTS.submit(lambda: find(SUFFIX) if verify else None)
    try:
        plain = open_stored(uri, storage_options=options)
    except StorageError as error:
        stored = compressed.result() if is_absent(error) else None
        if stored is None:
            raise
        return stored
    finally:
        wait([compressed, sums])
    found_sums = sums.result()
    return _StoredBin(plain, sums=found_sums.reader if found_sums else None)


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
