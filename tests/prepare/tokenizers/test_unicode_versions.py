"""What libraries read by different versions of Unicode is all in the table, and such texts give the reference's ids."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from helpers.trained_tokenizers import any_code_point, buffers, lists, save

from binidx import describe_tokenizer
from binidx.prepare.tokenizers.engine_choice import choose_engine, reference_engine
from binidx.prepare.tokenizers.gigatoken_engine import RUNS, find_new_code_points

UNSETTLED = {point for first, stop in RUNS.tolist() for point in range(first, stop)}


def in_words(point: int) -> str:
    """Alone, in words, doubled, and among marks."""
    letter = chr(point)
    return (
        f"a{letter}b {letter}A1{letter}2 {letter}{letter}'s\n{letter} e{letter}\u0301 e\u0316{letter} e{letter}\u093c"
    )


def code_points() -> list[int]:
    """Most of those that are assigned and rarer ones at random, and the first and last of each run."""
    rng = random.Random(0)
    edges = [point for run in RUNS.tolist() for point in (run[0] - 1, run[0], run[1] - 1, run[1])]
    return [*range(0x80, 0x2000, 3), *(any_code_point(rng) for _ in range(2500)), *edges]


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "o200k"])
def test_any_code_point_gives_the_ids_of_the_reference(kind: str, tmp_path: Path) -> None:
    spec = describe_tokenizer(save(kind, tmp_path))
    points = code_points()
    texts = buffers([in_words(point) for point in points])
    found, needed = (
        lists(engine.encode(*texts)) for engine in (choose_engine(spec, "gigatoken"), reference_engine(spec))
    )
    assert [hex(point) for point, row, right in zip(points, found, needed, strict=True) if row != right] == []


def test_texts_with_such_a_code_point_are_found() -> None:
    points = [*range(0x1000), *range(0xE000, 0x20000, 7), *range(0x2B730, 0x2B750), 0x10FFFF, *UNSETTLED]
    random.Random(0).shuffle(points)
    words = [f"w{chr(point)}" for point in points if not 0xD800 <= point < 0xE000]
    found = find_new_code_points(*buffers(words))
    assert found.tolist() == [number for number, word in enumerate(words) if ord(word[1]) in UNSETTLED]


def test_a_text_cut_before_such_a_code_point_has_none() -> None:
    texts, offsets = buffers(["a", "\U00016ea0", "b"])
    assert find_new_code_points(texts, offsets).tolist() == [1]
    assert find_new_code_points(texts, offsets[:2]).tolist() == []
    assert find_new_code_points(texts, np.zeros(1, np.int64)).tolist() == []
