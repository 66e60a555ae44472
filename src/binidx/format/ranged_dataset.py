"""A dataset whose `.idx` stays where it lies: of 6 GB, what some samples need is read, and no more."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError, ObjectChangedError
from binidx.format.bin_object import open_bin
from binidx.format.idx import HEADER, DType, SequenceIndex, get_idx_path, parse_counts, stored
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.ranged import RangedArray, beneath_copy, open_in_ranges
from binidx.native import Sequences
from binidx.storage import filesystem
from binidx.storage.look_up import Found
from binidx.storage.publish import object_identity
from binidx.storage.ranges import RangeReader

Fields = Mapping[str, Any]


class RangedDataset(IndexedDataset):
    """An `IndexedDataset` whose arrays are `RangedArray`s, over an `.idx` that somebody has read whole and found right.

    Args:
        path_prefix, mmap, storage_options: as of an IndexedDataset.
        content: `identity` of that dataset: "num_sequences", "index_digest".
        one_each: whether each document is one sequence, where that is known.
        found: what its `.idx` is known by; None: whatever lies there, as `opened` tells.

    The rules of the format are not checked, but for the header and the counts. What is read is pinned to the object
    that was opened.

    Raises:
        FormatError: the header breaks a rule, or tells of another dataset.
        ObjectChangedError: a remote `.idx` is not the one that was found.
    """

    def __init__(
        self,
        path_prefix: str,
        content: Fields,
        found: Found | None = None,
        *,
        one_each: bool = False,
        mmap: bool = True,
        storage_options: Fields | None = None,
    ) -> None:
        self.path_prefix, self.mmap, self.storage_options = path_prefix, mmap, storage_options
        self.multimodal, self._content = False, content
        uri, count = get_idx_path(path_prefix), int(content["num_sequences"])
        reader = open_in_ranges(uri, storage_options, found=found)
        lengths: Any = RangedArray(reader, HEADER.size, "<i4", (count,))
        pointers: Any = RangedArray(reader, HEADER.size + 4 * count, "<i8", (count,))
        last = [each.range_of(count - 1) for each in (lengths, pointers)] if count else []
        header, *ends = beneath_copy(reader).read([(0, HEADER.size), *last])
        dtype, num_sequences, num_bounds, _ = parse_counts(header, reader.size, uri=uri)
        if num_sequences != count:
            raise FormatError(f"{uri}: {num_sequences} sequences, needed {count}")
        bounds: Any = RangedArray(reader, HEADER.size + 12 * count, "<i8", (num_bounds,))
        length, pointer = (int.from_bytes(end, "little") for end in ends) if ends else (0, 0)
        num_tokens = pointer // np.dtype(dtype).itemsize + length
        self.index = SequenceIndex(dtype, lengths, pointers, bounds, None, num_tokens, one_each)
        self._opened = {"idx": dict(getattr(reader, "identity", {}))}
        self._stored = stored(dtype)

    @functools.cached_property
    def bin_reader(self) -> RangeReader:  # type: ignore[override] # opened when the first token is read
        """The tokens; ObjectChangedError where the `.idx` is another by now, so that they may be of that."""
        reader = open_bin(self.path_prefix, mmap=self.mmap, storage_options=self.storage_options)
        uri = get_idx_path(self.path_prefix)
        now = object_identity(uri, self.storage_options)
        if not filesystem.same_identity(self._opened["idx"], now):
            raise ObjectChangedError(f"{uri}: {now}, was {self._opened['idx']} when it was opened; open it again")
        if reader.size < self.index.num_bytes:
            raise FormatError(f"{reader.uri}: {reader.size} bytes, its .idx needs {self.index.num_bytes}")
        return reader

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "num_sequences": len(self),
            "dtype": self.index.dtype.__name__,
            "index_digest": self._content["index_digest"],
        }

    @property
    def one_each(self) -> bool:
        """As far as it is known."""
        return self.index.one_each

    def locate_all(self, spans: NDArray[np.int64]) -> NDArray[np.int64]:
        wanted, place = np.unique(spans[:, 0], return_inverse=True)
        ranges, right = self.some_sequences(wanted, pointers=True).locate(
            np.column_stack([place.reshape(-1), spans[:, 1:]])
        )
        if right < len(spans):
            raise self._outside(*spans[right].tolist())
        return ranges

    def some_sequences(self, numbers: NDArray[np.int64], *, pointers: bool = False) -> Sequences:
        """These, renumbered from 0, as C wants them; without `pointers` only their lengths."""
        lengths = self.index.sequence_lengths[numbers]
        places = self.index.sequence_pointers[numbers] if pointers else np.zeros(len(numbers), "<i8")
        return Sequences(
            lengths, places, dtype_code=DType.code_from_dtype(self.index.dtype), item_bytes=self.index.dtype_size
        )
