"""The `.idx` file format: parse and format its bytes, without I/O.

    offset       bytes  field
    0            9      magic `MMIDIDX` and two NUL bytes
    9            8      u64 version, 1
    17           1      u8 dtype code, see `DType`
    18           8      u64 S, number of sequences
    26           8      u64 D, number of document bounds: documents + 1
    34           4 S    i32 sequence_lengths, in tokens
    34+4S        8 S    i64 sequence_pointers, first byte of each sequence in the `.bin`
    34+12S       8 D    i64 document_indices, first sequence of each document, then S
    34+12S+8D    1 S    i8 sequence_modes, only in multimodal datasets

All fields are little-endian and packed, so no array is aligned. A repeated document bound is an empty document. The
header does not record whether modes follow: the caller passes `multimodal=`, and a reader of text ignores them.
Pointers are the running sum of the lengths times the bytes of a token: redundant, and checked. The `.bin` holds the
tokens one after the other and nothing else.

Prohibited: another magic, version or dtype code; any other file size; negative lengths; pointers that leave gaps or
overlap; bounds that do not start at 0, that decrease, or that do not end at S.

Source: Megatron Core, indexed_dataset.py, which checks magic, version and the last bound only.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import FormatError
from binidx.native import token_files

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
RESTORE = "restore the pair from where it was written"


class DType(Enum):
    """Token types and their codes in the header of an `.idx`.

    Example:
        DType.optimal_dtype(50_257)  # numpy.uint16

    Source: Megatron Core, `DType`, with the same members and methods; there is no uint32.
    """

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: DTypeLike) -> int:
        """Return the code of a NumPy type.

        Args:
            value: anything that `numpy.dtype` accepts.

        Returns:
            A code from 1 to 8.

        Raises:
            FormatError: the type has no code, where Megatron raises KeyError.
        """
        try:
            return cls._code_of(np.dtype("none" if value is None else value))  # NumPy takes None for float64
        except TypeError:
            raise FormatError(f"dtype: found {value!r}, needed one of {', '.join(cls.__members__)}") from None

    @classmethod
    @functools.lru_cache  # the name of a dtype takes 6 us
    def _code_of(cls, dtype: np.dtype[Any]) -> int:
        if dtype.name not in cls.__members__:
            raise FormatError(f"dtype: {dtype.name}, needed one of {', '.join(cls.__members__)}")
        return int(cls[dtype.name].value)

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.number[Any]]:
        """Return the NumPy type of a code.

        Args:
            value: a code from 1 to 8.

        Returns:
            A NumPy scalar type, such as `numpy.uint16`.

        Raises:
            ValueError: no type has the code.
        """
        return np.dtype(cls(value).name).type

    @staticmethod
    def size(key: int | type[np.number[Any]]) -> int:
        """Return the bytes of one token.

        Args:
            key: a code, or a NumPy number type.

        Returns:
            1, 2, 4 or 8.

        Raises:
            ValueError: the key is neither.
        """
        if isinstance(key, int):
            return np.dtype(DType.dtype_from_code(key)).itemsize
        if isinstance(key, type) and issubclass(key, np.number):
            return np.dtype(key).itemsize
        raise ValueError(f"dtype: {key!r}, needed a code or a NumPy number type")

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number[Any]]:
        """Return the token type for the size of a vocabulary.

        Args:
            cardinality: number of token ids; None if it is not known.

        Returns:
            `numpy.uint16` below 65,500 ids (Megatron's bound; 65,536 would fit), else `numpy.int32`.
        """
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


def little_endian(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the little-endian form of a type, in which files store it."""
    return np.dtype(np.dtype(dtype).newbyteorder("<").str)  # by its name NumPy's one object, not a new one


@dataclass(frozen=True)
class IdxLayout:
    """Contents of the header of an `.idx`, from which the places of its columns follow.

    Attributes:
        dtype: NumPy type of a token.
        num_sequences, num_bounds: S and D.
        has_modes: whether modes follow; False without sequences, unless the caller requires modes.
    """

    dtype: type[np.number[Any]]
    num_sequences: int
    num_bounds: int
    has_modes: bool = False

    @classmethod
    def parse(cls, header: memoryview, size: int, *, uri: str, multimodal: bool = False) -> IdxLayout:
        """Parse the header of an `.idx`.

        Args:
            header: at least the first 34 bytes of the file.
            size: bytes of the whole file.
            uri: name of the file, for errors.
            multimodal: whether modes must follow.

        Raises:
            FormatError: the header breaks a rule, or the size does not fit it.
        """
        if len(header) < HEADER.size:
            raise FormatError(f"{uri}: {len(header)} bytes, an .idx header needs {HEADER.size}; {RESTORE}")
        magic, version, code, num_sequences, num_bounds = HEADER.unpack_from(header)
        if magic != MAGIC:
            way = "; binidx import neox brings it over" if magic.startswith(b"TNTIDX") else ""
            raise FormatError(f"{uri}: starts with {magic!r}, an .idx needs {MAGIC!r}{way}")
        if version != VERSION:
            raise FormatError(f"{uri}: version {version}, needed {VERSION}")
        if not 1 <= code <= len(DType):
            raise FormatError(f"{uri}: dtype code {code}, needed 1 to {len(DType)}")
        if num_bounds < 1:
            raise FormatError(f"{uri}: 0 document bounds, needed at least the leading 0")
        # The counts are any u64; these products are Python integers, so they cannot wrap round to a size that fits.
        text = idx_size(num_sequences, num_bounds)
        counts = f"its header ({num_sequences} sequences, {num_bounds} document bounds)"
        if multimodal and size == text != text + num_sequences:
            raise FormatError(f"{uri}: no modes, multimodal=True needs {num_sequences} bytes of them; open it as text")
        if multimodal and size != text + num_sequences:
            raise FormatError(f"{uri}: {size} bytes, {counts} and modes need {text + num_sequences}; {RESTORE}")
        if size not in (text, text + num_sequences):
            needed = f"{text}, or {text + num_sequences} with modes"
            raise FormatError(f"{uri}: {size} bytes, {counts} needs {needed}; {RESTORE}")
        return cls(DType.dtype_from_code(code), num_sequences, num_bounds, multimodal or size > text)

    @property
    def columns(self) -> list[tuple[int, str, int]]:
        """(First byte, type, number of values) of lengths, pointers, bounds and modes, in the order of the file."""
        modes = self.num_sequences if self.has_modes else 0
        types, counts = ("<i4", "<i8", "<i8", "i1"), (self.num_sequences, self.num_sequences, self.num_bounds, modes)
        sizes = [np.dtype(dtype).itemsize * count for dtype, count in zip(types, counts, strict=True)]
        return [*zip(accumulate(sizes, initial=HEADER.size), types, counts, strict=False)]


def format_idx_header(dtype: DTypeLike, num_sequences: int, num_document_bounds: int) -> bytes:
    """Return the header of an `.idx`: the 34 bytes before the arrays.

    Args:
        dtype: type of a token, one of `DType`.
        num_sequences: S.
        num_document_bounds: D, documents + 1.
    """
    return HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(dtype), num_sequences, num_document_bounds)


