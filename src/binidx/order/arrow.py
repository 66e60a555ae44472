"""Readings and their contents as an Arrow table: the notebook-friendly form, and what parquet files are made of.

step int32, rank int16, slot int16      who read it, and when
sample int64                            its number in the run's dataset
source dictionary<int16, string>        the prefix, and
epoch int16                             how often it was gone through before
docs list<int32>                        its documents, in the order of their tokens; numbers in the source
start int32, stop int32                 first token in the first of them, one after the last in the last of them;
                                        those between are whole (whole sequences, where documents have several)
spans list<struct<doc int64, start int32, len int32, dst int32>>
                                        on request, in their place: each piece by itself, and where it goes to
input_ids list<uint16 or uint32>        on request: S + 1 tokens; list<int64> where a token is below 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, MissingDriverError
from binidx.loader.readings import Readings
from binidx.order.samples import Contents, Documents, Origins, Spans

try:
    import pyarrow as pa
    import pyarrow.parquet as parquet
except ImportError as error:  # pragma: no cover - the message is the point
    raise MissingDriverError("order tables: need pyarrow; pip install 'binidx[parquet]'") from error

SOURCE = pa.dictionary(pa.int16(), pa.string())
SPAN = [("doc", pa.int64()), ("start", pa.int32()), ("len", pa.int32()), ("dst", pa.int32())]


WHO_AND_WHAT = [
    ("step", pa.int32()),
    ("rank", pa.int16()),
    ("slot", pa.int16()),
    ("sample", pa.int64()),
    ("source", SOURCE),
    ("epoch", pa.int16()),
]


def to_table(
    readings: Readings, contents: Origins, sources: Sequence[str], tokens: Sequence[NDArray[Any]] | None = None
) -> pa.Table:
    """The rows as a table.

    Args:
        sources: the prefix of each source.
        tokens: of each row, all of one integer dtype.
    """
    columns = _who_and_what(readings, contents.source, sources, contents.epoch)
    if isinstance(contents, Contents):
        columns["spans"] = _spans(contents.spans)
    if isinstance(contents, Documents):
        columns["docs"] = _lists(contents.bounds, pa.array(contents.document, pa.int32()))
        columns |= {name: pa.array(getattr(contents, name), pa.int32()) for name in ("start", "stop")}
    return _table(columns | _input_ids(tokens))


def packed_table(
    readings: Readings, blocks: NDArray[np.int64], names: Sequence[str], tokens: Sequence[NDArray[Any]] | None = None
) -> pa.Table:
    """The same for rows (set, file, block, pass) of packed files."""
    columns = _who_and_what(readings, blocks[:, 0], names, blocks[:, 3])
    columns |= {"file": pa.array(blocks[:, 1], pa.int32()), "block": pa.array(blocks[:, 2], pa.int32())}
    return _table(columns | _input_ids(tokens))


def _table(columns: Mapping[str, Any]) -> pa.Table:
    """Nothing is ever missing, and parquet need not say so for each value."""
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    return pa.table(list(columns.values()), schema=pa.schema(fields))


def _lists(bounds: NDArray[np.int64], values: Any) -> Any:
    kind = pa.list_(pa.field("element", values.type, nullable=False))
    return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), values, type=kind)


def _who_and_what(
    readings: Readings, source: NDArray[np.int64], sources: Sequence[str], epoch: NDArray[np.int64]
) -> dict[str, Any]:
    names = pa.array(list(sources), pa.string())
    values = [readings.step, readings.rank, readings.slot, readings.sample, source, epoch]
    columns = {
        name: pa.array(value, kind.index_type if kind == SOURCE else kind)
        for (name, kind), value in zip(WHO_AND_WHAT, values, strict=True)
    }
    columns["source"] = pa.DictionaryArray.from_arrays(columns["source"], names)
    return columns


def _input_ids(tokens: Sequence[NDArray[Any]] | None) -> dict[str, Any]:
    if tokens is None:
        return {}
    bounds = np.concatenate([[0], np.cumsum([len(each) for each in tokens], dtype=np.int64)])
    text = np.concatenate(tokens) if len(tokens) else np.empty(0, np.uint16)
    return {"input_ids": _lists(bounds, pa.array(text, _token_type(text)))}


def _spans(spans: Spans) -> Any:
    values = (spans.document, spans.start, spans.length, spans.target)
    arrays = [pa.array(value, kind) for value, (_, kind) in zip(values, SPAN, strict=True)]
    fields = [pa.field(name, kind, nullable=False) for name, kind in SPAN]
    return _lists(spans.bounds, pa.StructArray.from_arrays(arrays, fields=fields))


def _token_type(text: NDArray[Any]) -> Any:
    if text.dtype.kind not in "iu":
        raise ConfigError(f"input_ids: tokens of {text.dtype}, needs integers")
    if text.dtype == np.uint16:
        return pa.uint16()
    return pa.int64() if text.itemsize > 4 or text.min(initial=0) < 0 else pa.uint32()


__all__ = ["pa", "packed_table", "parquet", "to_table"]
