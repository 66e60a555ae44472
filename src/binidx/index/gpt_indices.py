"""The order in which samples are served.

Long windows cut into shorter samples: which part of which window is served when.

    windows of 8 tokens, served in groups of 3        0       1       2       3 ..
    samples of 4 tokens                               0a 0b   1a 1b   2a 2b
    served                                            0a 1a 2a  0b 1b 2b | 3a ..

The parts of a window lie as far apart as a group allows; when a group is over each of its windows was served whole.

The three indices of a GPT dataset, straight into their files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.cache.building import Building
from binidx.index.document_sample import (
    EpochPlan,
    build_document_and_sample_index,
    goes_in_order,
    index_shapes,
    out_or_empty,
    row_dtype,
)
from binidx.index.documents import Documents, fill
from binidx.native.permutations import RandomState


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


def build_window_order(
    num_samples: int, parts: int, group: int, rows: slice | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The window and the part of each sample, both of shape (num_samples,), or of those in `rows`.

    Args:
        num_samples: a multiple of parts: whole windows.
        parts: samples of a window.
        group: windows whose parts are served in turn; the last group may have fewer.
        rows: from a sample to another.

    Raises:
        IndexBuildError: not whole windows, or groups of nothing.

    Source: ours.
    """
    if parts < 1 or group < 1 or num_samples < 0 or num_samples % parts:
        raise IndexBuildError(
            f"windows: {num_samples} samples, {parts} a window, {group} in a group; needs whole windows"
        )
    sample = np.arange(num_samples) if rows is None else np.arange(rows.start, rows.stop)
    first = sample // (group * parts) * group
    width = np.minimum(group, num_samples // parts - first)
    within = sample - first * parts
    return first + within % width, within // width


ARRAYS = ("document_index", "sample_index", "shuffle_index")


def build_gpt_index(
    building: Building,
    sequence_lengths: NDArray[np.int32],
    documents: Documents,
    plan: EpochPlan,
    rng: RandomState,
    sequence_length: int,
    *,
    add_extra_token: bool = True,
    threads: int = 1,
) -> None:
    """document_index, sample_index and shuffle_index; see the functions that build each.

    Memory: with n = len(documents) * plan.num_epochs and s = plan.num_samples, the anonymous memory of a build for a
    local disk is at most 2 MiB a thread and the larger of

        8 n bytes of records while n <= 2**27, above it 4 n of the document index, and
        4 s bytes of the shuffle index, where these are over 1 GiB (8 s from 2**32 samples on).

    The files are page cache: 4 n + 8 s + 4 s bytes, which the kernel writes out and drops at will. For 10**9 documents
    of 1,000 tokens in samples of 4,096: 4 GB of memory and 7 GB of files.

    Cost: 6 ns a document, and as much again for the first touch of its memory and file pages.

    Source: Megatron Core, GPTDataset._build_document_sample_shuffle_indices, which goes by 27 n bytes of memory.
    """
    positions, rows = index_shapes(len(documents), plan)
    in_order = goes_in_order(len(documents), plan)
    with (
        building.array("document_index", positions, np.int32, in_order=in_order) as document_index,
        building.array("sample_index", rows, row_dtype(positions[0])) as sample_index,
    ):
        build_document_and_sample_index(
            sequence_lengths,
            documents,
            plan,
            rng,
            sequence_length,
            add_extra_token=add_extra_token,
            out=(document_index, sample_index),
            threads=threads,
        )
    del document_index, sample_index  # they are files by now, and what they were filled in goes
    size = plan.num_samples
    dtype: Any = shuffle_dtype(size)
    with building.array("shuffle_index", (size,), dtype, in_order=False) as shuffle_index:
        build_shuffle_index(plan.num_samples_shuffled_first, size, rng, out=shuffle_index, threads=threads)
