"""Open both files of a dataset so that they belong together.

    identity of .idx ──► read .idx  ─┐
                         open .bin  ─┴──► identity of .idx again: unchanged? a pair; else an error

A writer removes the .idx first and publishes the new one last (`indexed_dataset_builder`, `corpus.convert`). If the
.idx is the same before and after the .bin was opened, the .bin belongs to it, as no writer was at work in between. For
tools that replace files in another order, or in place, there is no such proof, only their times and sizes.

For many datasets of one folder, two lists prove the same without a request for each: `prefix_listing`. Otherwise the
cost is one HEAD more, at the same time as another (the .bin is opened while the .idx arrives), and two for objects
that may exist instead of the .bin or beside it (`bin_file`); for local files two stat calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.format.bin_file import Options, open_bin
from binidx.format.idx import SequenceIndex, get_idx_path, parse_index
from binidx.format.prefix_listing import ListedPair, list_pairs
from binidx.format.virtual import VirtualParts, concatenate_indices, read_parts
from binidx.storage.adapters import JoinedReader
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_object, read_whole
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import OPENS, run_both
from binidx.storage.writing.publish import object_identity

WaitCheck = Callable[[bool], None]


class ResolvedPrefix(str):
    """Prefix of a dataset with facts about its files, which its opener need not fetch again.

    `dataset/` opens low-level datasets by functions with Megatron's arguments, which users may replace by their own;
    the prefix is the argument that all of them pass on. Pickles as the plain prefix.

    Args:
        listed: the pair as a list of its folder shows it.
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
        """Return the prefix unchanged if it has such facts, else without any."""
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
    """Arguments of `open_pair`."""

    multimodal: bool
    mmap: bool
    cache: bool | None
    options: Options

    def open_parts(self, parts: VirtualParts) -> Pair:
        """Open the parts of a virtual merge as one pair."""
        listed = list_pairs(parts.prefixes, self.options)
        pairs = OPENS.map(lambda each: self.open_alone(ResolvedPrefix(each, listed.get(each))), parts.prefixes)
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

        def read_index() -> SequenceIndex:
            return parse_index(read_whole(idx_reader), uri=idx_reader.uri, multimodal=self.multimodal)

        def open_tokens() -> RangeReader:
            return open_bin(path_prefix, storage_options=self.options, mmap=self.mmap, cache=self.cache)

        try:
            index, bin_reader = (read_index(), open_tokens()) if local else run_both(read_index, open_tokens)
            return _join(index, bin_reader, dict(idx_reader.identity))
        finally:
            # If the .idx was replaced meanwhile, neither result nor error is valid.
            if _current_identity(uri, self.options) != before:
                raise ObjectChangedError(f"{uri}: replaced while it was opened; open it when its writer has finished")

    def _open_listed(self, path_prefix: ResolvedPrefix, found: ListedPair) -> Pair | None:
        """Open a listed pair; None if it was replaced since or is not valid, so that it must be opened alone."""
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
    if bin_reader.size < index.num_bytes:
        needed = f"its .idx needs {index.num_bytes} ({index.num_tokens} tokens of {index.dtype.__name__})"
        raise FormatError(f"{bin_reader.uri}: {bin_reader.size} bytes, {needed}")
    return Pair(index, bin_reader, {"idx": idx_identity, "bin": dict(bin_reader.identity)})


def _current_identity(uri: str, options: Options) -> Any:
    """Return the identity of the object that has this name now: the stat of a local file; None without an object."""
    path = local_path(uri)
    try:
        if path is None:
            return object_identity(uri, options)
        found = os.stat(path)
    except (ObjectNotFoundError, FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
