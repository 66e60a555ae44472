"""Dataset of a run with a read plan: its samples, from the run's own tokens and without any index.

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

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.dataset.affects import described_fields, words_of
from binidx.dataset.baked import Baked, PositionedDataset
from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.torch_bridge import Sample, is_first_rank
from binidx.errors import FormatError, ObjectChangedError, ObjectNotFoundError, redacted
from binidx.format.bin_file import strip_bin_suffix
from binidx.format.idx import DType
from binidx.format.virtual import named_location
from binidx.json_models import Count, JsonFile, tolerate_all
from binidx.native.gpt_samples import GPTRows
from binidx.order.order_options import format_order
from binidx.order.order_protocols import Bounds, Numbers
from binidx.order.source_order import join_ranges
from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.cache.memory import ChunkCache
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_of, layered, open_object, open_stored, read_document
from binidx.storage.ranges import read_many, stored_reader
from binidx.storage.requests.remote_object import recorded_object
from binidx.storage.stores.identity import same_identity

logger = logging.getLogger(__name__)

SAMPLE = np.dtype([("num_pieces", "<u4"), ("source", "<u2")])
PIECE = np.dtype([("start", "<u4"), ("start_high", "<u2"), ("num_tokens", "<u4")])
"""`start` is the first byte of the piece in the plain bytes of the source, 48 bits."""

BLOCK_SAMPLES = 64
DIGEST_BYTES = 8
CHUNK_BYTES = 8 << 10
"""Unit of fetching rows from a store, and of caching them in memory: two blocks of samples of 5 pieces."""


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

    def format(self) -> bytes:
        return (json.dumps({**PLAN_FILE.tags, **asdict(self)}, indent=1) + "\n").encode()


PLAN_FILE = JsonFile(
    ReadPlan,
    {"binidx": "readplan", "version": 1},
    hint="needs a file written by binidx read-plan",
    tolerates=tolerate_all,
)


def read_plan(file: Location) -> tuple[ReadPlan, str]:
    """Read a `readplan.json`; return it, and the digest of its bytes, with which the digests of its parts are seeded.

    Raises:
        FormatError: the file is none.
    """
    data = read_document(PLAN_FILE, file)
    return PLAN_FILE.decode(data, file.uri), xxhash.xxh3_128_hexdigest(data)


def part_location(directory: Location, part: range) -> Location:
    """Return the location of the part with these positions."""
    return directory / f"{part.start:012d}.rows"


IN_ANOTHER_FORM = {"split", "order", "tokenizer"}
"""Fields that names of plans have as bookends, and as the text of the order; the tokenizer in no form, since it has no
text that is the same in each process, and moves no token of stored data."""


def hashed_fields(config: GPTDatasetConfig, split: Split) -> tuple[list[str], set[str]]:
    """Return the fields of a config in the names of early plans, and those of them that today's names lack.

    Early names have all fields but those of places and of the start. Today's lack those that move no token of the split
    in the kinds that have plans. Both have all fields of a subclass, whatever they affect, as stored plans do.
    """
    known = described_fields(GPTDatasetConfig)
    ways = {name for name, option in known.items() if words_of(option) & {"place", "start"}} | IN_ANOTHER_FORM
    lacking = {name for name, option in known.items() if "order" not in words_of(option, split.name)}
    return [option.name for option in fields(config) if option.init and option.name not in ways], lacking


def locate_plans(kind: str, config: GPTDatasetConfig, split: Split, num_samples: int | None) -> list[Location]:
    """Return where the plan of a split is that belongs to a config: its place, then that of early versions of binidx.

    The list is empty without a `path_to_cache`, and for a list of validation sets.

    Args:
        kind: recorded name of the class of the datasets.
        config: options of the run.
        split: the split.
        num_samples: the least number of samples of the split; None is one epoch.
    """
    blend = config.blend if config.blend_per_split is None else config.blend_per_split[split.value]
    is_list = config.multiple_validation_sets and split is Split.valid
    if config.path_to_cache is None or blend is None or is_list:
        return []
    names, lacking = hashed_fields(config, split)
    early: dict[str, Any] = {name: getattr(config, name) for name in names}
    order = config.order and format_order(config.order.pinned(config.storage_options))
    bookends = config.split_matrix and config.split_matrix[split.value]
    prefixes = [config.as_written(prefix) for prefix in blend[0]]
    early |= {"kind": kind, "prefixes": prefixes, "weights": blend[1], "bookends": bookends, "order": order}
    early |= {"split": split.name, "num_samples": num_samples}
    cache, now = Location(config.path_to_cache, config.storage_options), early.keys() - lacking
    both = [json.dumps({name: early[name] for name in kept}, sort_keys=True, default=str) for kept in (now, early)]
    return [cache / f"{xxhash.xxh3_128_hexdigest(text.encode())}-{split.name}-read-plan" for text in both]


class PlannedPieces(NamedTuple):
    """Places of the tokens of B samples.

    Attributes:
        sources: number of the source of each sample, shape (B,).
        bounds: sample i has the pieces bounds[i] up to bounds[i + 1], shape (B + 1,).
        starts: first byte of each piece in the plain bytes of the source, shape (n,).
        num_tokens: of each piece, shape (n,).
    """

    sources: Numbers
    bounds: Bounds
    starts: Numbers
    num_tokens: Numbers


def format_blocks(pieces: PlannedPieces, first: int, plan_digest: str) -> Iterator[bytes]:
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


class PlannedRows:
    """Rows of the samples of a read plan, by position. A part is opened at its first use.

    Args:
        directory: of the plan.
        plan: its description.
        plan_digest: digest of the bytes of the description.
    """

    def __init__(self, directory: Location, plan: ReadPlan, plan_digest: str) -> None:
        self.directory, self.plan, self.parts, self.plan_digest = directory, plan, plan.parts(), plan_digest
        self._opened: dict[int, tuple[RangeReader, Numbers]] = {}

    def read(self, positions: Numbers) -> PlannedPieces:
        """Return the places of the tokens of samples: one range of rows if the positions are consecutive.

        Args:
            positions: positions of the run that are stored, shape (B,).

        Raises:
            FormatError: a part is damaged, or of another plan.
            ObjectNotFoundError: a part is missing.
        """
        part, in_part = np.divmod(positions - self.plan.first, self.plan.samples_per_part)
        in_part, row = np.divmod(in_part, BLOCK_SAMPLES)
        blocks_per_part = -(-self.plan.samples_per_part // BLOCK_SAMPLES)
        blocks, place = np.unique(part * blocks_per_part + in_part, return_inverse=True)
        of_part, blocks = np.divmod(blocks, blocks_per_part)
        reads = [self._read_blocks(number, blocks[of_part == number]) for number in np.unique(of_part).tolist()]
        decoded = [*chain(*reads)]
        samples, pieces = (np.concatenate(columns) for columns in zip(*decoded, strict=True))
        row += np.cumsum([0, *(len(own) for own, _ in decoded)])[place.reshape(-1)]
        ends = np.concatenate([[0], np.cumsum(samples["num_pieces"], dtype=np.int64)])
        chosen = pieces[join_ranges(ends[row], ends[row + 1])]
        starts = chosen["start"].astype(np.int64) | chosen["start_high"].astype(np.int64) << 32
        bounds = np.concatenate([[0], np.cumsum(ends[row + 1] - ends[row])])
        sources = samples["source"][row].astype(np.int64)
        return PlannedPieces(sources, bounds, starts, chosen["num_tokens"].astype(np.int64))

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
        reader = open_object(part_location(self.directory, part), cache=False)
        table_bytes = 4 * -(-len(part) // BLOCK_SAMPLES) + DIGEST_BYTES
        table = self._unseal(reader, [(max(0, reader.size - table_bytes), reader.size)], [part])[0]
        ends = np.concatenate([[0], np.cumsum(np.frombuffer(table, "<u4"), dtype=np.int64)])
        if self.directory.local_path is None:
            reader = ChunkCache(reader, chunk_bytes=CHUNK_BYTES)
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
                    "twice; delete this file and write it again with binidx read-plan"
                )
        return [view[:-DIGEST_BYTES] for view in views]


class PlannedDataset(PositionedDataset):
    """Dataset of a run whose read plan `binidx read-plan` has written.

    Sample i is the one that the run's loaders served at position i (after i consumed samples), with any sampler. Read
    it with the "single" sampler, from any `consumed_samples`, on any number of ranks. `len()` is one past the last
    position; positions before the first stored one raise IndexError. No `.idx` and no index is opened: a process reads
    the description of the plan, the rows that it needs, and the tokens, in the version of which the plan was made. It
    opens each file at its first use.

    The state of a loader over it is that of a loader over the run's own dataset, if that has the "single" sampler.

    Args:
        directory: URI of the read plan.
        config: config of the run. It names the data that may be read; sequence_length, extra token and masks must be
            the run's.

    Attributes:
        order_identity: identity of the samples and their order, in JSON values: that of the run's own dataset, if its
            sampler is "single".

    Raises:
        ConfigError: the config has another sequence_length or extra token, or does not name a prefix of the plan.
        FormatError: the description is invalid. On read: rows are damaged.
        ObjectNotFoundError: the description is missing: the plan is not finished. On read: a file with tokens is.
        ObjectChangedError: on read, a file with tokens is another one than that of which the plan was made.

    Example:
        >>> dataset = binidx.PlannedDataset("s3://corpus/plan", config)
        >>> batch = dataset.__getitems__(range(1000, 1008))

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "PlannedDataset"

    def __init__(self, directory: str, config: GPTDatasetConfig) -> None:
        folder = Location(directory, config.storage_options)
        self.plan, plan_digest = read_plan(file := folder / "readplan.json")
        super().__init__(directory, config, self.plan, file.uri)
        self.masks_ends, self.order_identity = self.plan.masks_ends, self.plan.order
        self._rows, self._readers = PlannedRows(folder, self.plan, plan_digest), list_readers(self.plan, file, config)

    def _read(self, positions: Numbers) -> tuple[Sequence[Sample], NDArray[Any] | None]:
        """Read the rows, then the tokens of all sources at once."""
        batch, pieces, parts, reads = GPTRows(self._assemble.recipe, len(positions)), self._rows.read(positions), [], []
        for source in np.unique(pieces.sources).tolist():
            places = np.flatnonzero(pieces.sources == source)
            first, stop = pieces.bounds[places], pieces.bounds[places + 1]
            dtype, own = np.dtype(self.plan.sources[source].dtype), join_ranges(first, stop)
            starts, stops = pieces.starts[own], pieces.starts[own] + pieces.num_tokens[own] * dtype.itemsize
            parts.append((dtype, np.concatenate([[0], np.cumsum(stop - first)]), places.tolist()))
            reads.append((self._readers[source], list(zip(starts.tolist(), stops.tolist(), strict=True))))
        try:
            views = read_many(reads)
        except (ObjectChangedError, ObjectNotFoundError) as error:
            again = "is of the data as it was; bring that back, or write the plan again with binidx read-plan"
            raise type(error)(f"{error}; the read plan {self.directory} {again}") from error
        for (dtype, bounds, rows), own_views in zip(parts, views, strict=True):
            batch.fill(own_views, bounds, rows, dtype_code=DType.code_from_dtype(dtype), item_bytes=dtype.itemsize)
        return self._assemble.finish(batch), pieces.sources if self.plan.blended else None

    def locate_bytes(self, samples: Numbers) -> Iterator[tuple[RangeReader, Numbers, Numbers]]:
        """Yield where the tokens of samples are stored; see `OrderedDataset.locate_bytes`."""
        pieces = self._rows.read(samples)
        places = np.repeat(np.arange(len(samples)), np.diff(pieces.bounds))
        of_piece = pieces.sources[places]
        for source in np.unique(of_piece).tolist():
            rows, item_bytes = of_piece == source, np.dtype(self.plan.sources[source].dtype).itemsize
            starts = pieces.starts[rows]
            yield (
                self._readers[source],
                np.column_stack([starts, starts + pieces.num_tokens[rows] * item_bytes]),
                places[rows],
            )

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the tokens.

        Returns:
            One reader for each source; its files may not be open yet.
        """
        return self._readers


def open_plan(kind: str, config: GPTDatasetConfig, split: Split, num_samples: int | None) -> PlannedDataset | None:
    """Open the plan of a split, with the arguments of `locate_plans`; log its name if there is none."""
    places = locate_plans(kind, config, split, num_samples)
    for folder in places:
        with contextlib.suppress(ObjectNotFoundError):
            return PlannedDataset(folder.uri, config)
    if places and num_samples != 0 and is_first_rank():
        logger.warning("%s: no read plan, so each .idx is read; prepare-cache writes it", redacted(places[0].uri))
    return None


def list_readers(plan: ReadPlan, file: Location, config: GPTDatasetConfig) -> list[RangeReader]:
    """Return readers of the plain tokens of each source, whose files are opened at the first read.

    Args:
        plan: the description.
        file: its location.
        config: config of the run.

    Raises:
        ConfigError: the plan names data that the config does not name, on a host or in a bucket of its own.
    """
    named = {prefix for blend in (config.blend, *(config.blend_per_split or ())) if blend for prefix in blend[0]}

    def read_lazily(planned: PlannedFile) -> LazyReader:
        is_named = strip_bin_suffix(planned.uri) in named
        location = Location(planned.uri, file.options) if is_named else named_location(planned.uri, file)
        return LazyReader(planned.uri, planned.size, partial(open_planned, location, planned, config.mmap_bin_files))

    return [
        JoinedReader(source.prefix, [*map(read_lazily, source.files)], [planned.num_bytes for planned in source.files])
        for source in plan.sources
    ]


def open_planned(location: Location, file: PlannedFile, mmap: bool) -> RangeReader:
    """Open a file with tokens in the version of which a plan was made; a remote one without a HEAD where possible.

    Args:
        location: of the file.
        file: what the plan has of it.
        mmap: map a local file.

    Raises:
        ObjectChangedError: it is another version, as far as that is known before it is read.
        ObjectNotFoundError: the settings require checksums, and there were none.
    """
    verify, codec = location.settings.verify, codec_of(location.uri)
    if verify and codec == "raw" and file.sums is None:
        raise ObjectNotFoundError(f"{location}{SUFFIX}: not there when the plan was written; BINIDX_VERIFY=1 needs it")
    stored = _open_version(location, file.identity, mmap)
    checks = verify if location.local_path is not None else verify is not False
    sums = _open_version(location + SUFFIX, file.sums, mmap) if file.sums and checks else None
    return layered(stored, location, sums=sums, codec=codec)


def _open_version(location: Location, identity: Mapping[str, Any], mmap: bool) -> RangeReader:
    found = None if location.local_path is not None else recorded_object(location.uri, identity)
    stored = open_stored(location, mmap=mmap, found=found)
    if not same_identity(identity, stored.identity):
        raise ObjectChangedError(f"{location}: found {dict(stored.identity)}, need {dict(identity)}")
    return stored