def idx_size(num_sequences: int, num_document_bounds: int) -> int:
    """Return the bytes of an `.idx` without modes; with modes it has `num_sequences` more."""
    return HEADER.size + 12 * num_sequences + 8 * num_document_bounds


def check_sequences(
    lengths: NDArray[np.int32], pointers: NDArray[np.int64], item_bytes: int, uri: str, *, first: int, start: int
) -> int:
    """Check neighbouring sequences and return the number of their tokens.

    Args:
        first: number of the first of these sequences in the `.idx`, for errors.
        start: byte of the `.bin` at which that sequence must start.

    Raises:
        FormatError: a length is negative, or a pointer leaves a gap.
    """
    valid, num_tokens = token_files.count_valid_sequences(lengths, pointers - start if start else pointers, item_bytes)
    if valid == len(lengths):
        return num_tokens
    if lengths[valid] < 0:
        raise FormatError(f"{uri}: sequence {first + valid} has length {lengths[valid]}, needed 0 or more")
    needed = start + num_tokens * item_bytes
    raise FormatError(f"{uri}: sequence {first + valid} starts at byte {pointers[valid]}, needed {needed}")


def check_bounds(
    bounds: NDArray[np.int64], num_sequences: int, uri: str, *, first: int, lowest: int, complete: bool
) -> None:
    """Check neighbouring document bounds.

    Args:
        first: number of `bounds[0]` in the `.idx`.
        lowest: value of the bound before `bounds[0]`.
        complete: whether `bounds[-1]` is the last bound of the `.idx`.

    Raises:
        FormatError: the first bound of the `.idx` is not 0, a bound decreases or exceeds the number of sequences, or
            the last bound of the `.idx` is not that number.
    """
    if first == 0 and bounds[0] != 0:
        raise FormatError(f"{uri}: first document bound is {bounds[0]}, needed 0")
    valid = token_files.count_valid_documents(bounds, num_sequences) if bounds[0] >= lowest else 0
    if valid < len(bounds):
        low, number = bounds[valid - 1] if valid else lowest, first + valid
        raise FormatError(f"{uri}: document bound {number} is {bounds[valid]}, needed {low} to {num_sequences}")
    if complete and bounds[-1] != num_sequences:
        hint = "(the writer forgot end_document?)"
        raise FormatError(f"{uri}: last document bound is {bounds[-1]}, needed {num_sequences} {hint}")


def get_idx_path(path_prefix: str) -> str:
    """Return the URI of a prefix's index: plain concatenation, as in Megatron Core."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """Return the URI of a prefix's tokens."""
    return path_prefix + ".bin"
