"""Inputs cut into slices: the work of one part each, told by what lies in the store and nothing else.

    jsonl       bytes      [0, 64 MiB) [64, 128 MiB) ...
    jsonl.zst   frames     by its seek table or its frames' headers, else whole
    jsonl.gz    whole
    parquet     row groups

A bound b that is neither 0 nor the end stands for the first line that begins after the first newline at or after byte b
(Hadoop's rule): so each line is in exactly one slice, wherever they are cut, and none needs the byte before its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

JSONL, GZIP, ZSTD, PARQUET = "jsonl", "jsonl.gz", "jsonl.zst", "parquet"
FORMATS = (JSONL, GZIP, ZSTD, PARQUET)


@dataclass(frozen=True)
class Block:
    """What is read as one piece: a frame of zstd, or a row group.

    Attributes:
        stored: first byte in the object.
        stored_bytes: how many there are.
        first: its first plain byte; its first row in parquet.
        count: plain bytes, or rows.
    """

    stored: int
    stored_bytes: int
    first: int
    count: int


@dataclass(frozen=True)
class Input:
    """An object that was found: see `find_inputs`.

    Attributes:
        identity: size, and ETag, generation or time of the last change.
        blocks: where it can be cut; a plain jsonl anywhere, a .gz nowhere.
    """

    uri: str
    format: str
    identity: Mapping[str, Any]
    blocks: tuple[Block, ...] = ()

    @property
    def size(self) -> int:
        return int(self.identity["size"])


@dataclass(frozen=True)
class Slice:
    """A piece of one input. Pickles; `to_json` and `from_json` for the rest.

    Attributes:
        uri, format: of the input.
        identity: of the object when it was planned: one that is another by then is not read.
        first, last: plain bytes as said above; in parquet row groups. `last` None: to the end.
        stored: first byte to be read, where plain byte `first` is: the same in plain jsonl.
        num_bytes: stored bytes, for progress and to balance parts; in parquet of all columns.
        first_row: row in the file of its first row; None where nobody has counted.
    """

    uri: str
    format: str
    identity: Mapping[str, Any] = field(hash=False)
    first: int
    last: int | None
    stored: int
    num_bytes: int
    first_row: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Slice:
        return cls(**value)


def plan_slices(inputs: Sequence[Input], part_bytes: int) -> list[Slice]:
    """Slices of about so many stored bytes each, in the order of the inputs: every row is in exactly one of them.

    An empty input has a slice, too, so that it is accounted for.

    Args:
        part_bytes: of stored bytes, at least 1; a block is never cut, and an input never shares a slice with another.
    """
    if part_bytes < 1:
        raise ValueError(f"part_bytes: {part_bytes}, needs 1 or more")
    return [piece for each in inputs for piece in _slices_of(each, part_bytes)]


def _slices_of(each: Input, part_bytes: int) -> list[Slice]:
    if each.format == JSONL:
        bounds = [*range(0, each.size or 1, part_bytes), each.size]
        return [
            Slice(each.uri, each.format, each.identity, first, last, first, last - first, None if first else 0)
            for first, last in pairwise(bounds)
        ]
    if not each.blocks:
        return [Slice(each.uri, each.format, each.identity, 0, None, 0, each.size, 0)]
    groups = _grouped(each.blocks, part_bytes)
    return [_of_blocks(each, first, last) for first, last in groups]


def _grouped(blocks: Sequence[Block], part_bytes: int) -> list[tuple[int, int]]:
    """Runs of blocks, (first, last), that reach `part_bytes` where there are enough of them."""
    groups, first, held = [], 0, 0
    for number, block in enumerate(blocks):
        if held and held + block.stored_bytes > part_bytes:
            groups.append((first, number))
            first, held = number, 0
        held += block.stored_bytes
    return [*groups, (first, len(blocks))]


def _of_blocks(each: Input, first: int, last: int) -> Slice:
    begin, end = each.blocks[first], each.blocks[last - 1]
    num_bytes = sum(block.stored_bytes for block in each.blocks[first:last])
    if each.format == PARQUET:
        return Slice(each.uri, each.format, each.identity, first, last, begin.stored, num_bytes, begin.first)
    stop = end.first + end.count if last < len(each.blocks) else None
    first_row = 0 if begin.first == 0 else None
    return Slice(each.uri, each.format, each.identity, begin.first, stop, begin.stored, num_bytes, first_row)
