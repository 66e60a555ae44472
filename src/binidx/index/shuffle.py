"""The order in which samples are served."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.document import out_or_empty
from binidx.index.documents import fill
from binidx.native import RandomState


def build_shuffle_index(
    num_samples: int, total_size: int, rng: RandomState, *, out: NDArray[Any] | None = None, threads: int = 1
) -> NDArray[np.uint32] | NDArray[np.int64]:
    """The numbers 0 to total_size, the first `num_samples` and the rest each shuffled among themselves.

    Memory: the index, 4 * total_size bytes (8 from 2**32 - 2 samples on), and nothing else; where `out` lies in a
    mapped file it is page cache.

    Args:
        num_samples: samples before a separate final epoch; total_size when there is none.
        total_size: all samples.
        rng: the one that shuffled the document index.
        out: where the index goes, contiguous, of its shape and `shuffle_dtype`; a new array by default.
        threads: so many put the numbers there; one shuffles them.

    Returns:
        Shape (total_size,): uint32, or int64 from 2**32 - 2 samples on.

    Raises:
        IndexBuildError: num_samples is not within 0 and total_size, or `out` does not fit.

    Source: Megatron Core, _build_shuffle_index.
    """
    if not 0 <= num_samples <= total_size:
        raise IndexBuildError(f"shuffle index: {num_samples} of {total_size} samples, needs 0 to all of them")
    index = out_or_empty(out, total_size, shuffle_dtype(total_size))
    fill(index, range(total_size), threads)
    rng.shuffle(index[:num_samples])
    rng.shuffle(index[num_samples:])
    return index


def shuffle_dtype(total_size: int) -> type[np.uint32] | type[np.int64]:
    """What holds the numbers of so many samples. uint32 ends one early, as in Megatron Core."""
    return np.uint32 if total_size < 2**32 - 2 else np.int64
