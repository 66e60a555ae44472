"""What docs/explanation says in numbers: its examples print what their comments say, and that is Megatron Core's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers.oracle import megatron
from helpers.pages import DOCS, python_blocks, read_page

import binidx

ORDER = read_page("explanation/order")
LENGTHS, SEQUENCE_LENGTH, SEED = [4, 7, 3, 6, 5], 6, 1234


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the examples of order.md define, once each has printed what its comments say."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("order"))
        for example in python_blocks(ORDER):
            printed: list[str] = []
            exec(example, {**found, "print": lambda value, to=printed: to.append(str(value))}, found)
            assert printed == re.findall(r"  # (\[.*\]+)", example)
    return found


def megatrons_indices(num_samples: int) -> list[Any]:
    """Document, sample and shuffle index of the example, by Megatron's functions and its formula of epochs."""
    per_epoch = sum(LENGTHS)
    epochs = -(-(num_samples * SEQUENCE_LENGTH + 1) // per_epoch)
    before = ((epochs - 1) * per_epoch - 1) // SEQUENCE_LENGTH
    separate = epochs > 1 and num_samples - before < int(0.8 * ((per_epoch - 1) // SEQUENCE_LENGTH))
    rng, lengths = np.random.RandomState(SEED), np.array(LENGTHS, np.int32)
    documents = megatron.gpt._build_document_index(np.arange(5, dtype=np.int32), epochs, rng, separate)
    samples = megatron.helpers.build_sample_idx(lengths, documents, SEQUENCE_LENGTH, epochs, per_epoch, True, True)
    count = len(samples) - 1
    return [documents, samples, megatron.gpt._build_shuffle_index(before if separate else count, count, rng)]


@pytest.mark.parametrize(("name", "num_samples"), [("train", 4), ("four", 4), ("six", 6), ("eight", 8)])
def test_the_example_has_megatrons_indices(name: str, num_samples: int, names: dict[str, Any]) -> None:
    dataset = names[name]
    for found, needed in zip(
        (dataset.document_index, dataset.sample_index, dataset.shuffle_index),
        megatrons_indices(num_samples),
        strict=True,
    ):
        assert np.array_equal(found, needed)


def test_the_example_of_a_blend_is_megatrons(names: dict[str, Any]) -> None:
    shares, numbers = np.zeros(12, np.int16), np.zeros(12, np.int64)
    megatron.helpers.build_blending_indices(shares, numbers, np.array([0.7, 0.3]), 2, 12, False)
    assert names["shares"].tolist() == shares.tolist()
    assert names["numbers"].tolist() == numbers.tolist()


def numbers_in(picture: str, group: str) -> list[int]:
    """The numbers in a group of a picture, from left to right and top to bottom."""
    root = ElementTree.parse(DOCS / "explanation" / picture).getroot()
    [found] = [each for each in root.findall(".//{*}g") if each.get("id") == group]
    return [int(part) for each in found.findall(".//{*}text") for part in re.findall(r"\d+", each.text or "")]


def flat(rows: Any) -> Sequence[int]:
    return np.asarray(rows).reshape(-1).tolist()


def test_the_pictures_show_the_numbers_of_the_examples(names: dict[str, Any]) -> None:
    train = names["train"]
    assert numbers_in("order.svg", "documents") == np.concatenate(train.dataset[:]).tolist()
    assert numbers_in("order.svg", "stream") == [
        token for each in train.document_index for token in train.dataset[each]
    ]
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert numbers_in("order.svg", name) == flat(getattr(train, name))
    shown = np.array(numbers_in("order.svg", "samples")).reshape(4, -1)
    assert flat(shown[:, 1:]) == flat(train.read_tokens(range(4)))
    assert numbers_in("blend.svg", "dataset_index") == flat(names["shares"])
    assert numbers_in("blend.svg", "dataset_sample_index") == flat(names["numbers"])
    for rank in range(2):
        sampler = binidx.megatron.MegatronPretrainingSampler(12, 0, 2, data_parallel_rank=rank, data_parallel_size=2)
        assert numbers_in("blend.svg", f"rank{rank}") == flat([*sampler])


def test_every_test_that_the_page_of_correctness_names_is_there() -> None:
    page, root = read_page("explanation/correctness"), DOCS.parent
    paths = {*re.findall(r"`((?:tests|native)/[\w/.]+)", page)}
    assert len(paths) > 15
    assert [each for each in paths if not (root / each).exists()] == []
    sources = "".join(each.read_text() for each in (root / "tests").rglob("test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in sources] == []
    makefile = (root / "Makefile").read_text()
    targets = re.findall(r"(?:^    |`)make ([\w-]+)", page, re.M)
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
