"""The bytes of samples: enough to read them, and not one more."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, write_with_megatron
from hypothesis import given
from hypothesis import strategies as st

import binidx
from binidx.dataset.read_plan import merge_ranges, ranges_of_samples


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=20))
def test_a_union_has_the_same_bytes_sorted_and_apart(asked: list[tuple[int, int]]) -> None:
    ranges = np.array([(start, start + count) for start, count in asked], np.int64).reshape(-1, 2)
    found = merge_ranges(ranges).tolist()
    assert {byte for start, stop in found for byte in range(start, stop)} == {
        byte for start, stop in ranges.tolist() for byte in range(start, stop)
    }
    assert all(start < stop for start, stop in found)
    assert all(one[1] < other[0] for one, other in pairwise(found))


def test_a_union_by_hand() -> None:
    assert merge_ranges(np.array([(5, 9), (0, 2), (7, 8), (2, 3), (20, 20), (9, 11)])).tolist() == [[0, 3], [5, 11]]
    assert merge_ranges(np.empty((0, 2), np.int64)).shape == (0, 2)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory, rng = tmp_path_factory.mktemp("plan"), np.random.default_rng(3)
    return [
        write_with_megatron(directory / name, rng.integers(1, 90, 300).astype(np.int32), rng) for name in ("en", "code")
    ]


def build(blend: Any, kind: Any = binidx.GPTDataset) -> Any:
    config = binidx.GPTDatasetConfig(
        random_seed=7, sequence_length=40, blend=blend, split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    return binidx.BlendedMegatronDatasetBuilder(kind, [400, 0, 0], lambda: True, config).build()[0]


class OwnSpans(binidx.GPTDataset):
    """The same spans, one by one."""

    def spans(self, idx: int | None) -> Any:
        return super().spans(idx)


@pytest.mark.parametrize("blended", [False, True])
@pytest.mark.parametrize("kind", [binidx.GPTDataset, OwnSpans])
def test_the_ranges_are_exactly_what_the_samples_read(prefixes: list[str], blended: bool, kind: Any) -> None:
    dataset = build((prefixes, [0.6, 0.4]) if blended else (prefixes[:1], None), kind)
    rng = np.random.default_rng(0)
    for count in (0, 1, 8, 60):
        idxs = rng.integers(0, len(dataset), count).tolist()
        with Recording(dataset) as read:
            if idxs:
                dataset.__getitems__(idxs)
        planned = {stored.path_prefix: ranges.tolist() for stored, ranges in ranges_of_samples(dataset, idxs)}
        needed = {prefix: merge_ranges(np.array(ranges)).tolist() for prefix, ranges in read.items()}
        assert {prefix: ranges for prefix, ranges in planned.items() if ranges} == needed


class Recording:
    """What is read of the `.bin` of a dataset, or of those of a blend, during the block: prefix -> ranges."""

    def __init__(self, dataset: Any) -> None:
        self.stored = [each.dataset for each in getattr(dataset, "datasets", [dataset])]

    def __enter__(self) -> dict[str, list[Any]]:
        self.read: dict[str, list[Any]] = {}
        self.readers = [stored.bin_reader for stored in self.stored]
        for stored in self.stored:
            stored.bin_reader = Recorder(stored.bin_reader, self.read, stored.path_prefix)
        return self.read

    def __exit__(self, *error: object) -> None:
        for stored, reader in zip(self.stored, self.readers, strict=True):
            stored.bin_reader = reader


class Recorder:
    """A reader that remembers what it was asked."""

    def __init__(self, reader: Any, read: dict[str, list[Any]], name: str) -> None:
        self.reader, self.log, self.name = reader, read, name
        self.uri, self.size = reader.uri, reader.size

    def read(self, ranges: Any) -> Any:
        if ranges:
            self.log.setdefault(self.name, []).extend(ranges)
        return self.reader.read(ranges)


def test_the_order_and_number_of_samples_at_once_do_not_matter(prefixes: list[str], monkeypatch: Any) -> None:
    dataset = build((prefixes, [0.6, 0.4]))
    idxs = list(range(0, 300, 3))
    whole = [ranges.tolist() for _, ranges in ranges_of_samples(dataset, idxs)]
    monkeypatch.setattr("binidx.dataset.read_plan.AT_ONCE", 7)
    assert [ranges.tolist() for _, ranges in ranges_of_samples(dataset, idxs[::-1])] == whole


def test_every_token_of_an_epoch_is_planned_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    prefix = write_with_megatron(tmp_path / "en", rng.integers(1, 90, 100).astype(np.int32), rng)
    dataset = build(([prefix], None))
    ((stored, ranges),) = ranges_of_samples(dataset, range(len(dataset)))
    assert stored.path_prefix == prefix
    assert int((ranges[:, 1] - ranges[:, 0]).sum()) <= stored.bin_reader.size
