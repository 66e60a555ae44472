"""Byte ranges of samples, for fetching them early or counting them. Nothing is read.

samples of a blend ─► samples of each dataset ─► spans ─► ranges of its .bin, sorted, each byte once
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import BlendedDataset
from binidx.dataset.gpt import GPTDataset
from binidx.dataset.megatron_dataset import MegatronDataset
from binidx.format.indexed_dataset import IndexedDataset

AT_ONCE = 4096
"""Samples whose spans are in memory together: 1 MB."""


def ranges_of_samples(
    dataset: MegatronDataset | BlendedDataset, idxs: Sequence[int]
) -> list[tuple[IndexedDataset, NDArray[np.int64]]]:
    """Return the byte ranges of samples.

    Args:
        idxs: positions in serving order, as for the dataset's `__getitems__`.

    Returns:
        For each stored dataset with some of the samples: its ranges, shape (n, 2), sorted and disjoint.
    """
    found: dict[int, tuple[IndexedDataset, list[NDArray[np.int64]]]] = {}
    for each, numbers in _by_dataset(dataset, np.asarray(idxs, np.int64)):
        stored, parts = found.setdefault(id(each.dataset), (each.dataset, []))
        parts += [
            merge_ranges(stored.locate_all(_spans(each, numbers[at : at + AT_ONCE].tolist())))
            for at in range(0, len(numbers), AT_ONCE)
        ]
    return [(stored, merge_ranges(np.concatenate(parts))) for stored, parts in found.values() if parts]


def merge_ranges(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return sorted, disjoint ranges of the same bytes, shape (n, 2); adjacent ones are joined."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges[:, 1])
    first = np.flatnonzero(np.concatenate([[True], ranges[1:, 0] > reach[:-1]])[: len(ranges)])
    last = np.concatenate([first[1:], [len(ranges)]])[: len(first)] - 1
    return np.stack([ranges[first, 0], reach[last]], axis=1)


def _by_dataset(
    dataset: MegatronDataset | BlendedDataset, idxs: NDArray[np.int64]
) -> list[tuple[MegatronDataset, NDArray[np.int64]]]:
    if not isinstance(dataset, BlendedDataset):
        return [(dataset, idxs)]
    ids, numbers = dataset.dataset_index[idxs], dataset.dataset_sample_index[idxs]
    return [(dataset.datasets[int(each)], numbers[ids == each]) for each in np.unique(ids)]


def _spans(dataset: MegatronDataset, idxs: Sequence[int]) -> NDArray[np.int64]:
    """Return spans, shape (n, 3); sample by sample if a subclass replaces `spans`."""
    if isinstance(dataset, GPTDataset) and type(dataset).spans is GPTDataset.spans:
        return dataset.orders.spans(idxs)[0]
    spans: list[Any] = [*chain.from_iterable(map(dataset.spans, idxs))]
    return np.array(spans, np.int64).reshape(-1, 3)
