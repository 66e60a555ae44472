"""Sequences of tokens by number: the interface of every source of tokens, and the base of those in files.

span   (sequence, first, count)      in tokens
range  start = sequence_pointers[sequence] + first * dtype_size,  stop = start + count * dtype_size

    Tokens ─ StoredTokens ┬ SequencesInFiles ┬ IndexedDataset     `.bin` and `.idx`
           │              │                  └ JsonLines          rows of text
           │              └ PlainTokens                           bytes of a `.bin` as one sequence, without its `.idx`
           └ ComputedTokens                                      made up, or read by a user's own object
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, SupportsIndex, cast, runtime_checkable

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError, ObjectChangedError, redacted
from binidx.forks import cached_property, opening
from binidx.format.idx import DType, SequenceIndex
from binidx.native.gpt_samples import Sequences
from binidx.registries import Registrations
from binidx.storage.interfaces import MappedReader, Range, RangeReader, VersionMark
from binidx.storage.location import Location
from binidx.storage.ranges import as_capability, read_many
from binidx.storage.stores.identity import DATES_OFF, check_same, describe_mark, is_rewritten
from binidx.storage.stores.local import mark_to_pickle

Span = tuple[int, int, int]
"""(sequence, first, count) in tokens: `count` tokens of `sequence` from its token `first`."""


@runtime_checkable
class Tokens(Protocol):
    """Sequences of tokens that are read by spans; samples are made of nothing else.

    They are pickled to spawned workers of a loader, and are safe to read from several threads: a loader reads ahead in
    threads if it has a `look_ahead`, or if another source of the blend is in a store.
    """

    path_prefix: str
    """Name of the tokens, for errors."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens that `read` returns: an `np.dtype`, one of `DType`, in the byte order of the machine."""

    @property
    def sequence_lengths(self) -> NDArray[Any]:
        """Number of tokens of each sequence, shape (num_sequences,): 1-D, int32, contiguous."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Identity of the data on which sample orders depend, in JSON values: equal for equal data in any place.

        That of a `.bin` is equal to `identify_sequences(index, digest_index(index))` with `index = index_of(tokens)`,
        if its lengths and dtype are the same, and each of its documents is one sequence.
        """

    def read(self, spans: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return the tokens of spans, one contiguous array of shape (count,) and of `dtype` for each.

        Args:
            spans: (sequence, first, count) in tokens, shape (n, 3).
        """


class StoredTokens(ABC):
    """Base of tokens whose spans are ranges of bytes, so that they are read ahead, cached and joined with other reads.

    Attributes:
        dtype: type of a token in these bytes.
    """

    dtype: np.dtype[Any]

    @property
    @abstractmethod
    def bin_reader(self) -> RangeReader:
        """Reader of the bytes."""

    @abstractmethod
    def locate_all(self, spans: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the byte ranges of spans.

        Args:
            spans: (sequence, first, count) in tokens, shape (n, 3).

        Returns:
            (start, stop) in bytes for each span, shape (n, 2).
        """

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

    def read(self, spans: Iterable[Span] | NDArray[np.int64]) -> list[NDArray[Any]]:
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
        return self.view_tokens(self.bin_reader.read(self.locate(spans)))

    def view_tokens(self, views: Iterable[memoryview]) -> list[NDArray[Any]]:
        """Return read bytes as arrays of tokens."""
        return [np.frombuffer(view, self.dtype) for view in views]


@dataclass(eq=False)
class PlainTokens(StoredTokens):
    """Tokens of a reader as one sequence, whose bounds an order knows: no `.idx` is read. Implements `Tokens`.

    Args:
        path_prefix: name, for errors.
        dtype: type of a token.
        reader: of the bytes.
    """

    path_prefix: str
    dtype: np.dtype[Any]
    reader: RangeReader

    @property
    def bin_reader(self) -> RangeReader:
        return self.reader

    @property
    def sequence_lengths(self) -> NDArray[np.int64]:
        """Number of tokens, shape (1,)."""
        return np.array([self.reader.size // self.dtype.itemsize])

    @property
    def identity(self) -> Mapping[str, Any]:
        """Identity of the bytes."""
        return {**self.reader.identity, "dtype": self.dtype.name}

    def locate_all(self, spans: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.cumsum(spans[:, 1:], axis=1) * self.dtype.itemsize  # (first, first + count): half the time of `stack`


class SequencesInFiles(StoredTokens):
    """Base of sequences that an index locates in a file. Unpickled, they open their files at the first use.

    Attributes:
        path_prefix: URI, without the suffixes of the files.
        storage_options: fsspec options for this URI.
        index: lengths, positions and documents of the sequences.
    """

    path_prefix: str
    storage_options: Mapping[str, Any] | None
    index: SequenceIndex
    _opened: Mapping[str, Mapping[str, Any]]
    _marks: Mapping[str, VersionMark] = MappingProxyType({})

    _pickled: ClassVar[Sequence[str]]

    @abstractmethod
    def _open(self) -> None:
        """Open the files and set `index` and `dtype`; after unpickling, they must be those of the pickled sequences."""

    @property
    def location(self) -> Location:
        """Prefix and storage options."""
        return Location(self.path_prefix, self.storage_options)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Open the files at the first use after unpickling."""
            if name not in ("index", "dtype") or "_registrations" not in vars(self):
                raise AttributeError(f"{type(self).__name__} has no {name}")
            return self._late(name)

    @cached_property
    def bin_reader(self) -> RangeReader:
        """Reader of the tokens."""
        return cast(RangeReader, self._late("bin_reader"))

    def _late(self, name: str) -> Any:
        """Open the files of an unpickled dataset unless another thread did; return the attribute `name`, now set."""
        with opening(self):
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

    def _check_pickled(self, opened: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise ObjectChangedError if an object has another identity now than in the process that pickled this.

        Args:
            opened: suffix of each opened object -> its identity.
        """
        for end, was in vars(self).get("_opened", {}).items():
            way = "start again from the new data, or keep times when copying (cp -p, rsync -t)"
            check_same(f"{self.location}{end and '.'}{end}", was, opened[end], "it was pickled", way)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self._pickled}
        marks = {uri: mark_to_pickle(uri, mark) for uri, mark in self._marks.items()}
        return {**state, "_marks": marks, "_registrations": Registrations()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        """Return prefix, counts and dtype; an unpickled dataset is not opened for it."""
        counts = "not open"
        if "index" in vars(self):
            index = self.index
            counts = f"{len(index):,} sequences, {index.num_tokens:,} tokens, {index.dtype.__name__}"
        return f"{type(self).__name__}({redacted(self.path_prefix)}, {counts})"

    @cached_property
    def mapped_reader(self) -> MappedReader | None:
        """Reader of the `.bin` if C can read its mapped bytes, else None."""
        return as_capability(self.bin_reader, MappedReader)

    @cached_property
    def sequences(self) -> Sequences:
        """Lengths and pointers of all sequences, for C."""
        return self.index.bind()

    def locate_all(self, spans: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the byte ranges of spans as an array; as `locate`.

        Args:
            spans: (sequence, first, count) in tokens, shape (n, 3).

        Returns:
            (start, stop) in bytes for each span, shape (n, 2).
        """
        ranges, right = self._locate(spans)
        if right < len(spans):
            sequence, first, count = spans[right].tolist()
            length = self.index.sequence_lengths[self._number(sequence)]
            span = f"{count} tokens from {first} of sequence {sequence % len(self)}"
            raise ValueError(f"{self.path_prefix}: {span}, which has {length}")
        return ranges

    def _locate(self, spans: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Return the byte ranges of spans, and the number of the first span that leaves its sequence, n for none."""
        return self.sequences.locate(spans)

    def get(self, idx: int | np.integer[Any], offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return some tokens of one sequence; in a multimodal dataset a pair with its mode, which the type leaves out.

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
        if not isinstance(idx, int | np.integer | SupportsIndex):  # the last takes a microsecond
            raise TypeError(f"{self.path_prefix}: index of type {type(idx).__name__}, needed an integer or a slice")
        sequence = self._number(idx.__index__())
        count = max(0, self.index.sequence_lengths.item(sequence) - offset) if length is None else length
        tokens = self.read([(sequence, offset, count)])[0]
        return tokens if (modes := self.index.sequence_modes) is None else cast(Any, (tokens, modes[sequence]))

    def _number(self, sequence: int) -> int:
        count = len(self.index)
        if not -count <= sequence < count:
            raise IndexError(f"{self.path_prefix}: sequence {sequence}, it has {count}")
        return sequence % count

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Number of tokens of each sequence, shape (num_sequences,)."""
        return self.index.sequence_lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """First sequence of each document, then num_sequences; shape (num_documents + 1,)."""
        return self.index.document_indices

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Identity of the data on which sample orders depend, in JSON values: equal for equal data in any place.

        The digest is XXH3 over lengths and document bounds: one pass over 4 S + 8 D bytes, no token. It detects changed
        data, but not data made to collide.
        """
        return identify_sequences(self.index, self._digest_index())

    def _digest_index(self) -> str:
        """Return the digest in the identity."""
        return digest_index(self.index)


def identify_sequences(index: SequenceIndex, digest: str) -> dict[str, Any]:
    """Return the identity of sequences; see `SequencesInFiles.identity`."""
    return {"num_sequences": len(index), "dtype": index.dtype.__name__, "index_digest": digest}


def digest_index(index: SequenceIndex) -> str:
    """Return the XXH3 of lengths and document bounds."""
    hashed = xxhash.xxh3_128(index.sequence_lengths.view(np.uint8).data)
    hashed.update(index.document_indices.view(np.uint8).data)
    return hashed.hexdigest()


def index_of(tokens: Tokens) -> SequenceIndex:
    """Return the index of opened tokens; without an `.idx`, each sequence is a document.

    Args:
        tokens: of any kind.
    """
    if isinstance(tokens, SequencesInFiles):
        return tokens.index
    lengths = np.asarray(tokens.sequence_lengths, np.int32)
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    starts, documents = tokens.dtype.itemsize * bounds[:-1], np.arange(len(bounds), dtype=np.int64)
    return SequenceIndex(tokens.dtype.type, lengths, starts, documents, None, int(bounds[-1]))


def bind_sequences(tokens: Tokens) -> Sequences:
    """Return lengths and pointers of all sequences, for C."""
    return tokens.sequences if isinstance(tokens, SequencesInFiles) else index_of(tokens).bind()


def check_tokens(tokens: Tokens) -> None:
    """Raise ConfigError unless the members of a user's tokens have the types of `Tokens`."""
    name = f"{tokens.path_prefix}: {type(tokens).__name__}"
    dtype, lengths = tokens.dtype, tokens.sequence_lengths
    if not isinstance(dtype, np.dtype) or not dtype.isnative or dtype.name not in DType.__members__:
        raise ConfigError(f"{name}.dtype: found {dtype!r}, needs a numpy.dtype: {', '.join(DType.__members__)}")
    if not _is_array(lengths, np.dtype(np.int32)) or lengths.ndim != 1:
        raise ConfigError(
            f"{name}.sequence_lengths: found {_describe(lengths)}, needs a contiguous array of int32, shape (S,)"
        )
    identity = tokens.identity
    try:
        json.dumps(dict(identity))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}.identity: found {identity!r}, needs a mapping of JSON values ({error})") from None


def read_spans(requests: Sequence[tuple[Tokens, NDArray[np.int64]]]) -> list[list[NDArray[Any]]]:
    """Return the tokens of spans of many sources; those in stores are read at the same time.

    Raises:
        FormatError: a user's `read` returned other arrays than one of the needed shape and dtype for each span.
    """
    if len(requests) == 1 and isinstance(requests[0][0], StoredTokens):
        return [tokens.read(spans) for tokens, spans in requests]
    stored = [(tokens, spans) for tokens, spans in requests if isinstance(tokens, StoredTokens)]
    views = iter(read_many([(tokens.bin_reader, tokens.locate(spans)) for tokens, spans in stored]))
    return [
        tokens.view_tokens(next(views)) if isinstance(tokens, StoredTokens) else _read_checked(tokens, spans)
        for tokens, spans in requests
    ]


def _read_checked(tokens: Tokens, spans: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Return `tokens.read(spans)` of a user's tokens; raise FormatError unless it has the tokens of each span."""
    pieces, dtype, name = [*tokens.read(spans)], tokens.dtype, f"{tokens.path_prefix}: {type(tokens).__name__}.read"
    if len(pieces) != len(spans):
        raise FormatError(f"{name}: wrong number of arrays (found {len(pieces)}, need {len(spans)}, one for each span)")
    for piece, (sequence, first, count) in zip(pieces, spans.tolist(), strict=True):
        if not _is_array(piece, dtype) or piece.shape != (count,):
            found = f"found {_describe(piece)}, need a contiguous array of {dtype}, shape ({count},)"
            raise FormatError(f"{name}: wrong for {count} tokens from {first} of sequence {sequence} ({found})")
    return pieces


def _is_array(value: Any, dtype: np.dtype[Any]) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == dtype and value.flags.c_contiguous


def _describe(value: Any) -> str:
    """Return the type of a value; of an array its dtype, shape and strides."""
    if not isinstance(value, np.ndarray):
        return type(value).__name__
    return f"{value.dtype}, shape {value.shape}, strides {value.strides}"
