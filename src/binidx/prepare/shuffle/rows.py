"""Rows of lineage in the order of the documents that they are of: the same keys, the same two passes.

A row is 29 bytes of numbers, and its id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from binidx.prepare.preprocess.lineage import table_of
from binidx.prepare.shuffle.buckets import Buckets, Column, Run, batches, plan_shuffle
from binidx.prepare.shuffle.keys import shuffle_keys
from binidx.text.arrow_numbers import bitmap

ROW = np.dtype([("source", "<i4"), ("nulls", "u1"), ("row", "<i8"), ("byte", "<i8"), ("hash", "<u8")])
NULLABLE = ("row", "byte", "hash", "id")
"""Bit i of `nulls`: the i-th of them is null."""

ID_BYTES = 64
"""Of an id, where nobody has looked: more only makes buckets that are left on the disk."""


def shuffle_rows(
    tables: Iterable[Any], num_rows: int, seed: int, memory_bytes: int, scratch: str | None
) -> Iterator[Any]:
    """Tables of `SCHEMA` -> the same rows by their keys, in tables of some ten thousand.

    Args:
        num_rows: of all tables.
        memory_bytes, scratch: as in `shuffle_datasets`.
    """
    sources: dict[str, int] = {}
    plan, first = plan_shuffle(memory_bytes, num_rows * (ROW.itemsize + ID_BYTES), num_rows, 2), 0
    with contextlib.closing(Buckets(plan, 2, scratch)) as buckets:
        for table in tables:
            keys = shuffle_keys(seed, first, len(table))
            first += len(table)
            numbers, ids = as_columns(table, sources)
            for low, high in batches(ids[1], plan.round_bytes):
                part = ids[0][ids[1][low] : ids[1][high]], ids[1][low : high + 1] - ids[1][low]
                of_numbers = numbers[low:high].view(np.uint8).reshape(-1), np.arange(high - low + 1) * ROW.itemsize
                buckets.add(keys[low:high], [of_numbers, part])
        for run in buckets.sorted():
            yield as_table(run, list(sources))


def as_columns(table: Any, sources: dict[str, int]) -> tuple[NDArray[Any], Column]:
    """The numbers of rows, and their ids as bytes; new sources are added."""
    rows, batch = np.zeros(len(table), ROW), table.combine_chunks()
    named = batch.column("source").unify_dictionaries().combine_chunks()
    named = named.chunk(0) if isinstance(named, pa.ChunkedArray) else named
    numbers = [sources.setdefault(name, len(sources)) for name in named.dictionary.to_pylist()]
    rows["source"] = np.array(numbers, np.int32)[named.indices.to_numpy()]
    for bit, name in enumerate(NULLABLE):
        column = batch.column(name)
        rows["nulls"] |= column.is_null().to_numpy().astype(np.uint8) << bit
        if name != "id":
            rows[name] = column.fill_null(0).to_numpy()
    ids = batch.column("id").fill_null("").cast(pa.large_string()).combine_chunks()
    ids = ids.chunk(0) if isinstance(ids, pa.ChunkedArray) else ids
    return rows, id_bytes(ids)


def id_bytes(ids: Any) -> Column:
    """Of a large_string array without nulls."""
    _, offsets, data = ids.buffers()
    bounds = np.frombuffer(offsets, np.int64)[ids.offset : ids.offset + len(ids) + 1].copy()
    held = np.frombuffer(data, np.uint8) if data is not None and len(data) else np.empty(0, np.uint8)
    return held[bounds[0] : bounds[-1]], bounds - bounds[0]


def as_table(run: Run, sources: list[str]) -> Any:
    """The rows of a run."""
    rows = np.frombuffer(run.joined(0), ROW)
    null = {name: (rows["nulls"] >> bit & 1).astype(bool) for bit, name in enumerate(NULLABLE)}
    row, byte, hashes = (
        pa.array(np.ascontiguousarray(rows[name]), mask=null[name]) for name in ("row", "byte", "hash")
    )
    return table_of(sources, np.ascontiguousarray(rows["source"]), row, byte, id_array(run, null["id"]), hashes)


def id_array(run: Run, null: NDArray[np.bool_]) -> Any:
    offsets = np.zeros(len(run) + 1, np.int64)
    np.cumsum(run.lengths[:, 1], out=offsets[1:])
    validity = bitmap(~null)
    data = pa.py_buffer(run.joined(1))
    found = pa.Array.from_buffers(pa.large_string(), len(run), [validity, pa.py_buffer(offsets), data])
    return found.cast(pa.string())
