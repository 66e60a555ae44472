"""The text that Megatron hashes for the names of index caches is json's own, to the letter."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from binidx.dataset.megatron_dataset import describe
from binidx.errors import ConfigError


class Described:
    """As a tokenizer: known by its identifiers."""

    def __init__(self, identifiers: Any) -> None:
        self.unique_identifiers = identifiers


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
NAMES = st.text() | st.integers() | st.floats() | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS,
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.tuples(parts, parts)
        | st.dictionaries(NAMES, parts, max_size=4)
        | st.builds(Described, parts)
    ),
)


@given(st.dictionaries(st.text(), VALUES, max_size=4).map(OrderedDict))
def test_the_text_is_that_of_json(identifiers: OrderedDict[str, Any]) -> None:
    assert describe(identifiers) == json.dumps(identifiers, indent=4, default=lambda each: each.unique_identifiers)


@given(VALUES)
def test_what_is_said_twice_is_written_at_its_place(value: Any) -> None:
    identifiers = OrderedDict(a=value, b=[value, {"c": [value]}], d=(value, value))
    assert describe(identifiers) == json.dumps(identifiers, indent=4, default=lambda each: each.unique_identifiers)


def test_a_thing_without_identifiers_is_named() -> None:
    with pytest.raises(ConfigError, match="object: has no unique_identifiers"):
        describe(OrderedDict(tokenizer=[object()]))
