"""The bytes of samples: enough to read them, and not one more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, write_with_megatron

import binidx
from binidx.tools._warming import join_ranges, sample_ranges


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory, rng = tmp_path_factory.mktemp("plan"), np.random.default_rng(3)
    return [
        write_with_megatron(directory / name, rng.integers(1, 90, 300).astype(np.int32), rng) for name in ("en", "code")
    ]


def build(blend: Any) -> Any:
    config = binidx.GPTDatasetConfig(
        random_seed=7, sequence_length=40, blend=blend, split="1,0,0", tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [400, 0, 0], lambda: True, config).build()[0]


@pytest.mark.parametrize("blended", [False, True])
def test_the_ranges_are_exactly_what_the_samples_read(prefixes: list[str], blended: bool) -> None:
    dataset = build((prefixes, [0.6, 0.4]) if blended else (prefixes[:1], None))
    rng = np.random.default_rng(0)
    for count in (0, 1, 8, 60):
        idxs = rng.integers(0, len(dataset), count).tolist()
        with Recording(dataset) as read:
            if idxs:
                dataset.__getitems__(idxs)
        planned = {reader.uri[:-4]: bytes_in(ranges) for reader, ranges in sample_ranges(dataset, idxs)}
        needed = {prefix: bytes_in(ranges) for prefix, ranges in read.items()}
        assert {prefix: found for prefix, found in planned.items() if found} == needed


def bytes_in(ranges: Any) -> set[int]:
    return {byte for start, stop in ranges for byte in range(start, stop)}


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


def test_every_token_of_an_epoch_is_planned_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    prefix = write_with_megatron(tmp_path / "en", rng.integers(1, 90, 100).astype(np.int32), rng)
    dataset = build(([prefix], None))
    ((reader, ranges),) = sample_ranges(dataset, range(len(dataset)))
    assert reader.uri == f"{prefix}.bin"
    assert bytes_in(ranges) <= {*range(reader.size)}


def test_a_union_by_hand() -> None:
    assert join_ranges([(5, 9), (0, 2), (7, 8), (2, 3), (20, 20), (9, 11)]) == [(0, 3), (5, 11)]
    assert join_ranges([]) == []


def test_the_order_and_number_of_samples_at_once_do_not_matter(prefixes: list[str]) -> None:
    dataset = build((prefixes, [0.6, 0.4]))
    idxs = list(range(0, 300, 3))
    whole = [ranges for _, ranges in sample_ranges(dataset, idxs)]
    assert [ranges for _, ranges in sample_ranges(dataset, idxs[::-1], at_once=7)] == whole


def test_a_prefix_that_a_blend_names_twice_is_one_entry_with_each_byte_once(prefixes: list[str]) -> None:
    dataset = build((prefixes[:1] * 2, [0.6, 0.4]))
    ((_, ranges),) = sample_ranges(dataset, range(len(dataset)))
    assert len(bytes_in(ranges)) == sum(stop - start for start, stop in ranges)
