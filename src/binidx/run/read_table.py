"""Arrow tables of reads and of what these hold; `run.provenance.export` describes their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.format.arrow import pa
from binidx.order.reads import DocumentContents, SampleOrigins, TokenReads
from binidx.run.global_order import SampleReads

LARGEST_INT16 = (1 << 15) - 1
"""Largest value of a column of 16 bits."""

SPAN = {"doc": pa.int64(), "start": pa.int32(), "len": pa.int32(), "dst": pa.int32()}


def to_table(
    readings: SampleReads,
    contents: SampleOrigins,
    sources: Sequence[str],
    tokens: Sequence[NDArray[Any]] | NDArray[Any] | None = None,
    trained: NDArray[np.bool_] | None = None,
    blocks: Mapping[str, NDArray[np.int64]] | None = None,
) -> pa.Table:
    """Return reads of samples and their contents as an Arrow table, one row for each read.

    Args:
        readings: the reads, n rows.
        contents: sources of their samples; `DocumentContents` gives the columns docs, start and stop,
            `TokenReads` the column spans.
        sources: the prefix of each source.
        tokens: tokens of each row, all of one integer dtype.
        trained: whether each row was trained, and not only read; None leaves the column out.
        blocks: file and block of each sample that is a block of packed files.
    """
    names = pa.array(list(sources), pa.string())
    columns = {
        "step": pa.array(readings.step, pa.int32()),
        "rank": _small(readings.rank),
        "slot": _small(readings.slot),
        "sample": pa.array(readings.sample, pa.int64()),
        "source": pa.DictionaryArray.from_arrays(pa.array(contents.source, pa.int16()), names),
        "epoch": _small(contents.epoch),
    }
    if trained is not None:
        columns["trained"] = pa.array(trained)
    if isinstance(contents, TokenReads):
        columns["spans"] = _spans(contents)
    if isinstance(contents, DocumentContents):
        columns["docs"] = _lists(contents.bounds, pa.array(contents.document, pa.int32()))
        columns |= {name: pa.array(getattr(contents, name), pa.int32()) for name in ("start", "stop")}
    columns |= {name: pa.array(column, pa.int32()) for name, column in (blocks or {}).items()}
    columns |= _input_ids(tokens)
    # Fields are not nullable, so that parquet stores no validity per value.
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    return pa.table(list(columns.values()), schema=pa.schema(fields))


def _lists(bounds: NDArray[np.int64], values: Any) -> Any:
    kind = pa.list_(pa.field("element", values.type, nullable=False))
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), values, type=kind)


def _small(values: NDArray[np.int64]) -> Any:
    return pa.array(values, pa.int16() if values.max(initial=0) <= LARGEST_INT16 else pa.int32())


def _input_ids(tokens: Sequence[NDArray[Any]] | NDArray[Any] | None) -> dict[str, Any]:
    if tokens is None:
        return {}
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in tokens], dtype=np.int64)])
    text = np.concatenate(tokens) if len(tokens) else np.empty(0, np.uint16)
    return {"input_ids": _lists(bounds, pa.array(text, _token_type(text)))}


def _spans(reads: TokenReads) -> Any:
    values = (reads.document, reads.start, reads.length, reads.target)
    arrays = [pa.array(value, kind) for value, kind in zip(values, SPAN.values(), strict=True)]
    fields = [pa.field(name, kind, nullable=False) for name, kind in SPAN.items()]
    return _lists(reads.bounds, pa.StructArray.from_arrays(arrays, fields=fields))


def _token_type(text: NDArray[Any]) -> Any:
    if text.dtype.kind not in "iu":
        raise ConfigError(f"input_ids: tokens of {text.dtype}, needs integers")
    if text.dtype == np.uint16:
        return pa.uint16()
    return pa.int64() if text.itemsize > 4 or text.min(initial=0) < 0 else pa.uint32()
