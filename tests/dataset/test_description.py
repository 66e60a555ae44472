"""The text that Megatron hashes for the names of index caches."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from binidx.errors import ConfigError
from binidx.index.cache.index_files import describe, digest


class Described:
    """Has identifiers, as a tokenizer does."""

    def __init__(self, identifiers: Any) -> None:
        self.unique_identifiers = identifiers


TEXT = r"""{
    "class": "GPTDataset",
    "weights": [
        0.1,
        1e-09,
        null
    ],
    "split_matrix": [
        [
            0,
            0.9
        ],
        []
    ],
    "tokenizer": {
        "path": "caf\u00e9\n",
        "1": true,
        "none": {}
    }
}"""


def test_the_text_has_indents_escapes_and_what_the_tokenizer_is_known_by() -> None:
    tokenizer = Described({"path": "café\n", 1: True, "none": Described({})})
    identifiers = OrderedDict(
        [("class", "GPTDataset"), ("weights", (0.1, 1e-9, None)), ("split_matrix", [(0, 0.9), ()])]
    )
    text = describe(OrderedDict([*identifiers.items(), ("tokenizer", tokenizer)]))
    assert text == TEXT
    assert digest(text) == "e3cdda46e9ea8a472e44f502f0308372"


def test_a_thing_without_identifiers_is_named() -> None:
    with pytest.raises(ConfigError, match="object: has no unique_identifiers"):
        describe(OrderedDict(tokenizer=[object()]))
