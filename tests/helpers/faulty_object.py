"""A reader whose first reads fail on demand."""

from __future__ import annotations

from collections.abc import Sequence

from binidx.storage.interfaces import Range, RangeReader


class FaultyObject:
    """Reader whose first reads may fail: each takes the next of `faults`, and raises it, or succeeds if it is None.

    All reads succeed once the faults are used up.
    """

    def __init__(self, reader: RangeReader, faults: Sequence[Exception | None]) -> None:
        self.uri, self.size, self.identity = reader.uri, reader.size, reader.identity
        self.reader, self.faults = reader, list(faults)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return self.reader.read(ranges)
