"""A search of normal forms finds what Python finds in the normal form of each document's whole text."""

from __future__ import annotations

import random
import string
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.search_pieces import cut_small
from helpers.trained_tokenizers import any_code_point

from binidx.errors import ConfigError
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.native.token_search import TokenTable
from binidx.search.document_search import search_documents
from binidx.search.normalize import normalize_bytes, normalize_query

CHARACTERS = "aAbB .,-\n$+<éÉİßſﬁ…½´ＡａΣςσ雨각🙂\u0301\u0323\u00ad\u200b\u00a0\u2028\ufdfa"
INVALID = [b"\xff", b"\x80", b"\xc3", b"\xe2\x82", b"\xf0\x9f\x99", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"]


def normal_form(text: bytes) -> bytes:
    """The definition of the page, character by character; bytes that are no UTF-8 are U+DC80 to U+DCFF here."""
    pieces = [""]
    for character in text.decode(errors="surrogateescape"):
        once = unicodedata.normalize("NFKD", character).casefold()
        for part in " " if "\udc80" <= character <= "\udcff" else unicodedata.normalize("NFKD", once):
            category = unicodedata.category(part)
            if category[0] in "ZP" or category == "Cc" or part in string.punctuation:
                pieces += [] if pieces[-1] == " " else [" "]
            elif category != "Cf":
                pieces.append(part)
    return "".join(pieces).encode()


def random_text(rng: random.Random, most: int) -> bytes:
    """Few characters, so that texts share much, some of any plane, and some bytes that are no UTF-8."""
    kinds = rng.choices(["few", "any", "invalid"], [90, 5, 5 * (rng.random() < 0.5)], k=rng.randrange(most + 1))
    few = {"few": lambda: rng.choice(CHARACTERS).encode(), "any": lambda: chr(any_code_point(rng)).encode()}
    return b"".join(rng.choice(INVALID) if kind == "invalid" else few[kind]() for kind in kinds)


def split(text: bytes, tokens: dict[bytes, int], rng: random.Random) -> list[int]:
    """Ids of random pieces of a text, some within a character and some empty; new ones go into `tokens`."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(2 * len(text) + 2)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [tokens.setdefault(piece, len(tokens)) for piece in pieces]


def write(prefix: str, documents: Sequence[Sequence[int]], dtype: Any) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for ids in documents:
            builder.add_document(list(ids), [len(ids)])
        builder.finalize(f"{prefix}.idx")
    return prefix


def check_normalized_search(folder: Path, num_texts: int, seed: int) -> None:
    rng = random.Random(seed)
    texts = [random_text(rng, rng.choice([0, 3, 20, 120])) for _ in range(num_texts)]
    tokens: dict[bytes, int] = {b"": 0, b" " * 40: 1, b"A" * 20 + b"\xc3": 2}
    documents = [split(text, tokens, rng) for text in texts]
    prefix = write(f"{folder}/en", documents, rng.choice([np.int32, np.int64]))
    sought = ["a", "B,", "x" * 60]
    while len(sought) < rng.choice([4, 400]):
        text = rng.choice(texts).decode(errors="ignore")
        start = rng.randrange(len(text) + 1)
        part = text[start : start + rng.choice([1, 2, 5, 9, 30])]
        if normal_form(part.swapcase().encode()).strip():
            sought.append(part.swapcase())
    hits = search_documents([prefix], sought, TokenTable.of([*tokens]), normalize=True).hits[prefix]
    normal, forms = [normal_form(text) for text in texts], [normal_form(text.encode()).strip() for text in sought]
    expected = [
        [number, place, sum(text.startswith(form, at) for at in range(len(text))), text.find(form)]
        for number, text in enumerate(normal)
        for place, form in enumerate(forms)
        if form in text
    ]
    assert hits.tolist() == expected
    assert len(expected) > num_texts // 10


@pytest.mark.parametrize("seed", range(4))
def test_normal_forms_are_found_where_python_finds_them(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    cut_small(monkeypatch, [1, 300, 128 << 10, 1][seed], parts=bool(seed % 2))
    check_normalized_search(tmp_path, 600, seed)


@pytest.mark.slow
def test_normal_forms_are_found_where_python_finds_them_in_100_000(tmp_path: Path) -> None:
    for seed in range(4, 24):
        check_normalized_search(tmp_path, 5_000, seed)


def test_the_normal_form_is_the_definition_and_knows_where_each_byte_comes_from() -> None:
    rng = random.Random(0)
    for most in [5] * 500 + [100] * 200 + [100_000]:
        text = random_text(rng, most)
        normal, origins = normalize_bytes(text)
        assert normal.rstrip(b" ") == normal_form(text).rstrip(b" ")
        assert (np.diff(origins) >= 0).all()
        for place in rng.sample(range(len(normal)), min(len(normal), 3)):
            start = int(origins[place])
            stop = next((int(at) for at in origins[place:] if at > start), len(text))
            assert normal[place : place + 1] in normal_form(text[start:stop])


def test_every_code_point_has_the_form_of_its_nfkc_and_of_its_case_fold() -> None:
    everything = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    # A digit between them keeps marks apart.
    text = "0".join(everything)
    normal = normalize_bytes(text.encode())[0]
    assert normal == normal_form(text.encode())
    for other in ("NFC", "NFKC", "NFKD"):
        assert (
            normalize_bytes("0".join(unicodedata.normalize(other, each) for each in everything).encode())[0] == normal
        )
    assert normalize_bytes("0".join(each.casefold() for each in everything).encode())[0] == normal
    assert normalize_bytes(normal)[0] == normal


def test_no_match_crosses_the_end_of_a_document(tmp_path: Path) -> None:
    table = TokenTable.of([b"white", b" ", b"rabbit", b"caf\xc3", b"\xa9"])
    prefix = write(f"{tmp_path}/en", [[0, 1], [2], [3], [4], [0, 1, 1, 2], [3, 4]], np.int32)
    hits = search_documents([prefix], ["White Rabbit", "CAFÉ", "é"], table, normalize=True).hits[prefix]
    assert hits[:, :2].tolist() == [[4, 0], [5, 1], [5, 2]]


def test_a_search_that_cannot_be_normalized_is_an_error(tmp_path: Path) -> None:
    prefix = write(f"{tmp_path}/en", [[0]], np.int32)
    with pytest.raises(ConfigError, match="nothing is left of the text ' -- '"):
        search_documents([prefix], [" -- "], TokenTable.of([b"a"]), normalize=True)
    with pytest.raises(ConfigError, match="normalize, tokens: found both, need one"):
        search_documents([prefix], [[1]], normalize=True)
    assert normalize_query("“Hello, WORLD!”") == "hello world"
