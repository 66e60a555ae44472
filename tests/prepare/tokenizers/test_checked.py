"""An engine that is wrong is caught, on a sample of the texts that every run draws again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.trained_tokenizers import buffers, lists, plain_texts, save
from numpy.typing import NDArray

from binidx import describe_tokenizer
from binidx.errors import MismatchError
from binidx.prepare.tokenizers.checked_engine import CheckedEngine
from binidx.prepare.tokenizers.engine import Encoded, Engine
from binidx.prepare.tokenizers.engine_choice import choose_engine, reference_engine


class Wrong:
    """Changes the third id of every text that begins so."""

    name = "wrong"

    def __init__(self, engine: Engine, beginning: bytes) -> None:
        self.engine, self.beginning = engine, beginning

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        ids, bounds = self.engine.encode(texts, offsets)
        ids = ids.copy()
        for text, start in enumerate(offsets[:-1]):
            if texts[start : offsets[text + 1]].tobytes().startswith(self.beginning):
                ids[bounds[text] + 2] += 1
        return ids, bounds


class Silent(Wrong):
    """Loses the last text."""

    name = "silent"

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        return self.engine.encode(texts, offsets[:-1])


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return reference_engine(describe_tokenizer(save("gpt2", tmp_path_factory.mktemp("gpt2"))))


def test_a_wrong_engine_is_caught_with_both_lists_and_the_text(exact: Engine) -> None:
    checked = CheckedEngine(Wrong(exact, b"one two"), exact, first=1000)
    texts = buffers(["all right", "one two three four", "one two once more"])
    right = lists(exact.encode(*texts))[1]
    wrong = [*right[:2], right[2] + 1, *right[3:]]
    with pytest.raises(MismatchError, match="text 1, 18 bytes, beginning 'one two three four'") as raised:
        checked.encode(*texts)
    parts = (
        f"wrong has {wrong[:10]}",
        f"hf {right[:10]}",
        "2 is the first that differs",
        "--tokenizer-engine hf is exact",
    )
    for part in parts:
        assert part in str(raised.value)


def test_a_text_that_is_missing_is_caught(exact: Engine) -> None:
    with pytest.raises(MismatchError, match=r"1 texts returned .need 2"):
        CheckedEngine(Silent(exact, b""), exact).encode(*buffers(["a", "b"]))


def test_the_first_texts_are_compared_over_all_batches_and_then_no_more(exact: Engine) -> None:
    checked = CheckedEngine(Wrong(exact, b"never"), exact, first=5, share=0)
    for _ in range(3):
        checked.encode(*buffers(["a", "b", "c"]))
    assert checked.compared == 5


def test_the_sample_depends_on_the_numbers_of_part_and_text_alone(exact: Engine) -> None:
    texts = plain_texts()

    def sample(size: int, seed: int) -> list[int]:
        checked, found = CheckedEngine(Wrong(exact, b"never"), exact, share=0.2, seed=seed), list[int]()
        for start in range(0, len(texts), size):
            checked.encode(*buffers(texts[start : start + size]))
            found.append(checked.compared)
        return found

    once = sample(1, 3)
    assert once[6::7] == sample(7, 3)[: len(once) // 7]
    assert once != sample(1, 4)
    assert 0.1 < once[-1] / len(texts) < 0.3


def test_a_rare_fault_is_found_in_the_sample(exact: Engine) -> None:
    checked = CheckedEngine(Wrong(exact, b"text 7 "), exact, share=1)
    with pytest.raises(MismatchError, match="text 7, 20 bytes"):
        checked.encode(*buffers([f"text {number} of those here" for number in range(9)]))


def test_the_reference_is_not_compared_with_itself(exact: Engine, tmp_path: Path) -> None:
    checked = CheckedEngine(exact, exact, first=1000, share=1)
    assert lists(checked.encode(*buffers(["a b"]))) == lists(exact.encode(*buffers(["a b"])))
    assert checked.compared == 0
    assert (checked.name, CheckedEngine(choose_engine(describe_tokenizer(save("gpt2", tmp_path))), exact).name) == (
        "hf",
        "gigatoken",
    )


class Measured(Wrong):
    """Remembers how many bytes it was given at once."""

    name = "measured"

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        self.given = [*getattr(self, "given", []), int(offsets[-1] - offsets[0])]
        return self.engine.encode(texts, offsets)


def test_of_a_text_too_long_for_the_reference_the_beginning_is_compared(exact: Engine) -> None:
    long = buffers(["one two three été " * 50])
    for cut in range(95, 105):  # also in the middle of a character
        needed = Measured(exact, b"")
        checked = CheckedEngine(Wrong(exact, b"never"), needed, first=1)
        checked.longest_bytes = cut
        assert lists(checked.encode(*long)) == lists(exact.encode(*long))
        assert checked.compared == 1
        assert cut - 1 <= needed.given[0] <= cut
    with pytest.raises(MismatchError, match=r"text 0, \d+ bytes, beginning 'one two three"):
        CheckedEngine(Wrong(exact, b"one"), exact, first=1).encode(*long)
