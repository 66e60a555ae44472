"""Adapter of users' low-level datasets: anything with `get` and `sequence_lengths` is read like a `.bin`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.format.idx import SequenceIndex, little_endian
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.interfaces import Range
from binidx.storage.ranges import check_ranges

TOKEN_BYTES = 8


def adapt(dataset: Any) -> Any:
    """Return the dataset itself if it is ours, or has no sequences; else adapt it to our interface."""
    if not hasattr(dataset, "get") or not hasattr(dataset, "sequence_lengths"):
        return dataset
    ours = isinstance(dataset, IndexedDataset) and type(dataset).get.__module__.startswith("binidx.")
    return dataset if ours else LowLevel(dataset)


class LowLevel(IndexedDataset):
    """User's low-level dataset with the interface of ours; all other attributes are its own.

    Args:
        own: object with `get(idx, offset, length)` and `sequence_lengths` (S,).
    """

    def __init__(self, own: Any) -> None:
        self.own = own
        self.path_prefix = str(getattr(own, "path_prefix", type(own).__name__))
        self.multimodal, self.mmap, self.storage_options = False, False, None
        lengths = np.ascontiguousarray(own.sequence_lengths, np.int32)
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        documents = np.arange(len(lengths) + 1, dtype=np.int64)
        self.index = SequenceIndex(np.int64, lengths, TOKEN_BYTES * bounds[:-1], documents, None, int(bounds[-1]))
        self.bin_reader = LowLevelReader(own, bounds)
        self._stored = little_endian(np.int64)

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # looked up while it is unpickled
            raise AttributeError(name)
        return getattr(self.own, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"own": self.own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["own"])  # type: ignore[misc]

    def __getitem__(self, idx: Any) -> Any:
        return self.own[idx]

    def get(self, idx: Any, offset: int = 0, length: int | None = None) -> Any:
        return self.own.get(idx, offset, length)


class LowLevelReader:
    """`RangeReader` of the int64 tokens of a user's dataset.

    Args:
        own: the dataset.
        bounds: first token of each sequence, then the end, shape (S + 1,).
    """

    uri = "low-level.bin"
    identity: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, own: Any, bounds: NDArray[np.int64]) -> None:
        self.own, self.bounds = own, bounds
        self.size = TOKEN_BYTES * int(bounds[-1])

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        return [self._read_tokens(start // TOKEN_BYTES, stop // TOKEN_BYTES) for start, stop in ranges]

    def _read_tokens(self, start: int, stop: int) -> memoryview:
        """Return tokens of one sequence, or of several if ranges were joined."""
        pieces = [np.empty(0, np.int64)]
        while start < stop:
            sequence = int(np.searchsorted(self.bounds, start, side="right")) - 1
            first, end = self.bounds.item(sequence), min(stop, self.bounds.item(sequence + 1))
            pieces.append(np.asarray(self.own.get(sequence, offset=start - first, length=end - start)))
            start = end
        return np.concatenate(pieces, dtype=little_endian(np.int64), casting="unsafe").view(np.uint8).data
