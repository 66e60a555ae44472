"""The reading order of documents over all epochs.

Where samples start: cuts in the stream of shuffled documents, one every `sequence_length` tokens.

How often the data is read to serve the samples that were asked for.

The document index and the sample index together: the shuffle carries the lengths along.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.documents import Documents, check_documents, fill, map_windows, window, windows
from binidx.native import sample_index
from binidx.native.permutations import RandomState


def build_document_index(
    documents: Documents,
    num_epochs: int,
    rng: RandomState,
    separate_final_epoch: bool,
    *,
    out: NDArray[np.int32] | None = None,
    threads: int = 1,
) -> NDArray[np.int32]:
    """`documents` once an epoch, all epochs shuffled together; a separate final one is shuffled for itself, behind.

    Memory: the index, 4 * num_epochs * num_documents bytes, is written in its place and shuffled there; nothing else is
    made. NumPy asks for huge pages for a new one; where `out` lies in a mapped file it is page cache.

    Args:
        documents: numbers of the exposed sequences, shape (num_documents,); any integers that int32 holds, or a range.
        num_epochs: at least 1.
        rng: draws one shuffle, or two when the final epoch is separate and not the only one.
        separate_final_epoch: keep the last epoch behind the others.
        out: where the index goes, contiguous int32 of its shape; a new array by default.
        threads: so many put the numbers there; one shuffles them.

    Returns:
        Shape (num_epochs * num_documents,): sequence numbers.

    Raises:
        IndexBuildError: num_epochs is below 1, a document number is negative or beyond int32, or `out` does not fit.

    Source: Megatron Core, _build_document_index, which goes by 16 more bytes a document and epoch.
    """
    if num_epochs < 1:
        raise IndexBuildError(f"document index: {num_epochs} epochs, needs at least 1")
    check_documents(documents)
    index = out_or_empty(out, num_epochs * len(documents), np.int32)
    for epoch in index.reshape(num_epochs, -1):
        fill(epoch, documents, threads)
    last = len(documents) if separate_final_epoch and num_epochs > 1 else 0
    rng.shuffle(index[: len(index) - last])
    rng.shuffle(index[len(index) - last :])
    return index


def out_or_empty(out: NDArray[Any] | None, size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """`out` if it is a contiguous array of that size and dtype, a new one for None."""
    if out is None:
        return np.empty(size, dtype)
    if out.shape != (size,) or out.dtype != dtype or not out.flags.c_contiguous:
        raise IndexBuildError(f"out: shape {out.shape} of {out.dtype}, needs contiguous ({size},) of {np.dtype(dtype)}")
    return out


INT32_MAX = 2**31 - 1


def count_samples(num_tokens: int, sequence_length: int, *, add_extra_token: bool, drop_last_partial: bool) -> int:
    """How many samples a stream of tokens holds: floor, or ceil if the last may be short, of (tokens - extra) / length.

    Source: Megatron Core, build_sample_idx. There the ceil is taken of a float32, and so wrong from about 2**24 tokens
    on; counts stay integers here.
    """
    if sequence_length < 1:
        raise IndexBuildError(f"sequence_length: {sequence_length}, needs at least 1")
    tokens = max(num_tokens - add_extra_token, 0)
    return tokens // sequence_length if drop_last_partial else -(-tokens // sequence_length)


def count_tokens(sequence_lengths: NDArray[np.int32], documents: Documents, *, threads: int = 1) -> int:
    """Tokens of these documents: `int(np.sum(sequence_lengths[documents], dtype=np.int64))` without the copy.

    Raises:
        IndexBuildError: documents names a sequence there is not, or one with a length below 0.
    """

    def tokens(first: int) -> int:
        return sample_index.token_sum(sequence_lengths, window(documents, first), first)

    check_documents(documents, signs=False)
    return sum(map_windows(tokens, windows(len(documents)), threads))


def row_dtype(num_documents: int) -> type[np.int32] | type[np.int64]:
    """What holds the rows of so many documents. Megatron looks at the lengths as well; an int32 always fits."""
    return np.int32 if num_documents <= INT32_MAX else np.int64


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
    """Where each sample starts in the stream of shuffled documents.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned, as mapped.
        document_index: sequences in reading order, over all epochs, shape (num_documents,).
        sequence_length: tokens from one start to the next.
        num_tokens: of all documents in document_index.
        add_extra_token: a sample holds the first token of the next one too, as its last label.
        drop_last_partial: leave out a last sample that the stream cannot fill.
        threads: work on so many parts at once, each in 1 MiB of its own; the rows are the same.

    Returns:
        Shape (num_samples + 1, 2): position in document_index, token offset there; the last row is where a sample after
        the last would start. int32 if positions and lengths fit, else int64.

    Raises:
        IndexBuildError: document_index names a sequence there is not, or its documents do not hold num_tokens.

    Source: Megatron Core, build_sample_idx, row for row. Where it stores an offset of -1 (a last sample cut short, an
    empty document after its end, an extra token) the row is the end of the last document that has tokens.
    """
    num_samples = count_samples(
        num_tokens, sequence_length, add_extra_token=add_extra_token, drop_last_partial=drop_last_partial
    )
    rows: NDArray[Any] = np.empty((num_samples + 1, 2), row_dtype(len(document_index)))
    sample_index.sample_index(
        sequence_lengths,
        document_index,
        sequence_length,
        num_tokens,
        rows,
        add_extra_token=add_extra_token,
        threads=threads,
    )
    return rows


SEPARATE_BELOW = 0.80


"""A last epoch that serves less than this part of its samples is shuffled for itself."""


@dataclass(frozen=True)
class EpochPlan:
    """The arithmetic of a GPT dataset's indices.

    num_epochs: passes over the documents, at least 1.
    tokens_per_epoch: tokens of all documents.
    num_samples: samples in all epochs; at least as many as were asked for.
    separate_final_epoch: the last epoch is shuffled for itself, so that what it leaves unserved is spread evenly.
    num_samples_sans_final_epoch: samples that end before the last epoch; 0 when there is one epoch.
    """

    num_epochs: int
    tokens_per_epoch: int
    num_samples: int
    separate_final_epoch: bool
    num_samples_sans_final_epoch: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all epochs."""
        return self.num_epochs * self.tokens_per_epoch

    @property
    def num_samples_shuffled_first(self) -> int:
        """Samples of the shuffle index's first range: those before a separate last epoch, else all."""
        return self.num_samples_sans_final_epoch if self.separate_final_epoch else self.num_samples


