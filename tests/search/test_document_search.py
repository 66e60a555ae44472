"""Documents found in stored tokens are those that Python's `in` finds in their texts, or in their lists of ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.preprocess_jobs import tokenizer_path
from helpers.search_pieces import cut_small
from helpers.trained_tokenizers import any_code_point
from tokenizers import Tokenizer

from binidx import describe_tokenizer
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.errors import ConfigError, FormatError
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.jobs.parts import Shard, Workers
from binidx.search.document_search import search_documents
from binidx.tokenizers.token_bytes import token_table

LETTERS = ["the ", "sea", " wrote", "é", "雨", "🙂", "🙂🙂", "e\u0301", "\n", "ab", "aba", " ", "\x00", "naïve", "x"]


def random_texts(count: int, rng: random.Random) -> list[str]:
    """Of few letters, so that they share much; some of any code points, some empty."""
    texts = []
    for _ in range(count):
        pieces = [rng.choice(LETTERS) for _ in range(rng.choice([0, 1, 3, 10, 40]))]
        if rng.random() < 0.2:
            pieces.insert(rng.randrange(len(pieces) + 1), chr(any_code_point(rng)))
        texts.append("".join(pieces))
    return texts


def random_patterns(texts: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Most of them parts of texts, so that some stand over the bounds of documents; some that stand nowhere."""
    whole, patterns = "".join(texts), ["x" * 50]
    for _ in range(count):
        start = rng.randrange(len(whole))
        patterns.append(whole[start : start + rng.choice([1, 2, 5, 9, 20, 70])])
    return patterns


def write(prefix: Path, documents: Sequence[Sequence[int]], dtype: Any, rng: random.Random) -> str:
    """Documents of several sequences."""
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for ids in documents:
            cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(3)))
            builder.add_document(list(ids), np.diff([0, *cuts, len(ids)]).tolist())
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def check_search(folder: Path, num_texts: int, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(tokenizer_path())
    texts = random_texts(num_texts, rng)
    documents = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    dtype = rng.choice([np.uint16, np.int32, np.int64])
    prefix = write(folder / "en", documents, dtype, rng)
    table = token_table(describe_tokenizer(tokenizer_path()))
    for patterns in ([rng.choice("abx")], random_patterns(texts, rng.choice([3, 500]), rng), ["ab" * 8 + "é" * 5]):
        hits = search_documents([prefix], patterns, table).hits[prefix]
        expected = [
            [number, place, text.encode().find(pattern.encode())]
            for number, text in enumerate(texts)
            for place, pattern in enumerate(patterns)
            if pattern in text
        ]
        assert hits[:, [0, 1, 3]].tolist() == expected
        for number, place, matches, _ in random.Random(0).sample(hits.tolist(), min(len(hits), 200)):
            text, pattern = texts[number].encode(), patterns[place].encode()
            assert matches == sum(text.startswith(pattern, at) for at in range(len(text)))
    ids = [rng.choice([ids for ids in documents if ids]) for _ in range(20)]
    sought = [row[(at := rng.randrange(len(row))) : at + rng.choice([1, 2, 5, 30])] for row in ids]
    hits = search_documents([prefix], sought).hits[prefix]
    joined = [f",{','.join(map(str, row))}," for row in documents]
    found = [
        [number, place]
        for number, row in enumerate(joined)
        for place, part in enumerate(sought)
        if f",{','.join(map(str, part))}," in row
    ]
    assert hits[:, :2].tolist() == found


@pytest.mark.parametrize("seed", range(3))
def test_documents_are_those_in_which_python_finds_the_text(seed: int, tmp_path: Path, monkeypatch: Any) -> None:
    cut_small(monkeypatch, [1, 300, 128 << 10][seed], parts=seed == 1)
    check_search(tmp_path, 1500, seed)


def test_an_id_outside_the_vocabulary_is_an_error_that_names_its_document(tmp_path: Path) -> None:
    """Also if the document begins in a piece of the read that is not the first, at 8 MiB."""
    table = token_table(describe_tokenizer(tokenizer_path()))
    documents = np.full((5, 3_000_000), 17, np.uint16)
    documents[3, 7] = 60_000
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        for ids in documents:
            builder.add_document(ids, [len(ids)])
        builder.finalize(f"{tmp_path}/en.idx")
    message = r"en.bin: document 3: id outside the tokenizer's vocabulary \(found 60000\)"
    with pytest.raises(FormatError, match=message):
        search_documents([f"{tmp_path}/en"], ["sea"], table)


def test_compressed_data_and_virtual_merges_are_searched_as_plain_data(tmp_path: Path) -> None:
    rng, tokenizer = random.Random(0), Tokenizer.from_file(tokenizer_path())
    table = token_table(describe_tokenizer(tokenizer_path()))
    parts = []
    for number in range(2):
        ids = [encoding.ids for encoding in tokenizer.encode_batch(random_texts(100, rng))]
        source = write(tmp_path / f"plain{number}", ids, np.uint16, rng)
        convert_dataset(source, tmp_path / f"part{number}", way=StorageFormat("zstd"))
        parts.append(f"{tmp_path}/part{number}")
    merge_virtually(parts, f"{tmp_path}/all")
    found = search_documents(parts, ["aba", "🙂"], table).hits
    assert len(found[parts[0]]) > 10
    moved = found[parts[1]] + [100, 0, 0, 0]
    whole = search_documents([f"{tmp_path}/all"], ["aba", "🙂"], table).hits[f"{tmp_path}/all"]
    assert whole.tolist() == [*found[parts[0]].tolist(), *moved.tolist()]


def test_what_cannot_be_searched_for_is_an_error(tmp_path: Path) -> None:
    prefix = write(tmp_path / "en", [[1, 2]], np.float32, random.Random(0))
    for patterns in ([""], [], ["a", ""], [[]]):
        with pytest.raises(ConfigError, match="patterns: found an empty one, or none"):
            search_documents([prefix], patterns)
    with pytest.raises(FormatError, match="tokens are float32, a search needs integers"):
        search_documents([prefix], [[1]])


@pytest.mark.slow
def test_documents_are_those_in_which_python_finds_the_text_in_100_000(tmp_path: Path) -> None:
    for seed in range(3, 13):
        check_search(tmp_path, 12_000, seed)


def test_a_wrong_call_is_refused_before_data_are_opened(tmp_path: Path) -> None:
    nowhere = [str(tmp_path / "nowhere")]
    with pytest.raises(ConfigError, match="normalize, tokens: found both"):
        search_documents(nowhere, [[1, 2]], normalize=True)
    with pytest.raises(ConfigError, match="patterns: found an empty one"):
        search_documents(nowhere, [])
    with pytest.raises(ConfigError, match="shard, records: "):
        search_documents(nowhere, [[1, 2]], workers=Workers(shard=Shard(0, 2)))
