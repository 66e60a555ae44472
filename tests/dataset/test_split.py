"""Split strings and matrices against Megatron Core."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.oracle import megatron
from hypothesis import given
from hypothesis import strategies as st

from binidx.dataset.config import (
    Split,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
    split_indices,
    split_range,
)
from binidx.errors import ConfigError

shares = st.lists(st.floats(0, 1000).map(lambda share: f"{share:.4f}"), min_size=1, max_size=3).filter(
    lambda texts: sum(map(float, texts)) > 0
)


@given(shares, st.sampled_from([",", ", ", " ", ":"]))
def test_split_strings_give_megatrons_matrix(texts: list[str], separator: str) -> None:
    vector = parse_and_normalize_split(separator.join(texts))
    assert vector == megatron.config.parse_and_normalize_split(separator.join(texts))
    theirs = megatron.config.convert_split_vector_to_split_matrix(vector)
    assert convert_split_vector_to_split_matrix(vector) == theirs


@given(*[st.lists(st.floats(0.001, 1), min_size=3, max_size=3)] * 2)
def test_two_vectors_overlap_as_in_megatron(a: list[float], b: list[float]) -> None:
    theirs = megatron.config.convert_split_vector_to_split_matrix(a, b)
    assert convert_split_vector_to_split_matrix(a, b) == theirs


@pytest.mark.parametrize("text", ["1e-3,1", "-1,1,1", "a", "", "0,0,0", "1,1,1,1", ".", "1,.,1"])
def test_a_split_that_is_not_three_plain_shares_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="split"):
        parse_and_normalize_split(text)


@given(st.integers(0, 500), shares)
def test_splits_partition_the_elements(num_elements: int, texts: list[str]) -> None:
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(",".join(texts)))
    parts = [split_indices(bookends, num_elements) for bookends in matrix if bookends]
    assert [*np.concatenate(parts)] == list(range(num_elements))
    assert all(part.dtype == np.int32 for part in parts)


def test_halves_round_to_the_even_neighbour() -> None:
    assert len(split_indices((0.0, 0.5), 5)) == 2
    assert len(split_indices((0.0, 0.5), 7)) == 4


def test_the_splits_are_megatrons() -> None:
    assert [(split.name, split.value) for split in Split] == [(s.name, s.value) for s in megatron.utils.Split]


@pytest.mark.parametrize("count", [0, 1, 7, 2**18, 2**18 + 5])
def test_a_range_is_what_the_array_is(count: int) -> None:
    found = split_range((0.1, 0.9), count)
    assert split_indices((0.1, 0.9), count).tolist() == [*found]
