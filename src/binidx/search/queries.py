"""Items of an evaluation, and their n-grams of words, to find the items that training data contains.

An n-gram is a stretch of n words of an item with the blanks between them, byte for byte as the item has it. Words are
what blanks separate. Items with fewer words have no n-gram: such a short text stands in many documents by chance.

Source: 13-grams as in GPT-3 (Brown et al., 2020, appendix C), there of normalised text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError
from binidx.order.source_order import join_ranges
from binidx.search.document_search import Hits
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole


@dataclass(frozen=True)
class QueryItem:
    """Item of an evaluation.

    Attributes:
        line: number of its line, from 0.
        id: value of its key `id`; None without one.
        texts: its texts.
    """

    line: int
    id: str | None
    texts: Sequence[str]


def read_queries(file: Location, key: str | None = None) -> list[QueryItem]:
    """Return the items of a file of JSON Lines.

    Args:
        key: key of the text; None: all strings at the top of an item but `id`, each a text of its own.

    Raises:
        FormatError: a line is no JSON object, or has no string under the key.
    """
    items = list[QueryItem]()
    for number, line in enumerate(bytes(read_whole(open_object(file, cache=False))).split(b"\n")):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            chosen = {name: item[name] for name in (item.keys() - {"id"} if key is None else [key])}
            texts = [text for _, text in sorted(chosen.items()) if isinstance(text, str)]
        except (ValueError, AttributeError, KeyError, TypeError):
            texts = []
        if not texts:
            need = "a string" if key is None else f"a string under {key!r}"
            raise FormatError(f"{file}: line {number + 1}: found {line[:60]!r}, needs an object with {need}")
        items.append(QueryItem(number, None if item.get("id") is None else str(item["id"]), texts))
    return items


def count_ngrams(items: Sequence[QueryItem], num_words: int) -> tuple[list[str], list[list[int]]]:
    """Return the different n-grams of all items, and for each item the numbers of its own.

    Args:
        num_words: n.

    Raises:
        ConfigError: n is below 1, or no item has so many words.
    """
    if num_words < 1:
        raise ConfigError(f"ngram: found {num_words}, needs 1 or more")
    numbers: dict[str, int] = {}
    of_items = list[list[int]]()
    for item in items:
        own: dict[int, None] = {}
        for text in item.texts:
            words = [match.span() for match in re.finditer(r"\S+", text)]
            for (start, _), (_, stop) in zip(words, words[num_words - 1 :], strict=False):
                own[numbers.setdefault(text[start:stop], len(numbers))] = None
        of_items.append([*own])
    if not numbers:
        raise ConfigError(f"queries, ngram: no item has {num_words} words; give a smaller --ngram")
    return [*numbers], of_items


def match_items(
    items: Sequence[QueryItem], ngrams: Sequence[Sequence[int]], hits: Mapping[str, Hits]
) -> list[dict[str, Any]]:
    """Return the documents of each item, as JSON values.

    Each has the line and the id of the item, the numbers of its different n-grams and of those found in a document, and
    by prefix the numbers of the documents with one of them, ascending.

    Args:
        items, ngrams: as `count_ngrams` takes and returns them.
        hits: of the search for all n-grams, by prefix.
    """
    documents_of = {prefix: _group(rows[:, 1], rows[:, 0]) for prefix, rows in hits.items()}
    rows = list[dict[str, Any]]()
    for item, own in zip(items, ngrams, strict=True):
        present = {number for groups in documents_of.values() for number in own if number in groups}
        documents = {
            prefix: np.unique(np.concatenate(parts)).tolist()
            for prefix, groups in documents_of.items()
            if (parts := [groups[number] for number in own if number in groups])
        }
        counts = {"ngrams": len(own), "found": len(present), "documents": documents}
        rows.append({"line": item.line, "id": item.id, **counts})
    return rows


def group_matches(ngrams: Sequence[Sequence[int]], matches: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the matches of the n-grams of each item: rows (item, document, first token, token after the last).

    Args:
        ngrams: numbers of the n-grams of each item.
        matches: as `locate_matches` returns them.
    """
    number, item = np.array(sorted((each, item) for item, own in enumerate(ngrams) for each in own), np.int64).T
    first, stop = (number.searchsorted(matches[:, 1], side) for side in ("left", "right"))
    return np.column_stack([item[join_ranges(first, stop)], np.repeat(matches[:, [0, 2, 3]], stop - first, axis=0)])


def _group(keys: NDArray[np.int64], values: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Return key -> its values."""
    order = np.argsort(keys, kind="stable")
    distinct, starts = np.unique(keys[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(values[order], starts[1:]), strict=True)) if len(keys) else {}
