"""Tokens of one `.bin`/`.idx` pair in any store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, ObjectNotFoundError, trims_traceback
from binidx.forks import cached_property
from binidx.format.bin_file import as_prefix, find_bin, open_bin
from binidx.format.idx import CheckedIndex, DType, little_endian, open_index
from binidx.format.pair import check_opened, open_pair
from binidx.format.prefix_advice import did_you_mean
from binidx.format.prefix_listing import ListedPair
from binidx.format.tokens import SequencesInFiles, Tokens
from binidx.format.virtual import PARTS
from binidx.native.gpt_samples import Sequences
from binidx.storage.cache.seals import Seal
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.ranged_arrays import open_cached_in_blocks
from binidx.storage.ranges import version_marks
from binidx.storage.requests.remote_object import object_exists, object_identity
from binidx.storage.stores.identity import check_same, same_identity

BOUNDS_AT_ONCE = 1 << 17
"""Document bounds compared at once: 1 MiB."""


class IndexedDataset(SequencesInFiles):
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
    _digest_seal = Seal()

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
        self.path_prefix = as_prefix(Location.text_of("path_prefix", path_prefix))
        self.multimodal = multimodal
        self.mmap = mmap
        self.storage_options = storage_options
        self.checked = checked
        self._open(listed)

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
            idx_reader = open_cached_in_blocks(prefix + ".idx", self.checked.found)
            index = open_index(idx_reader, f"{prefix}.idx", self.checked, multimodal=self.multimodal)
            opened, made, marks = {"idx": dict(idx_reader.identity)}, {}, version_marks(idx_reader)
        self._check_pickled(opened)
        self._check_marks(marks)
        vars(self).update(made, _opened=opened, dtype=little_endian(index.dtype), index=index)

    @classmethod
    def open_unchecked(cls, prefix: Location) -> IndexedDataset:
        """Open a pair, of whose index parts are read as needed, and not checked."""
        checked = CheckedIndex(None, "", documents_are_sequences=False, found=None)
        return cls(prefix.uri, storage_options=prefix.options, checked=checked)

    @overload
    def __getitem__(self, idx: int | np.integer[Any]) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, idx: slice) -> list[NDArray[Any]]: ...
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
        return self._get_slice(idx) if isinstance(idx, slice) else self.get(idx)

    @cached_property
    def bin_reader(self) -> RangeReader:
        """Reader of the `.bin`.

        Raises:
            ObjectChangedError: the `.idx` was opened with `checked` and was replaced since.
            FormatError: the `.idx` was opened with `checked`, and the `.bin` is shorter than it requires; or it is
                longer, and its manifest contradicts the `.idx`.
        """
        if self.checked is None:
            return super().bin_reader
        prefix = self.location
        reader = open_bin(prefix, mmap=self.mmap)
        idx = prefix + ".idx"
        check_same(idx, self._opened["idx"], object_identity(idx), "it was opened", "open it again")
        check_opened(prefix, reader, self.index)
        self._check_marks(version_marks(reader))
        return reader

    def sequences_at(self, numbers: NDArray[np.int64], *, pointers: bool = False) -> Sequences:
        """Return lengths and pointers of some sequences for C, numbered from 0 in the given order.

        Args:
            numbers: numbers of the sequences in the dataset, shape (n,).
            pointers: whether to read the pointers, too; else all of them are 0.

        Returns:
            Lengths and pointers of these n sequences.
        """
        starts = self.index.sequence_pointers[numbers] if pointers else np.zeros(len(numbers), "<i8")
        lengths, code = self.index.sequence_lengths[numbers], DType.code_from_dtype(self.dtype)
        return Sequences(lengths, starts, dtype_code=code, item_bytes=self.dtype.itemsize)

    def _locate(self, spans: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        if self.checked is None:
            return super()._locate(spans)
        numbers, place = np.unique(spans[:, 0], return_inverse=True)
        renumbered = np.column_stack([place.reshape(-1), spans[:, 1:]])
        return self.sequences_at(numbers, pointers=True).locate(renumbered)

    @property
    def sequence_modes(self) -> NDArray[np.int8]:
        """Mode of each sequence, shape (num_sequences,).

        Raises:
            ConfigError: the dataset was opened as text.

        Source: Megatron Core, whose property asserts the truth of an array and so always fails.
        """
        if self.index.sequence_modes is None:
            raise ConfigError(f"{self.path_prefix}: opened as text, modes need multimodal=True")
        return self.index.sequence_modes

    def _digest_index(self) -> str:
        return self.checked.digest if self.checked else self._digest_seal.recall(super()._digest_index)

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

    def _get_slice(self, wanted: slice) -> Any:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError(f"{self.path_prefix}: slice with step {step}, needed a contiguous one")
        sequences = []
        if start < stop:
            # One range for all: much cheaper than a range for each, and the arrays share one buffer.
            ends = np.cumsum(self.index.sequence_lengths[start:stop], dtype=np.int64)
            first = self.index.sequence_pointers.item(start)
            views = self.bin_reader.read([(first, first + ends.item(-1) * self.dtype.itemsize)])
            sequences = np.split(self.view_tokens(views)[0], ends[:-1])
        modes = self.index.sequence_modes
        return sequences if modes is None else (sequences, modes[start : max(start, stop)])


def as_pair(tokens: Tokens) -> IndexedDataset:
    """Return tokens that are a `.bin`/`.idx` pair; raise ConfigError for those of another kind."""
    if not isinstance(tokens, IndexedDataset):
        raise ConfigError(
            f"{tokens.path_prefix}: {type(tokens).__name__}, needs a .bin/.idx pair; binidx preprocess writes it"
        )
    return tokens
