"""The tokens of a prefix, however they are stored: `.bin`, or `.bin.zst` where there is none; and the sums beside.

    PREFIX.bin        plain; read where both lie there
    PREFIX.bin.zst    zstd segments, `storage.segments`
    PREFIX.bin.xxh3   checksums of a plain one, `storage.checksums`

All three are looked for at once, so that the two which are mostly not there cost no round trip. Local files are checked
only on demand (BINIDX_VERIFY=1): a warm sample of 8 KiB takes 2 us, and checking its blocks would take 10.

A `.bin` on its way: compressed if its name says so, with checksums beside it if asked; unseen until `publish`.

    plain bytes ─┬─► segments, if .bin.zst ─► the object
                 └─► a sum for each 16 KiB ─► .bin.xxh3

At publishing, once all is written: what `goes` goes, then all that could be taken for the new tokens, or for their
sums; then the object appears, then its sums. The caller sees to it that no `.idx` stands in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

from binidx.errors import ConfigError, ObjectNotFoundError, StorageError
from binidx.format.idx import get_bin_path
from binidx.format.index_writer import SpooledColumn
from binidx.storage.codecs.checksums import SUFFIX, BlockSums, format_sums_header
from binidx.storage.codecs.segments import CODECS, TAIL_BYTES, check_level, codec_of
from binidx.storage.interfaces import Bytes, RangeReader
from binidx.storage.open import layered, open_stored
from binidx.storage.requests.head import Found, find_object, is_absent
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.registry import local_path
from binidx.storage.vectored_reads import submit
from binidx.storage.writing.publish import create_object, delete_object, object_exists

Options = Mapping[str, Any] | None


COMPRESSED = [(name, codec.suffix) for name, codec in CODECS.items() if codec.suffix]


def open_bin(
    path_prefix: str, *, mmap: bool = True, cache: bool | None = None, storage_options: Options = None
) -> RangeReader:
    """The plain bytes of the `.bin` of a prefix.

    Args:
        mmap, cache: as in `open_object`.

    Raises:
        ObjectNotFoundError: there is neither a `.bin` nor a compressed one; or no checksums, which
            `storage_options={"binidx": {"verify": True}}` or BINIDX_VERIFY=1 demand.
        FormatError: what is there is not stored as its name says, or the checksums are of another size.
    """
    stored = _find(path_prefix, mmap, storage_options)
    return layered(stored.reader, sums=stored.sums, codec=stored.codec, end=stored.end, cache=cache)


def find_bin(path_prefix: str, storage_options: Options = None) -> str | None:
    """The URI of the object that holds the tokens of a prefix; None: there is none."""
    uri = get_bin_path(path_prefix)
    names = [uri + codec.suffix for codec in CODECS.values()]
    return next((name for name in names if object_exists(name, storage_options)), None)


def related_objects(uri: str) -> list[str]:
    """The other objects that may hold what `uri` does, or tell of it: they go when it is written.

    Args:
        uri: of a `.bin`, compressed or not, or of an object that follows no rule.
    """
    plain = get_bin_path(prefix_of(uri))
    if prefix_of(uri) == uri:
        return [uri + SUFFIX]
    return [name for name in (*(plain + codec.suffix for codec in CODECS.values()), plain + SUFFIX) if name != uri]


def prefix_of(uri: str) -> str:
    """The prefix of a `.bin`, compressed or not; an object that follows no rule is its own."""
    return uri.removesuffix(CODECS[codec_of(uri)].suffix).removesuffix(".bin")


def open_found(
    path_prefix: str, found: Found, sums: Found | None, *, cache: bool | None = None, storage_options: Options = None
) -> RangeReader:
    """The remote plain `.bin` of a prefix, of which the store has told, and of its checksums if there are any.

    Raises:
        ObjectNotFoundError, FormatError: as `open_bin`.
    """
    uri, verify = get_bin_path(path_prefix), ReadSettings.of(storage_options).verify
    if verify and sums is None:
        raise _no_sums(uri)
    reader = open_stored(uri, storage_options=storage_options, found=found)
    beside = None
    if sums is not None and verify is not False:
        beside = open_stored(uri + SUFFIX, storage_options=storage_options, found=sums)
    return layered(reader, sums=beside, cache=cache)


@dataclass(frozen=True)
class _Stored:
    """An object as it is stored: what reads it, its codec, its checksums if they are wanted, its end if it is known."""

    reader: RangeReader
    codec: str = "raw"
    sums: RangeReader | None = None
    end: bytes = b""


def _find(prefix: str, mmap: bool, options: Options) -> _Stored:
    uri = get_bin_path(prefix)
    verify = ReadSettings.of(options).verify
    if local_path(uri) is None:
        stored = _find_remote(uri, verify is not False, options)
    else:
        stored = _find_local(uri, mmap, bool(verify), options)
    if verify and stored.codec == "raw" and stored.sums is None:
        raise _no_sums(uri)
    return stored


def _no_sums(uri: str) -> ObjectNotFoundError:
    needed = "BINIDX_VERIFY=1 needs it, binidx convert --checksums writes it"
    return ObjectNotFoundError(f"{uri}{SUFFIX}: no such object; {needed}")


def _find_local(uri: str, mmap: bool, verify: bool, options: Options) -> _Stored:
    def open_it(at: str) -> RangeReader:
        return open_stored(at, storage_options=options, mmap=mmap)

    try:
        stored = open_it(uri)
    except ObjectNotFoundError:
        for name, suffix in COMPRESSED:
            if object_exists(uri + suffix):
                return _Stored(open_it(uri + suffix), name)
        raise
    return _Stored(stored, sums=open_it(uri + SUFFIX) if verify and object_exists(uri + SUFFIX) else None)


def _find_remote(uri: str, verify: bool, options: Options) -> _Stored:
    """All at the same time; what was looked for in vain, or found beside a plain one, is of no consequence."""

    def look_for_compressed() -> _Stored | None:
        for name, suffix in COMPRESSED:
            if found := find_object(uri + suffix, options, end_bytes=TAIL_BYTES):
                return _Stored(open_stored(uri + suffix, storage_options=options, found=found), name, end=found.end)
        return None

    def look_for_sums() -> RangeReader | None:
        found = find_object(uri + SUFFIX, options) if verify else None
        return open_stored(uri + SUFFIX, storage_options=options, found=found) if found else None

    compressed, sums = submit(look_for_compressed), submit(look_for_sums)
    try:
        stored = open_stored(uri, storage_options=options)
    except StorageError as error:
        instead = compressed.result() if is_absent(error) else None
        if instead is None:
            raise
        return instead
    finally:
        wait([compressed])
        wait([sums])
    return _Stored(stored, sums=sums.result())


class BinWriter:
    """Writes one `.bin`, `.bin.zst`, or an object that follows no rule.

    Args:
        level: of compression; None: the codec's own.
        checksums: whether to write those, too.

    Attributes:
        goes: URIs that go first when it is published; the caller may add to it.

    Raises:
        ConfigError: a level for what is not compressed, or checksums for what is.
    """

    def __init__(
        self, uri: str, storage_options: Options = None, *, level: int | None = None, checksums: bool = False
    ) -> None:
        self.uri, self.options = uri, storage_options
        self.goes: list[str] = []
        check_options(uri, level, checksums)
        self._column = SpooledColumn("u8") if checksums else None
        self._sums = BlockSums(self._column.extend) if self._column is not None else None
        self._open = contextlib.ExitStack()
        stored = self._open.enter_context(create_object(uri, storage_options, before_publish=self._make_way))
        self._writer = self._open.enter_context(CODECS[codec_of(uri)].create(stored, level))

    def write(self, data: Bytes, /) -> int:
        if self._sums is not None:
            self._sums.feed(data)
        return self._writer.write(data)

    def publish(self) -> None:
        """Make it visible, and its checksums."""
        if self._sums is None or self._column is None:
            self._open.close()
            return
        self._sums.finish()
        with create_object(self.uri + SUFFIX, self.options, before_publish=self._open.close) as writer:
            writer.write(format_sums_header(self._sums.size))
            for block in self._column.blocks():
                writer.write(block.tobytes())

    def abandon(self) -> None:
        """Leave nothing of what is not published, and give the memory back."""
        if self._column is not None:
            self._column.close()
        with contextlib.suppress(_Abandoned), self._open:
            raise _Abandoned

    def _make_way(self) -> None:
        delete_all([*self.goes, *related_objects(self.uri)], self.options)


def check_options(uri: str, level: int | None, checksums: bool) -> None:
    """ConfigError where they do not go with this name."""
    compressed = codec_of(uri) != "raw"
    if level is not None and not compressed:
        raise ConfigError(f"{uri}: compression_level {level}, needed a name that ends in .bin.zst")
    if level is not None:
        check_level(level)
    if checksums and compressed:
        raise ConfigError(f"{uri}: checksums=True, needed a plain .bin; each compressed segment has its own")


def delete_all(uris: Sequence[str], options: Options) -> None:
    """Afterwards there is none of them; in this order."""
    for uri in uris:
        delete_object(uri, options)


class _Abandoned(Exception):
    """Thrown into an unfinished write so that it leaves nothing."""
