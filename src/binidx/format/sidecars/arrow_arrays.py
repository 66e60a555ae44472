"""Conversions between Arrow and NumPy arrays that do not import pandas.

pyarrow's `pa.array` and `to_numpy` import pandas if it is installed: 0.3 s of CPU and 40 MB in each worker process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def to_arrow(values: NDArray[Any], kind: Any) -> Any:
    """Convert numbers to an Arrow array of the type `kind`, without a copy if the type is the same.

    Raises:
        TypeError: `kind` does not hold all values of the array's type.
    """
    values = np.ascontiguousarray(values.astype(kind.to_pandas_dtype(), casting="safe", copy=False))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def to_bitmap(values: NDArray[np.bool_]) -> Any:
    """Convert booleans to an Arrow buffer, such as the validity bitmap of an array."""
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def to_arrow_strings(values: Sequence[str]) -> Any:
    """Convert a few strings to an Arrow array."""
    encoded = [each.encode() for each in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(encoded), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])


def to_numpy(column: Any) -> NDArray[Any]:
    """Convert an Arrow array or chunked array of numbers or booleans; the values of nulls are undefined."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    kind = column.type.to_pandas_dtype()
    found = [_numbers(each, kind) for each in chunks if len(each)]
    return np.concatenate(found) if found else np.empty(0, kind)


def _numbers(array: Any, kind: Any) -> NDArray[Any]:
    _, data = array.buffers()
    stop = array.offset + len(array)
    if kind is np.bool_:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=stop, bitorder="little")
        return bits[array.offset :].view(np.bool_)
    return np.frombuffer(data, kind, stop)[array.offset :]
