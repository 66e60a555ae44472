"""The train split of a run that is asked about, not trained on: of its indices, the ranges that an answer needs.

    manifest ─► its arrays and the .idx, pinned ─► shuffle_index of the samples ─► their rows of sample_index
             ─► their stretches of document_index ─► lengths of these sequences                four turns, all at once

A source of a blend is opened when one of its samples is asked for. What has no cache, or one that cannot be proven
without all its bytes (`index.ranged`), is opened as for training: loaded whole, or built.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset import blended as whole_blended
from binidx.dataset import gpt as whole_gpt
from binidx.dataset.builder import BlendedMegatronDatasetBuilder, Sizes, sizes_per_dataset
from binidx.dataset.config import BlendedMegatronDatasetConfig, GPTDatasetConfig
from binidx.dataset.megatron_dataset import MegatronDataset, required
from binidx.dataset.split import Bookends, Split, SplitMatrix, normalize, split_range
from binidx.errors import FormatError, IndexBuildError, StorageError
from binidx.format.listed import Listed
from binidx.format.ranged_dataset import RangedDataset
from binidx.index.build_context import BuildContext
from binidx.index.gpt import ARRAYS
from binidx.index.origin import ONE_EACH, origin_of
from binidx.index.ranged import fits, open_manifest
from binidx.native import Orders
from binidx.storage.filesystem import same_object
from binidx.storage.look_up import found_of
from binidx.storage.threads import Threads

Numbers = NDArray[np.int64]
Item = TypeVar("Item")
Result = TypeVar("Result")
CLOSED, OPENING, OPEN = range(3)
UNPROVEN = (FormatError, StorageError, ValueError, KeyError, TypeError)

logger = logging.getLogger(__name__)


class RangedOrders:
    """`native.Orders` over arrays of which only what is asked for is read: the same C, given these parts alone.

    Args:
        shuffle_index, sample_index, document_index: `RangedArray`s.
        dataset: whose sequences they name.
        add_extra_token: as of Orders.
    """

    def __init__(
        self,
        shuffle_index: Any,
        sample_index: Any,
        document_index: Any,
        dataset: RangedDataset,
        *,
        add_extra_token: bool,
    ) -> None:
        self.arrays = shuffle_index, sample_index, document_index
        self.dataset, self.add_extra_token = dataset, add_extra_token

    def spans(self, served: Sequence[int]) -> tuple[Numbers, Numbers]:
        """As of Orders: (sequence, first token, tokens), shape (n, 3), and the bounds of each sample.

        Raises:
            IndexError: there is no such sample.
            IndexBuildError: the indices do not belong together.
        """
        shuffle_index, sample_index, document_index = self.arrays
        count = len(shuffle_index)
        numbers = np.asarray(served, np.int64).reshape(-1)
        if len(numbers) and not -count <= numbers.min() <= numbers.max() < count:
            raise IndexError(f"samples {numbers.min()} to {numbers.max()}, there are {count}")
        rows = shuffle_index[numbers % max(count, 1)].astype(np.int64)
        try:
            ends = sample_index[np.stack([rows, rows + 1], axis=1)].reshape(-1, 2)
            first, stop = ends[::2, 0].astype(np.int64), ends[1::2, 0].astype(np.int64) + 1
            sequences, place = np.unique(document_index.runs(first, stop), return_inverse=True)
            some = self.dataset.some_sequences(sequences.astype(np.int64))
        except IndexError as error:
            raise IndexBuildError(f"the indices do not belong together: {error}") from error
        # The parts, renumbered: sample i has rows 2 i and 2 i + 1, its stretch lies where the one before ends.
        before = np.cumsum(stop - first) - (stop - first)
        ends[::2, 0], ends[1::2, 0] = before, before + (stop - first) - 1
        shuffled = np.arange(0, len(ends), 2, dtype=np.uint32)
        orders = Orders(shuffled, ends, place.reshape(-1).astype(np.int32), some, add_extra_token=self.add_extra_token)
        spans, bounds = orders.spans(range(len(numbers)))
        spans[:, 0] = sequences[spans[:, 0]]
        return spans, bounds


class GPTDataset(whole_gpt.GPTDataset):
    """A GPT dataset that is opened when it is asked something; of the name by which its index is cached.

    Args:
        bookends: which part of the sequences the split has.

    It has `orders`, `epochs_of`, `dataset`, `len` and the three indices; tokens are read as spans of `dataset`.
    """

    def __init__(
        self,
        dataset_path: str,
        bookends: Bookends,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        self.dataset_path, self.num_samples = dataset_path, num_samples
        self.index_split, self.config = index_split, config
        self._bookends, self._state, self._lock = bookends, CLOSED, threading.RLock()
        self.unique_identifiers = self._identifiers()

    def __reduce__(self) -> Any:
        return type(self), (self.dataset_path, self._bookends, self.num_samples, self.index_split, self.config)

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not there yet: all of it comes at once, to whoever asks first.
        if name.startswith("__"):
            raise AttributeError(name)
        with self._lock:
            if self._state != CLOSED:
                return object.__getattribute__(self, name)
            self._state = OPENING
            try:
                if not self._open_ranged():
                    self._open_whole()
                self._state = OPEN
            finally:
                self._state = OPEN if self._state == OPEN else CLOSED
        return object.__getattribute__(self, name)

    @property
    def is_open(self) -> bool:
        """Whether it was asked something."""
        return self._state == OPEN

    def _open_ranged(self) -> bool:
        prefix, options = str(self.dataset_path), self.config.storage_options
        files = self._files(prefix)
        try:
            opened = open_manifest(files, ARRAYS)
            if opened is None:
                return False
            manifest, arrays = opened
            known = manifest.data.get("idx")
            dataset = RangedDataset(
                prefix,
                manifest.content,
                found_of(known),
                one_each=manifest.content.get(ONE_EACH, False),
                mmap=self.config.mmap_bin_files,
                storage_options=options,
            )
            documents: Any = split_range(self._bookends, len(dataset))
        except UNPROVEN as error:
            logger.info("%s: opened as a whole: %s", prefix, error)
            return False
        vars(self).update(_documents=documents)
        if not (same_object(known, origin_of(dataset).data()["idx"]) and fits(manifest, self._fingerprint())):
            return False
        vars(self).update(dataset=dataset, **arrays)
        return True

    def _open_whole(self) -> None:
        low_level = self.build_low_level_dataset(self.dataset_path, self.config)
        documents: Any = split_range(self._bookends, len(low_level))
        super().__init__(low_level, self.dataset_path, documents, self.num_samples, self.index_split, self.config)

    @property
    def is_ranged(self) -> bool:
        """Whether its arrays stayed where they lie."""
        return isinstance(self.dataset, RangedDataset)

    @property
    def orders(self) -> Any:
        if not isinstance(self.dataset, RangedDataset):
            return super().orders
        arrays = self.shuffle_index, self.sample_index, self.document_index
        return RangedOrders(*arrays, self.dataset, add_extra_token=self.config.add_extra_token_to_sequence)


class BlendedDataset(whole_blended.BlendedDataset):
    """A blend that is opened when it is asked something, without opening its datasets."""

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float] | Sequence[int],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.datasets, self.config, self.size = list(datasets), config, size
        self.split = self.datasets[0].index_split
        self.weights = list(weights) if size is None else normalize(list(weights))
        self.unique_identifiers = self._identifiers()

    def __getattr__(self, name: str) -> Any:
        if name not in whole_blended.ARRAYS:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        arrays: Any = self._open_ranged() or dict(zip(whole_blended.ARRAYS, self._load_or_build(), strict=True))
        vars(self).update(arrays)
        return arrays[name]

    def _open_ranged(self) -> Any:
        if self.config.path_to_cache is None:
            return None
        try:
            opened = open_manifest(self._cache(self.config.path_to_cache).files, whole_blended.ARRAYS)
        except UNPROVEN as error:
            logger.info("%s blend: opened as a whole: %s", self.split.name, error)
            return None
        return opened[1] if opened and fits(opened[0], {}) else None


class RangedBuilder(BlendedMegatronDatasetBuilder):
    """Builds nothing: a run's train split, each dataset of it to be opened when it is asked something. GPT only."""

    blended = BlendedDataset

    def _build_prefixes(
        self,
        prefixes: Sequence[str],
        weights: Sequence[float] | None,
        matrix: SplitMatrix,
        sizes: Sizes,
        context: BuildContext,
    ) -> list[list[MegatronDataset | None]]:
        asked = sizes_per_dataset(len(prefixes), weights, matrix, sizes, self.config.mid_level_dataset_surplus)
        return [self._build_prefix(prefix, matrix, each, context) for prefix, each in zip(prefixes, asked, strict=True)]

    def _build_prefix(
        self, prefix: str | None, matrix: SplitMatrix, sizes: Sizes, context: BuildContext, listed: Listed | None = None
    ) -> list[MegatronDataset | None]:
        config: Any = self.config
        return [
            None if bookends is None else GPTDataset(required(prefix), bookends, size, split, config)
            for split, bookends, size in zip(Split, matrix, sizes, strict=True)
        ]

    def _blend(
        self,
        split: Split,
        weights: Sequence[float] | None,
        sizes: Sizes,
        datasets_per_prefix: list[list[MegatronDataset | None]],
        context: BuildContext,
    ) -> whole_blended.BlendedDataset | None:
        if split is not Split.train:
            return None
        if weights is None or sizes[split.value] is None:
            # Their lengths are the weights, and part of the blend's name.
            at_once(len, [splits[split.value] for splits in datasets_per_prefix if splits[split.value]])
        return super()._blend(split, weights, sizes, datasets_per_prefix, context)


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` of each, in their order, several at the same time; the first one's error, after all have ended."""
    pending = [_submit(partial(work, item)) for item in items[1:]]
    try:
        first = [work(item) for item in items[:1]]
    finally:
        wait(pending)
    return first + [each.result() for each in pending]


_submit = Threads("binidx-ranged", lambda: 64).submit
