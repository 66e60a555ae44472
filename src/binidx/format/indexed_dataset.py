"""Tokens of one `.bin`/`.idx` pair in any store: spans of sequences become ranges of bytes.

span   (sequence, first, count)      in tokens
range  start = sequence_pointers[sequence] + first * dtype_size,  stop = start + count * dtype_size
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import ConfigError, ObjectChangedError, ObjectNotFoundError, redacted, trims_traceback
from binidx.format.bin_file import as_prefix, did_you_mean, find_bin
from binidx.format.idx import DType, SequenceIndex, little_endian
from binidx.format.pair import check_opened, open_bin, open_pair
from binidx.format.prefix_listing import ListedPair
from binidx.format.ranged_arrays import CheckedIndex, open_index_in_ranges
from binidx.format.virtual import SUFFIX as PARTS
from binidx.native.gpt_samples import Sequences
from binidx.registries import Registrations
from binidx.storage.cache.seals import Seal
from binidx.storage.interfaces import MappedReader, Range, RangeReader, VersionMark
from binidx.storage.location import Location
from binidx.storage.ranges import as_mapped, read_many, version_marks
from binidx.storage.requests.remote_object import object_exists, object_identity
from binidx.storage.stores.identity import DATES_OFF, describe_mark, is_rewritten, same_identity
from binidx.storage.stores.local import mark_to_pickle

Span = tuple[int, int, int]
"""(sequence, first, count) in tokens: `count` tokens of `sequence` from its token `first`."""

BOUNDS_AT_ONCE = 1 << 17
"""Document bounds compared at once: 1 MiB."""


class IndexedDataset:
    """Sequences of tokens by number, from any URI.

    Returned arrays are read-only views of the fetched bytes, or of the mapped file if it is local.

    Args:
        path_prefix: URI without `.idx` and `.bin`. A `.bin.zst` is read if there is no `.bin`, and remote tokens are
            checked against a `.bin.xxh3`. The parts in a `.parts.json` are read as one dataset if there is no `.idx`.
        multimodal: whether each sequence has a mode; the `.idx` must have been written so.
        mmap: whether local files are mapped; False reads them like remote ones.
        storage_options: fsspec options for this URI; by default fsspec's environment and configuration apply.
        checked: facts about an `.idx` that was checked before. The `.idx` is then not read whole: its arrays are
            `RangedArray`s, and the `.bin` is opened at the first read.
        listed: the files of the pair in a listing of their folder, which saves requests.

    Attributes:
        index: the fully checked `SequenceIndex`.
        bin_reader: the `RangeReader` of the tokens.

    Raises:
        ObjectNotFoundError: `.idx` or `.bin` is missing.
        FormatError: the `.idx` breaks a rule of the format, or the `.bin` is shorter than it requires; or it is longer,
            and its manifest contradicts the `.idx`. A `.bin` that is much longer is a warning in the log.
        ObjectChangedError: the dataset was replaced while it was opened. At the first use after unpickling: an object
            differs in size, ETag, generation or date from the pickled one, so a worker would read other tokens; or a
            local file of the same node does in inode or ctime.

    Pickles as its arguments and the identities of both objects, which are opened at the first use. So unpickling sends
    no request and raises no error, which would leave the parent of a spawned worker waiting for ever.

    Example:
        dataset = IndexedDataset("s3://corpus/en_text_document")
        tokens = dataset[0]                       # all tokens of sequence 0
        head = dataset.get(0, length=16)          # its first 16
        many = dataset.read([(0, 0, 16), (7, 4, 8)])

    Source: Megatron Core, IndexedDataset. Its S3 arguments are missing, as any URI opens. Datasets without tokens open,
    which Megatron writes but cannot open. An empty slice gives an empty list, where Megatron gives one empty array.
    """

    checked: CheckedIndex | None = None
    index: SequenceIndex
    _stored: np.dtype[Any]
    _opened: Mapping[str, Mapping[str, Any]]
    _marks: Mapping[str, VersionMark] = MappingProxyType({})
    _digest_seal = Seal()
    _opening: Any
    is_stored: ClassVar[bool] = True
    """False if the tokens are computed, so that no cache can be proven to belong to them."""

    _pickled: ClassVar[Sequence[str]] = ("path_prefix", "multimodal", "mmap", "storage_options", "checked", "_opened")

    @trims_traceback
    def __init__(
        self,
        path_prefix: str | os.PathLike[str],
        multimodal: bool = False,
        mmap: bool = True,
        *,
        storage_options: Mapping[str, Any] | None = None,
        checked: CheckedIndex | None = None,
        listed: ListedPair | None = None,
    ) -> None:
        self.path_prefix = as_prefix(os.fspath(path_prefix))
        self.multimodal = multimodal
        self.mmap = mmap
        self.storage_options = storage_options
        self.checked = checked
        self._open(listed)

    @property
    def location(self) -> Location:
        """Prefix and storage options."""
        return Location(self.path_prefix, self.storage_options)

    def _open(self, listed: ListedPair | None = None) -> None:
        """Open the files; after unpickling, they must be those of the pickled dataset."""
        prefix = self.location
        if listed and listed.prefix and listed.prefix == prefix:
            prefix = listed.prefix
        if self.checked is None:
            try:
                pair = open_pair(prefix, self.multimodal, self.mmap, listed=listed)
            except ObjectNotFoundError as error:
                raise ObjectNotFoundError(f"{error}{did_you_mean(prefix)}") from error
            index, opened, marks = pair.index, pair.identities, pair.marks
            made: dict[str, Any] = {"bin_reader": pair.bin_reader, "_digest_seal": pair.digest_seal}
        else:
            index, idx_reader = open_index_in_ranges(prefix, self.checked)
            opened, made, marks = {"idx": dict(idx_reader.identity)}, {}, version_marks(idx_reader)
        for end, pickled in vars(self).get("_opened", {}).items():
            check_pickled(f"{prefix}.{end}", pickled, opened[end])
        self._check_marks(marks)
        vars(self).update(made, _opened=opened, _stored=little_endian(index.dtype), index=index)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Open the files at the first use after unpickling."""
            if name not in ("index", "_stored") or "_opening" not in vars(self):
                raise AttributeError(f"{type(self).__name__} has no {name}")
            return self._late(name)

    def _late(self, name: str) -> Any:
        """Open the files of an unpickled dataset unless another thread did; return the attribute `name`, now set."""
        with self._opening:
            if "index" not in vars(self):
                self._open()
        return vars(self)[name]

    def _check_marks(self, marks: Mapping[str, VersionMark]) -> None:
        """Check that opened objects have the dates, or inodes and ctimes, of the pickled dataset."""
        for uri, now in marks.items():
            if is_rewritten(was := self._marks.get(uri), now):
                kept, way = ("size", DATES_OFF) if isinstance(now, int) else ("size and mtime", "")
                need = f"found {describe_mark(now)}, need {describe_mark(was)}, as in the process that pickled it"
                problem = f"was rewritten under its old {kept} ({need})"
                raise ObjectChangedError(f"{uri}: {problem}; start again from the new data{way}")
        self._marks = {**self._marks, **marks}

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self._pickled}
        marks = {uri: mark_to_pickle(uri, mark) for uri, mark in self._marks.items()}
        return {**state, "_marks": marks, "_registrations": Registrations()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _opening=threading.RLock())

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        """Return prefix, counts and dtype; an unpickled dataset is not opened for it."""
        counts = "not open"
        if "index" in vars(self):
            index = self.index
            counts = f"{len(index):,} sequences, {index.num_tokens:,} tokens, {index.dtype.__name__}"
        return f"{type(self).__name__}({redacted(self.path_prefix)}, {counts})"

    def __getitem__(self, idx: int | np.integer[Any] | slice) -> Any:
        """Return one sequence, or the sequences of a slice; in a multimodal dataset a pair with their modes.

        Args:
            idx: number of a sequence, from the end if negative, or a slice with step 1.

        Returns:
            An array of shape (length,) in the stored dtype, or a list of such arrays. Multimodal: (array, mode) or
            (list, modes).

        Raises:
            IndexError: there is no such sequence.
            ValueError: the slice has a step.
            TypeError: `idx` is neither an integer nor a slice.
        """
        if isinstance(idx, int | np.integer):
            return self.get(idx)
        if isinstance(idx, slice):
            return self._get_slice(idx)
        raise TypeError(f"{self.path_prefix}: index of type {type(idx).__name__}, needed an integer or a slice")

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | None = None) -> Any:
        """Return some tokens of one sequence; in a multimodal dataset a pair with its mode.

        Args:
            idx: number of the sequence, from the end if negative.
            offset: first token.
            length: number of tokens; None for all that follow.

        Returns:
            An array of shape (length,) in the stored dtype. Multimodal: (array, mode).

        Raises:
            IndexError: there is no such sequence.
            ValueError: the tokens leave the sequence, where Megatron reads into its neighbours.
        """
        sequence = self._number(int(idx))
        count = self.index.sequence_lengths.item(sequence) - offset if length is None else length
        tokens = self.read([(sequence, offset, count)])[0]
        modes = self.index.sequence_modes
        return tokens if modes is None else (tokens, modes[sequence])

    @cached_property
    def bin_reader(self) -> RangeReader:
        """Reader of the `.bin`.

        Raises:
            ObjectChangedError: the `.idx` was opened with `checked` and was replaced since.
            FormatError: the `.idx` was opened with `checked`, and the `.bin` is shorter than it requires; or it is
                longer, and its manifest contradicts the `.idx`.
        """
        if self.checked is None:
            reader: RangeReader = self._late("bin_reader")
            return reader
        prefix = self.location
        reader = open_bin(prefix, mmap=self.mmap)
        was, now = self._opened["idx"], object_identity(prefix + ".idx")
        if not same_identity(was, now):
            raise ObjectChangedError(f"{prefix}.idx: {now}, was {was} when it was opened; open it again")
        check_opened(prefix, reader, self.index)
        self._check_marks(version_marks(reader))
        return reader

    @cached_property
    def mapped_reader(self) -> MappedReader | None:
        """Reader of the `.bin` if C can read its mapped bytes, else None."""
        return as_mapped(self.bin_reader)

    @cached_property
    def sequences(self) -> Sequences:
        """Lengths and pointers of all sequences, for C."""
        return self._bound(self.index.sequence_lengths, self.index.sequence_pointers)

    def sequences_at(self, numbers: NDArray[np.int64], *, pointers: bool = False) -> Sequences:
        """Return lengths and pointers of some sequences for C, numbered from 0 in the given order.

        Args:
            numbers: numbers of the sequences in the dataset, shape (n,).
            pointers: whether to read the pointers, too; else all of them are 0.

        Returns:
            Lengths and pointers of these n sequences.
        """
        starts = self.index.sequence_pointers[numbers] if pointers else np.zeros(len(numbers), "<i8")
        return self._bound(self.index.sequence_lengths[numbers], starts)

    def _bound(self, lengths: NDArray[np.int32], pointers: NDArray[np.int64]) -> Sequences:
        code = DType.code_from_dtype(self.index.dtype)
        return Sequences(lengths, pointers, dtype_code=code, item_bytes=self.index.dtype_size)

    def locate(self, spans: Iterable[Span] | NDArray[np.int64]) -> list[Range]:
        """Return the byte ranges of spans in the `.bin`, without I/O.

        Args:
            spans: (sequence, first, count) in tokens; an iterable of tuples, or an array of shape (n, 3).

        Returns:
            (start, stop) in bytes for each span.

        Raises:
            IndexError: there is no such sequence.
            ValueError: a span leaves its sequence.
        """
        array = spans if isinstance(spans, np.ndarray) else np.array(list(spans), np.int64).reshape(-1, 3)
        return [(start, stop) for start, stop in self.locate_all(array).tolist()]

    def locate_all(self, spans: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the byte ranges of spans as an array; as `locate`.

        Args:
            spans: (sequence, first, count) in tokens, shape (n, 3).

        Returns:
            (start, stop) in bytes for each span, shape (n, 2).
        """
        if self.checked is None:
            ranges, right = self.sequences.locate(spans)
        else:
            numbers, place = np.unique(spans[:, 0], return_inverse=True)
            renumbered = np.column_stack([place.reshape(-1), spans[:, 1:]])
            ranges, right = self.sequences_at(numbers, pointers=True).locate(renumbered)
        if right < len(spans):
            sequence, first, count = spans[right].tolist()
            length = self.index.sequence_lengths[self._number(sequence)]
            span = f"{count} tokens from {first} of sequence {sequence % len(self)}"
            raise ValueError(f"{self.path_prefix}: {span}, which has {length}")
        return ranges

    def read(self, spans: Iterable[Span]) -> list[NDArray[Any]]:
        """Read many spans in one vectored read.

        Args:
            spans: (sequence, first, count) in tokens; an iterable of tuples, or an array of shape (n, 3).

        Returns:
            One array of shape (count,) in the stored dtype for each span, in order.

        Raises:
            IndexError: there is no such sequence.
            ValueError: a span leaves its sequence.
            StorageError: the store failed.
        """
        return self._arrays(self.bin_reader.read(self.locate(spans)))

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each sequence, shape (S,)."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """First sequence of each document, then S; shape (num_documents + 1,)."""
        return self.index.document_indices

    @property
    def sequence_modes(self) -> NDArray[np.int8]:
        """Mode of each sequence, shape (S,).

        Raises:
            ConfigError: the dataset was opened as text.

        Source: Megatron Core, whose property asserts the truth of an array and so always fails.
        """
        if self.index.sequence_modes is None:
            raise ConfigError(f"{self.path_prefix}: opened as text, modes need multimodal=True")
        return self.index.sequence_modes

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Identity of the data on which sample orders depend, in JSON values: equal for equal data in any place.

        The digest is XXH3 over lengths and document bounds: one pass over 4 S + 8 D bytes, no token. It detects changed
        data, but not data made to collide.
        """

        def hash_index() -> str:
            hashed = xxhash.xxh3_128(self.index.sequence_lengths.view(np.uint8).data)
            hashed.update(self.index.document_indices.view(np.uint8).data)
            return hashed.hexdigest()

        digest = self.checked.digest if self.checked else self._digest_seal.recall(hash_index)
        return {"num_sequences": len(self), "dtype": self.index.dtype.__name__, "index_digest": digest}

    @cached_property
    def token_digests(self) -> dict[str, str]:
        """Digests of the tokens, see `PairSource.token_digests`; empty for a virtual merge, or if the data changed.

        Raises:
            StorageError: the store failed.
        """
        from binidx.format.source import PairSource  # modules of commands, which training needs for this alone

        try:
            source = PairSource(self.location)
        except ObjectNotFoundError:
            return {}
        return source.token_digests() if same_identity(source.opened["idx"], self._opened["idx"]) else {}

    @cached_property
    def documents_are_sequences(self) -> bool:
        """True if each document is one sequence, so that both have the same numbers; one pass over the bounds.

        For a dataset opened with `checked`, False means unknown.
        """
        if self.checked is not None:
            return self.checked.documents_are_sequences
        bounds, count = self.index.document_indices, len(self)
        if self.index.documents_are_sequences or len(bounds) != count + 1:
            return self.index.documents_are_sequences
        blocks = (slice(first, first + BOUNDS_AT_ONCE) for first in range(0, len(bounds), BOUNDS_AT_ONCE))
        return all((bounds[block] == np.arange(block.start, min(block.stop, len(bounds)))).all() for block in blocks)

    @property
    def opened(self) -> Mapping[str, Mapping[str, Any]]:
        """Identities of the opened objects: "idx" -> identity of the `.idx`, "bin" -> identity of the `.bin`.

        An identity has JSON values: `size`, and `etag`, `generation`, `version` or `mtime`. For a virtual merge it has
        the digest of the list of parts, under "parts". If the dataset was opened with the argument `checked`, "bin" is
        absent.
        """
        return self._opened

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> bool:
        """Return whether a dataset exists under a prefix: both files, compressed ones, or a virtual merge.

        Args:
            path_prefix: URI without `.idx` and `.bin`.
            storage_options: fsspec options for this URI.

        Returns:
            True if it can be opened by this name; neither file is read.
        """
        prefix = Location.of(path_prefix, storage_options)
        if object_exists(prefix + ".idx"):
            return find_bin(prefix) is not None
        return object_exists(prefix + PARTS)

    def _number(self, sequence: int) -> int:
        count = len(self.index)
        if not -count <= sequence < count:
            raise IndexError(f"{self.path_prefix}: sequence {sequence}, it has {count}")
        return sequence % count

    def _arrays(self, views: list[memoryview]) -> list[NDArray[Any]]:
        return [np.frombuffer(view, self._stored) for view in views]

    def _get_slice(self, wanted: slice) -> Any:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError(f"{self.path_prefix}: slice with step {step}, needed a contiguous one")
        sequences = []
        if start < stop:
            # One range for all: much cheaper than a range for each, and the arrays share one buffer.
            ends = np.cumsum(self.index.sequence_lengths[start:stop], dtype=np.int64)
            first = self.index.sequence_pointers.item(start)
            views = self.bin_reader.read([(first, first + ends.item(-1) * self._stored.itemsize)])
            sequences = np.split(self._arrays(views)[0], ends[:-1])
        modes = self.index.sequence_modes
        return sequences if modes is None else (sequences, modes[start : max(start, stop)])


def check_pickled(uri: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ObjectChangedError if an object has another identity now than in the process that pickled a dataset.

    Args:
        uri: name of the object, for the error.
        was, now: identity when the dataset was pickled, and after it was opened again.
    """
    if not same_identity(was, now):
        way = "start again from the new data, or keep times when copying (cp -p, rsync -t)"
        raise ObjectChangedError(f"{uri}: {dict(now)}, was {dict(was)} in the process that pickled it; {way}")


def read_spans(
    requests: Sequence[tuple[IndexedDataset, Sequence[Span] | NDArray[np.int64]]],
) -> list[list[NDArray[Any]]]:
    """Return `dataset.read(spans)` for many datasets; remote ones are read at the same time."""
    if len(requests) == 1:
        return [dataset.read(spans) for dataset, spans in requests]
    views = read_many([(dataset.bin_reader, dataset.locate(spans)) for dataset, spans in requests])
    return [dataset._arrays(read) for (dataset, _), read in zip(requests, views, strict=True)]
