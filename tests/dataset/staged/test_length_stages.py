"""Sequence lengths that change on the way: every token that the longest length would feed is fed once, in its order."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_samples import config, tokens
from helpers.memory_maps import file_under
from helpers.traceable_runs import write_source

import binidx
from binidx.dataset.staged import LengthStagedDataset
from binidx.errors import BlendError, ConfigError
from binidx.index.gpt_indices import build_window_order
from binidx.order.staged import window_order
from binidx.order.staged.window_order import LengthStage


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("lengths")
    return [write_source(directory / f"s{number}", random.Random(number), number % 2 == 0) for number in range(3)]


def windows_of(prefixes: list[str], size: int = 90, **options: Any) -> Any:
    blend = (prefixes, [0.5, 0.3, 0.2]) if len(prefixes) > 1 else (prefixes, None)
    built = config(blend, **{"sequence_length": 24, "split": "1,0,0", **options})
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [size, 0, 0], lambda: True, built).build()[0]


def cuts(sample: Any, parts: int) -> list[list[int]]:
    whole = tokens(sample)
    length = (len(whole) - 1) // parts
    return [whole[start : start + length + 1] for start in range(0, len(whole) - 1, length)]


@pytest.mark.parametrize("num_sources", [1, 3])
@pytest.mark.parametrize("extra", [True, False])
def test_each_stage_feeds_the_next_windows_of_the_longest_run(
    prefixes: list[str], num_sources: int, extra: bool
) -> None:
    windows = windows_of(prefixes[:num_sources], add_extra_token_to_sequence=extra)
    stages = [LengthStage(6, 80), LengthStage(12, 30), LengthStage(24, 10), LengthStage(6, 20)]
    staged = LengthStagedDataset(windows, stages, mixed_windows=8)
    assert len(staged) == 140
    first = begun = 0
    for stage in stages:
        parts = 24 // stage.sequence_length
        used = [windows[number] for number in range(begun, begun + stage.num_samples // parts)]
        served = [tokens(staged[number])[: stage.sequence_length] for number in range(first, first + stage.num_samples)]
        wanted = [cut[: stage.sequence_length] for window in used for cut in cuts(window, parts)]
        assert sorted(served) == sorted(wanted)
        first, begun = first + stage.num_samples, begun + stage.num_samples // parts


def test_a_part_has_the_labels_positions_and_loss_of_a_sample_of_its_length(prefixes: list[str]) -> None:
    windows = windows_of(prefixes[:1], reset_position_ids=True, eod_mask_loss=True)
    sample = LengthStagedDataset(windows, [LengthStage(6, 4)])[1]
    assert {key: tuple(value.shape) for key, value in sample.items() if key != "dataset_id"} == {
        "tokens": (6,), "labels": (6,), "loss_mask": (6,), "position_ids": (6,)
    }  # fmt: skip
    assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()
    assert sample["position_ids"][0] == 0


def test_parts_of_a_window_are_served_apart(prefixes: list[str]) -> None:
    staged = LengthStagedDataset(windows_of(prefixes[:1]), [LengthStage(6, 320)], mixed_windows=16)
    window = staged.dataset_sample_index // 4
    for start in range(0, 320, 16):
        assert len(set(window[start : start + 16].tolist())) == 16
    for start in range(0, 320, 64):
        assert len(set(window[start : start + 64].tolist())) == 16


def test_batches_within_a_stage_are_read_together(prefixes: list[str]) -> None:
    staged = LengthStagedDataset(windows_of(prefixes), [LengthStage(12, 40), LengthStage(24, 40)])
    loader = binidx.build_pretraining_data_loader(staged, 0, 8)
    assert loader is not None
    shapes = [tuple(batch["tokens"].shape) for batch in loader]
    assert shapes == [(8, 12)] * 5 + [(8, 24)] * 5
    assert tokens(staged.__getitems__([3, 5])[1]) == tokens(staged[5])


@pytest.mark.parametrize(("parts", "group", "windows"), [(1, 1, 5), (4, 3, 7), (2, 100, 9), (3, 4, 0)])
def test_the_order_of_parts_is_the_model(parts: int, group: int, windows: int) -> None:
    model = [
        (window, part)
        for first in range(0, windows, group)
        for part in range(parts)
        for window in range(first, min(first + group, windows))
    ]
    assert [*zip(*map(np.ndarray.tolist, build_window_order(windows * parts, parts, group)), strict=True)] == model


@pytest.mark.parametrize(
    ("stages", "needed"),
    [
        ([], "windows of 24, 0 stages"),
        ([LengthStage(7, 10)], "need a divisor of 24"),
        ([LengthStage(48, 10)], "need a divisor of 24"),
        ([LengthStage(0, 10)], "need a divisor of 24"),
        ([LengthStage(6, 10)], "need whole windows of 4, such as 8"),
        ([LengthStage(6, 0)], "need whole windows of 4, such as 4"),
        ([LengthStage(24, 100000)], "windows of 24, 1 stages need 100000"),
    ],
)
def test_impossible_stages_are_refused(prefixes: list[str], stages: list[LengthStage], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        LengthStagedDataset(windows_of(prefixes[:1]), stages)


def test_ranks_map_one_copy_of_all_that_is_as_long_as_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [write_source(tmp_path / f"s{number}", random.Random(number), True) for number in range(3)]
    stages = [LengthStage(6, 80_000), LengthStage(12, 30_000)]
    alone = LengthStagedDataset(windows_of(prefixes, size=36_000), stages, mixed_windows=8)
    monkeypatch.setattr(window_order, "AT_ONCE", 100)
    cached = {"path_to_cache": str(tmp_path / "cache"), "cache_small_indices": True}
    for _ in range(2):
        staged = LengthStagedDataset(windows_of(prefixes, size=36_000, **cached), stages, mixed_windows=8)
        for name in ("dataset_index", "dataset_sample_index"):
            np.testing.assert_array_equal(getattr(staged, name), getattr(alone, name))
        assert file_under(staged.dataset_sample_index).startswith(str(tmp_path / "cache"))
    for cut, again in zip(staged.order.members, alone.order.members, strict=True):
        np.testing.assert_array_equal(cut.sample_index, again.sample_index)
        np.testing.assert_array_equal(cut.shuffle_index, again.shuffle_index)
        assert file_under(cut.sample_index).startswith(str(tmp_path / "cache"))
    write_source(tmp_path / "s1", random.Random(7), True)  # other data under the same name
    one, other = (
        LengthStagedDataset(windows_of(prefixes, size=36_000, **some), stages, mixed_windows=8) for some in (cached, {})
    )
    assert (one.dataset_sample_index != alone.dataset_sample_index).any()
    np.testing.assert_array_equal(one.dataset_sample_index, other.dataset_sample_index)
    for number in (0, 77, 80_000, 109_999):
        assert tokens(one[number]) == tokens(other[number])


def test_the_order_of_some_samples_is_a_part_of_that_of_all() -> None:
    whole = build_window_order(60, 4, 4)
    for start in range(0, 60, 7):
        some = build_window_order(60, 4, 4, slice(start, min(start + 7, 60)))
        for one, all_of_them in zip(some, whole, strict=True):
            np.testing.assert_array_equal(one, all_of_them[start : start + 7])


def test_a_fault_in_the_order_is_found(prefixes: list[str]) -> None:
    staged = LengthStagedDataset(windows_of(prefixes), [LengthStage(12, 40)])
    for name in ("dataset_index", "dataset_sample_index"):
        setattr(staged, name, getattr(staged, name).copy())
    staged.dataset_sample_index[7] = staged.dataset_sample_index[8]
    staged.dataset_index[7] = staged.dataset_index[8]
    with pytest.raises(BlendError, match="skipped, or served twice"):
        staged.check()
