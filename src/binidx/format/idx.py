"""The `.idx` file format, and an opened `.idx`: one class, whatever way its columns are read.

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

    way        columns                                     by
    whole      views of the bytes, or of a map; checked    `parse_index`
    ranged     `RangedArray`: rows as they are needed      `open_index`
    streamed   the same, in blocks, from first to last     `lengths`, `bounds`, `modes`, `check`, `documents`
    joined     those of several files                      `virtual`: `concatenate_indices`, `join_indices`

Blocks are checked by the rules of the whole, in some MB of memory for any index.

Source: Megatron Core, indexed_dataset.py, which checks magic, version and the last bound only.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from binidx.errors import FormatError
from binidx.format.document_blocks import DocumentBlock, batch_by_size
from binidx.native import token_files
from binidx.native.gpt_samples import Sequences
from binidx.storage.adapters import InMemory
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import read_whole
from binidx.storage.ranged_arrays import RangedArray
from binidx.storage.ranges import cut, stored_reader
from binidx.storage.requests.remote_object import Found

if TYPE_CHECKING:
    from binidx.format.sidecars.dataset_manifest import DatasetCounts

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
RESTORE = "restore the pair from where it was written"
BLOCK_VALUES = 1 << 18
"""Values of a block: 3 MiB of lengths and pointers."""

WHOLE_BYTES = 64 << 10
"""An `.idx` of at most this size (3,000 documents) is read at once: thousands of indices would otherwise cost thousands
of round trips."""

NO_BYTES = InMemory("", b"")


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
        text = SequenceIndex.file_bytes(num_sequences, num_bounds)
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
        count, pointers = self.num_sequences, HEADER.size + 4 * self.num_sequences
        bounds = pointers + 8 * count
        modes = bounds + 8 * self.num_bounds, "i1", count if self.has_modes else 0
        return [(HEADER.size, "<i4", count), (pointers, "<i8", count), (bounds, "<i8", self.num_bounds), modes]


def format_idx_header(dtype: DTypeLike, num_sequences: int, num_document_bounds: int) -> bytes:
    """Return the header of an `.idx`: the 34 bytes before the arrays.

    Args:
        dtype: type of a token, one of `DType`.
        num_sequences: S.
        num_document_bounds: D, documents + 1.
    """
    return HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(dtype), num_sequences, num_document_bounds)


@dataclass(frozen=True, eq=False)
class SequenceIndex:
    """Contents of an `.idx`. Each column is an array in memory, a view of a map, or a `RangedArray`.

    Attributes:
        dtype: NumPy type of a token.
        sequence_lengths: number of tokens of each sequence, shape (num_sequences,), int32.
        sequence_pointers: first byte of each sequence in the `.bin`, shape (num_sequences,), int64.
        document_indices: first sequence of each document, then num_sequences; shape (num_documents + 1,), int64.
        sequence_modes: mode of each sequence, shape (num_sequences,), int8; None when opened as text.
        known_tokens: sum of the lengths, as soon as it is known.
        documents_are_sequences: whether each document is known to be one sequence, without reading the bounds.
        uri: name of the file, for errors.
        reader: reader of the file from which columns are read by ranges; empty for columns in memory.

    Source: Megatron Core, `_IndexReader`, with the same names.
    """

    dtype: type[np.number[Any]]
    sequence_lengths: NDArray[np.int32]
    sequence_pointers: NDArray[np.int64]
    document_indices: NDArray[np.int64]
    sequence_modes: NDArray[np.int8] | None
    known_tokens: int | None = None
    documents_are_sequences: bool = False
    uri: str = ""
    reader: RangeReader = NO_BYTES

    @staticmethod
    def file_bytes(num_sequences: int, num_document_bounds: int) -> int:
        """Return the bytes of an `.idx` without modes; with modes it has `num_sequences` more."""
        return HEADER.size + 12 * num_sequences + 8 * num_document_bounds

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        """Return (first byte, length, mode) of a sequence."""
        mode = None if self.sequence_modes is None else self.sequence_modes[idx]
        return self.sequence_pointers[idx], self.sequence_lengths[idx], mode

    @property
    def dtype_size(self) -> int:
        """Bytes of one token."""
        return np.dtype(self.dtype).itemsize

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S; Megatron's name is `sequence_count`."""
        return len(self)

    sequence_count = num_sequences

    @property
    def document_count(self) -> int:
        """Number of document bounds, D: one more than documents. Megatron's name."""
        return len(self.document_indices)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all tokens in the `.bin`."""
        return self.num_tokens * self.dtype_size

    @property
    def counts(self) -> DatasetCounts:
        """Counts and dtype, as a manifest has them."""
        documents, dtype = self.num_documents, self.dtype.__name__
        return {"documents": documents, "sequences": len(self), "tokens": self.num_tokens, "dtype": dtype}

    @property
    def num_tokens(self) -> int:
        """Sum of the lengths; before they were checked, the end of the last sequence."""
        if (known := self.known_tokens) is None:
            last = range(len(self))[-1:]
            ends = _read_rows([self.sequence_lengths, self.sequence_pointers], last.start, last.stop)
            known = vars(self)["known_tokens"] = int(ends[0].sum() + ends[1].sum() // self.dtype_size)
        return known

    def bind(self) -> Sequences:
        """Return lengths and pointers of all sequences, for C."""
        code = DType.code_from_dtype(self.dtype)
        return Sequences(self.sequence_lengths, self.sequence_pointers, dtype_code=code, item_bytes=self.dtype_size)

    def tokens_before(self, sequences: ArrayLike) -> NDArray[np.int64]:
        """Return the number of tokens before each of some sequences, of their shape; `len(self)` stands for the end."""
        numbers = np.asarray(sequences, np.int64)
        tokens, inner = np.full(numbers.shape, self.num_tokens), numbers < len(self)
        tokens[inner] = self.sequence_pointers[numbers[inner]] // self.dtype_size
        return tokens

    def tokens_of(self, sequences: range) -> int:
        """Return the number of tokens of consecutive sequences, by two pointers: a sum of 10^8 lengths takes 0.2 s."""
        return int(np.diff(self.tokens_before([sequences.start, sequences.stop]))[0])

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Yield blocks of sequence lengths, checked against the sequence pointers."""
        total, size = 0, self.dtype_size
        for first, (lengths, pointers) in _blocks(self.sequence_lengths, self.sequence_pointers):
            # No name for the shifted pointers: their memory is free again before the next block is read.
            counted = token_files.count_valid_sequences(lengths, pointers - total * size if total else pointers, size)
            valid, num_tokens = counted
            total += num_tokens
            if valid < len(lengths):
                problem = f"starts at byte {pointers[valid]}, needed {total * size}"
                if lengths[valid] < 0:
                    problem = f"has length {lengths[valid]}, needed 0 or more"
                raise FormatError(f"{self.uri}: sequence {first + valid} {problem}")
            yield lengths
        vars(self)["known_tokens"] = total

    def bounds(self) -> Iterator[NDArray[np.int64]]:
        """Yield blocks of document bounds, checked; in all there is one more bound than documents."""
        low, count = 0, len(self)
        for first, (bounds,) in _blocks(self.document_indices):
            if first == 0 and bounds[0] != 0:
                raise FormatError(f"{self.uri}: first document bound is {bounds[0]}, needed 0")
            valid = token_files.count_valid_documents(bounds, count) if bounds[0] >= low else 0
            if valid < len(bounds):
                problem = f"is {bounds[valid]}, needed {bounds[valid - 1] if valid else low} to {count}"
                raise FormatError(f"{self.uri}: document bound {first + valid} {problem}")
            low = int(bounds[-1])
            if first + len(bounds) == len(self.document_indices) and low != count:
                hint = "(the writer forgot end_document?)"
                raise FormatError(f"{self.uri}: last document bound is {low}, needed {count} {hint}")
            yield bounds

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """Yield blocks of modes; none in a dataset of text."""
        for _, (modes,) in _blocks(self.sequence_modes) if self.sequence_modes is not None else ():
            yield modes

    def check(self) -> int:
        """Read and check all columns, and return the number of tokens.

        Raises:
            FormatError: a rule of the format is broken; the message names the rule and the place.
        """
        for block in (self.lengths(), self.bounds()):
            deque(block, maxlen=0)
        return self.num_tokens

    def documents(self, count: int | None = None, start: int = 0) -> Iterator[DocumentBlock]:
        """Yield `count` documents from number `start` on, or all, in blocks. No block is checked: call `check` before.

        Memory: some MB; for one document with more than `BLOCK_VALUES` sequences, 5 bytes for each of them.

        Args:
            count: None: up to the last one.
        """
        stop_at = self.num_documents if count is None else min(start + count, self.num_documents)
        token = int(self.tokens_before(self.document_indices[start])) if start else 0
        columns = [self.sequence_lengths, *([] if self.sequence_modes is None else [self.sequence_modes])]
        for first, stop in cut((start, stop_at), BLOCK_VALUES):
            (bounds,) = _read_rows([self.document_indices], first, stop + 1)
            for low, high in batch_by_size(bounds, BLOCK_VALUES):
                piece = bounds[low : high + 1]
                lengths, *modes = _read_rows(columns, int(piece[0]), int(piece[-1]))
                yield DocumentBlock(first + low, piece, lengths, modes[0] if modes else None, token)
                token += int(lengths.sum(dtype=np.int64))


