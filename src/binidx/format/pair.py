"""Open both files of a dataset so that they belong together.

    identity of .idx ──► read .idx  ─┐
                         open .bin  ─┴──► identity of .idx again: unchanged? a pair; else once more

A writer removes the .idx first and publishes the new one last (`indexed_dataset_builder`, `corpus.convert`). If the
.idx is the same before and after the .bin was opened, the .bin belongs to it, as no writer was at work in between. For
tools that replace files in another order, or in place, there is no such proof, only their times and sizes.

For many datasets of one folder, two lists prove the same without a request for each: `prefix_listing`. Otherwise the
cost is one HEAD more, at the same time as another (the .bin is opened while the .idx arrives), and two for objects
that may exist instead of the .bin or beside it (`bin_file`); for local files two stat calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.format.bin_file import open_bin, open_listed_bin
from binidx.format.idx import SequenceIndex, get_idx_path, parse_index
from binidx.format.prefix_listing import ListedPair, list_pairs
from binidx.format.virtual import concatenate_indices, read_parts
from binidx.storage.adapters import JoinedReader
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_object, read_whole
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import OPENS, run_both
from binidx.storage.writing.publish import object_identity

Options = Mapping[str, Any] | None
WaitCheck = Callable[[bool], None]
ATTEMPTS = 5
PAUSE_SECONDS = 0.05
"""Pause after the first attempt, doubled each time: 0.75 s in all, more than a writer takes between its files."""


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
        ObjectChangedError: the dataset was replaced repeatedly while it was opened.
    """
    try:
        return _open_alone(ResolvedPrefix.of(path_prefix), multimodal, mmap, cache, storage_options)
    except ObjectNotFoundError:
        virtual = _open_virtual(path_prefix, multimodal, mmap, cache, storage_options)
        if virtual is None:
            raise
        return virtual


def _open_alone(
    path_prefix: ResolvedPrefix, multimodal: bool, mmap: bool, cache: bool | None, options: Options
) -> Pair:
    """Open the pair of files under a prefix."""
    if path_prefix.listed and (pair := _open_listed(path_prefix, path_prefix.listed, multimodal, cache, options)):
        return pair
    uri = get_idx_path(path_prefix)
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            pair = _open_once(path_prefix, multimodal, mmap, cache, options)
        except ObjectNotFoundError:
            # At the first attempt the file is missing; later a writer is between its two files.
            if not attempt:
                raise
            continue
        if pair is not None:
            return pair
    raise ObjectChangedError(
        f"{uri}: replaced while it was opened, {ATTEMPTS} times; open it when its writer has finished"
    )


def _open_virtual(path_prefix: str, multimodal: bool, mmap: bool, cache: bool | None, options: Options) -> Pair | None:
    """Open the parts listed under a prefix as one pair; None if there is no list."""
    parts = read_parts(path_prefix, options)
    if parts is None:
        return None
    found = list_pairs(parts.prefixes, options)

    def open_part(prefix: str) -> Pair:
        known = ResolvedPrefix(prefix, found.get(prefix))
        return _open_alone(known, multimodal, mmap, cache, options)

    pairs = OPENS.map(open_part, parts.prefixes)
    parts.check([pair.identities for pair in pairs])
    index = concatenate_indices([pair.index for pair in pairs], parts)
    bin_reader = JoinedReader(parts.uri, [pair.bin_reader for pair in pairs], [pair.index.num_bytes for pair in pairs])
    marks = {"parts": parts.digest}
    return Pair(index, bin_reader, {"idx": marks, "bin": {"size": bin_reader.size, **marks}})


def _open_listed(
    path_prefix: ResolvedPrefix, found: ListedPair, multimodal: bool, cache: bool | None, options: Options
) -> Pair | None:
    """Open a listed pair; None if it was replaced since or is not valid, so that it must be opened alone."""
    uri = get_idx_path(path_prefix)
    try:
        data = found.index
        if data is None:
            idx_reader = open_object(uri, storage_options=options, cache="disk", found=found.idx)
            data = read_whole(idx_reader)
        bin_reader = open_listed_bin(path_prefix, found.bin, found.sums, storage_options=options, cache=cache)
        index = parse_index(data, uri=uri, multimodal=multimodal)
        _check_bin_size(bin_reader.uri, bin_reader.size, index)
    except (FormatError, StorageError):
        found.index = None
        return None
    found.index = data
    return Pair(index, bin_reader, {"idx": found.identity, "bin": dict(bin_reader.identity)})


def _open_once(
    path_prefix: ResolvedPrefix, multimodal: bool, mmap: bool, cache: bool | None, options: Options
) -> Pair | None:
    """Open both files; None if the .idx was replaced meanwhile, so that neither result nor error is valid."""
    uri = get_idx_path(path_prefix)
    # Of a local path its own stat, not the reader's: the inode tells files apart whose times are equal.
    before = None if local_path(uri) is None else _current_identity(uri, options)
    idx_reader = open_object(uri, storage_options=options, mmap=mmap, cache="disk")
    before = before or dict(idx_reader.identity)
    try:
        pair = _read_both(path_prefix, idx_reader, multimodal, mmap, cache, options)
    except (FormatError, StorageError):
        if _current_identity(uri, options) == before:
            raise
        return None
    return pair if _current_identity(uri, options) == before else None


def _read_both(
    path_prefix: ResolvedPrefix,
    idx_reader: RangeReader,
    multimodal: bool,
    mmap: bool,
    cache: bool | None,
    options: Options,
) -> Pair:
    def read_index() -> SequenceIndex:
        return parse_index(read_whole(idx_reader), uri=idx_reader.uri, multimodal=multimodal)

    def open_tokens() -> RangeReader:
        return open_bin(path_prefix, storage_options=options, mmap=mmap, cache=cache)

    if local_path(path_prefix) is None:
        index, bin_reader = run_both(read_index, open_tokens)
    else:
        index, bin_reader = read_index(), open_tokens()
    _check_bin_size(bin_reader.uri, bin_reader.size, index)
    return Pair(index, bin_reader, {"idx": dict(idx_reader.identity), "bin": dict(bin_reader.identity)})


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


def _check_bin_size(uri: str, size: int, index: SequenceIndex) -> None:
    if size < index.num_bytes:
        needed = f"its .idx needs {index.num_bytes} ({index.num_tokens} tokens of {index.dtype.__name__})"
        raise FormatError(f"{uri}: {size} bytes, {needed}")
