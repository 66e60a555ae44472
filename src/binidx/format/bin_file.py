"""The `.bin` of a prefix: the forms in which its tokens are stored, and how they are written; `pair` opens them.

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
import difflib
import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError, StorageError
from binidx.format.idx import RESTORE
from binidx.format.idx_blocks import SpooledColumn
from binidx.format.sidecars.dataset_manifest import DatasetCounts, check_counts
from binidx.format.virtual import PARTS
from binidx.storage.cache.eviction import warn_once
from binidx.storage.codecs.checksums import SUMS, BlockSums, format_sums_header
from binidx.storage.interfaces import Bytes
from binidx.storage.location import Location
from binidx.storage.open import CODECS, codec_named, codec_of, suffix_of
from binidx.storage.requests.remote_object import Found, find_object, list_page, object_exists
from binidx.storage.writing.publish import create_object, delete_object, discard_writes

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


def did_you_mean(prefix: Location) -> str:
    """Return advice for a prefix without an `.idx`: datasets of its folder with a name that begins with it or is like
    it; else nothing.

    Raises:
        ObjectNotFoundError: its bucket does not exist.
    """
    path = prefix.local_path
    if path and os.path.exists(f"{path}.idx"):
        return ""
    if hint := _hint_at_spelling(prefix.uri):
        return hint
    near = _list_datasets(prefix) or _list_datasets(Location(f"{prefix}/", prefix.options))
    if prefix.uri in near:  # its writer was replacing it
        return ""
    if path and not near and os.path.isfile(path):
        return f"; {prefix} is a file, and no dataset; binidx preprocess makes one of text"
    near = near or _list_similar(prefix)
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def _hint_at_spelling(typed: str) -> str:
    """Return advice for a URI with one slash too few, or for several prefixes in one text; else nothing."""
    if re.match(r"\w{2,}:/[^/]", typed):
        return f"; did you mean {typed.replace(':/', '://', 1)}?"
    parts = [part for part in re.split(r"[,;\s]+", typed) if part != typed]
    if typed.count("://") > 1 or any(os.path.exists(f"{part}.idx") for part in parts):
        return "; if these are several datasets, give each as a text of its own: {'a': 0.7, 'b': 0.3}, or ['a', 'b']"
    return ""


def _list_similar(prefix: Location) -> list[str]:
    """Return the prefixes of the same folder whose names are like this one."""
    folder = prefix.uri[: len(prefix.uri) - len(prefix.name)]
    names = _list_datasets(Location(folder, prefix.options)) if folder else []
    near = difflib.get_close_matches(prefix.name, [uri.removeprefix(folder) for uri in names])
    return [folder + name for name in near]


def _list_datasets(start: Location) -> list[str]:
    """Return the prefixes of `.idx` files whose names begin so, in order; of a store those of one page of its list."""
    try:
        pattern = None if start.local_path is None else f"{glob.escape(start.local_path)}*.idx"
        files = glob.iglob(pattern) if pattern else list_page(start)
        return sorted(file.removesuffix(".idx") for file in files if file.endswith(".idx"))
    except ObjectNotFoundError:  # no such bucket
        raise
    except StorageError:  # the store cannot be listed, or refuses it
        return []


def remove_superseded(location: Location) -> None:
    """Delete the objects that become invalid when one is written: other forms of its tokens, and checksums.

    Args:
        location: of a `.bin`, compressed or not, or of an object of any other name.
    """
    prefix, forms = strip_bin_suffix(location.uri), [location + SUMS]
    if prefix != location.uri:
        forms = [Location(f"{prefix}.bin{suffix}", location.options) for suffix in (*CODECS.names(), SUMS)]
    for form in forms:
        if form.uri != location.uri:
            delete_object(form)


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
        remove_superseded(self.location)
