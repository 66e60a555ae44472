"""Whatever holds tokens -> one flat array of the stored type, or an error: no value is changed on the way.

Sequences and documents -> one `.bin`/`.idx` pair, in a memory that does not grow with them.

    tokens ──────────────► .bin      (unseen until finalize; compressed if it is called .bin.zst)
    lengths, modes, bounds ─► .idx      `index_columns`

Both files are written whole, unseen, before anything that stands is touched. Then, at once: the old `.idx` goes, and a
`.bin.zst` or `.bin.xxh3` of old; the `.bin` appears, its checksums if asked, the new `.idx`. So nobody reads new tokens
with an old index, and a builder that fails, or is never finalized, leaves what was there. Only a failure between these
leaves no dataset: never a mixed one.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import ConfigError, FormatError
from binidx.format.bin_file import BinWriter, strip_bin_suffix
from binidx.format.idx import DType, SequenceIndex, get_idx_path, little_endian
from binidx.format.index_writer import IndexColumns
from binidx.format.pair import open_pair
from binidx.storage.open import stream
from binidx.storage.writing.publish import create_object


def as_tokens(tokens: Any, dtype: DTypeLike, subject: str) -> NDArray[Any]:
    """Tokens as they will lie in the file: flat, contiguous, little-endian.

    An array of the right type passes without a copy or a look at its values; any other is checked, at the price of a
    pass or two over it.

    Args:
        tokens: an array of any shape, a torch tensor on the CPU, a list, anything NumPy takes.
        dtype: the type of the dataset.
        subject: who asks, for the message.

    Raises:
        FormatError: a value the type does not hold: 70000, -1 or 0.5 for uint16. Floats may be rounded to float32.

    Source: us. Megatron casts: 70000 becomes 4464 in uint16, and 0.5 becomes 0.
    """
    needed = little_endian(dtype)
    # A torch tensor says .numpy(), which shares its memory; asking so needs no import of torch.
    found = np.asarray(tokens.numpy() if hasattr(tokens, "numpy") else tokens)
    rounds = needed.kind == "f" and found.dtype.kind in "iu"  # which NumPy calls safe
    if found.size and (rounds or not np.can_cast(found.dtype, needed)):
        _check_values(found.reshape(-1), needed, subject)
    return np.ascontiguousarray(found, needed).reshape(-1)


def _check_values(found: NDArray[Any], needed: np.dtype[Any], subject: str) -> None:
    if found.dtype.kind not in "iuf":
        raise FormatError(f"{subject}: tokens of type {found.dtype}, needed numbers of at most 64 bits")
    low, high = _limits(found.dtype, needed)
    unfit = (found < low) | (found > high)
    if needed.kind != "f" and found.dtype.kind == "f":
        wide = found.astype(np.float64)  # where high + 1 is exact; high itself rounds up to it in int64's case
        unfit |= (wide != np.trunc(wide)) | (wide >= high + 1)
    if unfit.any():
        first = int(unfit.argmax())
        raise FormatError(f"{subject}: token {found[first]} at position {first}, {needed.name} holds {low} to {high}")


def _limits(found: np.dtype[Any], needed: np.dtype[Any]) -> tuple[Any, Any]:
    """The least and the greatest value of `found` that `needed` holds."""
    if needed.kind != "f":
        return np.iinfo(needed).min, np.iinfo(needed).max
    if found.kind == "f":
        return -np.finfo(needed).max, np.finfo(needed).max
    exact = 2 ** (np.finfo(needed).nmant + 1)  # from here on a float skips integers
    return -exact, exact


MAX_LENGTH = 2**31 - 1


class IndexedDatasetBuilder:
    """Writes a dataset to any URI; the files are Megatron's, byte for byte.

        with IndexedDatasetBuilder("s3://bucket/en.bin", dtype=np.uint16) as builder:
            builder.add_document([5, 6, 7, 8], [3, 1])
            builder.finalize("s3://bucket/en.idx")

    Args:
        bin_path: URI of the `.bin`. An object already there stays until `finalize`.
        dtype: the type of a token.
        multimodal: whether a mode is kept for each sequence.
        compression_level: of a `.bin.zst`, 1 to 22; 3 by default, 9 is 4 to 8 % smaller and four times slower.
        checksums: also write `.bin.xxh3`, 0.05 % of the `.bin`; remote readers then check what they read. Not by
            default: a third file that other tools do not know, and leave behind when they write the `.bin` anew.
        storage_options: fsspec's own options, for everything this builder reads and writes.

    Bad arguments change nothing. After any other failure, of the disk or the store, what arrived is unknown, so the
    builder is closed for good and each further call raises ValueError. A forked child cannot use its parent's builder,
    and does it no harm by ending.

    Source: Megatron Core, IndexedDatasetBuilder, which keeps four Python lists, believes the lengths, and wraps tokens
    that its type does not hold. `add_documents` (awkward arrays) is not here.
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
        self.bin_path = os.fspath(bin_path)
        self.dtype = DType.dtype_from_code(DType.code_from_dtype(dtype))  # a type without a code fails here
        self.multimodal = multimodal
        self._options = storage_options
        self._columns = IndexColumns(self.dtype, multimodal)
        self._pid = os.getpid()
        self._failure: str | None = None
        self._bin = BinWriter(self.bin_path, storage_options, level=compression_level, checksums=checksums)
        # Also when the builder is forgotten: the half-written object and the spools must not stay.
        self._release = weakref.finalize(self, _abandon, self._bin, self._columns)

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence to the open document; `end_document` closes it.

        Raises:
            FormatError: a token or the mode does not fit its type. Then nothing was written.
        """
        tokens = as_tokens(tensor, self.dtype, self.bin_path)
        self._append(tokens, [len(tokens)], [mode] if mode or self.multimodal else None)

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a document of `len(lengths)` sequences and close it.

        Args:
            tensor: the tokens of all its sequences, one after the other.
            lengths: tokens of each sequence.
            modes: mode of each sequence; zeros by default (Megatron's default raises TypeError).

        Raises:
            FormatError: the lengths do not add up to the tokens, or something does not fit its type. Then nothing was
                written.
        """
        tokens = as_tokens(tensor, self.dtype, self.bin_path)
        self._append(tokens, lengths, modes)
        self.end_document()

    def end_document(self) -> None:
        """Close the document: what was added since the last bound. Nothing added is an empty document."""
        self._check_open()
        with self._closed_on_failure():
            self._columns.end_document()

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append a whole dataset, in blocks. Bytes of its `.bin` past its last sequence stay behind.

        Raises:
            FormatError: it has another dtype, no modes where they are kept, or is damaged. Then nothing was written.
            ObjectChangedError: it was replaced again and again while it was opened. Then nothing was written.

        Source: Megatron Core, which appends such bytes too, and so shifts all that is added later.
        """
        self._check_open()
        prefix = os.fspath(path_prefix)
        pair = open_pair(prefix, self.multimodal, cache=False, storage_options=self._options)
        if pair.index.dtype is not self.dtype:
            raise FormatError(f"{prefix}: dtype {pair.index.dtype.__name__}, needed {self.dtype.__name__}")
        with self._closed_on_failure():
            for block in stream(pair.bin_reader, pair.index.num_bytes):
                self._bin.write(block)
            self._extend(pair.index)

    def finalize(self, idx_path: str | os.PathLike[str]) -> None:
        """Make the `.bin` visible, then the `.idx`. The old `.idx` under this name, and the one beside the `.bin`, go.

        Raises:
            FormatError: sequences stand after the last document bound. Nothing is lost: end it and come again.
            StorageError: the store refuses. The builder is closed, and what stood under the names still does, unless
                one of the last three steps failed (see above); then there is no dataset.
        """
        self._check_open()
        path = os.fspath(idx_path)
        left = self._columns.num_open
        if left:
            raise FormatError(f"{path}: {left} sequences after the last document bound; call end_document()")
        self._bin.obsolete_uris.extend({path, get_idx_path(strip_bin_suffix(self.bin_path))})
        with (
            self._closed_on_failure(),
            create_object(path, self._options, before_publish=self._bin.publish) as writer,
        ):
            for piece in self._columns.format():
                writer.write(piece)
        self.close()

    def close(self) -> None:
        """Give everything back. What was not finalized is gone."""
        self._release()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, tokens: NDArray[Any], lengths: Sequence[int], modes: Sequence[int] | None) -> None:
        self._check_open()
        self._check_lengths(len(tokens), lengths)
        if modes is not None:
            self._check_modes(lengths, modes)
        with self._closed_on_failure():
            self._bin.write(tokens.view(np.uint8).data)
            self._columns.lengths.extend(lengths)
            if self.multimodal:
                self._columns.modes.extend([0] * len(lengths) if modes is None else modes)

    def _extend(self, index: SequenceIndex) -> None:
        before = len(self._columns.lengths)
        self._columns.lengths.extend(index.sequence_lengths)
        if index.sequence_modes is not None:
            self._columns.modes.extend(index.sequence_modes)
        self._columns.add_bounds(index.document_indices[1:], plus=before)

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Around what is all or nothing: how much of it arrived is unknown, so this object can only be begun again."""
        try:
            yield
        except BaseException as error:
            self._failure = " ".join(f"{type(error).__name__}: {error}".split())
            self.close()
            raise

    def _check_open(self) -> None:
        if self._failure is not None:
            raise ValueError(f"{self.bin_path}: the builder is closed since it failed ({self._failure}); begin again")
        if not self._release.alive:
            raise ValueError(f"{self.bin_path}: the builder is closed")
        if os.getpid() != self._pid:
            raise ValueError(
                f"{self.bin_path}: the builder is of process {self._pid}, a fork cannot add to it; "
                f"build one dataset in each and merge them with add_index()"
            )

    def _check_lengths(self, num_tokens: int, lengths: Sequence[int]) -> None:
        total = sum(map(int, lengths))
        if total != num_tokens:
            raise FormatError(f"{self.bin_path}: lengths add up to {total}, the document has {num_tokens} tokens")
        if len(lengths) and (min(lengths) < 0 or max(lengths) > MAX_LENGTH):
            raise FormatError(f"{self.bin_path}: lengths {min(lengths)} to {max(lengths)}, needed 0 to {MAX_LENGTH}")

    def _check_modes(self, lengths: Sequence[int], modes: Sequence[int]) -> None:
        if len(modes) != len(lengths):
            raise FormatError(f"{self.bin_path}: {len(modes)} modes, needed one for each of {len(lengths)} sequences")
        as_tokens(modes, np.int8, f"{self.bin_path} (modes)")
        if not self.multimodal and any(modes):
            raise ConfigError(f"{self.bin_path}: modes given, keeping them needs multimodal=True")


def _abandon(unfinished: BinWriter, columns: IndexColumns) -> None:
    columns.close()
    unfinished.abandon()
