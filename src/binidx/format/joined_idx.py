"""The `.idx` that a merge of datasets would write, as an object that is made while it is read.

    header        of all                                       in memory
    lengths       those of the parts, as they lie there
    pointers      the same, each plus the bytes before its part
    bounds        0, then those of the parts without their first, each plus the sequences before its part
    modes         those of the parts

Nothing of it is kept, and nothing is checked but what decides where a column begins: `index_stream` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from binidx.errors import FormatError
from binidx.format.idx import HEADER, format_header
from binidx.format.index_stream import IndexStream
from binidx.storage.joined import InMemory, Joined
from binidx.storage.ranges import Range, RangeReader, check_ranges

NUMBER_BYTES = 8


class Shifted:
    """`count` int64 of `reader` from byte `start` on, each with `plus` added."""

    def __init__(self, reader: RangeReader, start: int, count: int, plus: int) -> None:
        self.uri, self.size = reader.uri, count * NUMBER_BYTES
        self._reader, self._start, self._plus = reader, start, plus

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        whole = [
            (first // NUMBER_BYTES * NUMBER_BYTES, -(-stop // NUMBER_BYTES) * NUMBER_BYTES) for first, stop in ranges
        ]
        found = self._reader.read([(self._start + first, self._start + stop) for first, stop in whole])
        shifted = [(np.frombuffer(view, "<i8") + self._plus).astype("<i8", copy=False).view(np.uint8) for view in found]
        return [
            each[first - low : stop - low].data
            for each, (first, stop), (low, _) in zip(shifted, ranges, whole, strict=True)
        ]


def join_idx(uri: str, parts: Sequence[IndexStream], num_bytes: Sequence[int]) -> Joined:
    """An object of the bytes of that `.idx`.

    Args:
        uri: what errors call it.
        num_bytes: plain bytes of the tokens of each part.

    Raises:
        FormatError: some parts have modes, and others have none; one without sequences has whatever the others have.
    """
    columns = [*_columns(uri, parts, num_bytes)]
    readers, starts, sizes = zip(*columns, strict=True)
    return Joined(uri, readers, sizes, starts=starts)


def is_multimodal(parts: Sequence[IndexStream]) -> bool:
    """Whether the sequences of all of them have modes.

    Raises:
        FormatError: those of some have, and those of others have none.
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
    """Reader, first byte, bytes: of each piece, from front to back."""
    sequences, documents = [each.num_sequences for each in parts], [each.num_documents for each in parts]
    header = format_header(parts[0].dtype, sum(sequences), sum(documents) + 1)
    yield InMemory(uri, header), 0, len(header)
    for each in parts:
        yield each.reader, HEADER.size, 4 * each.num_sequences
    for each, before in zip(parts, _sums(num_bytes), strict=False):
        pointers = Shifted(each.reader, HEADER.size + 4 * each.num_sequences, each.num_sequences, before)
        yield pointers, 0, pointers.size
    yield InMemory(uri, bytes(NUMBER_BYTES)), 0, NUMBER_BYTES
    for each, before in zip(parts, _sums(sequences), strict=False):
        second = HEADER.size + 12 * each.num_sequences + NUMBER_BYTES
        bounds = Shifted(each.reader, second, each.num_documents, before)
        yield bounds, 0, bounds.size
    if is_multimodal(parts):
        for each in parts:
            yield each.reader, each.size - each.num_sequences, each.num_sequences


def _sums(counts: Sequence[int]) -> list[int]:
    found: list[int] = np.cumsum([0, *counts], dtype=np.int64).tolist()
    return found
