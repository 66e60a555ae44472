"""Checksums of the blocks of a plain object, in a file `<name>.xxh3` beside it; and the reader that compares with them.

    offset  bytes  field
    0       8      `BINXXH3` and a NUL byte
    8       4      u32 version, 1
    12      4      u32 bytes of a block, B: 16384 as written by this library
    16      8      u64 bytes of the object, N
    24      8      u64 xxh3_64 of the 24 bytes before
    32      8 n    u64 xxh3_64 of each block of B bytes, the last one shorter; n = ceil(N / B)

All little-endian. Prohibited: another magic, version or size of the file; B outside 512 to 2^30.

    read      [20000, 21000)          data     [16384, 32768)   ─┐ read at the same time
    block     1                       sums     [40, 48)         ─┴► equal: a view; else both again; else an error

Blocks of 16 KiB: a piece of a document, 2 KiB, mostly is in one block, and 16 KiB are less than the gap of 64 KiB that
saves a request. The checksums of 100 GB are 50 MB, and after 800 reads of 64 KiB all are in memory; blocks of 4 KiB
would need 200 of its 256 MB, blocks of 64 KiB would move 64 KiB for 2. Cost: 2 us a block, 0.05 % more to store.

Source: ours. No other format checks ranged reads: an ETag is for a whole object, S3's checksums are for whole parts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.storage.cache.memory import ChunkCache, chunks_of, runs_of
from binidx.storage.interfaces import Bytes, Range, RangeReader
from binidx.storage.ranges import assemble, check_ranges, cut
from binidx.storage.stats import LayerStats
from binidx.storage.threads import REQUESTS, run_both

SUMS_HEADER = struct.Struct("<8sIIQQ")
SUMS_MAGIC = b"BINXXH3\x00"
SUMS_VERSION = 1
SUMS = ".xxh3"
"""Suffix after `.bin` of the checksums of a dataset."""
SUMMED_BYTES = 16 << 10
LEAST_BLOCK, MOST_BLOCK = 512, 1 << 30
SUM_BYTES = 8
SUM_SHARE = SUM_BYTES / SUMMED_BYTES
"""Bytes of checksums for each byte of tokens."""


@dataclass(frozen=True)
class Sums:
    """Header of a checksum file."""

    block_bytes: int
    size: int

    @property
    def num_blocks(self) -> int:
        return -(-self.size // self.block_bytes)

    def range_of(self, first: int, stop: int) -> Range:
        """Return the range of bytes of blocks [first, stop) in the object."""
        return first * self.block_bytes, min(stop * self.block_bytes, self.size)


def format_sums_header(size: int, block_bytes: int = SUMMED_BYTES) -> bytes:
    """Return the header of the checksums of an object of `size` bytes."""
    head = struct.pack("<8sIIQ", SUMS_MAGIC, SUMS_VERSION, block_bytes, size)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def parse_sums_header(head: memoryview, file_bytes: int, uri: str) -> Sums:
    """Return the header of a checksum file of `file_bytes` bytes, from its first 32.

    Args:
        head: the first 32 bytes of the file.
        file_bytes: bytes of the file.
        uri: name of the file in errors.

    Raises:
        FormatError: a rule of the format is broken.
    """
    if len(head) < SUMS_HEADER.size:
        raise FormatError(f"{uri}: {len(head)} bytes, a checksum file needs {SUMS_HEADER.size}")
    magic, version, block_bytes, size, digest = SUMS_HEADER.unpack(head[: SUMS_HEADER.size])
    if magic != SUMS_MAGIC:
        raise FormatError(f"{uri}: starts with {magic!r}, a checksum file needs {SUMS_MAGIC!r}")
    if xxhash.xxh3_64_intdigest(head[: SUMS_HEADER.size - SUM_BYTES]) != digest:
        raise FormatError(f"{uri}: its header is damaged; write it again with binidx convert --checksums --overwrite")
    if version != SUMS_VERSION:
        raise FormatError(f"{uri}: version {version}, needed {SUMS_VERSION}")
    if not LEAST_BLOCK <= block_bytes <= MOST_BLOCK:
        raise FormatError(f"{uri}: blocks of {block_bytes} bytes, needed {LEAST_BLOCK} to {MOST_BLOCK}")
    sums = Sums(block_bytes, size)
    needed = SUMS_HEADER.size + SUM_BYTES * sums.num_blocks
    if file_bytes != needed:
        raise FormatError(f"{uri}: {file_bytes} bytes, the sums of {size} bytes need {needed}")
    return sums


class BlockSums:
    """Checksums of the blocks of a stream of bytes.

    Args:
        append: called with each new array of checksums, uint64.
    """

    format_header = staticmethod(format_sums_header)

    def __init__(self, append: Callable[[NDArray[np.uint64]], object], block_bytes: int = SUMMED_BYTES) -> None:
        self.size = 0
        self._append, self._block_bytes = append, block_bytes
        self._open = xxhash.xxh3_64()

    def feed(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        into_block = self.size % self._block_bytes
        head = min(-into_block % self._block_bytes, len(view))
        self._open.update(view[:head])
        self.size += len(view)
        if into_block and into_block + head == self._block_bytes:
            self._close()
        blocks = (len(view) - head) // self._block_bytes
        starts = range(head, head + blocks * self._block_bytes, self._block_bytes)
        self._append(compute_checksums([view[start : start + self._block_bytes] for start in starts]))
        self._open.update(view[head + blocks * self._block_bytes :])

    def finish(self) -> None:
        """Finish a last block that is shorter than the others."""
        if self.size % self._block_bytes:
            self._close()

    def _close(self) -> None:
        self._append(np.array([self._open.intdigest()], np.uint64))
        self._open.reset()


def compute_checksums(blocks: Sequence[Bytes]) -> NDArray[np.uint64]:
    """Return xxh3_64 of each block, uint64."""
    return np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], np.uint64)


DIGESTED_PIECES, DIGESTED_BYTES = 16, 16 << 10
"""Number and size of the pieces of a checksum file that `CheckedObject.digest` reads: each rank does so when it first
saves its state."""

NUM_PROBES = 16
"""Other blocks that are checked for the error message, to find out whether the checksums are of other data."""


class CheckedObject:
    """Reader that compares the bytes of another reader with their checksums. Reads are widened to whole blocks.

    Args:
        reader: reader of the object.
        sums: reader of the checksum file; its chunks are cached in memory, each for 128 MiB of data.

    Raises:
        FormatError: the checksum file is malformed, or of an object of another size. On read: a block differs from its
            checksum, also after both were read again; the message says whether the block seems damaged (few blocks
            differ) or the checksums seem to be of other data (most differ).
    """

    def __init__(self, reader: RangeReader, sums: RangeReader) -> None:
        self.reader, self.sums = reader, sums
        self.uri, self.size, self.identity = reader.uri, reader.size, reader.identity
        self._sums_cache = ChunkCache(sums)
        [head] = self._sums_cache.read([(0, min(SUMS_HEADER.size, sums.size))])
        self.header = parse_sums_header(head, sums.size, sums.uri)
        if self.header.size != self.size:
            raise FormatError(
                f"{self.uri}: {self.size} bytes, {sums.uri} is for {self.header.size}; {_remedy(stale=True)}"
            )
        self.stats = LayerStats()
        self.stored_bytes, self.codec, self.block_bytes = self.size, "raw", self.header.block_bytes
        self.num_blocks = self.header.num_blocks

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        runs = runs_of(chunks_of(ranges, self.block_bytes))
        self.stats.add(bytes_asked=sum(stop - start for start, stop in ranges))
        answers: list[Bytes] = []
        for (first, _), data, right in zip(runs, *self._read_both(runs, self._sums_cache), strict=True):
            wrong = (np.flatnonzero(self._checksums_of(data) != right) + first).tolist()
            answers.append(self._reread(first, data, wrong) if wrong else data)
        return assemble(ranges, [self.header.range_of(*run) for run in runs], answers)

    def digest(self) -> str:
        """Return xxh3_64 of the checksums of up to 32,768 blocks, spread evenly: all of them up to 512 MiB of data."""
        starts = np.unique(np.linspace(0, max(self.sums.size - DIGESTED_BYTES, 0), DIGESTED_PIECES).astype(np.int64))
        pieces = [(start, min(start + DIGESTED_BYTES, self.sums.size)) for start in starts.tolist()]
        return xxhash.xxh3_64_hexdigest(b"".join(self.sums.read(pieces)))

    def _read_both(self, runs: Sequence[Range], sums: RangeReader) -> tuple[list[memoryview], list[NDArray[np.uint64]]]:
        """Return the data of runs of blocks and their checksums, read at the same time."""
        data, right = run_both(
            lambda: self.stats.read(self.reader, [self.header.range_of(*run) for run in runs]),
            lambda: sums.read(
                [(SUMS_HEADER.size + SUM_BYTES * first, SUMS_HEADER.size + SUM_BYTES * stop) for first, stop in runs]
            ),
            REQUESTS,  # a thread of READS may wait for this one
        )
        return data, [np.frombuffer(view, "<u8") for view in right]

    def _checksums_of(self, data: memoryview) -> NDArray[np.uint64]:
        return compute_checksums([data[start:stop] for start, stop in cut((0, len(data)), self.block_bytes)])

    def _read_blocks(self, blocks: Sequence[int]) -> tuple[list[memoryview], list[bool]]:
        """Return blocks, and whether each agrees with its checksum, both read from the store."""
        views, sums = self._read_both([(block, block + 1) for block in blocks], self.sums)
        return views, [bool(self._checksums_of(view)[0] == right[0]) for view, right in zip(views, sums, strict=True)]

    def _reread(self, first: int, data: memoryview, wrong: Sequence[int]) -> bytearray:
        """Return the data with its wrong blocks read again, and their checksums read from the store."""
        self._sums_cache = ChunkCache(self.sums)  # its cached chunks may be damaged
        data_again = bytearray(data)
        for block, view, good in zip(wrong, *self._read_blocks(wrong), strict=True):
            if not good:
                raise self._error(block)
            start = (block - first) * self.block_bytes
            data_again[start : start + len(view)] = view
        return data_again

    def _error(self, block: int) -> FormatError:
        start, stop = self.header.range_of(block, block + 1)
        count = self.header.num_blocks
        others = sorted({number * count // NUM_PROBES for number in range(min(NUM_PROBES, count))} - {block})
        agree = sum(self._read_blocks(others)[1])
        stale = 2 * agree < len(others)
        what = (
            f"{len(others) - agree} of {len(others)} other blocks differ, too: {self.sums.uri} is of other data"
            if stale
            else f"{agree} of {len(others)} other blocks agree: these bytes, or their sum in it, are damaged"
        )
        return FormatError(
            f"{self.uri}: block {block}, bytes {start}-{stop}, is not what {self.sums.uri} says, read twice; "
            f"{what}; {_remedy(stale=stale)}"
        )

    def __repr__(self) -> str:
        return f"CheckedObject({self.reader!r}, {self.sums!r})"


def _remedy(*, stale: bool) -> str:
    again = (
        "if the data is right, write the sums again with binidx convert --checksums --overwrite; BINIDX_VERIFY=0 "
        "ignores them"
    )
    return again if stale else "restore the object from its source"
