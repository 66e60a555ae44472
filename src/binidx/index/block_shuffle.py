"""An order that keeps neighbours together: blocks of samples as they are stored, a few of which are mixed.

    stored       [0 1 2 3][4 5 6 7][8 9 10 11][12 13 14 15]       blocks of 4 samples, one epoch
    blocks       [8 9 10 11][0 1 2 3] | [12 13 14 15][4 5 6 7]    shuffled, then taken 2 at a time
    served        1 9 8 3 0 11 2 10   |  5 14 12 6 7 13 4 15      each such window shuffled

What it costs in randomness: the samples of a batch come from at most `blocks_mixed` places of the corpus, where a full
shuffle takes each from its own. Of two samples of a window a share of 1 / blocks_mixed lie in the same block, within
block_samples * sequence_length tokens of each other. So a block should be small against the stretch in which a corpus
keeps to a topic, and a window large against a global batch.

What it buys: a sample is one range of bytes and not one per document, and all bytes of a block are wanted within one
window: caches of chunks, and codecs of segments, fetch and decode nothing in vain.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.shuffle import shuffle_dtype
from binidx.native import RandomState


def build_block_shuffle_index(
    samples_per_epoch: NDArray[np.int64], block_samples: int, blocks_mixed: int, rng: RandomState
) -> NDArray[Any]:
    """The order in which samples that are numbered as they are stored are served.

    Args:
        samples_per_epoch: samples that end in each epoch, shape (num_epochs,); an epoch is served before the next.
        block_samples: neighbours that stay in one window; the last block of an epoch may have fewer.
        blocks_mixed: blocks of a window.
        rng: draws for each epoch the order of its blocks, and then that within each window.

    Returns:
        Shape (samples_per_epoch.sum(),), uint32, or int64 from 2**32 - 2 samples on. The order of an epoch does not
        depend on how many follow it.

    Raises:
        IndexBuildError: blocks or windows of nothing.

    Source: ours.
    """
    if block_samples < 1 or blocks_mixed < 1:
        raise IndexBuildError(f"blocks of {block_samples} samples, {blocks_mixed} mixed; both need at least 1")
    index = np.arange(samples_per_epoch.sum(), dtype=shuffle_dtype(int(samples_per_epoch.sum())))
    stop = 0
    for count in samples_per_epoch.tolist():
        start, stop = stop, stop + count
        _shuffle_epoch(index[start:stop], block_samples, blocks_mixed, rng)
    return index


def _shuffle_epoch(numbers: NDArray[Any], block_samples: int, blocks_mixed: int, rng: RandomState) -> None:
    """In place; the numbers come in order."""
    order = np.arange(-(-len(numbers) // block_samples), dtype=np.int64)
    rng.shuffle(order)
    starts = order * block_samples
    lengths = np.minimum(block_samples, len(numbers) - starts)
    before = np.cumsum(lengths) - lengths
    numbers += np.repeat(starts - before, lengths).astype(numbers.dtype)  # wraps round where it is below 0, and back
    for window in np.split(numbers, before[blocks_mixed::blocks_mixed]):
        rng.shuffle(window)
