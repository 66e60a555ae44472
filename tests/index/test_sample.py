"""The sample index against Megatron's, and against a search in the cumulative sum."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.errors import IndexBuildError
from binidx.index.document_sample import build_sample_index, count_samples, count_tokens
from binidx.native.sample_index import SampleArrays

helpers = megatron.helpers


def random_stream(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Lengths, a third of them sometimes 0, sometimes one of them long; and an order that repeats some, skips some."""
    lengths = rng.integers(0, rng.choice([2, 8, 60, 300]), rng.integers(1, rng.choice([3, 40, 400]))).astype(np.int32)
    lengths[rng.random(len(lengths)) < rng.choice([0, 0.3, 0.9])] = 0
    lengths[rng.integers(len(lengths))] = rng.choice([1, 5, 2000])
    documents = rng.integers(0, len(lengths), rng.integers(1, 2 * len(lengths) + 1)).astype(np.int32)
    return lengths, documents


def searched_rows(lengths: np.ndarray, documents: np.ndarray, length: int, extra: bool, drop: bool) -> np.ndarray:
    """Row j by definition: the document of the last token of sample j - 1, and the place after it, less extra."""
    ends = np.cumsum(lengths[documents].astype(np.int64))
    tokens = int(ends[-1]) - extra
    num_samples = max(tokens // length if drop else -(-tokens // length), 0)
    last = np.minimum(np.arange(1, num_samples + 1) * length + extra, ends[-1]) - 1
    position = np.searchsorted(ends, last, side="right")
    rows = np.stack([position, last - (ends - lengths[documents])[position] + 1 - extra], axis=1)
    return np.concatenate([np.zeros((1, 2), np.int64), rows])


def ends_in_no_token(lengths: np.ndarray, documents: np.ndarray, length: int, extra: bool, drop: bool) -> bool:
    """The last sample is cut short by empty documents: the one place where more than one row is right."""
    tokens = int(lengths[documents].sum()) - extra
    return not drop and tokens > 0 and tokens % length > 0 and lengths[documents[-1]] == 0


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_equals_megatrons_and_the_search(extra: bool, drop: bool) -> None:
    rng = np.random.default_rng(5 + 2 * extra + drop)
    for _ in range(1000):
        (lengths, documents), length = random_stream(rng), int(rng.integers(1, rng.choice([3, 10, 200])))
        tokens = int(lengths[documents].sum())
        found = build_sample_index(lengths, documents, length, tokens, add_extra_token=extra, drop_last_partial=drop)
        if extra or not ends_in_no_token(lengths, documents, length, extra, drop):
            assert (found == searched_rows(lengths, documents, length, extra, drop)).all()
        # Of no tokens, Megatron's C counts (0 - extra) / length, which is -1 for a length of 1.
        if tokens and not (extra and ends_in_no_token(lengths, documents, length, extra, drop)):
            needed = helpers.build_sample_idx(lengths, documents, length, 1, tokens, drop, extra)
            assert found.dtype == needed.dtype == np.int32
            assert (found == needed).all()


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_int64_rows_equal_megatrons(extra: bool, drop: bool) -> None:
    rng = np.random.default_rng(6)
    for _ in range(300):
        (lengths, documents), length = random_stream(rng), int(rng.integers(1, 100))
        if ends_in_no_token(lengths, documents, length, extra, drop):
            continue
        tokens = int(lengths[documents].sum())
        needed = helpers.build_sample_idx_int64(lengths, documents, length, 1, tokens, drop, extra)
        rows = np.empty_like(needed)
        SampleArrays(lengths, documents, length, tokens, add_extra_token=extra).fill_starts(rows)
        assert rows.dtype == np.int64
        assert (rows == needed).all()


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_write_the_same_rows(threads: int) -> None:
    """Windows of 10 documents, so that there are many, some without a row, and several at once."""
    rng = np.random.default_rng(threads)
    for _ in range(200):
        (lengths, documents), length = random_stream(rng), int(rng.integers(1, rng.choice([3, 10, 200])))
        tokens, extra, drop = int(lengths[documents].sum()), bool(rng.integers(2)), bool(rng.integers(2))
        options = {"add_extra_token": extra, "drop_last_partial": drop}
        one = build_sample_index(lengths, documents, length, tokens, **options)
        assert (build_sample_index(lengths, documents, length, tokens, **options, threads=threads) == one).all()
        arrays = SampleArrays(lengths, documents, length, tokens, add_extra_token=extra)
        for dtype in (np.int32, np.int64):
            arrays.fill_starts(many := np.empty(one.shape, dtype), threads, window=10)
            assert (many == one).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_raise_the_first_error(threads: int) -> None:
    lengths, documents = np.ones(100, np.int32), np.arange(100, dtype=np.int32)
    with pytest.raises(IndexBuildError, match="the documents hold 100 tokens, needs those counted: 24 samples over 99"):
        SampleArrays(lengths, documents, 4, 99).fill_starts(np.empty((25, 2), np.int32), threads, window=10)
    documents[[37, 38, 77]] = 100
    lengths[99] = -1
    with pytest.raises(IndexBuildError, match=r"document_index\[37\]: 100, needs 0 <= sequence < 100"):
        SampleArrays(lengths, documents, 4, 100).fill_starts(np.empty((25, 2), np.int32), threads, window=10)


def test_no_documents_and_no_threads() -> None:
    nothing = np.empty(0, np.int32)
    assert build_sample_index(nothing, nothing, 4, 0, threads=2).tolist() == [[0, 0]]
    with pytest.raises(ValueError, match="threads: 0, needs 1 <= threads"):
        build_sample_index(nothing, nothing, 4, 0, threads=0)


def test_count_tokens_is_the_sum_of_the_lengths() -> None:
    rng = np.random.default_rng(9)
    for _ in range(300):
        lengths, documents = random_stream(rng)
        assert count_tokens(lengths, documents) == int(np.sum(lengths[documents], dtype=np.int64))
    assert count_tokens(np.full(1, 2**31 - 1, np.int32), np.zeros(9, np.int32)) == 9 * (2**31 - 1)
    with pytest.raises(IndexBuildError, match=r"documents\[0\]: 1, needs 0 <= sequence < 1"):
        count_tokens(np.ones(1, np.int32), np.ones(1, np.int32))
    with pytest.raises(IndexBuildError, match=r"sequence_lengths\[0\]: -1"):
        count_tokens(-np.ones(1, np.int32), np.zeros(1, np.int32))


def test_several_epochs_equal_megatrons() -> None:
    lengths = np.array([3, 0, 9, 1], np.int32)
    documents = np.tile(np.array([2, 0, 1, 3], np.int32), 5)
    needed = helpers.build_sample_idx(lengths, documents, 4, 5, 13, True, True)
    assert (build_sample_index(lengths, documents, 4, 65) == needed).all()


def test_samples_tile_the_stream_of_documents() -> None:
    """Read back by rows, the samples are the stream, S + 1 tokens every S."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        (lengths, documents), length = random_stream(rng), int(rng.integers(1, 30))
        starts = np.cumsum(lengths[documents]) - lengths[documents]
        rows = build_sample_index(lengths, documents, length, int(lengths[documents].sum()))
        assert (starts[rows[:, 0]] + rows[:, 1] == np.arange(len(rows)) * length).all()


def test_lengths_may_be_unaligned_as_in_a_mapped_idx() -> None:
    lengths = np.array([5, 6, 7], np.int32)
    unaligned = np.frombuffer(b"ab" + lengths.tobytes(), np.uint8)[2:].view("<i4")
    assert not unaligned.flags.aligned
    documents = np.array([2, 0, 1], np.int32)
    assert (build_sample_index(unaligned, documents, 4, 18) == build_sample_index(lengths, documents, 4, 18)).all()


def test_lengths_and_documents_may_be_read_only() -> None:
    lengths, documents = np.array([5, 6], np.int32), np.array([1, 0], np.int32)
    lengths.flags.writeable = documents.flags.writeable = False
    assert build_sample_index(lengths, documents, 4, 11).tolist() == [[0, 0], [0, 4], [1, 2]]


@pytest.mark.parametrize(
    ("tokens", "length", "theirs", "exact"), [(16_777_730, 512, 32_769, 32_770), (16_777_220, 1549, 10_832, 10_831)]
)
def test_counts_are_exact_where_megatrons_float32_is_not(tokens: int, length: int, theirs: int, exact: int) -> None:
    """It drops the last sample of the first, and repeats the end of the second as a sample of one token."""
    lengths, documents = np.array([tokens], np.int32), np.zeros(1, np.int32)
    assert len(helpers.build_sample_idx(lengths, documents, length, 1, tokens, False, True)) - 1 == theirs
    rows = build_sample_index(lengths, documents, length, tokens, drop_last_partial=False)
    assert len(rows) - 1 == exact == -(-(tokens - 1) // length)
    assert rows[-1].tolist() == [0, tokens - 1]


def test_an_empty_last_document_gives_no_negative_offset() -> None:
    """Megatron stores offset -1, and its own assertion stops it; we store the end of the last document with tokens."""
    lengths, documents = np.array([6, 0], np.int32), np.array([0, 1, 1], np.int32)
    with pytest.raises(AssertionError):
        helpers.build_sample_idx(lengths, documents, 4, 1, 6, False, True)
    assert build_sample_index(lengths, documents, 4, 6, drop_last_partial=False).tolist() == [[0, 0], [0, 4], [0, 5]]


def test_an_empty_last_document_ends_the_stream_without_the_extra_token() -> None:
    lengths, documents = np.array([6, 0], np.int32), np.array([0, 1, 1], np.int32)
    needed = helpers.build_sample_idx(lengths, documents, 4, 1, 6, False, False)
    found = build_sample_index(lengths, documents, 4, 6, add_extra_token=False, drop_last_partial=False)
    assert found.tolist() == needed.tolist() == [[0, 0], [0, 4], [2, 0]]


@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_too_few_tokens_are_no_samples(tokens: int) -> None:
    lengths, documents = np.array([tokens], np.int32), np.zeros(1, np.int32)
    assert build_sample_index(lengths, documents, 4, tokens).tolist() == [[0, 0]]


def test_no_documents_are_no_samples() -> None:
    nothing = np.empty(0, np.int32)
    assert build_sample_index(nothing, nothing, 4, 0, drop_last_partial=False).tolist() == [[0, 0]]


def test_samples_longer_than_int32_are_counted_right() -> None:
    lengths, documents = np.array([2**31 - 1], np.int32), np.zeros(9, np.int32)
    tokens = 9 * (2**31 - 1)
    rows = build_sample_index(lengths, documents, 2**33, tokens)
    assert (rows == searched_rows(lengths, documents, 2**33, True, True)).all()
    assert len(rows) == 3


def test_count_samples_is_floor_or_ceil_and_never_negative() -> None:
    counts = [
        count_samples(tokens, 4, add_extra_token=extra, drop_last_partial=drop)
        for tokens in (0, 1, 5, 6)
        for extra in (False, True)
        for drop in (True, False)
    ]
    assert counts == [0, 0, 0, 0, 0, 1, 0, 0, 1, 2, 1, 1, 1, 2, 1, 2]
    assert count_samples(10**18 + 2, 10, add_extra_token=True, drop_last_partial=False) == 10**17 + 1


@pytest.mark.parametrize(
    ("lengths", "documents", "tokens", "message"),
    [
        ([3, 4], [0, 2], 7, r"document_index\[1\]: 2, needs 0 <= sequence < 2"),
        ([3, 4], [-1, 0], 7, r"document_index\[0\]: -1, needs 0 <= sequence < 2"),
        ([3, 4], [0, 2**31 - 1], 7, r"document_index\[1\]: 2147483647"),
        ([3, 4], [0, 1], 100, "the documents hold 7 tokens, needs those counted: 24 samples over 100"),
        ([3, 4], [0, 1, 1], 7, "the documents hold 11 tokens, needs those counted: 1 samples over 7"),
        ([3, 4], [], 7, "the documents hold 0 tokens"),
        ([], [0], 0, r"document_index\[0\]: 0, needs 0 <= sequence < 0"),
        ([3, -4], [0, 1], 7, r"sequence_lengths\[1\]: -4, needs 0 or more tokens"),
    ],
)
def test_missing_sequences_are_errors(lengths: list[int], documents: list[int], tokens: int, message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        build_sample_index(np.array(lengths, np.int32), np.array(documents, np.int32), 4, tokens)


def test_a_sequence_length_of_0_is_an_error() -> None:
    with pytest.raises(IndexBuildError, match="sequence_length: found 0, need at least 1"):
        build_sample_index(np.array([3], np.int32), np.array([0], np.int32), 0, 3)
