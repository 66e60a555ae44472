"""The `.bin` of a prefix: the forms in which its tokens are stored, and how they are opened and written.

    PREFIX.bin        plain tokens; used if a compressed object exists, too
    PREFIX.bin.zst    zstd segments, or the suffix of another codec: `storage.open`
    PREFIX.bin.xxh3   checksums of the plain tokens: `storage.codecs.checksums`

Writing, invisible until `publish`:

    plain bytes ─┬─► the codec of the name, such as .bin.zst ─► the object
                 └─► a checksum for each 16 KiB ─► .bin.xxh3

`publish` first removes obsolete objects and whatever could be taken for the new tokens or their checksums; then the
object appears, then its checksums. The caller makes sure that no `.idx` exists in between.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from binidx.errors import CancelledReadError, ConfigError, FormatError, ObjectNotFoundError, StorageError, warn_once
from binidx.format.idx import RESTORE
from binidx.format.index_columns import SpooledColumn
from binidx.format.prefix_listing import ListedPair
from binidx.format.sidecars.dataset_manifest import DatasetCounts, check_counts
from binidx.format.virtual import PARTS
from binidx.storage.codecs.checksums import SUMS, BlockSums, format_sums_header
from binidx.storage.interfaces import Bytes, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import CODECS, codec_named, codec_of, layered, open_stored, suffix_of
from binidx.storage.requests.remote_object import Found, find_object, is_absent, object_exists
from binidx.storage.threads import REQUESTS
from binidx.storage.writing.publish import create_object, delete_object, discard_writes

logger = logging.getLogger(__name__)
Report = Callable[[str, str], None]
PADDING_BYTES = 4096
"""Most bytes after the last token that are taken for padding. Neither Megatron nor binidx writes any; a tool that
stages files with O_DIRECT fills up their last block, which has 4096 bytes on all but a few disks."""


def check_bin_size(
    prefix: str,
    bin_uri: str,
    size: int,
    index: DatasetCounts,
    read_manifest: Callable[[], Mapping[str, Any] | None],
    report: Report = warn_once,
) -> None:
    """Check the size of a `.bin` against its `.idx`.

    Args:
        prefix, bin_uri: names of the dataset and of its `.bin`, for errors.
        size: plain bytes of the `.bin`.
        index: counts and dtype of the `.idx`.
        read_manifest: called only if there are bytes after the last token; a manifest that cannot be read is ignored.
        report: called with the URI and the problem if these bytes are too many for padding.

    Raises:
        FormatError: the `.bin` is too short; or it is too long, and its manifest contradicts the `.idx`.
    """
    if not (surplus := count_surplus_bytes(bin_uri, size, index)):
        return
    try:
        manifest = read_manifest()
    except (FormatError, StorageError):
        manifest = None
    if manifest and "dataset" in manifest:
        check_counts(prefix, manifest, index)
    if surplus > PADDING_BYTES:
        needed = f"{describe_need(index)} and at most {PADDING_BYTES} of padding"
        rest = "the other bytes are never read, as if the .idx belonged to another dataset"
        report(bin_uri, f"{size} bytes, {needed}; {rest}: restore the pair, or cut the .bin")


def count_surplus_bytes(bin_uri: str, size: int, index: DatasetCounts) -> int:
    """Return the number of bytes of a `.bin` after its last token; raise FormatError if it is too short.

    Args:
        bin_uri: URI of the `.bin`, for the error.
        size: plain bytes of the `.bin`.
        index: counts and dtype of the `.idx`.
    """
    surplus = size - _num_bytes(index)
    if surplus < 0:
        raise FormatError(f"{bin_uri}: {size} bytes, {describe_need(index)}; {RESTORE}")
    return surplus


def _num_bytes(index: DatasetCounts) -> int:
    return index["tokens"] * np.dtype(index["dtype"]).itemsize


def describe_need(index: DatasetCounts) -> str:
    """Return a text with the number of bytes that an `.idx` needs."""
    return f"its .idx needs {_num_bytes(index)} ({index['tokens']} tokens of {index['dtype']})"


def compares_sums(location: Location) -> bool:
    """Return whether the settings of a location let readers compare tokens with checksums, if there are some."""
    verify = location.settings.verify
    return bool(verify) if location.local_path is not None else verify is not False


def require_sums(tokens: Location, codec: str, has_sums: bool) -> None:
    """Raise ObjectNotFoundError if the settings of a `.bin` require checksums, and a plain one has none."""
    if tokens.settings.verify and codec == "raw" and not has_sums:
        thing = "object" if tokens.local_path is None else "file"
        needed = "BINIDX_VERIFY=1 needs it, binidx convert --checksums writes it"
        raise ObjectNotFoundError(f"{tokens}{SUMS}: no such {thing}; {needed}")


def find_bin(prefix: Location) -> Location | None:
    """Return the object that holds the tokens of a prefix, or None."""
    return next((tokens for suffix in _bin_suffixes() if object_exists(tokens := prefix + f".bin{suffix}")), None)


def look_up_bin(prefix: Location) -> Found | None:
    """Return what the store reports of the object that holds the tokens of a prefix, or None."""
    forms = (find_object(prefix + f".bin{suffix}", refused_is_absent=False) for suffix in _bin_suffixes())
    return next(filter(None, forms), None)


def _bin_suffixes() -> Iterator[str]:
    """Yield the suffixes of all codecs; those of installed packages are looked up if no other one is accepted."""
    yield from (known := CODECS.known)
    yield from (suffix for suffix in CODECS.names() if suffix not in known)


def open_bin(
    prefix: Location, *, mmap: bool = True, cache: bool | None = None, listed: ListedPair | None = None
) -> RangeReader:
    """Open the tokens of a prefix as plain bytes.

    Args:
        mmap, cache: as in `open_object`.
        listed: the pair's files in a listing of their folder, if one was made.

    Raises:
        ObjectNotFoundError: there is no `.bin`, plain or compressed; or no checksums, which
            `storage_options={"binidx": {"verify": True}}` or BINIDX_VERIFY=1 require.
        FormatError: the object is not stored as its name says, or the checksums are of another size.
    """
    tokens, verify = prefix + ".bin", prefix.settings.verify
    if listed:
        suffix = listed.bin.info.uri.removeprefix(tokens.uri)
        stored = _StoredBin(open_stored(tokens + suffix, found=listed.bin), codec_of(listed.bin.info.uri))
        if listed.sums and verify is not False:
            stored = replace(stored, sums=open_stored(tokens + SUMS, found=listed.sums))
    elif prefix.local_path is None:
        stored = _find_remote(tokens, verify)
    else:
        stored = _find_local(prefix, mmap, bool(verify))
    require_sums(tokens, stored.codec, stored.sums is not None)
    return layered(stored.reader, tokens, sums=stored.sums, codec=stored.codec, end=stored.end, cache=cache)


@dataclass(frozen=True)
class _StoredBin:
    """Opened object with its codec, its checksums if they are to be checked, and its last bytes if they are known."""

    reader: RangeReader
    codec: str = "raw"
    sums: RangeReader | None = None
    end: bytes = b""


def _find_local(prefix: Location, mmap: bool, verify: bool) -> _StoredBin:
    stored = find_bin(prefix) or prefix + ".bin"
    codec = codec_of(stored.uri)
    has_sums = verify and codec == "raw" and object_exists(stored + SUMS)
    sums = open_stored(stored + SUMS, mmap=mmap) if has_sums else None
    return _StoredBin(open_stored(stored, mmap=mmap), codec, sums)


def _find_remote(tokens: Location, verify: bool | None) -> _StoredBin:
    """Look up the `.bin`, its forms in all known codecs and the checksums at the same time: one round trip.

    An encoded object is used only if there is no plain one. If there is neither, the codecs of installed packages are
    looked up; only then do they become known.

    Args:
        verify: True: a failure to look up the checksums is an error; None: a warning; False: they are not looked up.
    """

    def find(suffix: str, codec: str = "raw", end_bytes: int = 0) -> _StoredBin | None:
        # Checksums that may not be read are not taken for absent ones.
        found = find_object(tokens + suffix, end_bytes=end_bytes, refused_is_absent=suffix != SUMS)
        if found is None:
            return None
        return _StoredBin(open_stored(tokens + suffix, found=found), codec, end=found.end)

    def find_encoded(suffix: str) -> _StoredBin | None:
        # The codec of an installed package is imported once an object has its suffix.
        is_ready = suffix in CODECS or suffix in CODECS.builtin
        return find(suffix, codec_of(f"{tokens}{suffix}"), CODECS[suffix].tail_bytes if is_ready else 0)

    known = CODECS.known
    encoded = [REQUESTS.submit(partial(find_encoded, suffix)) for suffix in known if suffix]
    sums = REQUESTS.submit(lambda: find(SUMS) if verify is not False else None)
    try:
        plain = open_stored(tokens)
    except StorageError as error:
        if not is_absent(error):
            raise
        forms = [form.result() for form in encoded]
        others = [suffix for suffix in CODECS.names() if suffix not in known] if not any(forms) else []
        stored = next(filter(None, [*forms, *REQUESTS.map(find_encoded, others)]), None)
        if stored is None:
            raise
        return stored
    finally:
        wait([*encoded, sums])
    try:
        found_sums = sums.result()
    except StorageError as error:
        if verify or isinstance(error, CancelledReadError):
            raise
        logger.warning("%s: read without checksums, as these could not be looked up: %s", tokens, error)
        found_sums = None
    return _StoredBin(plain, sums=found_sums.reader if found_sums else None)


def strip_bin_suffix(uri: str) -> str:
    """Return the prefix of a `.bin`, compressed or not; an object of any other name is its own prefix."""
    return uri.removesuffix(suffix_of(codec_of(uri))).removesuffix(".bin")


FILE_ENDS = (".idx", f".bin{SUMS}", PARTS)
"""Ends of the names of a dataset's files after its prefix, but for those that hold tokens."""


