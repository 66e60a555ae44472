"""A reader that checks what it reads against the checksums beside the object: `checksums` is their format.

    asked     [20000, 21000)          data     [16384, 32768)   ─┐ read at the same time
    block     1                       sums     [40, 48)         ─┴► equal? a view; else both once more; else an error

A read is widened to whole blocks. The sums come through a ChunkCache: a chunk of them is for 128 MiB of data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.storage.checksums import HEADER, SUM_BYTES, parse_sums_header, sums_of
from binidx.storage.chunk_cache import ChunkCache, chunks_of, runs_of
from binidx.storage.ranges import Bytes, Range, RangeReader, assemble, check_ranges
from binidx.storage.side_reads import submit
from binidx.storage.stats import LayerStats

NUM_PROBES = 16
"""Other blocks that are looked at to tell which side is stale."""


class CheckedObject:
    """A reader that gives the bytes of another one if they are what their checksums say.

    Args:
        reader: of the object.
        sums: of its checksum file.

    Raises:
        FormatError: the checksum file is none, or of an object of another size. On read: a block is not what it was
            when the sums were taken, also when both were read a second time; the message tells which side seems to be
            another: one block that differs is damage, most of them are sums of other data.
    """

    def __init__(self, reader: RangeReader, sums: RangeReader) -> None:
        self.reader, self.sums = reader, sums
        self.uri, self.size = reader.uri, reader.size
        self._kept = ChunkCache(sums)
        self.header = parse_sums_header(self._kept.read([(0, min(HEADER.size, sums.size))])[0], sums.size, sums.uri)
        if self.header.size != self.size:
            raise FormatError(
                f"{self.uri}: {self.size} bytes, {sums.uri} is for {self.header.size}; {_way_out(stale=True)}"
            )
        self.stats = LayerStats()

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the object; the sums only say whether it is that."""
        found: dict[str, Any] = getattr(self.reader, "identity", {})
        return found

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        runs = runs_of(chunks_of(ranges, self.header.block_bytes))
        stretches = [(self.header.block(first)[0], self.header.block(stop - 1)[1]) for first, stop in runs]
        answers = self._fetch(runs, stretches, self._kept) if runs else []
        self.stats.add(bytes_asked=sum(stop - start for start, stop in ranges))
        return assemble(ranges, stretches, answers)

    def _fetch(self, runs: Sequence[Range], stretches: Sequence[Range], sums: RangeReader) -> list[Bytes]:
        """The bytes of whole blocks, from `sums` the second time not from memory."""
        began = time.perf_counter()
        answers: list[Bytes] = []
        found, needed = self._read_both(runs, stretches, sums)
        self.stats.add(requests=len(stretches), bytes_moved=sum(map(len, found)), seconds=time.perf_counter() - began)
        for (first, _), data, right in zip(runs, found, needed, strict=True):
            wrong = (np.flatnonzero(self._sums_of(data) != right) + first).tolist()
            answers.append(self._mended(first, data, wrong) if wrong else data)
        return answers

    def _read_both(
        self, runs: Sequence[Range], stretches: Sequence[Range], sums: RangeReader
    ) -> tuple[list[memoryview], list[NDArray[np.uint64]]]:
        """The data of runs of blocks, and their sums, read at the same time."""
        places = [(HEADER.size + SUM_BYTES * first, HEADER.size + SUM_BYTES * stop) for first, stop in runs]
        pending = submit(lambda: sums.read(places))
        try:
            data = self.reader.read(stretches)
        finally:
            wait([pending])
        return data, [np.frombuffer(view, "<u8") for view in pending.result()]

    def _sums_of(self, data: memoryview) -> NDArray[np.uint64]:
        size = self.header.block_bytes
        return sums_of([data[start : start + size] for start in range(0, len(data), size)])

    def _mended(self, first: int, data: memoryview, wrong: Sequence[int]) -> bytearray:
        """The data with the blocks that were wrong read again, and their sums from the store itself."""
        self._kept = ChunkCache(self.sums)  # what it held may be what was damaged
        mended = bytearray(data)
        runs = [(block, block + 1) for block in wrong]
        found, needed = self._read_both(runs, [self.header.block(block) for block in wrong], self.sums)
        for block, view, right in zip(wrong, found, needed, strict=True):
            if self._sums_of(view)[0] != right[0]:
                raise self._error(block)
            start = self.header.block(block)[0] - self.header.block(first)[0]
            mended[start : start + len(view)] = view
        return mended

    def _error(self, block: int) -> FormatError:
        start, stop = self.header.block(block)
        differ, looked = self._probe(block)
        stale = 2 * differ > looked
        what = (
            f"{differ} of {looked} other blocks differ, too: {self.sums.uri} is of other data"
            if stale
            else f"{looked - differ} of {looked} other blocks agree: these bytes, or their sum in it, are damaged"
        )
        return FormatError(
            f"{self.uri}: block {block}, bytes {start}-{stop}, is not what {self.sums.uri} says, read twice; "
            f"{what}; {_way_out(stale=stale)}"
        )

    def _probe(self, block: int) -> tuple[int, int]:
        """How many other blocks differ from their sums, of how many that were looked at."""
        count = self.header.num_blocks
        others = sorted({number * count // NUM_PROBES for number in range(min(NUM_PROBES, count))} - {block})
        found, needed = self._read_both(
            [(each, each + 1) for each in others], [self.header.block(each) for each in others], self.sums
        )
        differ = (self._sums_of(view)[0] != right[0] for view, right in zip(found, needed, strict=True))
        return sum(map(bool, differ)), len(others)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stats": LayerStats()}

    def __repr__(self) -> str:
        return f"CheckedObject({self.reader!r}, {self.sums!r})"


def _way_out(*, stale: bool) -> str:
    if stale:
        return (
            "if the data is right, write the sums again with binidx convert --checksums; BINIDX_VERIFY=0 ignores them"
        )
    return "restore the object from its source"
