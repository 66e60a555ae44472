"""The tokens of one `.bin`/`.idx` pair, wherever it lies: spans of sequences go down as ranges of bytes.

span   (sequence, first, count)      in tokens
range  start = sequence_pointers[sequence] + first * dtype_size,  stop = start + count * dtype_size

Spans of many datasets as pieces of memory for C: what is mapped as it lies, the rest read at the same time.

A reader may offer `pieces(ranges)`: where ranges, shape (n, 2), are in memory already, or None where they are not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError, ObjectChangedError
from binidx.format.bin_file import find_bin, open_bin
from binidx.format.idx import DType, get_idx_path, little_endian
from binidx.format.pair import open_pair
from binidx.format.ranged_arrays import CheckedIndex, open_index_in_ranges
from binidx.format.virtual import get_parts_path
from binidx.native.locate import Sequences
from binidx.native.pieces import Pieces, scattered_pieces
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.stores.identity import same_identity
from binidx.storage.vectored_reads import read_many
from binidx.storage.writing.publish import object_exists, object_identity

Span = tuple[int, int, int]


"""(sequence, first, count) in tokens: `count` tokens of `sequence` from its token `first`."""


STRETCH = 1 << 17


"""Bounds looked at together: 1 MiB."""


class IndexedDataset:
    """Sequences of tokens by number, from any URI.

    The arrays it gives are read-only views of what was read: of the mapped file when it is local.

    Args:
        path_prefix: URI without `.idx` and `.bin`. A `.bin.zst` is read where there is no `.bin`, and remote tokens are
            checked where a `.bin.xxh3` lies beside them: `bin_object`. Of a PREFIX.parts.json, where there is no
            `.idx`, all parts are read as one: `virtual`.
        multimodal: whether each sequence comes with its mode; the `.idx` must have been written so.
        mmap: whether local files are mapped; False reads them as if they were remote.
        storage_options: fsspec's own options for this URI; by default its environment and configuration.
        checked: an `.idx` that was checked before is not read whole: its arrays are `RangedArray`s, and the `.bin` is
            opened at the first read.

    Attributes:
        index: the `SequenceIndex`, checked in full.

    Raises:
        ObjectNotFoundError: one of the two is missing.
        FormatError: the `.idx` breaks a rule of the format, or the `.bin` is shorter than it says.
        ObjectChangedError: it was replaced again and again while it was opened. On unpickling: one of the two is not
            what was pickled, by its size and ETag, generation or time; a spawned worker would read other tokens.

    Pickles as its arguments and these marks.

    Source: Megatron Core, IndexedDataset. Its S3 arguments are gone, as any URI opens; datasets without tokens, which
    it writes but cannot open, open; an empty slice is an empty list, where it gives one empty array.
    """

    checked: CheckedIndex | None = None

    def __init__(
        self,
        path_prefix: str | os.PathLike[str],
        multimodal: bool = False,
        mmap: bool = True,
        *,
        storage_options: Mapping[str, Any] | None = None,
        checked: CheckedIndex | None = None,
    ) -> None:
        self.path_prefix = str(os.fspath(path_prefix))  # without the facts of a KnownPrefix
        self.multimodal = multimodal
        self.mmap = mmap
        self.storage_options = storage_options
        self.checked = checked
        if checked is None:
            pair = open_pair(os.fspath(path_prefix), multimodal, mmap, storage_options=storage_options)
            self.index, self.bin_reader, self._opened = pair.index, pair.bin_reader, pair.identities
        else:
            self.index, identity = open_index_in_ranges(self.path_prefix, checked, storage_options)
            self._opened, self.one_each = {"idx": identity}, checked.one_each
        self._stored = little_endian(self.index.dtype)

    def __getstate__(self) -> dict[str, Any]:
        # The arguments and no bytes: the other process opens the files itself, and compares.
        names = ("path_prefix", "multimodal", "mmap", "storage_options", "checked")
        return {"arguments": {name: getattr(self, name) for name in names}, "opened": self._opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        IndexedDataset.__init__(self, **state["arguments"])  # a subclass may take others
        for end, was in state["opened"].items():
            if not same_identity(was, self._opened[end]):
                raise ObjectChangedError(
                    f"{self.path_prefix}.{end}: {self._opened[end]}, was {was} in the process that pickled it; "
                    f"start again from the new data, or keep times when copying (cp -p, rsync -t)"
                )

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, idx: int | np.integer[Any] | slice) -> Any:
        """One sequence, or the list of those in a contiguous slice; multimodal: with its mode, or with their modes.

        Raises:
            IndexError: there is no such sequence.
            ValueError: the slice has a step.
            TypeError: neither an integer nor a slice.
        """
        if isinstance(idx, int | np.integer):
            return self.get(idx)
        if isinstance(idx, slice):
            return self._get_slice(idx)
        raise TypeError(f"{self.path_prefix}: index of type {type(idx).__name__}, needed an integer or a slice")

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | None = None) -> Any:
        """`length` tokens of sequence `idx` from token `offset`, by default all that follow; multimodal: and its mode.

        Raises:
            IndexError: there is no such sequence.
            ValueError: the tokens asked for leave the sequence, where Megatron reads into its neighbours.
        """
        sequence = self._number(int(idx))
        count = self.index.sequence_lengths.item(sequence) - offset if length is None else length
        tokens = self.read([(sequence, offset, count)])[0]
        modes = self.index.sequence_modes
        return tokens if modes is None else (tokens, modes[sequence])

    @functools.cached_property
    def bin_reader(self) -> RangeReader:
        """The reader of the `.bin`.

        Raises:
            ObjectChangedError: the `.idx` was opened as checked and is another now, so that the `.bin` may be, too.
        """
        reader = open_bin(self.path_prefix, mmap=self.mmap, storage_options=self.storage_options)
        uri = get_idx_path(self.path_prefix)
        now = object_identity(uri, self.storage_options)
        if not same_identity(self._opened["idx"], now):
            raise ObjectChangedError(f"{uri}: {now}, was {self._opened['idx']} when it was opened; open it again")
        if reader.size < self.index.num_bytes:
            raise FormatError(f"{reader.uri}: {reader.size} bytes, its .idx needs {self.index.num_bytes}")
        return reader

    @functools.cached_property
    def sequences(self) -> Sequences:
        """Lengths and pointers of all sequences for C."""
        return self._bound(self.index.sequence_lengths, self.index.sequence_pointers)

    def sequences_at(self, numbers: NDArray[np.int64], *, pointers: bool = False) -> Sequences:
        """Lengths of some sequences for C, where they are numbered from 0; `pointers`: and where they start."""
        starts = self.index.sequence_pointers[numbers] if pointers else np.zeros(len(numbers), "<i8")
        return self._bound(self.index.sequence_lengths[numbers], starts)

    def _bound(self, lengths: NDArray[np.int32], pointers: NDArray[np.int64]) -> Sequences:
        code = DType.code_from_dtype(self.index.dtype)
        return Sequences(lengths, pointers, dtype_code=code, item_bytes=self.index.dtype_size)

    def locate(self, spans: Iterable[Span]) -> list[Range]:
        """Where spans lie in the `.bin`, in bytes. Pure; spans that leave their sequence are errors, as in `get`."""
        wanted = np.array(list(spans), np.int64).reshape(-1, 3)
        return [(start, stop) for start, stop in self.locate_all(wanted).tolist()]

    def locate_all(self, spans: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same for arrays: (sequence, first, count), shape (n, 3), to (start, stop), shape (n, 2)."""
        if self.checked is None:
            ranges, right = self.sequences.locate(spans)
        else:
            numbers, place = np.unique(spans[:, 0], return_inverse=True)
            renumbered = np.column_stack([place.reshape(-1), spans[:, 1:]])
            ranges, right = self.sequences_at(numbers, pointers=True).locate(renumbered)
        if right < len(spans):
            sequence, first, count = spans[right].tolist()
            raise self._outside(self._number(sequence), first, count)
        return ranges

    def read(self, spans: Iterable[Span]) -> list[NDArray[Any]]:
        """The tokens of many spans in one vectored read, in the order asked."""
        return self._arrays(self.bin_reader.read(self.locate(spans)))

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, shape (S,)."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """First sequence of each document, then S; shape (D,), D = documents + 1."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> NDArray[np.int8]:
        """Mode of each sequence, shape (S,). (Megatron's asserts the truth of an array and so always fails.)"""
        if self.index.sequence_modes is None:
            raise ConfigError(f"{self.path_prefix}: opened as text, modes need multimodal=True")
        return self.index.sequence_modes

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What an order of this dataset depends on, in JSON values: equal for equal data, wherever the files lie.

        The digest is XXH3 over lengths and document bounds, one pass over 4 S + 8 D bytes at the speed of memory; no
        token is read. It tells data apart that changed; data made to collide is not its matter.
        """
        digest = self._digest() if self.checked is None else self.checked.digest
        return {"num_sequences": len(self), "dtype": self.index.dtype.__name__, "index_digest": digest}

    def _digest(self) -> str:
        digest = xxhash.xxh3_128()
        for array in (self.index.sequence_lengths, self.index.document_indices):
            digest.update(array.view(np.uint8).data)
        return digest.hexdigest()

    @functools.cached_property
    def one_each(self) -> bool:
        """Whether each document is one sequence, so that both have the same numbers; one pass over the bounds.

        Of an `.idx` that was checked before False means that it is not known.
        """
        bounds, count = self.index.document_indices, len(self)
        if self.index.one_each or len(bounds) != count + 1:
            return self.index.one_each
        stretches = (slice(first, first + STRETCH) for first in range(0, len(bounds), STRETCH))
        return all((bounds[each] == np.arange(each.start, min(each.stop, len(bounds)))).all() for each in stretches)

    @property
    def opened(self) -> Mapping[str, Mapping[str, Any]]:
        """What identified both objects, "idx" and "bin", when they were opened; of a checked `.idx` only its own."""
        return self._opened

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> bool:
        """Whether both files lie under this prefix, in any store; compressed, or all of it `virtual`, too."""
        prefix = os.fspath(path_prefix)
        if object_exists(get_idx_path(prefix), storage_options):
            return find_bin(prefix, storage_options) is not None
        return object_exists(get_parts_path(prefix), storage_options)

    def _number(self, sequence: int) -> int:
        count = len(self.index)
        if not -count <= sequence < count:
            raise IndexError(f"{self.path_prefix}: sequence {sequence}, it has {count}")
        return sequence % count

    def _outside(self, sequence: int, first: int, count: int) -> ValueError:
        length = self.index.sequence_lengths[sequence]
        asked = f"{count} tokens from {first} of sequence {sequence}"
        return ValueError(f"{self.path_prefix}: {asked}, which has {length}")

    def _arrays(self, views: list[memoryview]) -> list[NDArray[Any]]:
        return [np.frombuffer(view, self._stored) for view in views]

    def _get_slice(self, wanted: slice) -> Any:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError(f"{self.path_prefix}: slice with step {step}, needed a contiguous one")
        stop = max(start, stop)
        sequences = self._read_run(start, stop)
        modes = self.index.sequence_modes
        return sequences if modes is None else (sequences, modes[start:stop])

    def _read_run(self, start: int, stop: int) -> list[NDArray[Any]]:
        # Neighbours are one range: cheaper by far than a range for each, and the views share one buffer.
        if start == stop:
            return []
        ends = np.cumsum(self.index.sequence_lengths[start:stop], dtype=np.int64)
        first_byte = self.index.sequence_pointers.item(start)
        [tokens] = self._arrays(
            self.bin_reader.read([(first_byte, first_byte + ends.item(-1) * self._stored.itemsize)])
        )
        return np.split(tokens, ends[:-1])


def read_spans(requests: Sequence[tuple[IndexedDataset, Sequence[Span]]]) -> list[list[NDArray[Any]]]:
    """`dataset.read(spans)` of many datasets, the remote ones at the same time."""
    views = read_many([(dataset.bin_reader, dataset.locate(spans)) for dataset, spans in requests])
    return [dataset._arrays(found) for (dataset, _), found in zip(requests, views, strict=True)]


def read_pieces(requests: Sequence[tuple[IndexedDataset, NDArray[np.int64]]]) -> list[Pieces]:
    """The tokens of each dataset's spans, shape (n, 3), where they are in memory.

    Raises:
        ValueError: a span leaves its sequence.
    """
    located = [(dataset.bin_reader, dataset.locate_all(spans)) for dataset, spans in requests]
    mapped: list[Pieces | None] = [
        reader.pieces(ranges) if hasattr(reader, "pieces") else None for reader, ranges in located
    ]
    missing = [
        (reader, list(map(tuple, ranges.tolist())))
        for (reader, ranges), here in zip(located, mapped, strict=True)
        if here is None
    ]
    views = iter(read_many(missing) if missing else [])
    return [scattered_pieces(next(views)) if here is None else here for here in mapped]
