"""LITPKDS files: blocks of tokens without an index, as written by lit-gpt, TinyLlama and the Gemstones.

    offset  bytes                     meaning, little-endian
    0       7                         LITPKDS
    7       8                         uint64, version = 1
    15      1                         uint8, dtype: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f32, 7 f64, 8 u16
    16      8                         uint64, tokens in this file: the chunk size
    24      chunk size * item size    tokens

Codes 6 and 7 are those of an `.idx`, swapped. A token separates documents; the file does not store where one ends. A
block is `block_size` tokens; the tokens behind the last whole block of a file are never served.

Source: lit-gpt, `packed_dataset.py`. It reads the header of the first file only; here every header must be equal.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.dataset.torch_bridge import Tensor, as_tensor
from binidx.errors import ConfigError, FormatError, redacted
from binidx.packed.packed_order import PackedRun
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.ranges import read_many
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import create_object

PACKED_MAGIC = b"LITPKDS"
PACKED_VERSION = 1
PACKED_HEADER = struct.Struct("<7sQBQ")
PACKED_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f4", 7: "<f8", 8: "<u2"}
"""Stored dtype of each code of the header."""

OPENED_AT_ONCE = 32
UINT16_VOCAB = 65_500
"""Size of a vocabulary below which dtype="auto" is uint16, else int32. (Other programs switch at 65,536.)"""


@dataclass(frozen=True)
class PackedHeader:
    """Properties that all files of one set share."""

    dtype: np.dtype[Any]
    chunk_size: int

    @property
    def file_bytes(self) -> int:
        return PACKED_HEADER.size + self.chunk_size * self.dtype.itemsize


def parse_packed_header(data: bytes | memoryview, *, uri: str) -> PackedHeader:
    """Return the header in the first 24 bytes of a file; raise FormatError if they are no header.

    Args:
        data: the first bytes of the file.
        uri: name of the file, for errors.
    """
    if len(data) < PACKED_HEADER.size:
        raise FormatError(f"{uri}: {len(data)} bytes, a LITPKDS header needs {PACKED_HEADER.size}")
    magic, version, code, chunk_size = PACKED_HEADER.unpack(data[: PACKED_HEADER.size])
    if magic != PACKED_MAGIC:
        raise FormatError(f"{uri}: begins with {magic!r}, a packed file begins with {PACKED_MAGIC!r}")
    if version != PACKED_VERSION or code not in PACKED_DTYPES:
        raise FormatError(
            f"{uri}: version {version}, dtype code {code}; needs version {PACKED_VERSION} and {list(PACKED_DTYPES)}"
        )
    return PackedHeader(np.dtype(PACKED_DTYPES[code]), chunk_size)


def format_packed_header(header: PackedHeader) -> bytes:
    """Return the first 24 bytes of a file with this header."""
    return PACKED_HEADER.pack(PACKED_MAGIC, PACKED_VERSION, find_code(header.dtype), header.chunk_size)


def find_code(dtype: DTypeLike) -> int:
    """Return the code of a dtype; raise ConfigError if the format has no code for it."""
    wanted = np.dtype(dtype).newbyteorder("<")
    for code, stored in PACKED_DTYPES.items():
        if np.dtype(stored) == wanted:
            return code
    raise ConfigError(
        f"packed file: dtype {wanted.name}, needs one of {[np.dtype(d).name for d in PACKED_DTYPES.values()]}"
    )


def packed_file_name(prefix: str, number: int) -> str:
    """Return the name of a file of a set, counted from 0."""
    return f"{prefix}_{number:010d}.bin"


class PackedFiles:
    """Blocks of a set of packed files, at any URI.

    Args:
        uris: the files, in the order of their numbers. The first is opened at construction, and another one when a
            block of it is first read; all must have the same header.
        block_size: number of tokens of a block; S + 1 to train on S tokens, since labels are the tokens shifted by one.
        storage_options: options of the store.

    Raises:
        ConfigError: no files, or blocks of less than one token or more tokens than a file.
        FormatError: an invalid header, or a file not as long as its header says; at a read, also a file that differs
            from the first one in dtype or chunk size.

    Example:
        files = binidx.packed.PackedFiles(["s3://corpus/train_0000000000.bin"], 2049)
        blocks = files.read([0, 0], [0, 1])        # shape (2, 2049)

    Source: lit-gpt, `PackedDataset`.
    """

    def __init__(
        self, uris: Sequence[str], block_size: int, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        if not uris or block_size < 1:
            raise ConfigError(f"packed set: {len(uris)} files in blocks of {block_size}, needs 1 and 1 at least")
        self.uris, self.block_size, self.storage_options = list(uris), block_size, storage_options
        reader, self.header = self._open(self.uris[0])
        self._opened = {0: reader}
        self.num_blocks = self.header.chunk_size // block_size
        if not self.num_blocks:
            raise ConfigError(f"{uris[0]}: has {self.header.chunk_size} tokens, blocks of {block_size} need more")

    def __repr__(self) -> str:
        files = "1 file" if len(self.uris) == 1 else f"{len(self.uris):,} files"
        blocks = f"{self.num_blocks:,} blocks x {self.block_size:,}"
        return f"PackedFiles({redacted(self.uris[0])}, {files} of {blocks}, {self.header.dtype.name})"

    def _open(self, uri: str) -> tuple[RangeReader, PackedHeader]:
        reader = open_object(uri, storage_options=self.storage_options, cache="disk")
        header = parse_packed_header(reader.read([(0, min(PACKED_HEADER.size, reader.size))])[0], uri=uri)
        if reader.size != header.file_bytes:
            raise FormatError(f"{uri}: {reader.size} bytes, its header needs {header.file_bytes}")
        return reader, header

    @property
    def readers(self) -> Sequence[RangeReader]:
        """The readers of all files, which are opened by now."""
        return self._readers(range(len(self.uris)))

    def _readers(self, files: Collection[int]) -> list[RangeReader]:
        """Return the readers of these files, all opened at once."""
        missing = [file for file in dict.fromkeys(files) if file not in self._opened]
        with OPENS.executor(OPENED_AT_ONCE) as threads:
            opened = [*threads.map(lambda file: self._open(self.uris[file]), missing)] if missing else []
        for file, (reader, header) in zip(missing, opened, strict=True):
            if header != self.header:
                raise FormatError(f"{self.uris[file]}: {header}, the first file of the set has {self.header}")
            self._opened[file] = reader
        return [self._opened[file] for file in files]

    def _locate(self, block: int) -> Range:
        """Return the byte range of a block within its file."""
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"{self.uris[0]}: block {block}, each file has {self.num_blocks}")
        block_bytes = self.block_size * self.header.dtype.itemsize
        return PACKED_HEADER.size + block * block_bytes, PACKED_HEADER.size + (block + 1) * block_bytes

    def read(self, files: Sequence[int], blocks: Sequence[int]) -> NDArray[Any]:
        """Return block `blocks[i]` of file `files[i]` for each i, by one vectored read.

        Args:
            files: numbers of files in `uris`, n of them.
            blocks: number of a block in each of these files.

        Returns:
            Shape (n, block_size), dtype as stored.
        """
        return read_blocks([self], np.column_stack([np.zeros(len(files), np.int64), files, blocks]).astype(np.int64))

    def plan_reads(self, places: Sequence[Sequence[int]]) -> list[tuple[list[int], RangeReader, list[Range]]]:
        """Return, for each file of some places (file, block), their numbers, the file's reader, and their ranges."""
        numbers: dict[int, list[int]] = {}
        for number, (file, _) in enumerate(places):
            numbers.setdefault(file, []).append(number)
        ranges = [[self._locate(places[number][1]) for number in own] for own in numbers.values()]
        return [*zip(numbers.values(), self._readers(numbers), ranges, strict=True)]


