"""`.npy` files as bytes: what numpy.save writes, around an array that lies in the file itself.

offset  bytes  field
0       8      magic `\\x93NUMPY`, version 1.0
8       2      u16 H, bytes of the header
10      H      a Python literal: {'descr': '<i4', 'fortran_order': False, 'shape': (3, 2), }, spaces, a newline
10+H    ...    the array; 10+H is a multiple of 64, so it is aligned
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

# As numpy.save writes it: to evaluate the literal, as NumPy does, takes 35 us.
HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|][a-z]\d+)', 'fortran_order': False, "
    rb"'shape': \((\d+,(?: \d+(?:, \d+)*)?|)\), \} *\n",
    re.S,
)


@dataclass(frozen=True)
class Npy:
    """The file of an array of this shape and dtype.

    header: its first bytes.
    size: bytes of the file.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def header(self) -> bytes:
        out = io.BytesIO()
        described = {"descr": self.dtype.str, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(out, described)
        return out.getvalue()

    @property
    def size(self) -> int:
        return len(self.header) + prod(self.shape) * self.dtype.itemsize

    def begin(self, buffer: memoryview) -> NDArray[Any]:
        """The array in a buffer of `size` bytes, whose header is written; what it holds is what the buffer held."""
        header = self.header
        buffer[: len(header)] = header
        return np.frombuffer(buffer, self.dtype, prod(self.shape), len(header)).reshape(self.shape)


def npy_of(shape: tuple[int, ...], dtype: DTypeLike) -> Npy:
    return Npy(shape, np.dtype(dtype))


def parse_npy(buffer: memoryview) -> NDArray[Any]:
    """The array in the bytes of a `.npy` file as numpy.save writes it, without a copy; ValueError for other bytes."""
    dtype, shape, offset = parse_header(buffer)
    return np.frombuffer(buffer, dtype, prod(shape), offset).reshape(shape)


def parse_header(buffer: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """dtype, shape and first byte of the array; ValueError where these are not the first bytes of such a file."""
    found = HEADER.match(buffer[:4096])
    if not found or found.end() != 10 + int.from_bytes(found[1], "little"):
        raise ValueError(f"a .npy that numpy.save did not write: begins with {bytes(buffer[:80])!r}")
    shape = tuple(int(size) for size in found[3].split(b",") if size.strip())
    return np.dtype(found[2].decode()), shape, found.end()
