"""Both files of a dataset, opened so that they belong together.

    look at .idx ──► read .idx  ─┐
                     open .bin  ─┴──► look at .idx again: the same? a pair; else once more

Whoever replaces a dataset removes the .idx first and publishes the new one last (`builder`, `convert`). So if the .idx
is the same before and after the .bin was opened, that .bin is its own: no writer was at work in between. Tools that
replace the files in another order, or in place, prove nothing and get no more than what their times and sizes show.

Of many in one folder two lists tell the same, at no price for each: `listed`. Else, the
price: one HEAD more, at the time of none (the .bin is opened while the .idx arrives), and two for what may lie there in
its place or beside it (`bin_object`); for local files two stat calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.format.bin_file import open_bin, open_found
from binidx.format.idx import SequenceIndex, get_idx_path, parse_index
from binidx.format.prefix_listing import ListedPair, list_pairs
from binidx.format.virtual import concatenate, map_concurrently, read_parts
from binidx.storage.adapters import Joined
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_object, read_whole
from binidx.storage.stores.identity import same_object
from binidx.storage.stores.registry import local_path
from binidx.storage.vectored_reads import run_both
from binidx.storage.writing.publish import object_identity

Options = Mapping[str, Any] | None


Identity = Mapping[str, Any]


Checked = Callable[[], Sequence[Identity]]


Check = Callable[[], None]


ATTEMPTS = 5


PAUSE_SECONDS = 0.05


"""After the first attempt, then twice as long each time: 0.75 s in all, more than a writer takes between its files."""


class KnownPrefix(str):
    """A prefix with facts about its files that its opener need not find out again.

    `dataset/` opens low-level datasets by functions with Megatron's arguments, which users replace by their own: a
    prefix is the argument that all of them pass on.

    Pickles as the plain prefix.

    Args:
        listed: the pair, where a list of its folder has shown it.
        checked: returns, once they are fetched, identities of `.idx` objects that were checked in full before: one of
            them needs no pass over its arrays.
        checks: called by all that wait for an index of this dataset; an exception ends the wait. See `index.turn`.
    """

    listed: ListedPair | None
    checked: Checked
    checks: tuple[tuple[Check, Check], ...]

    def __new__(
        cls,
        prefix: str,
        listed: ListedPair | None = None,
        checked: Checked = tuple,
        checks: tuple[tuple[Check, Check], ...] = (),
    ) -> Self:
        made = super().__new__(cls, prefix)
        made.listed, made.checked, made.checks = listed, checked, checks
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    @classmethod
    def of(cls, prefix: str) -> KnownPrefix:
        """The prefix as it is if it has such facts, else with none."""
        return prefix if isinstance(prefix, cls) else cls(prefix)


@dataclass(frozen=True)
class Pair:
    """An index, its tokens, and what identified both objects, by "idx" and "bin", when they were opened."""

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
    """Open the dataset under a prefix, which may be a `KnownPrefix`; `cache` is for its `.bin`, as in `open_object`.

    Where there is none, but a list of parts, these are opened as one: `virtual`.

    Raises:
        ObjectNotFoundError: one of the two is missing.
        FormatError: the `.idx` breaks a rule of the format, or the `.bin` is shorter than it says.
        ObjectChangedError: it was replaced again and again while it was opened.
    """
    try:
        return _open_alone(KnownPrefix.of(path_prefix), multimodal, mmap, cache, storage_options)
    except ObjectNotFoundError:
        virtual = _open_virtual(path_prefix, multimodal, mmap, cache, storage_options)
        if virtual is None:
            raise
        return virtual


def reader_identity(reader: RangeReader) -> dict[str, Any]:
    """What identified the object when it was opened; nothing where the reader does not know."""
    found: dict[str, Any] = getattr(reader, "identity", {})
    return found


def _open_alone(path_prefix: KnownPrefix, multimodal: bool, mmap: bool, cache: bool | None, options: Options) -> Pair:
    """The pair of files under a prefix."""
    if path_prefix.listed and (pair := _open_listed(path_prefix, path_prefix.listed, multimodal, cache, options)):
        return pair
    uri = get_idx_path(path_prefix)
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            pair = _open_once(path_prefix, multimodal, mmap, cache, options)
        except ObjectNotFoundError:
            # Missing from the start is missing; later it is a writer between its two files.
            if not attempt:
                raise
            continue
        if pair is not None:
            return pair
    raise ObjectChangedError(f"{uri}: replaced while it was opened, {ATTEMPTS} times; open it when its writer is done")


def _open_virtual(path_prefix: str, multimodal: bool, mmap: bool, cache: bool | None, options: Options) -> Pair | None:
    """The parts that are listed under a prefix, as one pair; None: there is no such list."""
    parts = read_parts(path_prefix, options)
    if parts is None:
        return None
    found = list_pairs(parts.prefixes, options)

    def open_part(prefix: str) -> Pair:
        known = KnownPrefix(prefix, found.get(prefix))
        return _open_alone(known, multimodal, mmap, cache, options)

    pairs = map_concurrently(open_part, parts.prefixes)
    parts.check([pair.identities for pair in pairs])
    index = concatenate([pair.index for pair in pairs], parts)
    bin_reader = Joined(parts.uri, [pair.bin_reader for pair in pairs], [pair.index.num_bytes for pair in pairs])
    marks = {"parts": parts.digest}
    return Pair(index, bin_reader, {"idx": marks, "bin": {"size": bin_reader.size, **marks}})


def _open_listed(
    path_prefix: KnownPrefix, found: ListedPair, multimodal: bool, cache: bool | None, options: Options
) -> Pair | None:
    """The pair that lists have shown; None if it was replaced since, or breaks a rule: then it is opened anew."""
    uri = get_idx_path(path_prefix)
    try:
        data = found.index
        if data is None:
            idx_reader = open_object(uri, storage_options=options, cache="disk", found=found.idx)
            data, sound = _read_index(idx_reader, path_prefix.checked)
        else:
            sound = False
        bin_reader = open_found(path_prefix, found.bin, found.sums, storage_options=options, cache=cache)
        index = parse_index(data, uri=uri, multimodal=multimodal, sound=sound)
        _check_bin_size(bin_reader.uri, bin_reader.size, index)
    except (FormatError, StorageError):
        found.index = None
        return None
    found.index = data
    return Pair(index, bin_reader, {"idx": found.identity, "bin": reader_identity(bin_reader)})


def _open_once(
    path_prefix: KnownPrefix, multimodal: bool, mmap: bool, cache: bool | None, options: Options
) -> Pair | None:
    """None: the .idx changed in the meantime, so what was opened, or what failed, means nothing."""
    uri = get_idx_path(path_prefix)
    local = local_path(uri)
    # The path's own stat, not the reader's: the inode tells files apart whose times are equal.
    before: Any = None if local is None else _stat(local)
    idx_reader = open_object(uri, storage_options=options, mmap=mmap, cache="disk")
    if local is None:
        before = reader_identity(idx_reader)
    try:
        pair = _read_both(path_prefix, idx_reader, multimodal, mmap, cache, options)
    except (FormatError, StorageError):
        if _look(uri, options) == before:
            raise
        return None
    return pair if _look(uri, options) == before else None


def _read_both(
    path_prefix: KnownPrefix,
    idx_reader: RangeReader,
    multimodal: bool,
    mmap: bool,
    cache: bool | None,
    options: Options,
) -> Pair:
    def read_index() -> SequenceIndex:
        data, sound = _read_index(idx_reader, path_prefix.checked)
        return parse_index(data, uri=idx_reader.uri, multimodal=multimodal, sound=sound)

    def open_tokens() -> RangeReader:
        return open_bin(path_prefix, storage_options=options, mmap=mmap, cache=cache)

    if local_path(path_prefix) is None:
        index, bin_reader = run_both(read_index, open_tokens)
    else:
        index, bin_reader = read_index(), open_tokens()
    _check_bin_size(bin_reader.uri, bin_reader.size, index)
    return Pair(index, bin_reader, {"idx": reader_identity(idx_reader), "bin": reader_identity(bin_reader)})


def _read_index(idx_reader: RangeReader, checked: Checked) -> tuple[memoryview, bool]:
    """The bytes of an `.idx`, and whether this very object was checked in full before."""
    data, identity = read_whole(idx_reader), reader_identity(idx_reader)
    return data, any(same_object(each, identity) for each in checked())


def _look(uri: str, options: Options) -> Any:
    """What stands under the name now, in the terms of the look before; None: nothing."""
    local = local_path(uri)
    try:
        return object_identity(uri, options) if local is None else _stat(local)
    except ObjectNotFoundError:
        return None


def _stat(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectNotFoundError(f"{path}: no such file") from error
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _check_bin_size(uri: str, size: int, index: SequenceIndex) -> None:
    if size < index.num_bytes:
        needed = f"its .idx needs {index.num_bytes} ({index.num_tokens} tokens of {index.dtype.__name__})"
        raise FormatError(f"{uri}: {size} bytes, {needed}")
