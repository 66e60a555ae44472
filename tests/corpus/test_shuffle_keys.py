"""The keys of a shuffle: the same for ever, told in blocks as at once, and random enough."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from binidx.corpus.random_numbers import shuffle_keys
from binidx.corpus.shuffle_buckets import assign_buckets, shuffle_order

KEYS_OF_SEED_1 = [12004600435170586634, 18318579786496903705, 15258216826347561832]
ORDER_OF_SEED_1 = [11, 6, 4, 10, 0, 3, 7, 5, 2, 9, 8, 1]


def test_the_order_of_a_seed_stays_what_it_is() -> None:
    assert shuffle_keys(1, 0, 3).tolist() == KEYS_OF_SEED_1
    assert shuffle_order(shuffle_keys(1, 0, 12)).tolist() == ORDER_OF_SEED_1
    assert np.array_equal(shuffle_keys(1 + 2**64, 0, 9), shuffle_keys(1, 0, 9))


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 40))
def test_keys_in_blocks_are_those_at_once(seed: int, first: int, count: int) -> None:
    assert np.array_equal(shuffle_keys(seed, first, count), shuffle_keys(seed, 0, first + count)[first:])


@given(st.integers(1, 2**31), st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_buckets_are_equal_ranges_of_keys_in_their_order(num_buckets: int, keys: list[int]) -> None:
    found = assign_buckets(np.sort(np.array(keys, np.uint64)), num_buckets)
    assert found.tolist() == [(key >> 32) * num_buckets >> 32 for key in sorted(keys)]
    assert (np.diff(found) >= 0).all()
    assert found[-1] < num_buckets


def test_equal_keys_stay_in_their_order() -> None:
    assert shuffle_order(np.array([5, 1, 5, 1, 5], np.uint64)).tolist() == [1, 3, 0, 2, 4]


def test_each_order_of_four_records_is_as_likely_as_any_other() -> None:
    """Chi-square over 24 orders of 48,000 seeds: 23 degrees of freedom, beyond 49.7 once in a thousand."""
    keys = np.array([shuffle_keys(seed, 0, 4) for seed in range(48_000)])
    codes = np.argsort(keys, axis=1) @ [64, 16, 4, 1]
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 2000) ** 2 / 2000).sum() < 49.7


def test_where_a_record_comes_from_says_nothing_of_where_it_goes() -> None:
    """Rank correlation and neighbours of a million: both are what chance gives, within four deviations."""
    count = 1_000_000
    order = shuffle_order(shuffle_keys(3, 0, count))
    places = np.arange(count)
    assert np.array_equal(np.sort(order), places)
    assert abs(np.corrcoef(order, places)[0, 1]) * count**0.5 < 4
    assert np.count_nonzero(np.diff(order) == 1) < 8  # one is expected
