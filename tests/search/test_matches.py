"""Tokens of matches against every place at which Python finds a pattern in the text of a document."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.preprocess_jobs import tokenizer_path
from search.test_document_search import random_patterns, random_texts, write
from search.test_normalize import normal_form, random_text, split
from tokenizers import Tokenizer

import binidx
from binidx import describe_tokenizer
from binidx.errors import ObjectChangedError
from binidx.native.token_search import TokenTable
from binidx.search.document_search import search_documents
from binidx.search.matches import locate_matches
from binidx.tokenizers.token_bytes import token_table


def places_of(pattern: Any, text: Any) -> list[int]:
    """Every place of a pattern, overlapping ones too."""
    return [at for at in range(len(text) - len(pattern) + 1) if text[at : at + len(pattern)] == pattern]


@pytest.mark.parametrize("seed", range(12))
def test_matches_are_the_tokens_that_hold_a_byte_of_the_pattern(seed: int, tmp_path: Path) -> None:
    at_once = [1, 7, 1 << 20][seed % 3]
    rng, tokenizer = random.Random(seed), Tokenizer.from_file(tokenizer_path())
    table = token_table(describe_tokenizer(tokenizer_path()))
    texts = random_texts(60, rng)
    documents = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    prefix = write(tmp_path / "en", documents, [np.uint16, np.int32][seed % 2], rng)
    patterns = [*random_patterns(texts, 40, rng), "aba", "ababa", "🙂"]
    dataset = binidx.IndexedDataset(prefix)
    hits = search_documents([prefix], patterns, table).hits[prefix]
    expected = []
    for document, ids in enumerate(documents):
        pieces = [table.decode([number]) for number in ids]
        ends, text = [*accumulate(map(len, pieces))], b"".join(pieces)
        for number, pattern in enumerate(each.encode() for each in patterns):
            for at in places_of(pattern, text):
                held = [token for token, (end, piece) in enumerate(zip(ends, pieces, strict=True))
                        if end > at and end - len(piece) < at + len(pattern)]  # fmt: skip
                expected.append([document, number, held[0], held[-1] + 1])
    assert locate_matches(dataset, hits, patterns, table, tokens_at_once=at_once).tolist() == expected
    ids = [own[1:4] for own in documents if len(own) > 4][:20]
    hits = search_documents([prefix], ids).hits[prefix]
    expected = [
        [document, number, at, at + len(pattern)] for document, own in enumerate(documents)
        for number, pattern in enumerate(ids) for at in places_of(pattern, own)
    ]  # fmt: skip
    assert locate_matches(dataset, hits, ids, None, tokens_at_once=at_once).tolist() == expected


def test_other_tokens_than_those_that_were_searched_are_an_error(tmp_path: Path) -> None:
    prefix = write(tmp_path / "en", [[1, 2, 3], [2, 2, 2]], np.uint16, random.Random(0))
    hits = search_documents([prefix], [[2, 2]]).hits[prefix]
    assert locate_matches(binidx.IndexedDataset(prefix), hits, [[2, 2]], None).tolist() == [[1, 0, 0, 2], [1, 0, 1, 3]]
    with pytest.raises(ObjectChangedError, match="has other tokens than when it was searched"):
        locate_matches(binidx.IndexedDataset(prefix), hits, [[2, 3]], None)
    assert locate_matches(binidx.IndexedDataset(prefix), hits[:0], [[2, 3]], None).shape == (0, 4)


def fold_with_places(text: bytes) -> tuple[bytes, list[tuple[int, int]]]:
    """The normal form of a text, and for each of its bytes the bytes of the character that it comes from."""
    normal, places, at = b"", list[tuple[int, int]](), 0
    for character in text.decode(errors="surrogateescape"):
        size = len(character.encode(errors="surrogateescape"))
        added = normal_form(character.encode(errors="surrogateescape"))
        for number in range(len(added)):
            if added[number : number + 1] != b" " or not normal.endswith(b" "):
                normal += added[number : number + 1]
                places.append((at, at + size))
        at += size
    return normal, places


@pytest.mark.parametrize("seed", range(12))
def test_matches_of_normal_forms_are_the_tokens_that_hold_their_characters(seed: int, tmp_path: Path) -> None:
    at_once = [1, 7, 1 << 20][seed % 3]
    rng, tokens = random.Random(seed), {b"": 0, b" " * 40: 1}
    texts = [random_text(rng, rng.choice([0, 3, 20, 80])) for _ in range(60)]
    documents = [split(text, tokens, rng) for text in texts]
    prefix, pieces = write(tmp_path / "en", documents, np.int32, rng), [*tokens]
    candidates = [text.decode(errors="ignore")[first:][: rng.choice([1, 2, 5, 9])].swapcase()
                  for text in rng.choices(texts, k=80)
                  for first in [rng.randrange(max(1, len(text) // 2))]]  # fmt: skip
    patterns = ["a", "B", *(each for each in dict.fromkeys(candidates) if normal_form(each.encode()).strip())]
    table = TokenTable.of(pieces)
    hits = search_documents([prefix], patterns, table, normalize=True).hits[prefix]
    expected = []
    for document, ids in enumerate(documents):
        ends = [*accumulate(len(pieces[number]) for number in ids)]
        normal, places = fold_with_places(texts[document])
        for number, pattern in enumerate(normal_form(each.encode()).strip() for each in patterns):
            for at in places_of(pattern, normal):
                first, stop = places[at][0], places[at + len(pattern) - 1][1]
                held = [token for token, (end, own) in enumerate(zip(ends, ids, strict=True))
                        if end > first and end - len(pieces[own]) < stop and pieces[own]]  # fmt: skip
                expected.append([document, number, held[0], held[-1] + 1])
    assert len(expected) > 100
    dataset = binidx.IndexedDataset(prefix)
    found = locate_matches(dataset, hits, patterns, table, normalize=True, tokens_at_once=at_once)
    assert found.tolist() == expected