def plan_epochs(
    tokens_per_epoch: int,
    sequence_length: int,
    num_samples: int | None,
    *,
    add_extra_token: bool,
    drop_last_partial: bool,
) -> EpochPlan:
    """The fewest epochs that hold `num_samples` full samples; None asks for one epoch.

    One epoch may hold no sample at all (fewer tokens than one needs); then num_samples is 0, which is an answer as long
    as none was asked for.

    Raises:
        IndexBuildError: samples asked of no tokens (Megatron Core loops for ever), or a negative argument.

    Source: Megatron Core, GPTDataset._build_document_sample_shuffle_indices. That the last epoch serves at least 0 and
    at most samples-per-epoch + 1, which it asserts, follows from num_epochs being the smallest.
    """
    if tokens_per_epoch < 0 or (num_samples or 0) < 0:
        raise IndexBuildError(f"epochs: {num_samples} samples of {tokens_per_epoch} tokens an epoch, need 0 or more")
    if num_samples and tokens_per_epoch == 0:
        raise IndexBuildError(
            f"epochs: 0 tokens an epoch, {num_samples} samples need some; check the split and the data"
        )

    def count(epochs: int, drop: bool = True) -> int:
        tokens = epochs * tokens_per_epoch
        return count_samples(tokens, sequence_length, add_extra_token=add_extra_token, drop_last_partial=drop)

    requested = num_samples * sequence_length + add_extra_token if num_samples else 0
    num_epochs = max(1, -(-requested // max(tokens_per_epoch, 1)))
    before = count(num_epochs - 1)
    in_final = (num_samples or 0) - before
    separate = num_epochs > 1 and in_final < int(SEPARATE_BELOW * count(1))
    return EpochPlan(num_epochs, tokens_per_epoch, count(num_epochs, drop_last_partial), separate, before)


Indices = tuple[NDArray[np.int32], NDArray[Any]]


MOST_RECORDS = 2**27


"""Documents and epochs that are shuffled as records of 8 bytes."""


def build_document_and_sample_index(
    sequence_lengths: NDArray[np.int32],
    documents: Documents,
    plan: EpochPlan,
    rng: RandomState,
    sequence_length: int,
    *,
    add_extra_token: bool = True,
    out: Indices | None = None,
    threads: int = 1,
) -> Indices:
    """What `build_document_index` and then `build_sample_index` give, in three quarters of their time.

    Cost: 4 ns a document and epoch at 10^7, 5 at 10^8, in memory that was touched before; new memory comes on top.

    Memory beside `out`: 8 * n bytes of records, where n = len(documents) * epochs, of the epochs shuffled together:
    all, or all but a separate last one. Beyond MOST_RECORDS, 1 GiB, there are none: the document index is shuffled in
    place and its lengths gathered, a third more work, and the memory is 2 MiB a thread.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned, as mapped.
        documents: numbers of the exposed sequences, shape (num_documents,); any integers that int32 holds, or a range.
        plan: of these documents: its epochs, tokens and samples.
        rng: draws one shuffle, or two when the final epoch is separate and not the only one.
        sequence_length: tokens from one start to the next.
        add_extra_token: a sample holds the first token of the next one too, as its last label.
        out: where both go, as `empty_indices` would make them; new arrays by default.
        threads: so many gather lengths at once; one shuffles. The arrays are the same for any number.

    Returns:
        document_index, int32 of shape (num_epochs * num_documents,); sample_index, int32 or int64 of shape
        (num_samples + 1, 2).

    Raises:
        IndexBuildError: documents names a sequence there is not, or they do not hold the tokens of the plan.

    Source: Megatron Core, _build_document_index and build_sample_idx; to shuffle records is ours.
    """
    index, rows = out or empty_indices(len(documents), plan)
    _check_shapes(index, rows, *index_shapes(len(documents), plan))
    samples = sample_index.SampleArrays(
        sequence_lengths, index, sequence_length, plan.num_tokens, plan.num_samples, add_extra_token=add_extra_token
    )
    if not goes_in_order(len(documents), plan):
        build_document_index(documents, plan.num_epochs, rng, plan.separate_final_epoch, out=index, threads=threads)
        sample_index.fill_sample_rows(samples, rows, threads)
        return index, rows
    first = token = 0
    for records, tokens in _records_to_shuffle(sequence_lengths, documents, plan, threads):
        sample_index.shuffle_records(samples, rng, records, first, token, tokens, rows)
        first, token = first + len(records), token + tokens
    sample_index.put_end(samples, rows, token)
    return index, rows


def goes_in_order(num_documents: int, plan: EpochPlan) -> bool:
    """Whether the two are filled from one end to the other; else the document index is shuffled in place."""
    return num_documents * _epochs_shuffled_together(plan) <= MOST_RECORDS


def index_shapes(num_documents: int, plan: EpochPlan) -> tuple[tuple[int], tuple[int, int]]:
    """Of document_index, int32, and of sample_index, of `row_dtype`."""
    return (num_documents * plan.num_epochs,), (plan.num_samples + 1, 2)


def empty_indices(num_documents: int, plan: EpochPlan) -> Indices:
    """Both arrays, not filled."""
    positions, rows = index_shapes(num_documents, plan)
    return np.empty(positions, np.int32), np.empty(rows, row_dtype(positions[0]))


def _check_shapes(index: NDArray[np.int32], rows: NDArray[Any], positions: tuple[int], pairs: tuple[int, int]) -> None:
    dtype = np.dtype(row_dtype(positions[0]))
    if index.shape != positions or rows.shape != pairs or rows.dtype != dtype:
        found = f"shapes {index.shape} and {rows.shape} of {rows.dtype}"
        raise IndexBuildError(f"out: {found}, needs {positions} and {pairs} of {dtype}")


def _epochs_shuffled_together(plan: EpochPlan) -> int:
    return plan.num_epochs - (plan.separate_final_epoch and plan.num_epochs > 1)


def _records_to_shuffle(
    sequence_lengths: NDArray[np.int32], documents: Documents, plan: EpochPlan, threads: int
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Records of the epochs shuffled together and their tokens, then of a separate last one, in the same memory."""
    if plan.num_epochs < 1:
        raise IndexBuildError(f"document index: {plan.num_epochs} epochs, needs at least 1")
    check_documents(documents, signs=False)
    together = _epochs_shuffled_together(plan)
    records = np.empty((together, len(documents)), np.int64)

    def fill(first: int) -> int:
        some = window(documents, first)
        samples = sample_index.SampleArrays(sequence_lengths, some, subject="documents", first=first)
        return sample_index.fill_records(samples, records[0, first : first + len(some)])

    for epochs in (together, plan.num_epochs - together):
        if epochs:
            tokens = sum(map_windows(fill, windows(len(documents)), threads))
            if tokens != plan.tokens_per_epoch:
                needed = f"needs those of the plan: {plan.tokens_per_epoch}"
                raise IndexBuildError(f"document index: the documents hold {tokens} tokens, {needed}")
            records[1:epochs] = records[0]
            yield records[:epochs].reshape(-1), epochs * tokens
