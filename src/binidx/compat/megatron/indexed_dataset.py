"""Stand-in for `megatron.core.datasets.indexed_dataset`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from binidx.format import indexed_dataset
from binidx.format.idx import DType as DType
from binidx.format.idx import SequenceIndex, parse_index
from binidx.format.idx import get_bin_path as get_bin_path
from binidx.format.idx import get_idx_path as get_idx_path
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder as IndexedDatasetBuilder
from binidx.storage.open import open_object, read_whole


class _IndexReader(SequenceIndex):
    """Our `SequenceIndex`, opened by the path of the `.idx`.

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
    """Our dataset as a torch Dataset with Megatron's arguments and two of its methods.

    Its arguments for stores are attributes without effect: any URI opens, with `mmap` or without.
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
    ) -> None:
        super().__init__(path_prefix, multimodal, mmap, storage_options=storage_options)
        self.object_storage_config, self.fast_cache_load = object_storage_config or s3_config, fast_cache_load
        self.sequences_per_dataset, self.dtype_code = sequences_per_dataset, dtype_code

    def get_document_indices(self) -> NDArray[np.int64]:
        """Return the first sequence of each document, then the end, shape (num_documents + 1,)."""
        return self.index.document_indices

    def set_document_indices(self, document_indices: NDArray[np.int64]) -> None:
        """Replace them, in this object."""
        bounds = np.ascontiguousarray(document_indices, np.int64)
        self.index = dataclasses.replace(self.index, document_indices=bounds, documents_are_sequences=False)
        vars(self).pop("identity", None)
