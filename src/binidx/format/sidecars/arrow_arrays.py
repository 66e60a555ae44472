"""Numbers of Arrow as NumPy's and back, as they lie in memory: for workers, of which a machine has many.

pyarrow's own ways, `pa.array` and `to_numpy`, import pandas first where it is installed: 0.3 s of CPU and 40 MB of each
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def to_arrow(values: NDArray[Any], kind: Any) -> Any:
    """Numbers as an array of a type that holds all of theirs, without a copy if it is the same.

    Raises:
        TypeError: it may not hold them.
    """
    values = np.ascontiguousarray(values.astype(kind.to_pandas_dtype(), casting="safe", copy=False))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def to_bitmap(values: NDArray[np.bool_]) -> Any:
    """Truth values as a buffer of Arrow's: above all, which values are there."""
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def to_arrow_strings(values: Sequence[str]) -> Any:
    """A few strings as an array."""
    encoded = [each.encode() for each in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(encoded), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])


def to_numpy(column: Any) -> NDArray[Any]:
    """The numbers or truth values of an array or a chunked one; of a null, whatever lies there."""
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
