"""Datasets opened to be read from end to end, by commands that process every token: `open_source`.

                 `PairSource`            `VirtualSource`, over the parts of a virtual merge: `virtual`
    index        PREFIX.idx              those of the parts, with their numbers shifted
    tokens       .bin, .bin.zst, plain   those of the parts, each up to its last token
    as stored    the same object         those of the parts; compressed ones under one table, as a merge writes them
    pieces       input of a merge        those of the parts

A command on a virtual merge therefore writes, byte for byte, what it writes for the dataset that `binidx merge` makes.
The joined `.idx` is computed while it is read:

    header        of all parts                             in memory
    lengths       those of the parts, unchanged
    pointers      those of the parts, each plus the bytes before its part
    bounds        0, then those of the parts without their first, each plus the sequences before its part
    modes         those of the parts
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError
from binidx.format.bin_file import Options, did_you_mean, find_bin
from binidx.format.idx import HEADER, format_idx_header, get_bin_path, get_idx_path
from binidx.format.idx_blocks import IndexStream
from binidx.format.prefix_listing import ListedPair
from binidx.format.sidecars.dataset_manifest import MANIFEST, read_manifest
from binidx.format.virtual import VirtualParts, read_parts
from binidx.storage.adapters import InMemory, JoinedReader, LazyReader
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.codecs.seek_table import SeekTable, format_table
from binidx.storage.codecs.segments import read_table
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import CODECS, codec_of, layered, open_object, open_stored
from binidx.storage.ranges import as_block_reader, check_ranges
from binidx.storage.requests.remote_object import object_exists, object_identity, recorded_object
from binidx.storage.stores.identity import same_identity
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import OPENS
from binidx.storage.writing.concatenate import SourcePiece


class PairSource:
    """`.idx` and tokens under one prefix, to be read from end to end.

    Args:
        distrust_sums: do not check the tokens against their checksums, because these are about to be replaced.
        listed: the pair's files in a listing of their folder, if one was made.

    Attributes:
        bin_uri: URI of the object that holds the tokens.
        codec: codec of that object.
        sums_uri: URI of the checksums; None if there are none, or they are not trusted.
        opened: identities of both files when they were opened.
        pairs: pairs of files that the dataset consists of: this one.
        uris: absolute URIs of the prefixes that are read, which must not be written meanwhile.

    Raises:
        ObjectNotFoundError: the `.idx` or the `.bin` is missing.
    """

    num_parts, mixed = 0, False

    def __init__(
        self, prefix: str, options: Options, *, distrust_sums: bool = False, listed: ListedPair | None = None
    ) -> None:
        self.prefix, self.options, self.uris, self.pairs = prefix, options, {absolute_uri(prefix)}, [self]
        self._listed = listed
        found = get_bin_path(prefix) if listed else find_bin(prefix, options)
        if found is None:
            thing = "object" if local_path(prefix) is None else "file"
            raise ObjectNotFoundError(f"{get_bin_path(prefix)}: no such {thing}{did_you_mean(prefix)}")
        self.bin_uri, self.codec = found, codec_of(found)
        sums_uri = found + SUFFIX
        has_sums = bool(listed.sums) if listed else self.codec == "raw" and object_exists(sums_uri, options)
        self.sums_uri = sums_uri if has_sums and not distrust_sums else None
        self.opened = self.identity(listed)

    def identity(self, listed: ListedPair | None = None) -> dict[str, Any]:
        """Return the identities of both files in JSON values: those of `listed` if given, else from the store now."""
        if listed:
            tokens, index = (dict(each.info.identity) for each in (listed.bin, listed.idx))
        else:
            tokens, index = (object_identity(uri, self.options) for uri in (self.bin_uri, get_idx_path(self.prefix)))
        return {"uri": absolute_uri(self.prefix), "bin": tokens, "idx": index}

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """Raise ObjectChangedError if the `.bin` or `.idx` was replaced since it was opened.

        A writer removes the `.idx` first. So if the `.idx` is still the same after a read, the tokens that were read
        belong to it.

        Args:
            listed: the pair in a fresh listing of its folder; by default the store is asked.
        """
        now = self.identity(listed)
        if not all(same_identity(self.opened[end], now[end]) for end in ("idx", "bin")):
            raise ObjectChangedError(f"{self.prefix}: changed while it was read; run it again")

    @property
    def checked_by(self) -> str | None:
        """Check of the tokens when they are read: "checksums", "frames" (zstd's own), or None."""
        return "frames" if self.codec != "raw" else "checksums" if self.sums_uri else None

    def plain_bytes(self) -> int:
        """Return the number of uncompressed bytes of the tokens, including bytes after the last sequence."""
        return int(self.opened["bin"]["size"]) if self.codec == "raw" else self.table.plain_bytes

    def open_index(self) -> IndexStream:
        """Open the `.idx` as a stream."""
        return IndexStream(self.open_idx(mmap=False), get_idx_path(self.prefix))

    def open_idx(self, *, mmap: bool = True) -> RangeReader:
        """Open the `.idx`; with `mmap`, its pages count as memory of this process until other processes need them."""
        uri = get_idx_path(self.prefix)
        found = recorded_object(uri, self.opened["idx"])
        return open_object(uri, storage_options=self.options, mmap=mmap, cache=False, found=found)

    def open_stored(self) -> RangeReader:
        """Open the tokens as they are stored; plain ones are checked against checksums, if there are any."""
        sums = None
        if self.sums_uri is not None:
            found_sums = self._listed.sums if self._listed else None
            sums = open_stored(self.sums_uri, storage_options=self.options, found=found_sums)
        found = recorded_object(self.bin_uri, self.opened["bin"])
        tokens = open_stored(self.bin_uri, storage_options=self.options, found=found)
        return layered(tokens, self.options, sums=sums, cache=False)

    def has(self, suffix: str) -> bool:
        """Return whether a sidecar of this suffix, one of `SIDECARS`, exists."""
        return suffix in self._listed.sidecars if self._listed else object_exists(self.prefix + suffix, self.options)

    def open_plain(self) -> RangeReader:
        """Open the tokens as plain bytes."""
        return CODECS[self.codec].open(self.open_stored(), b"")

    def token_digests(self) -> dict[str, str]:
        """Return digests of files that describe the tokens: "raw", "zstd" and "manifest", as far as there are any.

        "raw" is the digest of the checksums beside a plain `.bin`, "zstd" that of the seek table of a compressed one,
        "manifest" that of the job in a manifest. Copies in the same form have the same digests.

        Raises:
            FormatError, StorageError: one of these is malformed, or cannot be read.
        """
        blocks = as_block_reader(self.open_plain())
        found = {blocks.codec: blocks.digest()} if blocks else {}
        manifest = read_manifest(self.prefix + MANIFEST, self.options) if self.has(MANIFEST) else None
        return {**found, "manifest": manifest["plan"]} if manifest and "plan" in manifest else found

    @functools.cached_property
    def table(self) -> SeekTable:
        """Seek table of a compressed dataset."""
        return read_table(self.open_stored())

    def pieces(self, plain_bytes: int) -> list[SourcePiece]:
        """Return the first `plain_bytes` bytes of the tokens as stored; of a compressed dataset, all zstd frames.

        Raises:
            FormatError: the dataset is compressed and has another number of plain bytes.
        """
        reader = self.open_stored()
        if self.codec == "raw":
            return [SourcePiece(reader, 0, plain_bytes)] if plain_bytes else []
        table = self.table
        if table.plain_bytes != plain_bytes:
            raise FormatError(
                f"{self.bin_uri}: holds bytes past its last token, needed none to be moved compressed; "
                "binidx convert --plain first"
            )
        starts, stops = table.stored_starts, table.stored_stops
        breaks = np.flatnonzero(starts[1:] != stops[:-1])  # frames that follow each other are one piece
        firsts, lasts = np.append(starts[:1], starts[breaks + 1]), np.append(stops[breaks], stops[-1:])
        return [SourcePiece(reader, *piece) for piece in zip(firsts.tolist(), lasts.tolist(), strict=True)]


class VirtualSource:
    """Parts of a virtual merge as one dataset. Attributes and methods are those of `PairSource`.

    Attributes:
        pairs: parts, in order.
        opened: digest of the list of parts, and total bytes of the parts' files.
        codec: codec of the object that a merge of the parts would write; "raw" if the parts are `mixed`.
        mixed: whether some parts are compressed and others not.
        sums_uri: None, as a merge writes no checksums; each part is checked against its own.

    Raises:
        ObjectNotFoundError: a part is missing.
        ObjectChangedError: a part was replaced since the list of parts was written.
        FormatError: on opening the `.idx`, a part has another dtype or count than listed, or some parts have modes and
            others have none.
    """

    sums_uri = None

    def __init__(self, prefix: str, parts: VirtualParts, options: Options) -> None:
        self.prefix, self.options, self.bin_uri, self._listed = prefix, options, parts.uri, parts
        self.pairs = parts.open_each(lambda each, own_options, listed: PairSource(each, own_options, listed=listed))
        self.num_parts = len(self.pairs)
        self.uris = {absolute_uri(prefix)}.union(*(each.uris for each in self.pairs))
        codecs = {each.codec for each in self.pairs}
        self.mixed = len(codecs) > 1
        self.codec = "raw" if self.mixed else codecs.pop()
        parts.check([each.opened for each in self.pairs])
        sizes = {end: sum(int(each.opened[end]["size"]) for each in self.pairs) for end in ("bin", "idx")}
        marks = {end: {"size": size, "parts": parts.digest} for end, size in sizes.items()}
        self.opened: dict[str, Any] = {"uri": absolute_uri(prefix), **marks}
        item_bytes = np.dtype(parts.dtype).itemsize
        self._num_bytes = [each.tokens * item_bytes for each in parts.parts]

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """Raise ObjectChangedError if a part was replaced since the list of parts was written."""
        found = self._listed.list_pairs()
        self._listed.check(OPENS.map(lambda each: each.identity(found.get(each.prefix)), self.pairs))

    @property
    def checked_by(self) -> str | None:
        """Check of the tokens when they are read, as in `PairSource`; "in part" if only some parts are checked."""
        kinds = {each.checked_by for each in self.pairs}
        return kinds.pop() if len(kinds) == 1 else "in part" if None in kinds else "checksums"

    def plain_bytes(self) -> int:
        """Return the number of uncompressed bytes of the tokens; raise FormatError if a part has too few."""
        found = OPENS.map(lambda each: each.plain_bytes(), self.pairs)
        for part, size, needed in zip(self.pairs, found, self._num_bytes, strict=True):
            if size < needed:
                raise FormatError(f"{part.bin_uri}: {size} bytes, {self.bin_uri} needs {needed}")
        return sum(self._num_bytes)

    def part_at(self, position: int) -> str:
        """Return the prefix of the part that holds the byte at `position` of the uncompressed tokens."""
        return self.pairs[int(np.searchsorted(np.cumsum(self._num_bytes), position, "right"))].prefix

    def open_index(self) -> IndexStream:
        return IndexStream(self.open_idx(mmap=False), self.bin_uri)

    def open_idx(self, *, mmap: bool = True) -> RangeReader:
        """Open the `.idx` that a merge would write."""
        opened = OPENS.map(lambda each: IndexStream(each.open_idx(mmap=mmap), get_idx_path(each.prefix)), self.pairs)
        for index, part in zip(opened, self._listed.parts, strict=True):
            found, needed = (index.dtype.__name__, index.num_sequences), (self._listed.dtype, part.sequences)
            if found != needed:
                raise FormatError(f"{index.uri}: (dtype, sequences) are {found}, {self.bin_uri} needs {needed}")
        readers, starts, sizes = zip(*_columns(self.bin_uri, opened, self._num_bytes), strict=True)
        return JoinedReader(self.bin_uri, readers, sizes, starts=starts)

    def open_stored(self) -> RangeReader:
        """Open the `.bin`, or `.bin.zst`, that a merge would write."""
        if self.codec == "raw":
            return self.open_plain()
        pieces = self.pieces(sum(self._num_bytes))
        seek_table = InMemory(self.bin_uri, concatenate_seek_tables([each.table for each in self.pairs]))
        pieces.append(SourcePiece(seek_table, 0, seek_table.size))
        readers, sizes = [each.reader for each in pieces], [each.num_bytes for each in pieces]
        return JoinedReader(self.bin_uri, readers, sizes, starts=[each.start for each in pieces])

    def open_plain(self) -> RangeReader:
        """Open the tokens as plain bytes; a part is opened when it is read."""
        self.plain_bytes()
        late = [LazyReader(each.bin_uri, each.plain_bytes(), each.open_plain) for each in self.pairs]
        return JoinedReader(self.bin_uri, late, self._num_bytes)

    def has(self, suffix: str) -> bool:
        return object_exists(self.prefix + suffix, self.options)

    def pieces(self, plain_bytes: int) -> list[SourcePiece]:
        stops = np.cumsum([0, *self._num_bytes], dtype=np.int64)
        wanted = np.clip(plain_bytes - stops[:-1], 0, self._num_bytes).tolist()
        # A compressed part without tokens may hold others, so its table is checked, too.
        both = zip(self.pairs, wanted, strict=True)
        some = [(part, count) for part, count in both if count or part.codec != "raw"]
        found = OPENS.map(lambda each: each[0].pieces(each[1]), some)
        return [piece for each in found for piece in each]


def open_source(
    prefix: str | os.PathLike[str],
    options: Options = None,
    *,
    distrust_sums: bool = False,
    listed: ListedPair | None = None,
) -> PairSource | VirtualSource:
    """Open the dataset under a prefix: a pair of files, or a virtual merge.

    Raises:
        ObjectNotFoundError: there is neither.
        FormatError, ObjectChangedError: as `VirtualSource`.
    """
    name = os.fspath(prefix)
    try:
        return PairSource(name, options, distrust_sums=distrust_sums, listed=listed)
    except ObjectNotFoundError:
        parts = read_parts(name, options)
        if parts is None:
            raise
        return VirtualSource(name, parts, options)


def concatenate_seek_tables(tables: Sequence[SeekTable]) -> bytes:
    """Return the bytes of the seek table over the frames of all tables, one after the other."""
    stored = np.concatenate([each.stored_stops - each.stored_starts for each in tables])
    plain = np.concatenate([np.diff(each.plain_starts) for each in tables])
    return format_table(stored.astype(np.uint32), plain.astype(np.uint32))


def absolute_uri(prefix: str) -> str:
    """Return a URI as it is, or the absolute path of a local one."""
    path = local_path(prefix)
    return prefix if path is None else os.path.abspath(path)


class ShiftedReader:
    """Reader of `count` int64 values of another reader from byte `start` on, each with `plus` added."""

    def __init__(self, reader: RangeReader, start: int, count: int, plus: int) -> None:
        self.uri, self.size = reader.uri, count * 8
        self.identity: Mapping[str, Any] = {}
        self._reader, self._start, self._plus = reader, start, plus

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        whole = [(first // 8 * 8, -(-stop // 8) * 8) for first, stop in ranges]
        found = self._reader.read([(self._start + first, self._start + stop) for first, stop in whole])
        shifted = [(np.frombuffer(view, "<i8") + self._plus).astype("<i8", copy=False).view(np.uint8) for view in found]
        return [
            each[first - low : stop - low].data
            for each, (first, stop), (low, _) in zip(shifted, ranges, whole, strict=True)
        ]


def is_multimodal(parts: Sequence[IndexStream]) -> bool:
    """Return whether the sequences of all parts have modes.

    Raises:
        FormatError: those of some parts have modes and those of others have none.
    """
    some = [each for each in parts if each.num_sequences]
    for each in some:
        if each.multimodal != some[0].multimodal:
            which, other = (each, some[0]) if some[0].multimodal else (some[0], each)
            raise FormatError(f"{which.uri}: no modes, {other.uri} has them; needed all with or all without")
    return bool(some) and some[0].multimodal


def _columns(
    uri: str, parts: Sequence[IndexStream], num_bytes: Sequence[int]
) -> Iterator[tuple[RangeReader, int, int]]:
    """Yield reader, first byte and number of bytes of each piece of the `.idx` that a merge of the parts would write.

    Args:
        num_bytes: plain bytes of each part's tokens.

    Raises:
        FormatError: some parts have modes and others have none; parts without sequences fit either way.
    """
    sequences, documents = [each.num_sequences for each in parts], [each.num_documents for each in parts]
    header = format_idx_header(parts[0].dtype, sum(sequences), sum(documents) + 1)
    yield InMemory(uri, header), 0, len(header)
    for each in parts:
        yield each.reader, HEADER.size, 4 * each.num_sequences
    for each, before in zip(parts, accumulate(num_bytes, initial=0), strict=False):
        pointers = ShiftedReader(each.reader, HEADER.size + 4 * each.num_sequences, each.num_sequences, before)
        yield pointers, 0, pointers.size
    yield InMemory(uri, bytes(8)), 0, 8
    for each, before in zip(parts, accumulate(sequences, initial=0), strict=False):
        second = HEADER.size + 12 * each.num_sequences + 8
        bounds = ShiftedReader(each.reader, second, each.num_documents, before)
        yield bounds, 0, bounds.size
    if is_multimodal(parts):
        for each in parts:
            yield each.reader, each.size - each.num_sequences, each.num_sequences
