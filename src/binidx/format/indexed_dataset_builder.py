"""Builder of a `.bin`/`.idx` pair from sequences and documents, in a constant amount of memory.

    tokens ──────────────► .bin      (invisible until finalize; compressed if its name ends in .bin.zst)
    lengths, modes, bounds ─► .idx      `index_columns`

Both files are written completely and invisibly before anything that exists is touched. Then the old `.idx` is removed,
and an old `.bin.zst` or `.bin.xxh3`; the `.bin` appears, its checksums if requested, and the new `.idx`. New tokens are
never read with an old index, and a builder that fails, or is not finalized, leaves the old dataset in place. Only a
failure between these steps leaves no dataset; a mixed one is impossible.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import ConfigError, FormatError
from binidx.format.bin_file import BinWriter, strip_bin_suffix
from binidx.format.idx import DType, little_endian
from binidx.format.index_columns import IndexColumns
from binidx.format.pair import open_pair
from binidx.storage.location import Location
from binidx.storage.open import stream
from binidx.storage.threads import background
from binidx.storage.writing.publish import write_object


def as_tokens(tokens: Any, dtype: DTypeLike, subject: str) -> NDArray[Any]:
    """Return tokens as the file stores them: flat, contiguous, little-endian. No value is changed.

    An array of the right type is passed through without a copy; others are checked in one or two passes.

    Args:
        tokens: an array of any shape, a torch tensor on the CPU, a list, or anything else that NumPy accepts; also
            numbers as text, as Megatron's tests give them.
        dtype: type of the dataset.
        subject: name of the dataset, for errors.

    Raises:
        FormatError: the type cannot hold a value: 70000, -1, 0.5 or "the" in uint16. Floats may be rounded to float32.

    Source: ours. Megatron casts: 70000 becomes 4464 in uint16, and 0.5 becomes 0.
    """
    needed = little_endian(dtype)
    # A torch tensor's .numpy() shares its memory; looking for the method needs no import of torch.
    given = np.asarray(tokens.numpy() if hasattr(tokens, "numpy") else tokens)
    if given.dtype.kind in "US":
        try:
            given = given.astype(np.float64 if needed.kind == "f" else np.int64)
        except (ValueError, OverflowError) as error:
            raise FormatError(f"{subject}: tokens as text, needed numbers of type {needed.name} ({error})") from None
    rounds = needed.kind == "f" and given.dtype.kind in "iu"  # a safe cast for NumPy
    if given.size and (rounds or not np.can_cast(given.dtype, needed)):
        _check_values(given.reshape(-1), needed, subject)
    return np.ascontiguousarray(given, needed).reshape(-1)


def _check_values(given: NDArray[Any], needed: np.dtype[Any], subject: str) -> None:
    if given.dtype.kind not in "iuf":
        raise FormatError(f"{subject}: tokens of type {given.dtype}, needed numbers of at most 64 bits")
    # The smallest and the largest value of the given type that the needed type holds exactly.
    if needed.kind != "f":
        low, high = np.iinfo(needed).min, np.iinfo(needed).max
    else:  # a float skips integers above 2 ** (nmant + 1)
        high = np.finfo(needed).max if given.dtype.kind == "f" else 2 ** (np.finfo(needed).nmant + 1)
        low = -high
    unfit = (given < low) | (given > high)
    if needed.kind != "f" and given.dtype.kind == "f":
        wide = given.astype(np.float64)  # where high + 1 is exact; high itself rounds up to it in int64's case
        unfit |= (wide != np.trunc(wide)) | (wide >= high + 1)
    if unfit.any():
        first = int(unfit.argmax())
        raise FormatError(f"{subject}: token {given[first]} at position {first}, {needed.name} holds {low} to {high}")


MAX_LENGTH = 2**31 - 1


class IndexedDatasetBuilder:
    """Builder of a dataset at any URI; its files equal Megatron's, byte for byte.

    Args:
        bin_path: URI of the `.bin`; a name that ends in `.bin.zst` is compressed. An existing object stays until
            `finalize`.
        dtype: type of a token, one of `DType`.
        multimodal: whether each sequence has a mode.
        compression_level: level of a `.bin.zst`, 1 to 22; 3 by default. 9 is 4 to 8 % smaller and four times slower.
        checksums: also write `.bin.xxh3`, 0.05 % of the `.bin`, against which remote readers check tokens. Off by
            default, as other tools ignore the file and do not remove it when they replace the `.bin`.
        storage_options: fsspec options for all objects that the builder reads and writes.

    Invalid arguments change nothing. After any other failure the amount of written data is unknown, so the builder
    closes, and every further call raises ValueError. A forked child cannot use the builder of its parent, and does not
    harm it by exiting.

    Raises:
        FormatError: `dtype` is not a token type.
        ConfigError: a level for a plain `.bin`, or checksums for a compressed one.

    Example:
        with IndexedDatasetBuilder("s3://bucket/en.bin", dtype=np.uint16) as builder:
            builder.add_document([5, 6, 7, 8], [3, 1])
            builder.finalize("s3://bucket/en.idx")

    Source: Megatron Core, IndexedDatasetBuilder, which keeps three Python lists, does not check the lengths, and wraps
    tokens that the type cannot hold. Its `add_documents` (awkward arrays) is in `binidx.compat.megatron`.
    """

    def __init__(
        self,
        bin_path: str | os.PathLike[str],
        dtype: DTypeLike = np.int32,
        multimodal: bool = False,
        *,
        compression_level: int | None = None,
        checksums: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        location = Location.of(bin_path, storage_options)
        self.bin_path = location.uri
        self.dtype = DType.dtype_from_code(DType.code_from_dtype(dtype))  # a type without a code fails here
        self.multimodal = multimodal
        self._options = storage_options
        self._columns = IndexColumns(self.dtype, multimodal)
        self._pid = os.getpid()
        self._failure: str | None = None
        self._bin = BinWriter(location, level=compression_level, checksums=checksums)
        # Also removes the unfinished object and the spooled columns of a builder that is never closed.
        self._release = background().add(self, functools.partial(_abandon, self._bin, self._columns))
        self._is_closed = False

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence to the open document, which `end_document` closes.

        Args:
            tensor: tokens of the sequence: an array, tensor or list of any shape.
            mode: mode of the sequence, -128 to 127; only with `multimodal=True`.

        Raises:
            FormatError: a token or the mode does not fit its type; nothing was written.
            ConfigError: a mode without `multimodal=True`; nothing was written.
        """
        tokens = as_tokens(tensor, self.dtype, self.bin_path)
        self._append(tokens, [len(tokens)], [mode] if mode or self.multimodal else None)

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a document of `len(lengths)` sequences and close it.

        Args:
            tensor: tokens of all its sequences, one after the other.
            lengths: number of tokens of each sequence.
            modes: mode of each sequence; zeros by default (Megatron's default raises TypeError).

        Raises:
            FormatError: the lengths do not add up to the tokens, or a value does not fit its type; nothing was written.
            ConfigError: modes without `multimodal=True`; nothing was written.
        """
        tokens = as_tokens(tensor, self.dtype, self.bin_path)
        self._append(tokens, lengths, modes)
        self.end_document()

    def end_document(self) -> None:
        """Close the open document; without sequences since the last bound, add an empty document."""
        self._check_open()
        with self._closed_on_failure():
            self._columns.end_document()

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append a whole dataset, in blocks. Bytes after its last sequence are not copied.

        Args:
            path_prefix: URI of the dataset without `.idx` and `.bin`.

        Raises:
            FormatError: it has another dtype, lacks modes that this dataset has, or is damaged; nothing was written.
            ObjectChangedError: it was replaced while it was opened; nothing was written.

        Source: Megatron Core, which copies these bytes, too, and so shifts all that is added later.
        """
        self._check_open()
        prefix = Location.of(path_prefix, self._options)
        pair = open_pair(prefix, self.multimodal, cache=False)
        if pair.index.dtype is not self.dtype:
            raise FormatError(f"{prefix}: dtype {pair.index.dtype.__name__}, needed {self.dtype.__name__}")
        with self._closed_on_failure():
            for block in stream(pair.bin_reader, pair.index.num_bytes):
                self._bin.write(block)
            self._columns.add(pair.index.sequence_lengths, pair.index.document_indices[1:], pair.index.sequence_modes)

    def finalize(self, idx_path: str | os.PathLike[str]) -> None:
        """Publish the `.bin`, then the `.idx`; the old `.idx` of this name, and the one beside the `.bin`, are removed.

        Args:
            idx_path: URI of the `.idx`.

        Raises:
            FormatError: sequences follow the last document bound. Nothing is lost: call `end_document` and retry.
            StorageError: the store failed. The builder is closed, and the old dataset still exists, unless one of the
                last three steps failed (see the module); then there is no dataset.
        """
        self._check_open()
        idx = Location.of(idx_path, self._options)
        left = self._columns.num_open
        if left:
            raise FormatError(f"{idx}: {left} sequences after the last document bound; call end_document()")
        self._bin.obsolete += {idx, Location(f"{strip_bin_suffix(self.bin_path)}.idx", self._options)}
        with self._closed_on_failure():
            write_object(idx, self._columns.format(), before_publish=self._bin.publish)
        self.close()

    def close(self) -> None:
        """Free all resources; a dataset that was not finalized is discarded."""
        self._is_closed = True
        self._release()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _append(self, tokens: NDArray[Any], lengths: Sequence[int], modes: Sequence[int] | None) -> None:
        self._check_open()
        total = sum(map(int, lengths))
        if total != len(tokens):
            raise FormatError(f"{self.bin_path}: lengths add up to {total}, the document has {len(tokens)} tokens")
        if len(lengths) and (min(lengths) < 0 or max(lengths) > MAX_LENGTH):
            raise FormatError(f"{self.bin_path}: lengths {min(lengths)} to {max(lengths)}, needed 0 to {MAX_LENGTH}")
        if modes is not None:
            self._check_modes(lengths, modes)
        with self._closed_on_failure():
            self._bin.write(tokens.view(np.uint8).data)
            self._columns.lengths.extend(lengths)
            if self.multimodal:
                self._columns.modes.extend([0] * len(lengths) if modes is None else modes)

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Close the builder if the block fails, as the amount of written data is then unknown."""
        try:
            yield
        except BaseException as error:
            self._failure = " ".join(f"{type(error).__name__}: {error}".split())
            self.close()
            raise

    def _check_open(self) -> None:
        if self._failure is not None:
            problem = f"the builder is closed since it failed ({self._failure})"
            raise ValueError(f"{self.bin_path}: {problem}; build the dataset again")
        if self._is_closed:
            raise ValueError(f"{self.bin_path}: the builder is closed")
        if os.getpid() != self._pid:
            problem = f"the builder belongs to process {self._pid}, a fork cannot add to it"
            raise ValueError(f"{self.bin_path}: {problem}; build one dataset in each and merge them with add_index()")

    def _check_modes(self, lengths: Sequence[int], modes: Sequence[int]) -> None:
        if len(modes) != len(lengths):
            raise FormatError(f"{self.bin_path}: {len(modes)} modes, needed one for each of {len(lengths)} sequences")
        as_tokens(modes, np.int8, f"{self.bin_path} (modes)")
        if not self.multimodal and any(modes):
            raise ConfigError(f"{self.bin_path}: modes given, keeping them needs multimodal=True")


def _abandon(unfinished: BinWriter, columns: IndexColumns) -> None:
    columns.close()
    unfinished.abandon()
