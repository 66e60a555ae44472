""""""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

Range = tuple[int, int]


Bytes = bytes | bytearray | memoryview


@runtime_checkable
class RangeReader(Protocol):
    """The bytes of one object.

    `read` returns one view per range, in order and of exactly `stop - start` bytes, or raises: never a short answer,
    `None`, or an exception as a value. A range outside [0, size) is a `ShortReadError`; an empty range inside it is an
    empty view. Readers may be used from several threads, notice a fork, and pickle as their constructor arguments.
    `binidx.testing.check_range_reader` is the contract.
    """

    uri: str
    size: int

    def read(self, ranges: Sequence[Range]) -> list[memoryview]: ...


class Writer(Protocol):
    """What `create_object` gives: bytes go to the end of the object to be."""

    def write(self, data: Bytes, /) -> int: ...