def read_blocks(files: Sequence[PackedFiles], blocks: NDArray[np.int64]) -> NDArray[Any]:
    """Return the tokens of blocks of several sets, by one vectored read.

    Args:
        files: packed files of each set.
        blocks: numbers of set, file and block in each row; shape (n, 3), or more columns, which are ignored.

    Returns:
        Shape (n, block_size).
    """
    out = np.empty((len(blocks), files[0].block_size), np.result_type(*(packed.header.dtype for packed in files)))
    rows, wanted = list[tuple[int, np.dtype[Any]]](), list[tuple[RangeReader, list[Range]]]()
    for number, packed in enumerate(files):
        own = np.flatnonzero(blocks[:, 0] == number)
        for numbers, reader, ranges in packed.plan_reads(blocks[own, 1:3].tolist()):
            rows += [(row, packed.header.dtype) for row in own[numbers].tolist()]
            wanted.append((reader, ranges))
    for (row, dtype), view in zip(rows, chain.from_iterable(read_many(wanted)), strict=True):
        out[row] = np.frombuffer(view, dtype)
    return out


class PackedDataset:
    """The stream of one rank, by position: `dataset[i]` is its i-th block, int64 of shape (block_size,).

    A DataLoader over it with the run's micro-batch size and no shuffling yields the batches of the original loader,
    with any number of its own workers: the workers of the original are part of `run`. To resume, start at a position.

    Args:
        run: the order of the blocks of this rank.
        files: packed files of each set.
        num_samples: length of the dataset, required if the run has no end.

    Raises:
        ConfigError: sets and files that do not fit each other, or no end.

    Example:
        dataset = binidx.packed.PackedDataset(order.run_of(rank=0), order.files, num_samples=1_000_000)

    Source: lit-gpt, `PackedDataset` and `CombinedDataset`, which can only start at position 0.
    """

    RECORDED_NAME: ClassVar[str] = "PackedDataset"

    def __init__(self, run: PackedRun, files: Sequence[PackedFiles], num_samples: int | None = None) -> None:
        needed = [(packed_set.num_files, packed_set.num_blocks) for packed_set in run.sets]
        if [(len(packed.uris), packed.num_blocks) for packed in files] != needed:
            raise ConfigError("packed dataset: the files are not those that the run's sets describe")
        if len({packed.block_size for packed in files}) != 1:
            raise ConfigError(f"packed dataset: blocks of {[packed.block_size for packed in files]}, needs one size")
        length = run.length if num_samples is None else num_samples
        if length is None or (run.length is not None and length > run.length):
            raise ConfigError(f"packed dataset: num_samples {num_samples}, the run has {run.length or 'no end'}")
        self.run, self.files, self.num_samples = run, list(files), length

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        return f"PackedDataset({', '.join(map(repr, self.files))}, {self.num_samples:,} samples)"

    def __getitem__(self, idx: int) -> Tensor:
        return self.__getitems__([idx])[0]

    def __getitems__(self, idxs: Sequence[int]) -> list[Tensor]:
        """Return the blocks at these positions, by one vectored read."""
        positions = np.array([self._position(idx) for idx in idxs], np.int64)
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        blocks = [self.run.blocks(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
        tokens = read_blocks(self.files, np.concatenate([np.empty((0, 4), np.int64), *blocks]))
        return list(as_tensor(tokens.astype(np.int64)))

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of all packed files.

        Returns:
            Those of each set, in order.
        """
        return [reader for files in self.files for reader in files.readers]

    def _position(self, idx: int) -> int:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"packed dataset: sample {idx}, it has {len(self)}")
        return int(idx) % len(self)


class PackedDatasetBuilder:
    """Writer of packed files `{prefix}_{0000000000}.bin`, each published atomically.

    Args:
        outdir: path or URI of a directory.
        prefix: first part of the file names.
        chunk_size: number of tokens of a file.
        sep_token: token that fills the rest of the last file; the caller separates documents.
        dtype: dtype of the tokens; "auto" chooses uint16 or int32 by `vocab_size`.
        vocab_size: number of token ids, for dtype="auto" alone.
        storage_options: options of the store.

    A document may continue in the next file; a file that is exactly full is written by the next `add_array`. As in
    lit-gpt, an existing file is replaced.

    Raises:
        ConfigError: dtype="auto" without vocab_size, a dtype that the format lacks, or tokens that do not fit it.

    Example:
        builder = binidx.packed.PackedDatasetBuilder("packed", "train", 8 * 2049, sep_token=0, dtype="uint16")
        builder.add_array(np.arange(100_000, dtype=np.uint16))
        builder.write_reminder()

    Source: lit-gpt, `PackedDatasetBuilder`, byte for byte; `write_reminder` is its name, too.
    """

    def __init__(
        self,
        outdir: str,
        prefix: str,
        chunk_size: int,
        sep_token: int,
        dtype: DTypeLike = "auto",
        vocab_size: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if chunk_size < 1:
            raise ConfigError(f"{outdir}: chunk_size {chunk_size}, needs at least 1")
        self.outdir, self.prefix, self.sep_token = outdir, prefix, sep_token
        self.storage_options = storage_options
        self.dtype = np.dtype(_auto_dtype(vocab_size) if isinstance(dtype, str) and dtype == "auto" else dtype)
        self.header = PackedHeader(np.dtype(PACKED_DTYPES[find_code(self.dtype)]), chunk_size)
        self.filenames: list[str] = []
        self._check_fit(np.asarray([sep_token]))
        self._tokens = np.full(chunk_size, sep_token, self.header.dtype)
        self._filled = 0

    def add_array(self, tokens: NDArray[Any]) -> None:
        """Append tokens to the stream.

        Args:
            tokens: shape (n,).

        Raises:
            ConfigError: tokens that do not fit the dtype.
        """
        self._check_fit(tokens)
        while self._filled + len(tokens) > len(self._tokens):
            free = len(self._tokens) - self._filled
            self._tokens[self._filled :] = tokens[:free]
            self.write_reminder()
            tokens = tokens[free:]
        self._tokens[self._filled : self._filled + len(tokens)] = tokens
        self._filled += len(tokens)

    def write_reminder(self) -> None:
        """Write a file of the remaining tokens, filled up with `sep_token`; as in lit-gpt, also if none remain."""
        file = Location(self.outdir, self.storage_options) / packed_file_name(self.prefix, len(self.filenames))
        with create_object(file) as out:
            out.write(format_packed_header(self.header))
            out.write(self._tokens.view(np.uint8).data)
        self.filenames.append(file.uri)
        self._tokens.fill(self.sep_token)
        self._filled = 0

    def _check_fit(self, tokens: NDArray[Any]) -> None:
        if self.dtype.kind == "f" or not len(tokens):
            return
        limits = np.iinfo(self.dtype)
        least, most = int(tokens.min()), int(tokens.max())
        if least < limits.min or most > limits.max:
            holds = f"{self.dtype} holds {limits.min} to {limits.max}"
            raise ConfigError(f"{self.outdir}: tokens from {least} to {most}, {holds}")


def _auto_dtype(vocab_size: int | None) -> DTypeLike:
    if vocab_size is None:
        raise ConfigError('dtype="auto": found no vocab_size, needs one')
    return np.uint16 if vocab_size < UINT16_VOCAB else np.int32
