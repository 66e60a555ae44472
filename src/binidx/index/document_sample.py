"""Document index, sample index, and the number of epochs that they cover.

    document_index    the documents of all epochs, shuffled                        [4 0 2 | 1 3 0 ...]
    sample_index      cuts in the stream of these documents' tokens, one every `sequence_length` tokens

`plan_epochs` computes how many epochs serve the requested samples; the other functions fill the arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.documents import (
    Documents,
    check_documents,
    fill_numbers,
    get_window,
    map_windows,
    out_or_empty,
    windows,
)
from binidx.native.permutations import RandomState
from binidx.native.sample_index import SampleArrays

INT32_MAX = 2**31 - 1
SEPARATE_BELOW = 0.80
"""A last epoch that serves less than this share of its samples is shuffled separately."""


def build_document_index(
    documents: Documents,
    num_epochs: int,
    rng: RandomState,
    separate_final_epoch: bool,
    *,
    out: NDArray[np.int32] | None = None,
    threads: int = 1,
) -> NDArray[np.int32]:
    """Return the documents of all epochs, shuffled together; a separate last epoch is shuffled by itself at the end.

    Memory: the index, 4 * num_epochs * num_documents bytes, is written in its place and shuffled there.

    Args:
        documents: numbers of the sequences, shape (num_documents,); any integers that int32 holds, or a range.
        num_epochs: at least 1.
        rng: draws one shuffle, or two when the last epoch is separate and not the only one.
        separate_final_epoch: keep the last epoch behind the others.
        out: contiguous int32 array to fill, of the index's shape; None: a new array.
        threads: number of threads that write the numbers; one thread shuffles them.

    Returns:
        Shape (num_epochs * num_documents,): sequence numbers.

    Raises:
        IndexBuildError: num_epochs is below 1, a document number is negative or beyond int32, or `out` does not fit.

    Source: Megatron Core, _build_document_index, which takes 16 more bytes for each document and epoch.
    """
    if num_epochs < 1:
        raise IndexBuildError(f"document index: found {num_epochs} epochs, need at least 1")
    check_documents(documents)
    index = out_or_empty(out, num_epochs * len(documents), np.int32)
    for epoch in index.reshape(num_epochs, -1):
        fill_numbers(epoch, documents, threads)
    last = len(documents) if separate_final_epoch and num_epochs > 1 else 0
    rng.shuffle(index[: len(index) - last])
    rng.shuffle(index[len(index) - last :])
    return index


def count_samples(num_tokens: int, sequence_length: int, *, add_extra_token: bool, drop_last_partial: bool) -> int:
    """Return the number of samples in a stream: (tokens - extra) / length, rounded up if the last may be short.

    Args:
        num_tokens: tokens of the stream.
        sequence_length: tokens from one start of a sample to the next.
        add_extra_token: a sample holds the first token of the next one too.
        drop_last_partial: leave out a last sample that the stream cannot fill.

    Source: Megatron Core, build_sample_idx. There float32 is rounded up, which is wrong from about 2**24 tokens on;
    counts stay integers here.
    """
    if sequence_length < 1:
        raise IndexBuildError(f"sequence_length: found {sequence_length}, need at least 1")
    tokens = max(num_tokens - add_extra_token, 0)
    return tokens // sequence_length if drop_last_partial else -(-tokens // sequence_length)


def count_tokens(sequence_lengths: NDArray[np.int32], documents: Documents, *, threads: int = 1) -> int:
    """Return the number of tokens of documents: `sequence_lengths[documents].sum(dtype=np.int64)`, without the copy.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned.
        documents: numbers of the sequences, shape (num_documents,).
        threads: number of windows that are summed at once.

    Raises:
        IndexBuildError: a document is no number of a sequence, or a sequence has a length below 0.
    """

    def count_window(first: int) -> int:
        window = get_window(documents, first)
        return SampleArrays(sequence_lengths, window, subject="documents", first=first).count_tokens()

    check_documents(documents, signs=False)
    return sum(map_windows(count_window, windows(len(documents)), threads))


def row_dtype(num_documents: int) -> type[np.int32] | type[np.int64]:
    """Return the dtype of a sample index over `num_documents` documents: int32 if it holds their positions, else int64.

    Megatron chooses int64 also for some lengths, which int32 always holds.
    """
    return np.int32 if num_documents <= INT32_MAX else np.int64


def shuffle_dtype(total_size: int) -> type[np.uint32] | type[np.int64]:
    """Return the dtype of a shuffle index of `total_size` samples, Megatron's: uint32 below 2**32 - 2, else int64."""
    return np.uint32 if total_size < 2**32 - 2 else np.int64