def _blocks(*columns: Any) -> Iterator[tuple[int, list[NDArray[Any]]]]:
    """Yield (number of the first row, rows) of each block of neighbouring columns; arrays are one block."""
    size = BLOCK_VALUES if isinstance(columns[0], RangedArray) else max(1, len(columns[0]))
    for first, stop in cut((0, len(columns[0])), size):
        yield first, _read_rows(columns, first, stop)


def parse_index(buffer: Any, *, uri: str, multimodal: bool = False, num_tokens: int | None = None) -> SequenceIndex:
    """Return the columns of a whole `.idx` as views of `buffer`, fully checked.

    Args:
        buffer: bytes of the file, anything with the buffer protocol.
        uri: name of the file, for errors.
        multimodal: whether to return the modes, which must then be there.
        num_tokens: number of tokens of these bytes, if they were fully checked before; then only the header is.

    Raises:
        FormatError: a rule of the format is broken; the message names the rule and the place.
    """
    view = memoryview(buffer).cast("B")
    layout = IdxLayout.parse(view, len(view), uri=uri, multimodal=multimodal)
    lengths, pointers, bounds, modes = (np.frombuffer(view, kind, count, at) for at, kind, count in layout.columns)
    columns = lengths, pointers, bounds, modes if multimodal else None
    index = SequenceIndex(layout.dtype, *columns, num_tokens, uri=uri)
    if num_tokens is None:
        index.check()
    return index


