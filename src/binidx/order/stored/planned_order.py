"""Order of a run with a read plan: the stored places of the tokens of each sample, without any index.

    position ─ rows of the plan ─►  byte ranges of each `.bin` ─ one vectored read ─►  rows of the batch

    DIR/draft.json               description; written first, so that no directory holds parts of two plans
    DIR/{first:012d}.rows        samples from position `first` on
    DIR/readplan.json            the same bytes as draft.json; written when all parts exist

    part     block ─ block ─ ... ─ u32 bytes of each block ─ digest
    block    SAMPLE of each of 64 samples ─ PIECE of each of their pieces ─ digest

All little-endian. A digest is xxh3_64 of the bytes before it, seeded with the description, the position of the first
sample and the one after the last: bytes that are damaged, of another place or of another plan are an error.

The rows of a micro-batch are one contiguous range, for any number of ranks. The table at the end of a part gives it
without a request: 16 KiB for 262,144 samples. A sample of 5 pieces takes 56 bytes, of 20 pieces 206.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import FormatError, ObjectNotFoundError
from binidx.format.bin_file import compares_sums, strip_bin_suffix
from binidx.format.idx import DType
from binidx.format.indexed_dataset import as_pair
from binidx.format.tokens import PlainTokens
from binidx.format.virtual import named_location
from binidx.json_models import Count, JsonFile, tolerate_all
from binidx.order.opener import Opener
from binidx.order.order_protocols import Bounds, Numbers, Order, Source, Spans
from binidx.order.reads import TokenPlaces
from binidx.order.source_order import StoredSource, join_ranges, samples_with_hits
from binidx.order.stored.baked_order import Baked, StoredRequest
from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.cache.memory import ChunkCache
from binidx.storage.codecs.checksums import SUMS
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_of, layered, open_object, open_stored, read_document
from binidx.storage.ranges import stored_reader
from binidx.storage.requests.remote_object import find_object, object_identity
from binidx.storage.stores.identity import check_same

SAMPLE = np.dtype([("num_pieces", "<u4"), ("source", "<u2")])
PIECE = np.dtype([("start", "<u4"), ("start_high", "<u2"), ("num_tokens", "<u4")])
"""`start` is the first byte of the piece in the plain bytes of the source, 48 bits."""

BLOCK_SAMPLES = 64
DIGEST_BYTES = 8
ROW_CHUNK_BYTES = 8 << 10
"""Unit of fetching rows from a store, and of caching them in memory: two blocks of samples of 5 pieces."""

WRITTEN = "the read plan was written"


@dataclass(frozen=True)
class PlannedFile:
    """Object with tokens of a source, as it was when the plan was written.

    Attributes:
        uri: name of the `.bin`, plain or compressed.
        identity: of the stored object: `size`, and `etag`, `generation`, `version` or `mtime`.
        sums: identity of its `.bin.xxh3`; None: there is none.
        size: plain bytes.
        num_bytes: bytes of tokens; bytes after them are padding.
    """

    uri: str
    identity: Mapping[str, Any]
    sums: Mapping[str, Any] | None
    size: Count
    num_bytes: Count

    def __post_init__(self) -> None:
        if "size" not in self.identity or not (self.sums is None or "size" in self.sums):
            raise FormatError(f"{self.uri}: identity or sums has no size, needed it to identify the object")


@dataclass(frozen=True)
class PlannedSource:
    """Source of a run: its prefix, the dtype of its tokens, and its files; several if it is a virtual merge."""

    prefix: str
    dtype: str
    files: list[PlannedFile]

    def __post_init__(self) -> None:
        DType.code_from_dtype(self.dtype)

    @classmethod
    def of(cls, source: Source) -> PlannedSource:
        """Return the description of an open source; looks up the checksums of each of its files."""
        dataset = as_pair(source.dataset)
        reader, parts = dataset.bin_reader, [(dataset.bin_reader, dataset.index.num_bytes)]
        if isinstance(reader, JoinedReader):  # of a virtual merge
            parts = [*zip(reader.parts, reader.sizes, strict=True)]
        files = []
        for part, num_bytes in parts:
            stored = stored_reader(part)
            sums = find_object(Location(stored.uri + SUMS, dataset.storage_options))
            identity = None if sums is None or codec_of(stored.uri) != "raw" else sums.info.identity
            files.append(PlannedFile(stored.uri, stored.identity, identity, part.size, num_bytes))
        return cls(source.prefix, dataset.dtype.name, files)


@dataclass(frozen=True)
class ReadPlan(Baked):
    """Contents of `readplan.json`: those of a `baked.json`, and more.

    Attributes:
        order: identity of the order of the samples, with which states of loaders are compared.
        masks_ends: whether the last token of each piece has no label, as in packed orders.
        sources: in the order that the rows number.
    """

    order: Any
    masks_ends: bool
    sources: list[PlannedSource]

    first_file = "draft.json"
    last_file = "readplan.json"

    @property
    def json_file(self) -> JsonFile[Any]:
        return PLAN_FILE

    def part_file(self, directory: Location, part: range) -> Location:
        return super().part_file(directory, part) + ".rows"


PLAN_FILE = JsonFile(
    ReadPlan,
    {"binidx": "readplan", "version": 1},
    hint="needs a file written by binidx prepare read-plan",
    tolerates=tolerate_all,
)


def format_blocks(pieces: TokenPlaces, first: int, plan_digest: str) -> Iterator[bytes]:
    """Yield the blocks of consecutive samples.

    Args:
        pieces: places of their tokens.
        first: position of the first sample.
        plan_digest: digest of the description.
    """
    samples, rows = np.empty(len(pieces.sources), SAMPLE), np.empty(len(pieces.starts), PIECE)
    samples["num_pieces"], samples["source"] = np.diff(pieces.bounds), pieces.sources
    rows["start"], rows["start_high"] = pieces.starts & 0xFFFFFFFF, pieces.starts >> 32
    rows["num_tokens"] = pieces.num_tokens
    for start in range(0, len(samples), BLOCK_SAMPLES):
        own = samples[start : start + BLOCK_SAMPLES]
        own_rows = rows[pieces.bounds[start] : pieces.bounds[start + len(own)]]
        positions = range(first + start, first + start + len(own))
        yield seal(own.tobytes() + own_rows.tobytes(), positions, plan_digest)


def seal(data: bytes, positions: range, plan_digest: str) -> bytes:
    """Return bytes that describe the samples at these positions, and their digest."""
    seed = xxhash.xxh3_64_intdigest(f"{plan_digest} {positions.start} {positions.stop}".encode())
    return data + xxhash.xxh3_64_intdigest(data, seed).to_bytes(DIGEST_BYTES, "little")


class DecodedBlocks(NamedTuple):
    """Rows of some blocks of a plan.

    Attributes:
        blocks: their numbers, ascending, shape (n,).
        firsts: number of samples before each block, shape (n,).
        samples: SAMPLE of each of their samples, one block after the other.
        ends: number of pieces before each sample, then of all.
        pieces: PIECE of each piece.
    """

    blocks: Numbers
    firsts: Numbers
    samples: NDArray[Any]
    ends: Numbers
    pieces: NDArray[Any]


class PlannedRows:
    """Rows of the samples of a read plan, by position. A part is opened at its first use.

    The blocks of the last read are kept: an order reads the rows of a batch to locate it, and again for its spans.

    Args:
        directory: of the plan.
        plan: its description.
        plan_digest: digest of the bytes of the description.
    """

    def __init__(self, directory: Location, plan: ReadPlan, plan_digest: str) -> None:
        self.directory, self.plan, self.parts, self.plan_digest = directory, plan, plan.parts(), plan_digest
        self._blocks_per_part = -(-plan.samples_per_part // BLOCK_SAMPLES)
        self._opened: dict[int, tuple[RangeReader, Numbers]] = {}
        self._decoded: DecodedBlocks | None = None
        self._last_read: tuple[Numbers, TokenPlaces] | None = None

    def read(self, positions: Numbers) -> TokenPlaces:
        """Return the places of the tokens of samples: one range of rows if the positions are consecutive.

        Args:
            positions: positions of the run that are stored, shape (B,).

        Raises:
            FormatError: a part is damaged, or of another plan.
            ObjectNotFoundError: a part is missing.
        """
        last = self._last_read  # once: another thread may replace it
        if last is not None and np.array_equal(last[0], positions):
            return last[1]  # a batch asks for its sources, then for its spans
        part, in_part = np.divmod(positions - self.plan.first, self.plan.samples_per_part)
        in_part, row = np.divmod(in_part, BLOCK_SAMPLES)
        blocks = part * self._blocks_per_part + in_part
        decoded = self._decode(np.unique(blocks))
        row += decoded.firsts[decoded.blocks.searchsorted(blocks)]
        starts, stops = decoded.ends[row], decoded.ends[row + 1]
        chosen = decoded.pieces[join_ranges(starts, stops)]
        first_bytes = chosen["start"].astype(np.int64) | chosen["start_high"].astype(np.int64) << 32
        bounds, sources = np.concatenate([[0], np.cumsum(stops - starts)]), decoded.samples["source"][row]
        pieces = TokenPlaces(sources.astype(np.int64), bounds, first_bytes, chosen["num_tokens"].astype(np.int64))
        self._last_read = positions.copy(), pieces
        return pieces

    def _decode(self, blocks: Numbers) -> DecodedBlocks:
        """Return the rows of blocks, and perhaps of others; those of the last read are not read again."""
        decoded = self._decoded
        if decoded is None or not np.isin(blocks, decoded.blocks).all():
            of_part, in_part = np.divmod(blocks, self._blocks_per_part)
            reads = [self._read_blocks(number, in_part[of_part == number]) for number in np.unique(of_part).tolist()]
            samples, pieces = zip(*chain(*reads, [(np.empty(0, SAMPLE), np.empty(0, PIECE))]), strict=True)
            firsts = np.cumsum([0, *map(len, samples[:-1])])
            joined = np.concatenate(samples)
            ends = np.concatenate([[0], np.cumsum(joined["num_pieces"], dtype=np.int64)])
            self._decoded = decoded = DecodedBlocks(blocks, firsts, joined, ends, np.concatenate(pieces))
        return decoded

    def _read_blocks(self, number: int, blocks: Numbers) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return the samples and the pieces of some blocks of a part."""
        reader, ends = self._open_part(number)
        positions = [self.parts[number][block * BLOCK_SAMPLES :][:BLOCK_SAMPLES] for block in blocks.tolist()]
        ranges = list(zip(ends[blocks].tolist(), ends[blocks + 1].tolist(), strict=True))
        views = zip(self._unseal(reader, ranges, positions), positions, strict=True)
        split = [(view, len(own) * SAMPLE.itemsize) for view, own in views]
        return [(np.frombuffer(view[:size], SAMPLE), np.frombuffer(view[size:], PIECE)) for view, size in split]

    def _open_part(self, number: int) -> tuple[RangeReader, Numbers]:
        """Return the reader of a part, and the first byte of each block, then the end of the last."""
        if (opened := self._opened.get(number)) is not None:
            return opened
        part = self.parts[number]
        reader = open_object(self.plan.part_file(self.directory, part), cache=False)
        table_bytes = 4 * -(-len(part) // BLOCK_SAMPLES) + DIGEST_BYTES
        table = self._unseal(reader, [(max(0, reader.size - table_bytes), reader.size)], [part])[0]
        ends = np.concatenate([[0], np.cumsum(np.frombuffer(table, "<u4"), dtype=np.int64)])
        if self.directory.local_path is None:
            reader = ChunkCache(reader, chunk_bytes=ROW_CHUNK_BYTES)
        # Two are kept: a batch may end in the next part.
        self._opened = {**dict([*self._opened.items()][-1:]), number: (reader, ends)}
        return reader, ends

    def _unseal(self, reader: RangeReader, ranges: Sequence[Range], positions: Sequence[range]) -> list[memoryview]:
        """Return the bytes of ranges without their digests; wrong ones are read again, from the store."""
        views = reader.read(ranges)
        for place, own in enumerate(positions):
            if views[place] != seal(bytes(views[place][:-DIGEST_BYTES]), own, self.plan_digest):
                views[place] = stored_reader(reader).read([ranges[place]])[0]
            if views[place] != seal(bytes(views[place][:-DIGEST_BYTES]), own, self.plan_digest):
                raise FormatError(
                    f"{reader.uri}: rows of positions {own.start} to {own.stop} are damaged or of another plan, read "
                    "twice; delete this file and write it again with binidx prepare read-plan"
                )
        return [view[:-DIGEST_BYTES] for view in views]


class PlannedOrder:
    """Samples of a run by position: sample i was served after i consumed samples. Implements `ComposedOrder`.

    Each source is one sequence, its plain bytes, and the number of a sample in a source is its position. Positions
    before the first stored one are no samples.

    Args:
        sources: those of the plan, in its order.
        rows: rows of the plan.
    """

    num_epochs = 1

    def __init__(self, sources: Sequence[Source], rows: PlannedRows) -> None:
        self.sources, self.rows, self.stored = sources, rows, rows.plan
        self.ends_documents = rows.plan.masks_ends
        self._item_bytes = np.array([np.dtype(source.dtype).itemsize for source in self.stored.sources])

    @property
    def identity(self) -> Any:
        return self.stored.order

    @property
    def members(self) -> Sequence[Order]:
        return [self] * len(self.sources)

    def __len__(self) -> int:
        return self.stored.stop

    def list_sources(self) -> NDArray[np.int16]:
        sources = np.zeros(len(self), np.int16)
        sources[self.stored.first :] = self.find_ids(np.arange(self.stored.first, len(self)))
        return sources

    def find_ids(self, samples: Numbers) -> Numbers:
        """Return the source of samples, which is their dataset_id in a blend, shape (B,)."""
        return self.rows.read(samples).sources

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        return self.find_ids(samples), samples

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        pieces = self.rows.read(samples)
        spans = np.zeros((len(pieces.starts), 4), np.int64)
        spans[:, 0] = np.repeat(pieces.sources, np.diff(pieces.bounds))
        spans[:, 2] = pieces.starts // self._item_bytes[spans[:, 0]]
        spans[:, 3] = pieces.num_tokens
        return spans, pieces.bounds

    def find(self, source: int, sequences: Numbers) -> Numbers:
        found = [np.empty(0, np.int64)]
        for part in self.rows.parts if len(sequences) else []:
            samples = np.arange(part.start, part.stop)
            spans, bounds = self.spans(samples)
            found.append(samples[samples_with_hits((spans[:, 0] == source) & (spans[:, 3] > 0), bounds)])
        return np.concatenate(found)

    def epochs(self, samples: Numbers) -> Numbers:
        return np.zeros_like(samples)


@dataclass(frozen=True)
class PlannedRequest(StoredRequest):
    """Samples of a run whose read plan `binidx prepare read-plan` has written.

    Args:
        named: prefixes of data that the user names. A plan may name others only in its own bucket, or on its own host.
    """

    named: Collection[str] = ()

    file_name = ReadPlan.last_file

    def open(self, opener: Opener) -> Order:
        """Return the `PlannedOrder`; each file of tokens is opened at its first read.

        Raises:
            ConfigError: the plan names data on a host or in a bucket of its own that the user does not name.
            FormatError: the description is invalid.
            ObjectNotFoundError: the description is missing.
        """
        plan = PLAN_FILE.decode(data := read_document(PLAN_FILE, self.file), self.file.uri)
        sources = [self._open_source(source, opener.mmap) for source in plan.sources]
        return PlannedOrder(sources, PlannedRows(self.directory, plan, xxhash.xxh3_128_hexdigest(data)))

    def _open_source(self, source: PlannedSource, mmap: bool) -> StoredSource:
        """Return a source as one sequence, whose files are opened at the first read."""

        def read_lazily(planned: PlannedFile) -> LazyReader:
            is_named, options = strip_bin_suffix(planned.uri) in self.named, self.directory.options
            location = Location(planned.uri, options) if is_named else named_location(planned.uri, self.file)
            return LazyReader(planned.uri, planned.size, partial(open_planned, location, planned, mmap))

        sizes = [planned.num_bytes for planned in source.files]
        reader = JoinedReader(source.prefix, [*map(read_lazily, source.files)], sizes)
        return StoredSource(source.prefix, PlainTokens(source.prefix, np.dtype(source.dtype), reader), range(1))


def open_planned(location: Location, file: PlannedFile, mmap: bool) -> RangeReader:
    """Open a file with tokens in the version of which a plan was made; a remote one without a HEAD where possible.

    Args:
        location: of the file.
        file: its description in the plan.
        mmap: map a local file.

    Raises:
        ObjectChangedError: it is another version, as far as that is known before it is read.
        ObjectNotFoundError: the settings require checksums, and there were none.
    """
    codec = codec_of(location.uri)
    if location.settings.verify and codec == "raw" and file.sums is None:
        raise ObjectNotFoundError(f"{location}{SUMS}: not there when the plan was written; BINIDX_VERIFY=1 needs it")
    stored = _open_version(location, file.identity, mmap)
    sums = _open_version(location + SUMS, file.sums, mmap) if file.sums and compares_sums(location) else None
    return layered(stored, location, sums=sums, codec=codec)


def _open_version(location: Location, identity: Mapping[str, Any], mmap: bool) -> RangeReader:
    stored = open_stored(location, mmap=mmap, identity=identity)
    check_same(location, identity, stored.identity, WRITTEN, remedy="")
    return stored


def check_local(file: PlannedFile) -> None:
    """Raise ObjectChangedError or ObjectNotFoundError if a file on a disk is another one now; asks no store."""
    if (location := Location(file.uri)).local_path is not None:
        check_same(location, file.identity, object_identity(location), WRITTEN, remedy="")
