"""Stand-in for `megatron.core.datasets.indexed_dataset`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch.utils.data import Dataset

from binidx.compat.megatron.object_storage_utils import ObjectStorageConfig as ObjectStorageConfig
from binidx.compat.megatron.object_storage_utils import S3Config as S3Config
from binidx.compat.megatron.object_storage_utils import cache_index_file as cache_index_file
from binidx.compat.megatron.object_storage_utils import dataset_exists as dataset_exists
from binidx.compat.megatron.object_storage_utils import get_index_cache_path as get_index_cache_path
from binidx.compat.megatron.object_storage_utils import get_object_storage_access as get_object_storage_access
from binidx.compat.megatron.object_storage_utils import is_object_storage_path as is_object_storage_path
from binidx.compat.megatron.object_storage_utils import parse_s3_path as parse_s3_path
from binidx.format import indexed_dataset, indexed_dataset_builder
from binidx.format.idx import MAGIC, SequenceIndex, little_endian, parse_index
from binidx.format.idx import DType as DType
from binidx.format.idx import get_bin_path as get_bin_path
from binidx.format.idx import get_idx_path as get_idx_path
from binidx.format.idx_blocks import IndexColumns
from binidx.storage.open import open_object, read_whole
from binidx.storage.writing.publish import create_object

logger = logging.getLogger(__name__)

_INDEX_HEADER = MAGIC


class _IndexReader(SequenceIndex):
    """Our `SequenceIndex`, opened by the path of the `.idx`; `[i]` is (first byte, length, mode) of a sequence.

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

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        return self.sequence_pointers[idx], self.sequence_lengths[idx], self._mode(idx)

    def _mode(self, idx: int) -> np.int8 | None:
        return None if self.sequence_modes is None else self.sequence_modes[idx]


def _as_reader(index: SequenceIndex) -> _IndexReader:
    """Return the same arrays with Megatron's `[i]`."""
    reader = _IndexReader.__new__(_IndexReader)
    vars(reader).update(vars(index))
    return reader


class IndexedDataset(indexed_dataset.IndexedDataset, Dataset[Any]):
    """Our dataset as a torch Dataset with Megatron's arguments and two of its methods.

    Its arguments for stores are stored as attributes without effect: any URI opens, with `mmap` or without.
    """

    object_storage_config: ObjectStorageConfig | None = None
    fast_cache_load: bool = False
    sequences_per_dataset: Sequence[int] | None = None
    dtype_code: int | None = None

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: ObjectStorageConfig | None = None,
        s3_config: ObjectStorageConfig | None = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: Sequence[int] | None = None,
        dtype_code: int | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(path_prefix, multimodal, mmap, storage_options=storage_options)
        self.object_storage_config = object_storage_config or s3_config
        self.fast_cache_load = fast_cache_load
        self.sequences_per_dataset, self.dtype_code = sequences_per_dataset, dtype_code
        self.index = _as_reader(self.index)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "megatron": {name: getattr(self, name) for name in MEGATRON_ATTRIBUTES}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).update(state["megatron"])
        self.index = _as_reader(self.index)

    def get_document_indices(self) -> NDArray[np.int64]:
        return self.index.document_indices

    def set_document_indices(self, document_indices: NDArray[np.int64]) -> None:
        self.index = _as_reader(_with_documents(self.index, document_indices))
        vars(self).pop("identity", None)


MEGATRON_ATTRIBUTES = ("object_storage_config", "fast_cache_load", "sequences_per_dataset", "dtype_code")
"""Arguments that are only stored as attributes."""


def _with_documents(index: SequenceIndex, document_indices: NDArray[np.int64]) -> SequenceIndex:
    found = {field.name: getattr(index, field.name) for field in dataclasses.fields(SequenceIndex)}
    return SequenceIndex(**{**found, "document_indices": np.ascontiguousarray(document_indices, np.int64)})


class IndexedDatasetBuilder(indexed_dataset_builder.IndexedDatasetBuilder):
    """Our builder under Megatron's name."""


class _IndexWriter:
    """Writer of an `.idx` of lengths, modes and document bounds; the file appears complete, in `write`."""

    def __init__(self, idx_path: str, dtype: DTypeLike) -> None:
        self.idx_path, self.dtype = idx_path, dtype

    def __enter__(self) -> _IndexWriter:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def write(
        self, sequence_lengths: Sequence[int], sequence_modes: Sequence[int] | None, document_indices: Sequence[int]
    ) -> None:
        columns = IndexColumns(self.dtype, sequence_modes is not None)
        try:
            columns.lengths.extend(sequence_lengths)
            columns.modes.extend([] if sequence_modes is None else sequence_modes)
            columns.add_bounds(document_indices[1:], plus=0)
            with create_object(self.idx_path) as target:
                for piece in columns.format():
                    target.write(piece)
        finally:
            columns.close()


class _BinReader:
    """Reader of `count` items of a `.bin` from a byte offset, at any URI.

    An `IndexedDataset` does not use it: its own reader reads many byte ranges at a time.
    """

    mmap: bool = False

    def __init__(self, bin_path: str, *options: Any, **named: Any) -> None:
        self._reader = open_object(bin_path, mmap=self.mmap)

    def read(self, dtype: DTypeLike, count: int, offset: int) -> NDArray[Any]:
        start, kind = int(offset), little_endian(dtype)
        [view] = self._reader.read([(start, start + int(count) * kind.itemsize)])
        return np.frombuffer(view, kind)


class _MMapBinReader(_BinReader):
    mmap = True


class _FileBinReader(_BinReader):
    """Retries follow the store's settings."""


class _S3BinReader(_BinReader):
    """Accepts an `ObjectStorageConfig`, without effect."""


class _MultiStorageClientBinReader(_BinReader):
    """Same as `_S3BinReader`; msc:// needs the fsspec driver of multi-storage-client."""


OBJECT_STORAGE_BIN_READERS = {"s3": _S3BinReader, "msc": _MultiStorageClientBinReader}
