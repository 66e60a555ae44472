"""Virtual merge: a list of datasets that opens as one dataset, without copying anything.

`PREFIX.parts.json`, if there is no `PREFIX.idx`:

    {"format": "binidx-parts", "version": 1, "dtype": "uint16",
     "parts": [{"prefix": "en/0", "sequences": 4711, "tokens": 1203344,
                "idx": {"size": 94254, "etag": "..."}, "bin": {"size": 2406688, "etag": "..."}}, ...]}

prefix      prefix of a part, on the host and in the bucket of this file; a relative one starts at its folder
idx, bin    identities of the part's files when the list was written: size, and ETag, generation or time

The virtual dataset equals what `binidx merge` of the parts writes, byte for byte: lengths are concatenated, pointers
and bounds shifted, and the `.bin` of each part ends after its last sequence. A part that was replaced since is an
error that names it, when the dataset is opened and while it is read.

A part elsewhere is opened only if the user's setting `parts_from` names its host or bucket: the author of a list in a
store must not choose which hosts see the user's credentials, or which local files are read. A list on a disk may name
any local file.

Prohibited: no parts; parts of different dtypes; a part that is itself virtual.

Source: ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import xxhash

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError, StorageError
from binidx.forks import cached_property
from binidx.format.idx import DType, IdxLayout, SequenceIndex, format_idx_header
from binidx.format.prefix_listing import ListedPair
from binidx.json_models import Count, JsonFile, tolerate_all
from binidx.storage.adapters import InMemory, JoinedReader
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import read_document
from binidx.storage.ranges import check_ranges
from binidx.storage.requests.remote_object import is_absent
from binidx.storage.settings import OURS
from binidx.storage.stores.identity import check_pair
from binidx.storage.stores.registry import is_url, join_uri, place_of
from binidx.storage.threads import OPENS

PARTS = ".parts.json"
"""Suffix of the list of parts of a virtual merge."""
Identity = Mapping[str, Any]
Opened = TypeVar("Opened")


@dataclass(frozen=True)
class VirtualPart:
    """Part of a virtual merge; `prefix` as the `.parts.json` has it."""

    prefix: str
    sequences: Count
    tokens: Count
    idx: Identity
    bin: Identity

    def __post_init__(self) -> None:
        if "size" not in self.idx or "size" not in self.bin:
            raise FormatError(f"part {self.prefix}: idx or bin has no size, needed it to identify the file")


@dataclass(frozen=True)
class PartsFile:
    """Fields of a `.parts.json` besides its format and version."""

    dtype: str
    parts: list[VirtualPart]

    def __post_init__(self) -> None:
        DType.code_from_dtype(self.dtype)
        if not self.parts:
            raise FormatError("parts: found none, needs at least one")


TAGS = {"format": "binidx-parts", "version": 1}
PARTS_FILE = JsonFile(
    PartsFile, TAGS, hint="needed binidx-parts 1, as binidx merge --virtual writes it", tolerates=tolerate_all
)


@dataclass(frozen=True)
class VirtualParts:
    """Parts of a virtual merge: contents of the `.parts.json` at `location`, and the digest of its bytes."""

    location: Location
    dtype: str
    parts: Sequence[VirtualPart]
    digest: str

    @cached_property
    def prefixes(self) -> list[Location]:
        """Prefixes of the parts, as URIs or absolute paths; raises ConfigError as `named_location`."""
        return [named_location(resolve_part(self.location.uri, part.prefix), self.location) for part in self.parts]

    def list_pairs(self) -> dict[str, ListedPair]:
        """Return `ListedPair.list_all` of the parts that have the same storage options as the `.parts.json`."""
        return ListedPair.list_all([prefix for prefix in self.prefixes if prefix.options is self.location.options])

    def open_each(self, open_part: Callable[[Location, ListedPair | None], Opened]) -> list[Opened]:
        """Return `open_part(prefix, listed)` of each part, all at the same time."""
        listed = self.list_pairs()
        return OPENS.map(lambda prefix: open_part(prefix, listed.get(prefix.uri)), self.prefixes)

    def check(self, identities: Sequence[Mapping[str, Identity]]) -> None:
        """Raise ObjectChangedError if a file of a part was replaced since the `.parts.json` was written.

        Args:
            identities: present identities of each part's files, under "idx" and "bin".
        """
        for part, prefix, now in zip(self.parts, self.prefixes, identities, strict=True):
            way = "bring it back, or write the list again with binidx merge --virtual --overwrite"
            check_pair(prefix, {"idx": part.idx, "bin": part.bin}, now, f"{self.location} was written", way)

    def check_counts(self, indices: Sequence[SequenceIndex]) -> Sequence[SequenceIndex]:
        """Return the indices of the parts; raise FormatError if one has another dtype, or other counts, than listed."""
        for index, part, prefix in zip(indices, self.parts, self.prefixes, strict=True):
            found = index.dtype.__name__, len(index), index.num_tokens
            if found != (needed := (self.dtype, part.sequences, part.tokens)):
                problem = f"(dtype, sequences, tokens) are {found}, {self.location} needs {needed}"
                raise FormatError(f"{prefix}.idx: {problem}")
        return indices


def named_location(uri: str, file: Location) -> Location:
    """Return the location of a URI that a file names.

    Args:
        file: its options are valid for its own host and bucket only; their setting `parts_from` allows others.

    Raises:
        ConfigError: the URI is on a host or in a bucket that the user has not allowed.
    """
    place, home, options = place_of(uri), file.place, file.options
    if place == home:
        return Location(uri, options)
    allowed = {place_of(name): given for name, given in file.settings.parts_from.items()}
    if place not in allowed:
        way = f"allow it: parts_from of storage_options['{OURS}'], or BINIDX_PARTS_FROM={place}"
        raise ConfigError(f"{file}: names data elsewhere (found {uri}, needed {home}); if you trust the file, {way}")
    return Location(uri, {OURS: (options or {}).get(OURS), **(allowed[place] or {})})


def check_named(named: Iterable[str], file: Location) -> None:
    """Check by `named_location` the URIs that the description of a run names, if it was read over HTTP.

    A description in a bucket or on a disk is the user's own, and may name data anywhere.

    Args:
        named: URIs in the description.
        file: location of the description.
    """
    for uri in named if is_url(file.uri) else ():
        named_location(uri, file)


def format_parts(dtype: str, parts: Sequence[VirtualPart]) -> bytes:
    """Return the bytes of a `.parts.json`.

    Args:
        dtype: name of the parts' token type, such as "uint16".
        parts: the parts, in order.
    """
    return PARTS_FILE.encode(PartsFile(dtype, list(parts)), "\n", indent=1)


def pair_or_parts(
    prefix: Location, open_pair: Callable[[], Opened], open_parts: Callable[[VirtualParts], Opened]
) -> Opened:
    """Open the pair of files under a prefix or, if a file is missing and a list of parts exists, these parts."""
    try:
        return open_pair()
    except ObjectNotFoundError:
        if (parts := read_parts(prefix)) is None:
            raise
        return open_parts(parts)


def read_parts(prefix: Location) -> VirtualParts | None:
    """Read the list of parts under a prefix; None if there is none.

    It does not check where the parts are: `VirtualParts.prefixes` raises ConfigError for a part on a host or in a
    bucket that the user has not allowed.

    Raises:
        FormatError: the file is not valid, or of another version.
        StorageError: the store cannot be reached.
    """
    location = prefix + PARTS
    try:
        data = read_document(PARTS_FILE, location)
    except StorageError as error:
        if is_absent(error):
            return None
        raise
    listed = PARTS_FILE.decode(data, location.uri)
    return VirtualParts(location, listed.dtype, listed.parts, xxhash.xxh3_128_hexdigest(data))


def resolve_part(uri: str, prefix: str) -> str:
    """Return the URI or absolute path of a part whose prefix is stored in the list at `uri`.

    Args:
        uri: URI of the list.
        prefix: the part's prefix as the list has it: a URI, or relative to the folder of the list.
    """
    folder = uri.rpartition("/")[0]
    return prefix if "://" in prefix or os.path.isabs(prefix) or not folder else join_uri(folder, prefix)


def relative_part(uri: str, prefix: str) -> str:
    """Return the prefix of a part as the list `uri` stores it: relative if it is in or below the folder of the list.

    Args:
        uri: absolute URI of the list.
        prefix: absolute URI of the part's prefix.
    """
    folder = uri.rpartition("/")[0] + "/"
    return prefix.removeprefix(folder) if "/" in uri and prefix != folder else prefix


class ShiftedReader:
    """Reader of `count` int64 values of another reader from byte `start` on, each with `plus` added."""

    def __init__(self, reader: RangeReader, start: int, count: int, plus: int) -> None:
        self.uri, self.size = reader.uri, count * 8
        self.identity: Mapping[str, Any] = {}
        self._reader, self._start, self._plus = reader, start, plus

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        whole = [(first // 8 * 8, -(-stop // 8) * 8) for first, stop in ranges]
        stored = self._reader.read([(self._start + first, self._start + stop) for first, stop in whole])
        values = [(np.frombuffer(view, "<i8") + self._plus).astype("<i8", copy=False).view(np.uint8) for view in stored]
        wanted = [slice(first % 8, first % 8 + stop - first) for first, stop in ranges]
        return [data[part].data for data, part in zip(values, wanted, strict=True)]


def is_multimodal(parts: Sequence[SequenceIndex]) -> bool:
    """Return whether the sequences of all parts have modes.

    Raises:
        FormatError: those of some parts have modes and those of others have none.
    """
    some = {part.sequence_modes is not None: part for part in parts if len(part)}
    if len(some) == 2:
        raise FormatError(f"{some[False].uri}: no modes, {some[True].uri} has them; needed all with or all without")
    return True in some


def concatenate_indices(parts: Sequence[SequenceIndex]) -> SequenceIndex:
    """Return one index over all parts, with its columns in memory: 12 bytes for each sequence, 16 for each document.

    Reading `join_indices` whole gives the same, in twice the time.

    Args:
        parts: indices of the parts, fully checked.
    """
    lengths = np.concatenate([part.sequence_lengths for part in parts], dtype="<i4")
    pointers = np.cumsum(lengths, dtype="<i8")  # the running sum that the pointers of each part are
    pointers -= lengths
    pointers *= parts[0].dtype_size
    before = accumulate(map(len, parts), initial=0)
    bounds = [part.document_indices[1:] + first for part, first in zip(parts, before, strict=False)]
    columns = lengths, pointers, np.concatenate([[0], *bounds], dtype="<i8")
    for array in columns:
        array.flags.writeable = False
    modes = [part.sequence_modes for part in parts if part.sequence_modes is not None]
    num_tokens = sum(part.num_tokens for part in parts)
    return SequenceIndex(parts[0].dtype, *columns, np.concatenate(modes) if modes else None, num_tokens)


def join_indices(uri: str, parts: Sequence[SequenceIndex]) -> JoinedReader:
    """Return a reader of the `.idx` that a merge of the parts would write; its columns are computed while it is read.

        header        of all parts                             in memory
        lengths       those of the parts, unchanged
        pointers      those of the parts, each plus the bytes before its part
        bounds        0, then those of the parts without their first, each plus the sequences before its part
        modes         those of the parts

    Args:
        uri: name in errors.
        parts: indices of the parts, with known numbers of tokens.

    Raises:
        FormatError: some parts have modes and others have none; parts without sequences fit either way.
    """
    header = format_idx_header(parts[0].dtype, sum(map(len, parts)), sum(part.num_documents for part in parts) + 1)
    layouts = [IdxLayout(part.dtype, len(part), part.document_count, part.sequence_modes is not None) for part in parts]
    lengths, pointers, bounds, modes = zip(*(layout.columns for layout in layouts), strict=True)
    bytes_before = accumulate((part.num_bytes for part in parts), initial=0)
    sequences_before = accumulate(map(len, parts), initial=0)
    pieces: list[tuple[RangeReader, int, int]] = [(InMemory(uri, header), 0, len(header))]
    pieces += [(part.reader, at, 4 * count) for part, (at, _, count) in zip(parts, lengths, strict=True)]
    for part, (at, _, count), before in zip(parts, pointers, bytes_before, strict=False):
        pieces.append((ShiftedReader(part.reader, at, count, before), 0, 8 * count))
    pieces.append((InMemory(uri, bytes(8)), 0, 8))
    for part, (at, _, count), before in zip(parts, bounds, sequences_before, strict=False):
        pieces.append((ShiftedReader(part.reader, at + 8, count - 1, before), 0, 8 * count - 8))
    if is_multimodal(parts):
        pieces += [(part.reader, at, count) for part, (at, _, count) in zip(parts, modes, strict=True)]
    readers, starts, sizes = zip(*pieces, strict=True)
    return JoinedReader(uri, readers, sizes, starts=starts)
