"""Indices of a GPT dataset: the shuffle index, all three in their files, and checks of indices of unknown origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.document_sample import EpochPlan, build_document_index, shuffle_dtype
from binidx.index.documents import ArrayAllocator, Documents, check_array, check_within, fill_numbers, out_or_empty
from binidx.native.gpt_samples import GPTIndex, Sequences
from binidx.native.permutations import RandomState
from binidx.native.sample_index import SampleArrays

ARRAYS = ("document_index", "sample_index", "shuffle_index")

SAMPLES_CHECKED = 1000


def build_shuffle_index(
    num_samples: int, total_size: int, rng: RandomState, *, out: NDArray[Any] | None = None, threads: int = 1
) -> NDArray[np.uint32] | NDArray[np.int64]:
    """Return the numbers from 0 to total_size - 1; the first `num_samples` and the rest are shuffled separately.

    Memory: the index, 4 * total_size bytes (8 from 2**32 - 2 samples on), and nothing else.

    Args:
        num_samples: number of samples before a separate last epoch; total_size when there is none.
        total_size: number of all samples.
        rng: the generator that shuffled the document index.
        out: contiguous array to fill, of the index's shape and `shuffle_dtype`; None: a new array.
        threads: number of threads that write the numbers; one thread shuffles them.

    Returns:
        Shape (total_size,): uint32, or int64 from 2**32 - 2 samples on.

    Raises:
        IndexBuildError: num_samples is not within 0 and total_size, or `out` does not fit.

    Source: Megatron Core, _build_shuffle_index.
    """
    if not 0 <= num_samples <= total_size:
        raise IndexBuildError(f"shuffle index: found {num_samples} of {total_size} samples, need 0 to all of them")
    index = out_or_empty(out, total_size, shuffle_dtype(total_size))
    fill_numbers(index, range(total_size), threads)
    rng.shuffle(index[:num_samples])
    rng.shuffle(index[num_samples:])
    return index


def build_window_order(
    num_samples: int, parts: int, group: int, rows: slice | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the window of each sample, and its part of that window, if long windows are cut into shorter samples.

        windows of 8 tokens, served in groups of 3        0       1       2       3 ..
        samples of 4 tokens                               0a 0b   1a 1b   2a 2b
        served                                            0a 1a 2a  0b 1b 2b | 3a ..

    The parts of a window are as far apart as a group allows; at the end of a group all its windows were served whole.

    Args:
        num_samples: number of samples, a multiple of parts: whole windows.
        parts: number of samples of a window.
        group: number of windows whose parts are served in turn; the last group may have fewer.
        rows: the samples to return; None: all.

    Returns:
        Two arrays of shape (num_samples,), or of the length of `rows`.

    Raises:
        IndexBuildError: num_samples is no whole number of windows, or parts or group is below 1.

    Source: ours.
    """
    if parts < 1 or group < 1 or num_samples < 0 or num_samples % parts:
        raise IndexBuildError(
            f"windows: found {num_samples} samples, {parts} a window, groups of {group}; need whole ones"
        )
    sample = np.arange(num_samples) if rows is None else np.arange(rows.start, rows.stop)
    first = sample // (group * parts) * group
    width = np.minimum(group, num_samples // parts - first)
    within = sample - first * parts
    return first + within % width, within // width


def build_gpt_index(
    allocator: ArrayAllocator,
    sequence_lengths: NDArray[np.int32],
    documents: Documents,
    plan: EpochPlan,
    rng: RandomState,
    sequence_length: int,
    *,
    add_extra_token: bool = True,
    threads: int = 1,
) -> None:
    """Build document_index, sample_index and shuffle_index, each straight into the array that `allocator` provides.

    Args:
        allocator: provides the arrays, and publishes each when it is complete.
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned.
        documents: documents of the split: numbers of sequences, shape (num_documents,).
        plan: of the epochs.
        rng: generator of all shuffles, freshly seeded.
        sequence_length: tokens of a sample.
        add_extra_token: whether a sample has one more token, its last label.
        threads: number of threads that write numbers and rows; the arrays are the same for any number.

    Memory: with n = len(documents) * plan.num_epochs and s = plan.num_samples, the anonymous memory of a build for a
    local disk is at most 2 MiB a thread and, of 4 n bytes (document index) and 4 s bytes (shuffle index; 8 s from 2**32
    samples on), the larger number, if it is over 1 GiB.

    The files are page cache: 4 n + 8 s + 4 s bytes. For 10**9 documents of 1,000 tokens in samples of 4,096: 4 GB of
    memory and 7 GB of files.

    Cost: 7 ns a document, and as much again for the first touch of its memory and file pages.

    Source: Megatron Core, GPTDataset._build_document_sample_shuffle_indices, which takes 27 n bytes of memory.
    """
    of_documents, of_samples, shuffled = plan.arrays(len(documents))
    separate, tokens = plan.separate_final_epoch, plan.num_tokens
    with (
        allocator.array("document_index", *of_documents, in_order=False) as document_index,
        allocator.array("sample_index", *of_samples) as sample_index,
    ):
        build_document_index(documents, plan.num_epochs, rng, separate, out=document_index, threads=threads)
        stream = SampleArrays(
            sequence_lengths, document_index, sequence_length, tokens, add_extra_token=add_extra_token
        )
        stream.fill_starts(sample_index, threads)
    del document_index, sample_index  # the files are complete: free the memory that they were built in
    with allocator.array("shuffle_index", *shuffled, in_order=False) as shuffle_index:
        build_shuffle_index(plan.num_samples_shuffled_first, plan.num_samples, rng, out=shuffle_index, threads=threads)


def check_gpt_index(
    arrays: Mapping[str, NDArray[Any]], sequences: Sequences, documents: Documents, sequence_length: int, extra: bool
) -> None:
    """Raise ValueError unless the arrays can be the indices of a GPT split: shapes, dtypes, ranges, tokens of samples.

    The check proves that no sample leads outside the data (which the C core checks again for each), and that a thousand
    samples have the right length; not that the order is the one that `build_gpt_index` would build.

    Args:
        arrays: document_index, sample_index and shuffle_index.
        sequences: sequences of the dataset.
        documents: documents of the split.
        sequence_length: number of tokens of a sample.
        extra: whether a sample has one more token, its last label.
    """
    document_index, sample_index, shuffle_index = (arrays[name] for name in ARRAYS)
    check_array("document_index", document_index, (np.int32,), 1)
    check_array("sample_index", sample_index, (np.int32, np.int64), 2)
    check_array("shuffle_index", shuffle_index, (np.uint32, np.int64), 1)
    if sample_index.shape != (len(shuffle_index) + 1, 2):
        raise ValueError(f"sample_index: found shape {sample_index.shape}, need {(len(shuffle_index) + 1, 2)}")
    num_entries = len(document_index)
    if (num_entries == 0) != (len(documents) == 0) or num_entries % max(len(documents), 1):
        raise ValueError(f"document_index: found {num_entries} entries, need a multiple of {len(documents)}")
    if not num_entries:  # an empty split, whose sample_index is [[0, 0]]
        if len(shuffle_index):
            raise ValueError(f"shuffle_index: found {len(shuffle_index)} samples of an empty split, need none")
        return
    check_within("document_index", document_index, min(documents), max(documents))
    if len(shuffle_index):
        check_within("shuffle_index", shuffle_index, 0, len(shuffle_index) - 1)
    check_within("positions of sample_index", sample_index[:, 0], 0, len(document_index) - 1)
    index = GPTIndex(shuffle_index, sample_index, document_index, sequences, add_extra_token=extra)
    _check_samples(index, sequences, sequence_length + extra)


def _check_samples(index: GPTIndex, sequences: Sequences, tokens: int) -> None:
    """Check that evenly spread samples hold `tokens` tokens of existing sequences; the last may be shorter."""
    served = index.arrays[0]
    some = np.unique(np.linspace(0, len(served) - 1, min(len(served), SAMPLES_CHECKED)).astype(np.int64))
    if not len(some):
        return
    try:
        spans, bounds = index.spans(some.tolist())
    except IndexBuildError as error:
        raise ValueError(str(error)) from error
    if (right := sequences.locate(spans)[1]) < len(spans):
        sequence, first, count = spans[right].tolist()
        raise ValueError(f"sequence {sequence}: a sample needs {count} tokens from {first}, which it does not have")
    lengths = np.add.reduceat(spans[:, 2], bounds[:-1])
    wrong = (lengths != tokens) & (served[some] != len(served) - 1)
    if wrong.any():
        raise ValueError(f"found a sample of {lengths[wrong][0]} tokens, need {tokens}")