@dataclass(frozen=True)
class CheckedIndex:
    """Facts about an `.idx` that was fully checked before.

    Attributes:
        num_sequences, digest: "num_sequences" and "index_digest" of `IndexedDataset.identity`; None: any number.
        documents_are_sequences: whether each document is known to be one sequence.
        found: the checked version of the `.idx` in its store; None: open whatever has its name now.
    """

    num_sequences: int | None
    digest: str
    documents_are_sequences: bool
    found: Found | None


def open_index(
    reader: RangeReader, uri: str, checked: CheckedIndex | None = None, *, multimodal: bool = True
) -> SequenceIndex:
    """Return an `.idx` whose columns are read by ranges; only the header is checked.

    Args:
        reader: reader of the file.
        uri: name of the file, for errors.
        checked: facts about the file, if it was checked before; the number of tokens is then read with the header.
        multimodal: whether modes are returned, if the file has them.

    Raises:
        FormatError: the header breaks a rule, or has another number of sequences than `checked`.
    """
    if reader.size <= WHOLE_BYTES:
        reader = InMemory(reader.uri, read_whole(reader))
    ends = list[Range]()
    if checked and (count := checked.num_sequences):
        places = IdxLayout(np.uint8, count, 1).columns[:2]
        ends = [RangedArray(reader, at, kind, (count,)).range(count - 1, count) for at, kind, _ in places]
    header, *values = stored_reader(reader).read([(0, min(HEADER.size, reader.size)), *ends])
    layout = IdxLayout.parse(header, reader.size, uri=uri)
    if checked and checked.num_sequences not in (None, layout.num_sequences):
        raise FormatError(f"{uri}: {layout.num_sequences} sequences, needed {checked.num_sequences}")
    length, pointer = (int.from_bytes(value, "little", signed=True) for value in values) if values else (0, 0)
    num_tokens = length + pointer // np.dtype(layout.dtype).itemsize if values else None
    arrays: Any = (RangedArray(reader, at, kind, (count,)) for at, kind, count in layout.columns)
    lengths, pointers, bounds, modes = arrays
    columns = lengths, pointers, bounds, modes if layout.has_modes and multimodal else None
    one_each = bool(checked and checked.documents_are_sequences)
    return SequenceIndex(layout.dtype, *columns, num_tokens, one_each, uri, reader)


def _read_rows(columns: Sequence[Any], first: int, stop: int) -> list[NDArray[Any]]:
    """Return the rows [first, stop) of several columns: views of arrays, or those of one file, read at once."""
    if not isinstance(columns[0], RangedArray):
        return [column[first:stop] for column in columns]
    views = columns[0].reader.read([column.range(first, stop) for column in columns])
    return [np.frombuffer(view, column.dtype) for view, column in zip(views, columns, strict=True)]


def get_idx_path(path_prefix: str) -> str:
    """Return the URI of a prefix's index: plain concatenation, as in Megatron Core."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """Return the URI of a prefix's tokens."""
    return path_prefix + ".bin"
