"""Read plan of a run: the places of the tokens of its samples, in the order in which the run consumes them.

    DIR/draft.json               description; written first, so that no directory holds parts of two plans
    DIR/{first:012d}.rows        samples from position `first` on
    DIR/readplan.json            the same bytes as draft.json; written when all parts exist

    part     block ─ block ─ ... ─ u32 bytes of each block ─ digest
    block    SAMPLE of each of 64 samples ─ PIECE of each of their pieces ─ digest

All little-endian. A digest is xxh3_64 of the bytes before it, seeded with the description, the position of the first
sample and the number of samples: bytes that are damaged, of another place or of another plan are an error.

The rows of a micro-batch are one contiguous range, for any number of ranks. The table at the end of a part gives it
without a request: 16 KiB for 262,144 samples. A sample of 5 pieces takes 56 bytes, of 20 pieces 206.

Source: ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.format.idx import DType
from binidx.json_models import Count, JsonFile, Positive
from binidx.order.order_protocols import Bounds, Numbers
from binidx.order.source_order import join_ranges
from binidx.storage.cache.memory import ChunkCache
from binidx.storage.interfaces import Bytes, Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_document
from binidx.storage.ranges import stored_reader

SAMPLE = np.dtype([("num_pieces", "<u4"), ("source", "<u2")])
PIECE = np.dtype([("start", "<u4"), ("start_high", "<u2"), ("num_tokens", "<u4")])
"""`start` is the first byte of the piece in the plain bytes of the source, 48 bits."""

BLOCK_SAMPLES = 64
DIGEST_BYTES = 8
CHUNK_BYTES = 8 << 10
"""Unit of fetching rows from a store, and of caching them in memory: two blocks of samples of 5 pieces."""

MOST_OPEN_PARTS = 8


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
class ReadPlan:
    """Contents of `readplan.json`.

    Attributes:
        fingerprint: identity of the run, of its order and of its data.
        order: identity of the order of the samples, with which states of loaders are compared.
        first, stop: positions of the run that are stored.
        samples_per_part: number of samples in each part but the last.
        sequence_length: number of tokens fed per sample, S.
        add_extra_token: whether a sample has the token after them, too.
        masks_ends: whether the last token of each piece has no label, as in packed orders.
        blended: whether the samples have a dataset_id.
        sources: in the order that the rows number.
    """

    fingerprint: str
    order: Any
    first: Count
    stop: Count
    samples_per_part: Positive
    sequence_length: Positive
    add_extra_token: bool
    masks_ends: bool
    blended: bool
    sources: list[PlannedSource]

    def part(self, number: int) -> range:
        """Return the positions of a part."""
        first = self.first + number * self.samples_per_part
        return range(first, min(first + self.samples_per_part, self.stop))

    def parts(self) -> list[range]:
        """Return the positions of each part."""
        return [self.part(number) for number in range(-(-(self.stop - self.first) // self.samples_per_part))]

    def format(self) -> bytes:
        return (json.dumps({**PLAN_FILE.tags, **asdict(self)}, indent=1) + "\n").encode()


PLAN_FILE = JsonFile(ReadPlan, {"binidx": "readplan", "version": 1}, hint="needs a file written by binidx read-plan")


def read_plan(file: Location) -> tuple[ReadPlan, str]:
    """Read a `readplan.json`; return it, and the digest of its bytes, of which the digests of its parts depend.

    Raises:
        FormatError: the file is none.
    """
    data = read_document(PLAN_FILE, file)
    return PLAN_FILE.decode(data, file.uri), xxhash.xxh3_128_hexdigest(data)


def part_location(directory: Location, part: range) -> Location:
    """Return the location of the part with these positions."""
    return directory / f"{part.start:012d}.rows"


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
        stop = min(start + BLOCK_SAMPLES, len(samples))
        own = rows[pieces.bounds[start] : pieces.bounds[stop]]
        yield seal(samples[start:stop].tobytes() + own.tobytes(), range(first + start, first + stop), plan_digest)


def format_table(block_bytes: Sequence[int], part: range, plan_digest: str) -> bytes:
    """Return the end of a part: the sizes of its blocks, and the digest.

    Args:
        block_bytes: size of each block.
        part: positions of the part.
        plan_digest: digest of the description.
    """
    return seal(np.array(block_bytes, "<u4").tobytes(), part, plan_digest)


def seal(data: bytes, positions: range, plan_digest: str) -> bytes:
    """Return bytes that describe the samples at these positions, and their digest."""
    return data + _digest(data, positions, plan_digest)


def _digest(data: Bytes, positions: range, plan_digest: str) -> bytes:
    seed = xxhash.xxh3_64_intdigest(f"{plan_digest} {positions.start} {positions.stop}".encode())
    return xxhash.xxh3_64_intdigest(data, seed).to_bytes(DIGEST_BYTES, "little")


class PlannedRows:
    """Rows of the samples of a read plan, by position. A part is opened at its first use.

    Args:
        directory: of the plan.
        plan: its description.
        plan_digest: digest of the bytes of the description.
    """

    def __init__(self, directory: Location, plan: ReadPlan, plan_digest: str) -> None:
        self.directory, self.plan, self.plan_digest = directory, plan, plan_digest
        self._open: dict[int, tuple[RangeReader, Numbers]] = {}

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
        decoded = []
        for number in np.unique(of_part).tolist():
            decoded += self._read_blocks(number, blocks[of_part == number])
        samples, pieces = (np.concatenate(columns) for columns in zip(*decoded, strict=True))
        before = np.cumsum([0, *(len(own) for own, _ in decoded)])
        row += before[place.reshape(-1)]
        ends = np.concatenate([[0], np.cumsum(samples["num_pieces"], dtype=np.int64)])
        chosen = pieces[join_ranges(ends[row], ends[row + 1])]
        starts = chosen["start"].astype(np.int64) | chosen["start_high"].astype(np.int64) << 32
        bounds = np.concatenate([[0], np.cumsum(ends[row + 1] - ends[row])])
        return PlannedPieces(
            samples["source"][row].astype(np.int64), bounds, starts, chosen["num_tokens"].astype(np.int64)
        )

    def _read_blocks(self, number: int, blocks: Numbers) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return the samples and the pieces of some blocks of a part."""
        part, (reader, ends) = self.plan.part(number), self._open_part(number)
        positions = [part[block * BLOCK_SAMPLES : (block + 1) * BLOCK_SAMPLES] for block in blocks.tolist()]
        ranges = list(zip(ends[blocks].tolist(), ends[blocks + 1].tolist(), strict=True))
        decoded = []
        for view, own in zip(self._read_sealed(reader, ranges, positions), positions, strict=True):
            size = len(own) * SAMPLE.itemsize
            decoded.append((np.frombuffer(view[:size], SAMPLE), np.frombuffer(view[size:], PIECE)))
        return decoded

    def _open_part(self, number: int) -> tuple[RangeReader, Numbers]:
        """Return the reader of a part, and the first byte of each block, then the end of the last."""
        if (opened := self._open.get(number)) is not None:
            return opened
        part = self.plan.part(number)
        location = part_location(self.directory, part)
        reader = open_object(location, cache=False)
        table_bytes = 4 * -(-len(part) // BLOCK_SAMPLES) + DIGEST_BYTES
        table = self._read_sealed(reader, [(max(0, reader.size - table_bytes), reader.size)], [part])[0]
        ends = np.concatenate([[0], np.cumsum(np.frombuffer(table, "<u4"), dtype=np.int64)])
        if location.local_path is None:
            reader = ChunkCache(reader, chunk_bytes=CHUNK_BYTES)
        if len(self._open) >= MOST_OPEN_PARTS:
            self._open = {}
        self._open[number] = reader, ends
        return reader, ends

    def _read_sealed(
        self, reader: RangeReader, ranges: Sequence[Range], positions: Sequence[range]
    ) -> list[memoryview]:
        """Return the bytes of ranges without their digests; wrong ones are read again, from the store."""
        views = reader.read(ranges)
        wrong = [place for place, view in enumerate(views) if not self._is_right(view, positions[place])]
        again = stored_reader(reader).read([ranges[place] for place in wrong]) if wrong else []
        for place, view in zip(wrong, again, strict=True):
            if not self._is_right(view, own := positions[place]):
                raise FormatError(
                    f"{reader.uri}: rows of positions {own.start} to {own.stop} are damaged or of another plan, read "
                    "twice; delete this file and write it again with binidx read-plan"
                )
            views[place] = view
        return [view[:-DIGEST_BYTES] for view in views]

    def _is_right(self, view: memoryview, positions: range) -> bool:
        return bytes(view[-DIGEST_BYTES:]) == _digest(view[:-DIGEST_BYTES], positions, self.plan_digest)
