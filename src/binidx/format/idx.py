"""The `.idx` file: its bytes <-> arrays. No I/O happens here.

    offset       bytes  field
    0            9      magic `MMIDIDX` and two NUL bytes
    9            8      u64 version, 1
    17           1      u8 dtype code, see `DType`
    18           8      u64 S, number of sequences
    26           8      u64 D, number of document bounds: documents + 1
    34           4 S    i32 sequence_lengths, in tokens
    34+4S        8 S    i64 sequence_pointers, first byte of each sequence in the `.bin`
    34+12S       8 D    i64 document_indices, first sequence of each document, then S
    34+12S+8D    1 S    i8 sequence_modes, only where it was written multimodal

All little-endian, packed, so no array is aligned. A repeated document bound is an empty document. Nothing in the header
says whether the modes are there: the caller does (`multimodal=`), and a text reader passes over them. The pointers are
the running sum of the lengths, times the bytes of a token: redundant, and checked. The `.bin` beside it holds the
tokens one after the other and nothing else.

Prohibited: a magic, version or dtype code other than these; any other file size; negative lengths; pointers that leave
gaps or overlap; bounds that do not start at 0, that fall, or that do not end at S.

Source: Megatron Core, indexed_dataset.py. It checks magic, version and the last bound, and trusts the rest.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import FormatError
from binidx.native import token_files

MAGIC = b"MMIDIDX\x00\x00"


VERSION = 1


HEADER = struct.Struct("<9sQBQQ")


class DType(Enum):
    """The types a token may have, and their codes in the header. Source: Megatron Core; there is no uint32."""

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
        """The code of a NumPy type; a `FormatError` where Megatron raises KeyError."""
        name = np.dtype(value).name
        if name not in cls.__members__:
            raise FormatError(f"dtype: {name}, needed one of {', '.join(cls.__members__)}")
        return int(cls[name].value)

    @classmethod
    def dtype_from_code(cls, value: int) -> type[np.number[Any]]:
        """The NumPy type of a code; ValueError where there is none."""
        return np.dtype(cls(value).name).type

    @staticmethod
    def size(key: int | type[np.number[Any]]) -> int:
        """Bytes of one token, from a code or a NumPy number type; ValueError for anything else."""
        if isinstance(key, int):
            return np.dtype(DType.dtype_from_code(key)).itemsize
        if isinstance(key, type) and issubclass(key, np.number):
            return np.dtype(key).itemsize
        raise ValueError(f"dtype: {key!r}, needed a code or a NumPy number type")

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number[Any]]:
        """The type for a vocabulary of this size: uint16 below 65500 (not 65536: Megatron's rule), else int32."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


def little_endian(dtype: DTypeLike) -> np.dtype[Any]:
    """The same type as it lies in a file: little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


@dataclass(frozen=True, eq=False)
class SequenceIndex:
    """What an `.idx` says, as read-only views of its bytes.

    Attributes:
        dtype: NumPy type of a token.
        sequence_lengths: tokens of each sequence, shape (S,) int32.
        sequence_pointers: first byte of each in the `.bin`, shape (S,) int64.
        document_indices: first sequence of each document, then S, shape (D,) int64, D = documents + 1.
        sequence_modes: mode of each sequence, shape (S,) int8; None when opened as text.
        num_tokens: sum of the lengths.
        documents_are_sequences: it is known, without a look at the bounds, that each document is one sequence.

    Source: the names are those of Megatron Core's `_IndexReader`.
    """

    dtype: type[np.number[Any]]
    sequence_lengths: NDArray[np.int32]
    sequence_pointers: NDArray[np.int64]
    document_indices: NDArray[np.int64]
    sequence_modes: NDArray[np.int8] | None
    num_tokens: int
    documents_are_sequences: bool = False

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def dtype_size(self) -> int:
        """Bytes of one token."""
        return np.dtype(self.dtype).itemsize

    @property
    def sequence_count(self) -> int:
        """S, the number of sequences."""
        return len(self)

    @property
    def document_count(self) -> int:
        """D, the number of document *bounds*: Megatron's name for one more than there are documents."""
        return len(self.document_indices)

    @property
    def num_bytes(self) -> int:
        """Bytes of the `.bin` this index covers."""
        return self.num_tokens * self.dtype_size

    def tokens_before(self, sequence: int) -> int:
        """Tokens of all sequences before one, which may be the end: what is stored lies without gaps."""
        if sequence == len(self):
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype_size


def format_idx_header(dtype: DTypeLike, num_sequences: int, num_document_bounds: int) -> bytes:
    """The 34 bytes before the arrays."""
    return HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(dtype), num_sequences, num_document_bounds)


def index_bytes(num_sequences: int, num_document_bounds: int) -> int:
    """Bytes of an `.idx` without modes; with them it has `num_sequences` more."""
    return HEADER.size + 12 * num_sequences + 8 * num_document_bounds


