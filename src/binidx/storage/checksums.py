"""Checksums of the blocks of a plain object, in a file beside it: `<name>.xxh3`. No I/O happens here.

    offset  bytes  field
    0       8      `BINXXH3` and a NUL byte
    8       4      u32 version, 1
    12      4      u32 bytes of a block, B: 16384 as we write it
    16      8      u64 bytes of the object, N
    24      8      u64 xxh3_64 of the 24 bytes before
    32      8 n    u64 xxh3_64 of each block of B bytes, the last one shorter; n = ceil(N / B)

All little-endian. Prohibited: another magic, version or size of the file; B outside 512 to 2^30.

Why 16 KiB. A piece of a document, 2 KiB, mostly lies in one block: 16 KiB are read for it, less than the gap of 64 KiB
that a second request is worth. The sums of 100 GB are 50 MB, and after 800 reads of 64 KiB all are in memory; blocks of
4 KiB would need 200 of the 256 MB there, blocks of 64 KiB would move 64 KiB for 2. Price: 2 us a block, 0.05 % more
to store.

Source: us. No peer checks ranged reads: an ETag is for the whole object, S3's own checksums are for whole parts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.storage.ranges import Bytes, Range

HEADER = struct.Struct("<8sIIQQ")
MAGIC = b"BINXXH3\x00"
VERSION = 1
SUFFIX = ".xxh3"
BLOCK_BYTES = 16 << 10
LEAST_BLOCK, MOST_BLOCK = 512, 1 << 30
SUM_BYTES = 8


@dataclass(frozen=True)
class Sums:
    """What the header of a checksum file says."""

    block_bytes: int
    size: int

    @property
    def num_blocks(self) -> int:
        return -(-self.size // self.block_bytes)

    def block(self, number: int) -> Range:
        """Its bytes in the object."""
        return number * self.block_bytes, min((number + 1) * self.block_bytes, self.size)


def format_sums_header(size: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The 32 bytes before the sums of an object of `size` bytes."""
    head = struct.pack("<8sIIQ", MAGIC, VERSION, block_bytes, size)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))


def parse_sums_header(head: memoryview, file_bytes: int, uri: str) -> Sums:
    """What a checksum file of `file_bytes` bytes says in its first 32.

    Raises:
        FormatError: a rule of the format is broken.
    """
    if len(head) < HEADER.size:
        raise FormatError(f"{uri}: {len(head)} bytes, a checksum file needs {HEADER.size}")
    magic, version, block_bytes, size, digest = HEADER.unpack(head[: HEADER.size])
    if magic != MAGIC:
        raise FormatError(f"{uri}: starts with {magic!r}, a checksum file needs {MAGIC!r}")
    if xxhash.xxh3_64_intdigest(head[: HEADER.size - SUM_BYTES]) != digest:
        raise FormatError(f"{uri}: its header is damaged; write it again with binidx convert --checksums")
    if version != VERSION:
        raise FormatError(f"{uri}: version {version}, needed {VERSION}")
    if not LEAST_BLOCK <= block_bytes <= MOST_BLOCK:
        raise FormatError(f"{uri}: blocks of {block_bytes} bytes, needed {LEAST_BLOCK} to {MOST_BLOCK}")
    sums = Sums(block_bytes, size)
    needed = HEADER.size + SUM_BYTES * sums.num_blocks
    if file_bytes != needed:
        raise FormatError(f"{uri}: {file_bytes} bytes, the sums of {size} bytes need {needed}")
    return sums


class BlockSums:
    """The sums of bytes that come in any pieces.

    Args:
        keep: takes arrays of sums as they get ready, uint64.
    """

    def __init__(self, keep: Callable[[NDArray[np.uint64]], object], block_bytes: int = BLOCK_BYTES) -> None:
        self.size = 0
        self._keep, self._block_bytes = keep, block_bytes
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
        self._keep(sums_of([view[start : start + self._block_bytes] for start in starts]))
        self._open.update(view[head + blocks * self._block_bytes :])

    def finish(self) -> None:
        """The last block, if it is a short one."""
        if self.size % self._block_bytes:
            self._close()

    def _close(self) -> None:
        self._keep(np.array([self._open.intdigest()], np.uint64))
        self._open.reset()


def sums_of(blocks: Sequence[Bytes]) -> NDArray[np.uint64]:
    """xxh3_64 of each."""
    return np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], np.uint64)
