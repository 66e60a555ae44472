"""Numbers between Arrow and NumPy: as pyarrow has them, in whatever slice; without pandas."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from binidx.corpus.lineage.lineage_writer import to_arrow, to_arrow_strings, to_bitmap
from binidx.prepare.text.parquet_reader import to_numpy

KINDS = [np.bool_, np.int8, np.int32, np.int64, np.uint64, np.float64]


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_what_pyarrow_says(kind: type) -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        column = pa.array(random.integers(0, 2 if kind is np.bool_ else 100, random.integers(0, 40)).astype(kind))
        start, length = random.integers(0, len(column) + 1), random.integers(0, 50)
        for array in (column, column.slice(start, length)):
            found = to_numpy(array)
            assert found.dtype == kind
            assert found.tolist() == array.to_pylist()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_they_are_what_pyarrow_makes_of_them(kind: type) -> None:
    for values in (np.arange(20).astype(kind), np.arange(40).astype(kind)[::2], np.empty(0, kind)):
        found = to_arrow(values, pa.from_numpy_dtype(kind))
        found.validate(full=True)
        assert found.equals(pa.array(values))


def test_a_wider_type_takes_them_and_a_narrower_one_refuses() -> None:
    assert to_arrow(np.arange(3, dtype=np.int32), pa.int64()).equals(pa.array([0, 1, 2], pa.int64()))
    with pytest.raises(TypeError, match="int64"):
        to_arrow(np.arange(3), pa.int32())


@pytest.mark.parametrize("values", [[], ["a"], ["", "é", "s3://b/k"]])
def test_strings(values: list[str]) -> None:
    found = to_arrow_strings(values)
    found.validate(full=True)
    assert found.equals(pa.array(values, pa.string()))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_a_bitmap_says_what_is_there(count: int) -> None:
    there = np.random.default_rng(count).random(count) < 0.5
    numbers = to_arrow(np.arange(count), pa.int64())
    found = pa.Array.from_buffers(pa.int64(), count, [to_bitmap(there), numbers.buffers()[1]])
    assert found.is_valid().to_pylist() == there.tolist()


def test_pandas_stays_away() -> None:
    pytest.importorskip("pandas")
    program = """if True:
        import sys
        import numpy as np, pyarrow as pa
        pa.int64().to_pandas_dtype()
        if "pandas" in sys.modules:
            sys.exit(print("old"))
        from binidx.corpus.lineage.lineage_writer import to_bitmap, to_arrow_strings, to_arrow
        from binidx.prepare.text.parquet_reader import to_numpy
        to_numpy(to_arrow(np.arange(3), pa.int64()))
        to_numpy(to_arrow_strings(["a"]).is_null()), to_bitmap(np.ones(3, bool))
        before = "pandas" in sys.modules
        pa.array(np.arange(3))
        print(before, "pandas" in sys.modules)
    """
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    if told == "old\n":
        pytest.skip("this pyarrow imports pandas for the name of a type")
    assert told.split() == ["False", "True"]
