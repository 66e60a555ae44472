"""Datasets opened to be read from end to end, by commands that process every token: `open_source`.

                 `PairSource`            `VirtualSource`, over the parts of a virtual merge: `virtual`
    index        PREFIX.idx              those of the parts, with their numbers shifted
    tokens       .bin, .bin.zst, plain   those of the parts, each up to its last token
    as stored    the same object         those of the parts; compressed ones with one end, as a merge writes them
    pieces       input of a merge        those of the parts

A command on a virtual merge therefore writes, byte for byte, what it writes for the dataset that `binidx merge` makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from binidx.errors import FormatError, ObjectNotFoundError, warn_once
from binidx.forks import cached_property
from binidx.format.bin_file import Report, check_bin_size, compares_sums, look_up_bin, require_sums
from binidx.format.idx import SequenceIndex, open_index
from binidx.format.prefix_advice import did_you_mean
from binidx.format.prefix_listing import ListedPair
from binidx.format.sidecars.dataset_manifest import MANIFEST, DatasetCounts, check_counts, read_manifest
from binidx.format.virtual import VirtualPart, VirtualParts, format_parts, join_indices, pair_or_parts, relative_part
from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.codecs.checksums import SUMS
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, codec_of, layered, open_object, open_stored
from binidx.storage.ranges import as_block_reader
from binidx.storage.requests.remote_object import (
    Found,
    find_object,
    head,
    object_exists,
    object_identity,
    recorded_object,
)
from binidx.storage.stores.identity import check_pair
from binidx.storage.threads import OPENS
from binidx.storage.writing.concatenate import SourcePiece


class DatasetFiles:
    """Files of a dataset that is read from end to end, or planned: a pair, or the parts of a virtual merge."""

    prefix: Location
    bin: Location
    codec: str
    mixed: bool
    num_parts: int
    opened: Mapping[str, Any]
    pairs: Sequence[PairSource]
    sums: Location | None
    plain_bytes: Callable[[], int]
    open_idx: Callable[[], RangeReader]
    listed_sidecars: frozenset[str] | None = None
    """Suffixes of the sidecars in a listing of the folder; None if it was not listed."""

    @cached_property
    def index(self) -> SequenceIndex:
        """The `.idx`, whose columns are read by ranges; of a virtual merge the one that a merge would write."""
        return open_index(self.open_idx(), self.bin.uri if self.num_parts else f"{self.prefix}.idx")

    def check_opened(self, earlier: Mapping[str, Any]) -> None:
        """Raise ObjectChangedError unless this is the version with these identities, which was opened earlier."""
        check_pair(self.prefix, earlier, self.opened, "it was opened", "run it again")

    def lineage(self, documents: Range | None = None) -> Iterator[Any]:
        """Yield tables of the origins of documents: see `sidecars.lineage.read_lineage`."""
        from binidx.format.sidecars.lineage import read_lineage  # which needs pyarrow

        return read_lineage(self.prefix, self.index.num_documents, documents)

    def require_sums(self) -> None:
        """Raise ObjectNotFoundError if the settings require checksums, and a plain `.bin` has none."""
        require_sums(self.bin, self.codec, self.sums is not None)

    @property
    def idx_bytes(self) -> int:
        """Size of the `.idx`; of a virtual merge, of those of all parts."""
        return int(self.opened["idx"]["size"])

    @property
    def stored_bytes(self) -> int:
        """Size of the object that holds the tokens; of a virtual merge, of those of all parts."""
        return int(self.opened["bin"]["size"])

    @property
    def compressed(self) -> bool:
        """True if the tokens, or some of them, are compressed."""
        return self.mixed or self.codec != "raw"

    @property
    def checked(self) -> bool:
        """True if readers compare the tokens with checksums; those of parts are not looked up."""
        return self.sums is not None and compares_sums(self.prefix)

    @property
    def block_bytes(self) -> int:
        """Smallest read: a zstd frame, or a block with a checksum; of parts, which are not opened, the usual size."""
        return max(codec_named(pair.codec).block_bytes for pair in self.pairs)

    def part_counts(self) -> list[tuple[PairSource, DatasetCounts]]:
        """Return the parts of a virtual merge with the counts of their `.idx` files."""
        return []

    def has(self, suffix: str) -> bool:
        """Return whether a sidecar of this suffix, one of `SIDECARS`, exists."""
        return object_exists(self.prefix + suffix) if self.listed_sidecars is None else suffix in self.listed_sidecars

    @cached_property
    def manifest(self) -> dict[str, Any] | None:
        """Manifest beside the dataset; None if there is none. FormatError: it is malformed."""
        return read_manifest(self.prefix + MANIFEST) if self.listed_sidecars is None or self.has(MANIFEST) else None

    @property
    def tokenizer(self) -> tuple[str, str] | None:
        """URI and digest of the tokenizer in the manifest; None unless it has both."""
        tokenizer = (self.manifest or {}).get("job", {}).get("tokenizer", {})
        return (str(tokenizer["uri"]), str(tokenizer["digest"])) if {"uri", "digest"} <= tokenizer.keys() else None

    def check_size(self, index: DatasetCounts, report: Report = warn_once) -> None:
        """Do `check_bin_size` for the dataset, and for each part of a virtual merge.

        Args:
            index: counts of the `.idx`.
            report: called with the URI and the problem if a `.bin` is much longer than its `.idx` needs.
        """
        check_bin_size(self.prefix.uri, self.bin.uri, self.plain_bytes(), index, lambda: self.manifest, report)
        OPENS.map(lambda part: part[0].check_size(part[1], report), self.part_counts())

    def check_manifests(self, index: DatasetCounts) -> bool:
        """Compare counts of the `.idx` with the manifest, and of parts with theirs; return whether there is one.

        Raises:
            FormatError: counts differ, or a manifest has none.
        """
        if self.manifest is not None:
            check_counts(self.prefix.uri, self.manifest, index)
        of_parts = OPENS.map(lambda part: part[0].check_manifests(part[1]), self.part_counts())
        return self.manifest is not None or any(of_parts)


class PairSource(DatasetFiles):
    """`.idx` and tokens under one prefix, to be read from end to end.

    Args:
        distrust_sums: do not check the tokens against their checksums, because these are about to be replaced.
        listed: the pair's files in a listing of their folder, if one was made.

    Attributes:
        bin: object that holds the tokens.
        codec: codec of that object.
        sums: the checksums; None if there are none, or they are not trusted.
        opened: identities of both files when they were opened.
        pairs: pairs of files that the dataset consists of: this one.
        uris: absolute URIs of the prefixes that are read, which must not be written meanwhile.

    Raises:
        ObjectNotFoundError: the `.idx` or the `.bin` is missing.
    """

    num_parts, mixed, has_stored_form = 0, False, True

    def __init__(self, prefix: Location, *, distrust_sums: bool = False, listed: ListedPair | None = None) -> None:
        self.prefix, self.uris, self.pairs = prefix, {prefix.absolute}, [self]
        self.listed_sidecars = listed.sidecars if listed else None
        self._found = found = listed or look_up_pair(prefix)
        self.bin = prefix + found.bin.info.uri.removeprefix(prefix.uri)
        self.codec = codec_of(self.bin.uri)
        self.sums = self.bin + SUMS if found.sums and not distrust_sums else None
        self.opened = self.identity(found)

    def identity(self, listed: ListedPair | None = None) -> dict[str, Any]:
        """Return the identities of both files in JSON values: those of `listed` if given, else from the store now."""
        if listed:
            tokens, index = dict(listed.bin.info.identity), dict(listed.identity)
        else:
            tokens, index = object_identity(self.bin), object_identity(self.prefix + ".idx")
        return {"uri": self.prefix.absolute, "bin": tokens, "idx": index}

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """Raise ObjectChangedError if the `.bin` or `.idx` was replaced since it was opened.

        A writer removes the `.idx` first. So if the `.idx` is still the same after a read, the tokens that were read
        belong to it.

        Args:
            listed: the pair in a fresh listing of its folder; by default the store is asked.
        """
        check_pair(self.prefix, self.opened, self.identity(listed), "it was opened", "run it again")

    @property
    def checked_by(self) -> str | None:
        """Check of the tokens when they are read: "checksums", that of the codec ("frames" of zstd), or None."""
        return "checksums" if self.sums else codec_named(self.codec).checked_by

    @property
    def block_bytes(self) -> int:
        blocks = as_block_reader(self.plain) if self.checked or self.compressed else None
        return blocks.block_bytes if blocks else 1

    def plain_bytes(self) -> int:
        """Return the number of uncompressed bytes of the tokens, including bytes after the last sequence."""
        return int(self.opened["bin"]["size"]) if self.codec == "raw" else self.plain.size

    def open_idx(self) -> RangeReader:
        """Open the `.idx`. It is not mapped: mapped pages count as memory of this process until others need them."""
        idx = self.prefix + ".idx"
        return open_object(idx, mmap=False, cache=False, found=recorded_object(idx.uri, self.opened["idx"]))

    def open_stored(self, *, mmap: bool = True) -> RangeReader:
        """Open the tokens as they are stored; plain ones are checked against checksums, if there are any.

        Args:
            mmap: whether a local file is mapped; its pages then count as memory of this process.
        """
        sums = None if self.sums is None else open_stored(self.sums, found=self._found.sums)
        tokens = open_stored(self.bin, mmap=mmap, identity=self.opened["bin"])
        return layered(tokens, self.bin, sums=sums, cache=False)

    def open_plain(self, *, mmap: bool = True) -> RangeReader:
        """Open the tokens as plain bytes; `mmap` as in `open_stored`."""
        return codec_named(self.codec).open(self.open_stored(mmap=mmap), b"")

    @cached_property
    def plain(self) -> RangeReader:
        """Reader of the plain bytes."""
        return self.open_plain()

    def token_digests(self) -> dict[str, str]:
        """Return digests of files that describe the tokens: that of the codec and "manifest", as far as there are any.

        "raw" is the digest of the checksums beside a plain `.bin`, "zstd" that of the seek table of a compressed one,
        "manifest" that of the job in a manifest. Copies in the same form have the same digests.

        Raises:
            FormatError, StorageError: one of these is malformed, or cannot be read.
        """
        blocks = as_block_reader(self.open_plain())
        digests = {blocks.codec: blocks.digest()} if blocks else {}
        return {**digests, "manifest": self.manifest["plan"]} if self.manifest and "plan" in self.manifest else digests

    def pieces(self, plain_bytes: int) -> list[SourcePiece]:
        """Return the first `plain_bytes` bytes of the tokens: as stored if the codec joins objects, else decoded.

        Raises:
            FormatError: the dataset would be moved as it is stored, and has another number of plain bytes.
        """
        joining = codec_named(self.codec).joining
        if joining is None:
            return [SourcePiece(self.open_plain(), 0, plain_bytes)] if plain_bytes else []
        if self.plain.size != plain_bytes:
            raise FormatError(f"{self.bin}: has bytes after its last token, needed none; binidx convert --plain first")
        reader = self.open_stored()
        return [SourcePiece(reader, *where) for where in joining.pieces(self.plain)]

    @staticmethod
    def joined_end(uri: str, codec: str, pairs: Sequence[PairSource]) -> list[SourcePiece]:
        """Return the end of an object that joins the stored pieces of several pairs, such as a zstd seek table.

        Args:
            uri: URI of the joined object, for error messages.
            codec: codec of the joined object and of all pairs.
            pairs: pairs whose stored pieces the object contains, in its order.

        Returns:
            A list with one piece in memory, which follows the pieces of all pairs; [] if the codec does not join stored
            objects ("raw").
        """
        joining = codec_named(codec).joining
        return [SourcePiece.of_bytes(uri, joining.end([pair.plain for pair in pairs]))] if joining else []


class VirtualSource(DatasetFiles):
    """Parts of a virtual merge as one dataset. Attributes and methods are those of `PairSource`.

    Attributes:
        pairs: parts, in order.
        opened: digest of the list of parts, and total bytes of the parts' files.
        codec: codec of the object that a merge of the parts would write; "raw" if the parts are `mixed`.
        mixed: whether some parts are compressed and others not.
        has_stored_form: whether `open_stored` can be called: the codec joins objects without decoding them.
        sums: None, as a merge writes no checksums; each part is checked against its own.

    Raises:
        ObjectNotFoundError: a part is missing.
        ObjectChangedError: a part was replaced since the list of parts was written.
        FormatError: on opening the `.idx`, a part has another dtype or count than listed, or some parts have modes and
            others have none.
    """

    sums = None

    def __init__(self, prefix: Location, parts: VirtualParts) -> None:
        self.prefix, self.bin, self._parts = prefix, parts.location, parts
        self.pairs = parts.open_each(lambda part, listed: PairSource(part, listed=listed))
        self.num_parts = len(self.pairs)
        self.uris = {prefix.absolute}.union(*(pair.uris for pair in self.pairs))
        codecs = {pair.codec for pair in self.pairs}
        self.mixed = len(codecs) > 1
        self.codec = "raw" if self.mixed else self.pairs[0].codec
        self.has_stored_form = self.codec == "raw" or codec_named(self.codec).joining is not None
        parts.check([pair.opened for pair in self.pairs])
        sizes = {end: sum(int(pair.opened[end]["size"]) for pair in self.pairs) for end in ("bin", "idx")}
        marks = {end: {"size": size, "parts": parts.digest} for end, size in sizes.items()}
        self.opened: dict[str, Any] = {"uri": prefix.absolute, **marks}
        item_bytes = np.dtype(parts.dtype).itemsize
        self._num_bytes = [part.tokens * item_bytes for part in parts.parts]

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """Raise ObjectChangedError if a part was replaced since the list of parts was written."""
        pairs_now = self._parts.list_pairs()
        self._parts.check(OPENS.map(lambda pair: pair.identity(pairs_now.get(pair.prefix.uri)), self.pairs))

    @property
    def checked_by(self) -> str | None:
        """Name of the check that a read applies to the tokens; None if the tokens of no part are checked.

        The name is "checksums" (`.bin.xxh3`) or the codec's check ("frames" for zstd) if all parts have the same check.
        It is "checksums" if all parts are checked, but in different ways, and "in part" if some parts are not checked.
        """
        kinds = {pair.checked_by for pair in self.pairs}
        return kinds.pop() if len(kinds) == 1 else "in part" if None in kinds else "checksums"

    def plain_bytes(self) -> int:
        """Return the number of uncompressed bytes of the tokens; raise FormatError if a part has too few."""
        sizes = OPENS.map(lambda pair: pair.plain_bytes(), self.pairs)
        for pair, size, needed in zip(self.pairs, sizes, self._num_bytes, strict=True):
            if size < needed:
                raise FormatError(f"{pair.bin}: {size} bytes, {self.bin} needs {needed}")
        return sum(self._num_bytes)

    def part_counts(self) -> list[tuple[PairSource, DatasetCounts]]:
        return [(pair, index.counts) for pair, index in zip(self.pairs, self._indices, strict=True)]

    @cached_property
    def _indices(self) -> Sequence[SequenceIndex]:
        """Indices of the parts. FormatError: one has another dtype or count than listed."""
        parts = zip(OPENS.map(lambda pair: pair.index, self.pairs), self._parts.parts, strict=True)
        return self._parts.check_counts([replace(index, known_tokens=part.tokens) for index, part in parts])

    def part_at(self, position: int) -> str:
        """Return the prefix of the part that holds the byte at `position` of the uncompressed tokens."""
        return self.pairs[int(np.searchsorted(np.cumsum(self._num_bytes), position, "right"))].prefix.uri

    def open_idx(self) -> RangeReader:
        """Open the `.idx` that a merge would write."""
        return join_indices(self.bin.uri, self._indices)

    def open_stored(self) -> RangeReader:
        """Open the `.bin`, or `.bin.zst`, that a merge would write."""
        if self.codec == "raw":
            return self.open_plain()
        pieces = [*self.pieces(sum(self._num_bytes)), *PairSource.joined_end(self.bin.uri, self.codec, self.pairs)]
        readers, sizes = [piece.reader for piece in pieces], [piece.num_bytes for piece in pieces]
        return JoinedReader(self.bin.uri, readers, sizes, starts=[piece.start for piece in pieces])

    def open_plain(self, *, mmap: bool = True) -> RangeReader:
        """Open the tokens as plain bytes; a part is opened when it is read; `mmap` as in `PairSource.open_stored`."""
        self.plain_bytes()
        opens = [functools.partial(pair.open_plain, mmap=mmap) for pair in self.pairs]
        parts = zip(self.pairs, opens, strict=True)
        late = [LazyReader(pair.bin.uri, pair.plain_bytes(), open_part) for pair, open_part in parts]
        return JoinedReader(self.bin.uri, late, self._num_bytes)

    def pieces(self, plain_bytes: int) -> list[SourcePiece]:
        stops = np.cumsum([0, *self._num_bytes], dtype=np.int64)
        wanted = np.clip(plain_bytes - stops[:-1], 0, self._num_bytes).tolist()
        # A compressed part without tokens may hold others, so its table is checked, too.
        both = zip(self.pairs, wanted, strict=True)
        some = [(part, count) for part, count in both if count or part.codec != "raw"]
        pieces = OPENS.map(lambda part: part[0].pieces(part[1]), some)
        return list(chain.from_iterable(pieces))

    @staticmethod
    def format_list(file: Location, parts: Sequence[DatasetFiles]) -> bytes:
        """Return the bytes of the `.parts.json` at this absolute location that lists these pairs."""
        listed = []
        for part in parts:
            prefix, index = relative_part(file.absolute, part.prefix.uri), part.index
            listed.append(VirtualPart(prefix, len(index), index.num_tokens, part.opened["idx"], part.opened["bin"]))
        return format_parts(parts[0].index.dtype.__name__, listed)


def open_source(
    prefix: Location, *, distrust_sums: bool = False, listed: ListedPair | None = None
) -> PairSource | VirtualSource:
    """Open the dataset under a prefix: a pair of files, or a virtual merge.

    Args:
        distrust_sums, listed: as in `PairSource`.

    Raises:
        ObjectNotFoundError: there is neither.
        FormatError, ObjectChangedError: as `VirtualSource`.
    """
    pair = functools.partial(PairSource, prefix, distrust_sums=distrust_sums, listed=listed)
    parts: Callable[[VirtualParts], PairSource | VirtualSource] = functools.partial(VirtualSource, prefix)
    return pair_or_parts(prefix, pair, parts)


def look_up_pair(prefix: Location) -> ListedPair:
    """Return the files of a pair as the store reports them now.

    Raises:
        ObjectNotFoundError: the `.idx` or the `.bin` is missing.
    """
    tokens = look_up_bin(prefix)
    if tokens is None:
        thing = "object" if prefix.local_path is None else "file"
        raise ObjectNotFoundError(f"{prefix}.bin: no such {thing}{did_you_mean(prefix)}")
    is_plain = codec_of(tokens.info.uri) == "raw"
    sums = find_object(prefix + f".bin{SUMS}", refused_is_absent=False) if is_plain else None
    return ListedPair(Found(head(prefix + ".idx", prefix.settings)), tokens, sums)
