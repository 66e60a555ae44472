"""Open both files of a dataset so that they belong together.

    identity of .idx ──► read .idx  ─┐
                         open .bin  ─┴──► identity of .idx again: unchanged? a pair; else an error

A writer removes the .idx first and publishes the new one last (`indexed_dataset_builder`, `corpus.convert`). If the
.idx is the same before and after the .bin was opened, the .bin belongs to it, as no writer was at work in between. For
tools that replace files in another order, or in place, there is no such proof, only their times and sizes.

For many datasets of one folder, two lists prove the same without a request for each: `prefix_listing`. Otherwise the
cost is one HEAD more, at the same time as another (the .bin is opened while the .idx arrives), and two for objects
that may exist instead of the .bin or beside it (`bin_file`); for local files two stat calls. Checksums of local files
are checked only on demand (BINIDX_VERIFY=1): a warm sample of 8 KiB takes 2 us, checking its blocks would take 10.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.format.bin_file import Options, find_bin
from binidx.format.idx import SequenceIndex, get_bin_path, get_idx_path, parse_index
from binidx.format.prefix_listing import ListedPair
from binidx.format.virtual import VirtualParts, concatenate_indices, read_parts
from binidx.storage.adapters import InMemory, JoinedReader
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.codecs.segments import TAIL_BYTES
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import CODECS, codec_of, layered, open_object, open_stored, read_whole, replace_cached
from binidx.storage.ranges import stored_reader
from binidx.storage.requests.remote_object import find_object, is_absent, object_exists, object_identity
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import REQUESTS, run_both

logger = logging.getLogger(__name__)
WaitCheck = Callable[[bool], None]


class ResolvedPrefix(str):
    """Prefix of a dataset with facts about its files, which its opener need not fetch again.

    The package `dataset` opens `IndexedDataset`s by functions with Megatron's arguments, which users may replace by
    their own; the prefix is the argument that all of them pass on, so it carries the facts. Pickles as a plain str.

    Args:
        listed: the pair's files in a listing of their folder; None: not listed.
        checks: called by processes that wait for an index of this dataset; an exception ends the wait:
            `index.cache.build_lock`.
    """

    listed: ListedPair | None
    checks: tuple[WaitCheck, ...]

    def __new__(cls, prefix: str, listed: ListedPair | None = None, checks: tuple[WaitCheck, ...] = ()) -> Self:
        made = super().__new__(cls, prefix)
        made.listed, made.checks = listed, checks
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    @classmethod
    def of(cls, prefix: str) -> ResolvedPrefix:
        """Return a prefix as a `ResolvedPrefix`: unchanged if it is one, else without facts."""
        return prefix if isinstance(prefix, cls) else cls(prefix)


@dataclass(frozen=True)
class Pair:
    """Index and tokens of a dataset, and the identities of both objects, "idx" and "bin", when they were opened."""

    index: SequenceIndex
    bin_reader: RangeReader
    identities: dict[str, Any]


def open_pair(
    path_prefix: str,
    multimodal: bool = False,
    mmap: bool = True,
    *,
    cache: bool | None = None,
    storage_options: Options = None,
) -> Pair:
    """Open the dataset under a prefix; the parts of a virtual merge are opened as one dataset.

    Args:
        path_prefix: may be a `ResolvedPrefix`.
        cache: for the `.bin`, as in `open_object`.

    Raises:
        ObjectNotFoundError: one of the two files is missing.
        FormatError: the `.idx` breaks a rule of the format, or the `.bin` is shorter than it requires.
        ObjectChangedError: the dataset was replaced while it was opened.
    """
    opening = _Opening(multimodal, mmap, cache, storage_options)
    try:
        return opening.open_alone(ResolvedPrefix.of(path_prefix))
    except ObjectNotFoundError:
        parts = read_parts(path_prefix, storage_options)
        if parts is None:
            raise
        return opening.open_parts(parts)


@dataclass(frozen=True)
class _Opening:
    """Opening of datasets with the arguments of `open_pair`."""

    multimodal: bool
    mmap: bool
    cache: bool | None
    options: Options

    def open_parts(self, parts: VirtualParts) -> Pair:
        """Open the parts of a virtual merge as one pair."""
        pairs = parts.open_each(
            lambda prefix, options, listed: replace(self, options=options).open_alone(ResolvedPrefix(prefix, listed))
        )
        parts.check([pair.identities for pair in pairs])
        index = concatenate_indices([pair.index for pair in pairs], parts)
        sizes = [pair.index.num_bytes for pair in pairs]
        bin_reader = JoinedReader(parts.uri, [pair.bin_reader for pair in pairs], sizes)
        marks = {"parts": parts.digest}
        return Pair(index, bin_reader, {"idx": marks, "bin": {"size": bin_reader.size, **marks}})

    def open_alone(self, path_prefix: ResolvedPrefix) -> Pair:
        """Open the pair of files under a prefix."""
        if path_prefix.listed and (pair := self._open_listed(path_prefix, path_prefix.listed)):
            return pair
        uri, local = get_idx_path(path_prefix), local_path(path_prefix) is not None
        # Of a local path its own stat, not the reader's: the inode tells files apart whose times are equal.
        before = _current_identity(uri, self.options) if local else None
        idx_reader = open_object(uri, storage_options=self.options, mmap=self.mmap, cache="disk")
        before = before or dict(idx_reader.identity)

        def read_index(reader: RangeReader) -> SequenceIndex:
            return parse_index(read_whole(reader), uri=uri, multimodal=self.multimodal)

        def open_tokens() -> RangeReader:
            return open_bin(path_prefix, storage_options=self.options, mmap=self.mmap, cache=self.cache)

        def open_both(reader: RangeReader) -> Pair:
            read = partial(read_index, reader)
            index, bin_reader = (read(), open_tokens()) if local else run_both(read, open_tokens)
            return _join(index, bin_reader, dict(idx_reader.identity))

        try:
            try:
                return open_both(idx_reader)
            except FormatError as error:
                if local:
                    raise
                # A bit may have flipped on the way, and be cached on this node.
                again = InMemory(uri, read_whole(stored_reader(idx_reader)))
                pair = open_both(again)
                logger.warning("%s: damaged on its way or in a cache, fetched again from its store: %s", uri, error)
                replace_cached(idx_reader, again.data)
                return pair
        finally:
            # If the .idx was replaced meanwhile, neither result nor error is valid.
            if _current_identity(uri, self.options) != before:
                raise ObjectChangedError(f"{uri}: replaced while it was opened; open it when its writer has finished")

    def _open_listed(self, path_prefix: ResolvedPrefix, found: ListedPair) -> Pair | None:
        """Open a pair as its listing shows it; return None if a file was replaced since, or is not valid."""
        uri, data = get_idx_path(path_prefix), found.index
        try:
            if data is None:
                idx_reader = open_object(uri, storage_options=self.options, cache="disk", found=found.idx)
                data = read_whole(idx_reader)
            bin_reader = open_bin(path_prefix, listed=found, storage_options=self.options, cache=self.cache)
            index = parse_index(data, uri=uri, multimodal=self.multimodal)
            pair = _join(index, bin_reader, found.identity)
        except (FormatError, StorageError):
            found.index = None
            return None
        found.index = data
        return pair


def _join(index: SequenceIndex, bin_reader: RangeReader, idx_identity: dict[str, Any]) -> Pair:
    needed = f"its .idx needs {index.num_bytes} ({index.num_tokens} tokens of {index.dtype.__name__})"
    if bin_reader.size < index.num_bytes:
        raise FormatError(f"{bin_reader.uri}: {bin_reader.size} bytes, {needed}")
    if may_lack_a_bit(index, bin_reader.size - index.num_bytes):
        raise FormatError(
            f"{bin_reader.uri}: {bin_reader.size} bytes, {needed}, as if a bit in the length of its last sequence had "
            "flipped; restore the .idx, or cut the .bin if the bytes after its last token are a leftover"
        )
    return Pair(index, bin_reader, {"idx": idx_identity, "bin": dict(bin_reader.identity)})


def may_lack_a_bit(index: SequenceIndex, spare_bytes: int) -> bool:
    """Return whether one bit of an `.idx` that flipped to 0 explains the bytes after the last token of its `.bin`.

    The pointers prove every length but the last. Neither Megatron nor binidx writes bytes after the last token, but
    other tools may leave some, which both ignore: they are accepted unless they are as many as such a bit takes away.
    """
    tokens, rest = divmod(spare_bytes, index.dtype_size)
    last = int(index.sequence_lengths[-1]) if len(index) else -1
    return not rest and tokens.bit_count() == 1 and tokens < 2**31 and not last & tokens


def _current_identity(uri: str, options: Options) -> Any:
    """Return the identity of the object that has this name now: the stat of a local file; None without an object."""
    try:
        path = local_path(uri)
        if path is None:
            return object_identity(uri, options)
        found = os.stat(path)
    except ObjectNotFoundError:
        return None
    except OSError:
        if path is None:
            raise
        return None  # opening it says more
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


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
        listed: the pair's files in a listing of their folder, if one was made.

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
        thing = "object" if local_path(uri) is None else "file"
        needed = "BINIDX_VERIFY=1 needs it, binidx convert --checksums writes it"
        raise ObjectNotFoundError(f"{uri}{SUFFIX}: no such {thing}; {needed}")
    return layered(stored.reader, storage_options, sums=stored.sums, codec=stored.codec, end=stored.end, cache=cache)


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
    """Look up the `.bin`, the `.bin.zst` and the checksums at the same time, so that all cost one round trip.

    The compressed object is used only if there is no plain one.
    """

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