def strip_end(text: str) -> str | None:
    """Return the prefix of a dataset from the name of one of its files; None for other names."""
    prefix = next((text.removesuffix(end) for end in FILE_ENDS if text.endswith(end)), strip_bin_suffix(text))
    return prefix if prefix != text else None


def as_prefix(text: str) -> str:
    """Return the prefix that a user means: without a slash at its end, and without the ending of a dataset's file.

    A name to which `.idx` can be appended on this machine stays as it is.
    """
    bare = text.rstrip("/")
    prefix = strip_end(bare) or bare
    if prefix == text or prefix.endswith((":", "/")) or not prefix:
        return text
    path = Location(text).local_path
    return text if path is not None and os.path.exists(f"{path}.idx") else prefix


class BinWriter:
    """Writer of one `.bin`, `.bin.zst`, or object of any other name.

    Args:
        level: compression level; None for the codec's default.
        checksums: whether to write checksums, too.

    Attributes:
        obsolete: objects that `publish` removes first; the caller may append to it.

    Raises:
        ConfigError: a level for an object that is not compressed, or checksums for one that is.
    """

    def __init__(self, location: Location, *, level: int | None = None, checksums: bool = False) -> None:
        self.location, self.obsolete = location, list[Location]()
        codec = codec_named(name := codec_of(location.uri))
        if level is not None and name == "raw":
            raise ConfigError(f"{location}: compression_level {level}, needed a name that ends in .bin.zst")
        codec.check_level(level)
        if checksums and name != "raw":
            raise ConfigError(f"{location}: checksums=True, needed a plain .bin; each compressed segment has its own")
        self._column = SpooledColumn("u8") if checksums else None
        self._sums = BlockSums(self._column.extend) if self._column is not None else None
        self._open = contextlib.ExitStack()
        stored = self._open.enter_context(create_object(location, before_publish=self._remove_obsolete))
        self._writer = self._open.enter_context(codec.create(stored, level))

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
        with create_object(self.location + SUMS, before_publish=self._open.close) as writer:
            writer.write(format_sums_header(self._sums.size))
            for block in self._column.blocks():
                writer.write(block.tobytes())

    def abandon(self) -> None:
        """Remove the unpublished object and free memory; no effect after `publish`."""
        if self._column is not None:
            self._column.close()
        discard_writes(self._open)

    def _remove_obsolete(self) -> None:
        for location in self.obsolete:
            delete_object(location)
        self.remove_superseded(self.location)

    @staticmethod
    def suffixes() -> list[str]:
        """Return the suffixes of objects that hold tokens, of all codecs."""
        return [f"bin{suffix}" for suffix in CODECS.names()]

    @staticmethod
    def remove_superseded(location: Location) -> None:
        """Delete the objects that become invalid when one is written: other forms of its tokens, and checksums.

        Args:
            location: of a `.bin`, compressed or not, or of an object of any other name.
        """
        prefix, forms = strip_bin_suffix(location.uri), [location.uri + SUMS]
        if prefix != location.uri:
            forms = [f"{prefix}.{suffix}" for suffix in (*BinWriter.suffixes(), f"bin{SUMS}")]
        for uri in filter(location.uri.__ne__, forms):
            delete_object(Location(uri, location.options))