def build_sample_index(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_tokens: int,
    *,
    add_extra_token: bool = True,
    drop_last_partial: bool = True,
    threads: int = 1,
) -> NDArray[np.int32] | NDArray[np.int64]:
    """Return the start of each sample in the stream of shuffled documents.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned, as mapped.
        document_index: sequences in reading order, over all epochs, shape (num_documents,).
        sequence_length: number of tokens from one start to the next.
        num_tokens: number of tokens of all documents in document_index.
        add_extra_token: a sample holds the first token of the next one too, as its last label.
        drop_last_partial: leave out a last sample that the stream cannot fill.
        threads: number of parts that are built at once, each with 1 MiB of memory; the rows are the same.

    Returns:
        Shape (num_samples + 1, 2): position in document_index, token offset there; the last row is the start of the
        sample after the last. int32 if the positions fit, else int64.

    Raises:
        IndexBuildError: document_index names a missing sequence, or its documents do not hold num_tokens.

    Source: Megatron Core, build_sample_idx, row for row, but one: where the last sample is cut short, its stream ends
    in an empty document and there is an extra token, Megatron stores an offset of -1, and the last row here is the end
    of the last document that has tokens.
    """
    extra, drop = add_extra_token, drop_last_partial
    num_samples = count_samples(num_tokens, sequence_length, add_extra_token=extra, drop_last_partial=drop)
    rows: NDArray[Any] = np.empty((num_samples + 1, 2), row_dtype(len(document_index)))
    stream = SampleArrays(sequence_lengths, document_index, sequence_length, num_tokens, add_extra_token=extra)
    stream.fill_starts(rows, threads)
    return rows


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Number of epochs and samples of a GPT dataset's indices.

    num_epochs: passes over the documents, at least 1.
    tokens_per_epoch: number of tokens of all documents.
    num_samples: number of samples in all epochs; at least as many as were requested.
    separate_final_epoch: the last epoch is shuffled by itself, so that its unserved samples are spread evenly.
    num_samples_sans_final_epoch: number of samples that end before the last epoch; 0 when there is one epoch.
    """

    num_epochs: int
    tokens_per_epoch: int
    num_samples: int
    separate_final_epoch: bool
    num_samples_sans_final_epoch: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all epochs."""
        return self.num_epochs * self.tokens_per_epoch

    @property
    def num_samples_shuffled_first(self) -> int:
        """Number of samples that are shuffled together first: those before a separate last epoch, else all."""
        return self.num_samples_sans_final_epoch if self.separate_final_epoch else self.num_samples

    def arrays(self, num_documents: int) -> list[tuple[tuple[int, ...], Any]]:
        """Return the shape and the dtype of document_index, sample_index and shuffle_index."""
        size = num_documents * self.num_epochs
        samples = (self.num_samples,), shuffle_dtype(self.num_samples)
        return [((size,), np.int32), ((self.num_samples + 1, 2), row_dtype(size)), samples]


def plan_epochs(
    tokens_per_epoch: int,
    sequence_length: int,
    num_samples: int | None,
    *,
    add_extra_token: bool,
    drop_last_partial: bool,
) -> EpochPlan:
    """Return the plan of the fewest epochs that hold `num_samples` full samples; of one epoch for None.

    One epoch may hold no sample at all (fewer tokens than a sample needs). Then the plan has 0 samples, which is an
    error only if samples were requested.

    Args:
        tokens_per_epoch: number of tokens of all documents.
        sequence_length: tokens of a sample.
        num_samples: number of requested samples; None for those of one epoch.
        add_extra_token, drop_last_partial: as in `count_samples`.

    Raises:
        IndexBuildError: samples were requested of no tokens (Megatron Core loops for ever), or an argument is negative.

    Source: Megatron Core, GPTDataset._build_document_sample_shuffle_indices. It asserts that the last epoch serves at
    least 0 and at most samples-per-epoch + 1, which follows from num_epochs being the smallest.
    """
    if tokens_per_epoch < 0 or (num_samples or 0) < 0:
        asked = f"{num_samples} samples of {tokens_per_epoch} tokens an epoch"
        raise IndexBuildError(f"epochs: found {asked}, need 0 or more")
    if num_samples and tokens_per_epoch == 0:
        problem = f"found 0 tokens an epoch, {num_samples} samples need some"
        raise IndexBuildError(f"epochs: {problem}; check the split and the data")

    def count(epochs: int, drop: bool = True) -> int:
        tokens = epochs * tokens_per_epoch
        return count_samples(tokens, sequence_length, add_extra_token=add_extra_token, drop_last_partial=drop)

    requested = num_samples * sequence_length + add_extra_token if num_samples else 0
    num_epochs = max(1, -(-requested // max(tokens_per_epoch, 1)))
    before = count(num_epochs - 1)
    in_final = (num_samples or 0) - before
    separate = num_epochs > 1 and in_final < int(SEPARATE_BELOW * count(1))
    return EpochPlan(num_epochs, tokens_per_epoch, count(num_epochs, drop_last_partial), separate, before)
