"""`.npy` files: numpy.save's bytes, written in place and parsed without a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from binidx.index.cache.index_files import NpyLayout, parse_npy

ARRAYS = [
    np.empty((0, 2), np.int32),
    np.zeros(3, np.uint32),
    np.ones((4, 2), np.int64),
    np.arange(7, dtype=np.int16),
    np.array(5),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_bytes_parse_to_the_array_without_a_copy(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    buffer = memoryview(bytearray((tmp_path / "x.npy").read_bytes()))
    parsed = parse_npy(buffer)
    np.testing.assert_array_equal(parsed, array)
    assert parsed.dtype == array.dtype
    assert not array.size or np.shares_memory(parsed, np.frombuffer(buffer, np.uint8))


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_an_array_filled_in_place_leaves_numpys_file(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    npy = NpyLayout(array.shape, array.dtype)
    buffer = bytearray(npy.size)
    npy.begin(memoryview(buffer))[...] = array
    assert buffer == (tmp_path / "x.npy").read_bytes()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\x93NUMPY\x01", b"\x93NUMPY\x02"),
        (b"'<i4'", b"'|O4'"),
        (b"'<i4'", b"'<i3'"),
        (b"False", b"True "),
        (b"(5,)", b"(6,)"),
        (b"(5,)", b"(,,)"),
        (b"(5,)", b"(-5)"),
        (b"}     ", b"}\n    "),
        (b"\x76\x00{", b"\x66\x00{"),
    ],
)
def test_another_header_is_a_value_error(tmp_path: Path, old: bytes, new: bytes) -> None:
    np.save(tmp_path / "x.npy", np.arange(5, dtype=np.int32))
    content = (tmp_path / "x.npy").read_bytes()
    assert old in content
    with pytest.raises((ValueError, TypeError)):
        parse_npy(memoryview(content.replace(old, new)))
