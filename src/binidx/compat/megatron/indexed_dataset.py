"""Stand-in for `megatron.core.datasets.indexed_dataset`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from binidx.errors import FormatError
from binidx.format import indexed_dataset, indexed_dataset_builder
from binidx.format.idx import DType as DType
from binidx.format.idx import SequenceIndex, parse_index
from binidx.format.idx import get_bin_path as get_bin_path
from binidx.format.idx import get_idx_path as get_idx_path
from binidx.format.index_columns import SpooledColumn
from binidx.format.indexed_dataset_builder import as_tokens
from binidx.format.prefix_listing import ListedPair
from binidx.storage.open import open_object, read_whole


class _IndexReader(SequenceIndex):
    """binidx's `SequenceIndex`, opened by the path of the `.idx`.

    `sequences_per_dataset` and `dtype_code` have no effect: the header, which has both, is read.
    """

    def __init__(
        self,
        idx_path: str,
        multimodal: bool,
        sequences_per_dataset: Sequence[int] | None = None,
        dtype_code: int | None = None,
    ) -> None:
        view = read_whole(open_object(idx_path, cache="disk"))
        vars(self).update(vars(parse_index(view, uri=idx_path, multimodal=multimodal)))


ATTRIBUTES = ("object_storage_config", "fast_cache_load", "sequences_per_dataset", "dtype_code")
"""Arguments that `IndexedDataset` only stores as attributes, as Megatron does."""


class IndexedDataset(indexed_dataset.IndexedDataset, Dataset[Any]):
    """binidx's dataset as a torch Dataset, with Megatron's arguments and two of Megatron's methods.

    Megatron's arguments for stores only become attributes: any URI opens without them, with `mmap` or without.
    """

    _pickled = (*indexed_dataset.IndexedDataset._pickled, *ATTRIBUTES)

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: Any = None,
        s3_config: Any = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: Sequence[int] | None = None,
        dtype_code: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        listed: ListedPair | None = None,
    ) -> None:
        super().__init__(path_prefix, multimodal, mmap, storage_options=storage_options, listed=listed)
        self.object_storage_config, self.fast_cache_load = object_storage_config or s3_config, fast_cache_load
        self.sequences_per_dataset, self.dtype_code = sequences_per_dataset, dtype_code

    def get_document_indices(self) -> NDArray[np.int64]:
        """Return the first sequence of each document, then the end, shape (num_documents + 1,)."""
        return self.index.document_indices

    def set_document_indices(self, document_indices: NDArray[np.int64]) -> None:
        """Replace the document indices, in this object only."""
        bounds = np.ascontiguousarray(document_indices, np.int64)
        self.index = dataclasses.replace(self.index, document_indices=bounds, documents_are_sequences=False)
        vars(self).pop("identity", None)


class IndexedDatasetBuilder(indexed_dataset_builder.IndexedDatasetBuilder):
    """binidx's builder with two of Megatron's lists, copied at each access, and Megatron's `add_documents`."""

    @property
    def sequence_lengths(self) -> list[int]:
        """Number of tokens of each sequence."""
        return self._values(self._columns.lengths)

    @property
    def sequence_modes(self) -> list[int] | None:
        """Mode of each sequence; None unless multimodal."""
        return self._values(self._columns.modes) if self.multimodal else None

    def _values(self, column: SpooledColumn) -> list[int]:
        self._check_open()
        return [value for block in column.blocks() for value in block.tolist()]

    def add_documents(
        self,
        documents: Any,
        modes: Sequence[int] | None = None,
        eod_token: int | None = None,
        chunk_size: int = 1_000_000,
    ) -> None:
        """Append documents of one sequence each.

        Args:
            documents: awkward array of tokens: a list of numbers for each document.
            modes: mode of each document; zeros by default.
            eod_token: token to append to each document.
            chunk_size: number of documents written at a time.

        Raises:
            FormatError: `modes` has another length than `documents`, or a token does not fit the dtype; documents of
                earlier chunks are written.
            ModuleNotFoundError: awkward is not installed.

        Source: Megatron Core 0.20, which wraps tokens that the dtype cannot hold.
        """
        import awkward

        if modes is not None and len(modes) != len(documents):
            raise FormatError(f"{self.bin_path}: {len(modes)} modes, needed one for each of {len(documents)} documents")
        for start in range(0, len(documents), chunk_size):
            chunk = documents[start : start + chunk_size]
            lengths = np.asarray(awkward.num(chunk, axis=1))
            tokens = as_tokens(np.asarray(awkward.flatten(chunk)), self.dtype, self.bin_path)
            if eod_token is not None:
                end = as_tokens([eod_token], self.dtype, self.bin_path)
                tokens, lengths = np.insert(tokens, np.cumsum(lengths), end), lengths + 1
            before = len(self._columns.lengths)
            self._append(tokens, lengths.tolist(), None if modes is None else modes[start : start + chunk_size])
            with self._closed_on_failure():
                self._columns.add_bounds(np.arange(1, len(lengths) + 1), plus=before)