def parse_index(buffer: Any, *, uri: str, multimodal: bool = False, sound: bool = False) -> SequenceIndex:
    """The arrays of a whole `.idx`, as views of `buffer` and checked in full.

    Args:
        buffer: the bytes of the file, anything with the buffer protocol.
        uri: where they came from, for the messages.
        multimodal: whether the caller wants the modes, which then must be there.
        sound: these very bytes were checked before: only the header and the size are now.

    Raises:
        FormatError: a rule of the format is broken; the message names the rule and where.
    """
    view = memoryview(buffer).cast("B")
    dtype, num_sequences, num_bounds = _parse_header(view, uri)
    _check_size(len(view), num_sequences, num_bounds, multimodal, uri)
    lengths = np.frombuffer(view, "<i4", num_sequences, HEADER.size)
    pointers = np.frombuffer(view, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
    bounds = np.frombuffer(view, "<i8", num_bounds, HEADER.size + 12 * num_sequences)
    after = index_bytes(num_sequences, num_bounds)
    modes = np.frombuffer(view, np.int8, num_sequences, after) if multimodal else None
    item_bytes = np.dtype(dtype).itemsize
    if sound:
        num_tokens = pointers.item(-1) // item_bytes + lengths.item(-1) if num_sequences else 0
    else:
        num_tokens = _check_sequences(lengths, pointers, item_bytes, uri)
        _check_documents(bounds, num_sequences, uri)
    return SequenceIndex(dtype, lengths, pointers, bounds, modes, num_tokens)


def parse_idx_counts(header: memoryview, size: int, *, uri: str) -> tuple[type[np.number[Any]], int, int, bool]:
    """What the first 34 bytes of an `.idx` of `size` bytes say: dtype, sequences, bounds, whether modes follow.

    Raises:
        FormatError: the header breaks a rule, or the size is not what it needs.
    """
    dtype, num_sequences, num_bounds = _parse_header(header, uri)
    _check_size(size, num_sequences, num_bounds, False, uri)
    return dtype, num_sequences, num_bounds, size > index_bytes(num_sequences, num_bounds)


def _parse_header(view: memoryview, uri: str) -> tuple[type[np.number[Any]], int, int]:
    if len(view) < HEADER.size:
        raise FormatError(f"{uri}: {len(view)} bytes, an .idx header needs {HEADER.size}")
    magic, version, code, num_sequences, num_bounds = HEADER.unpack_from(view)
    if magic != MAGIC:
        raise FormatError(f"{uri}: starts with {magic!r}, an .idx needs {MAGIC!r}")
    if version != VERSION:
        raise FormatError(f"{uri}: version {version}, needed {VERSION}")
    if not 1 <= code <= len(DType):
        raise FormatError(f"{uri}: dtype code {code}, needed 1 to {len(DType)}")
    return DType.dtype_from_code(code), num_sequences, num_bounds


def _check_size(found: int, num_sequences: int, num_bounds: int, multimodal: bool, uri: str) -> None:
    # The counts are any u64; these products are Python integers, so they cannot wrap round to a size that fits.
    if num_bounds < 1:
        raise FormatError(f"{uri}: 0 document bounds, needed at least the leading 0")
    text = index_bytes(num_sequences, num_bounds)
    counts = f"its header ({num_sequences} sequences, {num_bounds} document bounds)"
    if multimodal and found == text != text + num_sequences:
        raise FormatError(f"{uri}: no modes, multimodal=True needs {num_sequences} bytes of them; open it as text")
    if multimodal and found != text + num_sequences:
        raise FormatError(f"{uri}: {found} bytes, {counts} and modes need {text + num_sequences}")
    if found not in (text, text + num_sequences):
        raise FormatError(f"{uri}: {found} bytes, {counts} needs {text}, or {text + num_sequences} with modes")


def _check_sequences(lengths: NDArray[np.int32], pointers: NDArray[np.int64], item_bytes: int, uri: str) -> int:
    right, num_tokens = token_files.count_valid_sequences(lengths, pointers, item_bytes)
    if right == len(lengths):
        return num_tokens
    if lengths[right] < 0:
        raise FormatError(f"{uri}: sequence {right} has length {lengths[right]}, needed 0 or more")
    raise FormatError(f"{uri}: sequence {right} starts at byte {pointers[right]}, needed {num_tokens * item_bytes}")


def _check_documents(bounds: NDArray[np.int64], num_sequences: int, uri: str) -> None:
    if bounds[0] != 0:
        raise FormatError(f"{uri}: first document bound is {bounds[0]}, needed 0")
    right = token_files.count_valid_documents(bounds, num_sequences)
    if right < len(bounds):
        lowest = bounds[right - 1]
        raise FormatError(f"{uri}: document bound {right} is {bounds[right]}, needed {lowest} to {num_sequences}")
    if bounds[-1] != num_sequences:
        raise FormatError(
            f"{uri}: last document bound is {bounds[-1]}, needed {num_sequences} (the writer forgot end_document?)"
        )


def get_idx_path(path_prefix: str) -> str:
    """The URI of a prefix's index. Plain concatenation, as in Megatron Core: a prefix may end in anything."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """The URI of a prefix's tokens."""
    return path_prefix + ".bin"
