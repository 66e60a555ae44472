"""Staged blends: the first stage is Megatron's blend, and at each seam every source goes on where it was."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_samples import config, tokens
from helpers.memory_maps import file_under
from helpers.traceable_runs import write_source

import binidx
from binidx.dataset.staged import Stage, StagedBlendedDataset
from binidx.errors import BlendError, ConfigError
from binidx.order.staged import staged_order


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("staged")
    return [write_source(directory / f"s{number}", random.Random(number), number % 2 == 0) for number in range(4)]


def test_the_first_stage_is_the_run_that_was_begun(prefixes: list[str]) -> None:
    weights = [0.6, 0.3, 0.1]
    [unstaged, *_] = binidx.BlendedMegatronDatasetBuilder(
        binidx.GPTDataset, [300, 1, 0], lambda: True, config((prefixes[:3], weights))
    ).build()
    stages = [Stage((prefixes[:3], weights), 100, planned_samples=300), Stage((prefixes, [1, 1, 1, 1]), 80)]
    staged = StagedBlendedDataset(binidx.GPTDataset, stages, config())
    assert len(staged) == 180
    for number in range(100):
        assert tokens(staged[number]) == tokens(unstaged[number])
        assert staged[number]["dataset_id"] == unstaged[number]["dataset_id"]


def test_a_source_goes_on_where_it_was_through_any_stages(prefixes: list[str]) -> None:
    for seed in range(40):
        choose = random.Random(seed)
        stages = []
        for _ in range(choose.randrange(1, 5)):
            chosen = choose.sample(prefixes, choose.randrange(1, 5))
            count = choose.randrange(1, 120)
            weights = [choose.random() + 0.05 for _ in chosen]
            stages.append(Stage((chosen, weights), count, choose.choice([None, count + choose.randrange(200)])))
        staged = StagedBlendedDataset(binidx.GPTDataset, stages, config(random_seed=seed))
        served: dict[str, list[tuple[int, int]]] = defaultdict(list)
        first = 0
        for stage, seam in zip(stages, staged.seams, strict=True):
            assert seam.sample == first
            assert {prefix: count for prefix, count in seam.served.items() if count} == {
                prefix: len(rows) for prefix, rows in served.items()
            }
            for number in range(first, first + stage.num_samples):
                dataset = int(staged.dataset_index[number])
                prefix = staged.datasets[dataset].dataset_path
                assert prefix in stage.blend[0]
                served[prefix].append((dataset, int(staged.dataset_sample_index[number])))
            first += stage.num_samples
        assert first == len(staged)
        for prefix, rows in served.items():
            rounds = [number for number, each in enumerate(staged.datasets) if each.dataset_path == prefix]
            every = [(dataset, sample) for dataset in rounds for sample in range(len(staged.datasets[dataset]))]
            assert rows == every[: len(rows)]


def served(staged: Any, numbers: range) -> list[Any]:
    return [tokens(staged[number]) for number in numbers]


def test_a_planned_stage_keeps_its_order_where_sources_are_in_later_rounds(prefixes: list[str]) -> None:
    first = Stage((prefixes[:2], [1.0, 1.0]), 20)
    blend = prefixes[:2], [0.95, 0.05]
    begun = StagedBlendedDataset(binidx.GPTDataset, [first, Stage(blend, 900)], config())
    assert len(begun.datasets) > 2
    stages = [first, Stage(blend, 500, planned_samples=900), Stage((prefixes[:3], [1, 1, 1]), 90)]
    changed = StagedBlendedDataset(binidx.GPTDataset, stages, config())
    assert served(changed, range(520)) == served(begun, range(520))


@pytest.mark.parametrize("weights", [None, [2.0]])
def test_a_run_of_one_prefix_can_be_given_a_stage(prefixes: list[str], weights: list[float] | None) -> None:
    blend = (prefixes[:1], weights)
    per_split = {"split": None, "blend_per_split": [blend, None, None]}
    settings = config(blend) if weights is None else config(None, **per_split)
    epoch = len(binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [1, 0, 0], lambda: True, settings).build()[0])
    [begun, *_] = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [epoch, 0, 0], lambda: True, settings).build()
    stages = [Stage(blend, epoch // 2, planned_samples=epoch), Stage((prefixes, [1, 1, 1, 1]), 80)]
    staged = StagedBlendedDataset(binidx.GPTDataset, stages, settings)
    assert served(staged, range(epoch // 2)) == served(begun, range(epoch // 2))


def test_a_stage_draws_its_own_weights(prefixes: list[str]) -> None:
    stages = [Stage((prefixes[:2], [3, 1]), 100), Stage((prefixes[:2], [1, 3]), 100)]
    staged = StagedBlendedDataset(binidx.GPTDataset, stages, config())
    paths = [staged.datasets[dataset].dataset_path for dataset in staged.dataset_index]
    assert paths[:100].count(prefixes[0]) == 75
    assert paths[100:].count(prefixes[0]) == 25


def test_a_spent_source_begins_a_round_in_another_order(prefixes: list[str]) -> None:
    alone = Stage((prefixes[:1], [1.0]), 10)
    epoch = len(StagedBlendedDataset(binidx.GPTDataset, [alone], config()).datasets[0])
    staged = StagedBlendedDataset(binidx.GPTDataset, [alone, Stage((prefixes[:1], [1.0]), 3 * epoch)], config())
    assert len(staged.datasets) > 1
    assert staged.datasets[1].config.random_seed == 4
    assert tokens(staged[0]) != tokens(staged[epoch])
    assert "more rounds of exhausted sources" in staged.proof


def test_batches_are_the_samples_one_by_one(prefixes: list[str]) -> None:
    stages = [Stage((prefixes[:2], [3, 1]), 100), Stage((prefixes, [1, 3, 2, 2]), 100)]
    staged = StagedBlendedDataset(binidx.GPTDataset, stages, config())
    numbers = [150, 3, 99, 100, 101, 199, 0]
    for sample, number in zip(staged.__getitems__(numbers), numbers, strict=True):
        assert tokens(sample) == tokens(staged[number])
    loader = binidx.build_pretraining_data_loader(staged, 96, 4)
    assert loader is not None
    batch = next(iter(loader))
    served = [tokens({key: batch[key][row] for key in batch}) for row in range(4)]
    assert served == [tokens(staged[number]) for number in range(96, 100)]


def test_the_proof_says_where_each_source_goes_on(prefixes: list[str]) -> None:
    stages = [Stage((prefixes[:2], [3, 1]), 100), Stage((prefixes[1:3], [1, 1]), 50)]
    lines = StagedBlendedDataset(binidx.GPTDataset, stages, config()).proof.splitlines()
    assert lines[0] == "stage 0: samples 0 to 100"
    assert lines[3] == "stage 1: samples 100 to 150"
    assert lines[4].startswith(f"   50.0%  {prefixes[1]}  from its sample 25 of ") or "from its sample 25" in lines[4]
    assert "from its sample 0 of" in lines[5]
    assert lines[6].startswith("checked: each of 150 samples is the next one of its source; none skipped, none twice")


def test_ranks_map_one_copy_of_the_rows_and_data_that_changed_has_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(staged_order, "COUNTED_HERE", 0)
    monkeypatch.setattr(staged_order, "AT_ONCE", 7)
    paths = [write_source(tmp_path / f"s{number}", random.Random(number), True) for number in range(2)]
    stages = [Stage((paths, [3, 1]), 50_000, 60_000), Stage((paths, [1, 3]), 100)]
    alone = StagedBlendedDataset(binidx.GPTDataset, stages, config())
    cached = config(path_to_cache=str(tmp_path / "cache"))
    for _ in range(2):
        staged = StagedBlendedDataset(binidx.GPTDataset, stages, cached)
        assert staged.seams == alone.seams
        for name in ("dataset_index", "dataset_sample_index"):
            np.testing.assert_array_equal(getattr(staged, name), getattr(alone, name))
        assert file_under(staged.dataset_sample_index).startswith(str(tmp_path / "cache"))
    assert "stale" not in caplog.text
    os.utime(write_source(tmp_path / "s1", random.Random(5), True) + ".idx")
    staged = StagedBlendedDataset(binidx.GPTDataset, stages, cached)
    assert "StagedBlendedDataset-train-binidx.json: stale, rebuilding: lengths" in caplog.text
    other = StagedBlendedDataset(binidx.GPTDataset, stages, config())
    np.testing.assert_array_equal(staged.dataset_sample_index, other.dataset_sample_index)


def test_rows_are_checked_in_little_memory(prefixes: list[str]) -> None:
    staged = StagedBlendedDataset(binidx.GPTDataset, [Stage((prefixes, [1, 1, 1, 1]), 3_000_000)], config())
    tracemalloc.start()
    staged.check()
    assert tracemalloc.get_traced_memory()[1] < 20e6, "and not 40 bytes for each of them"
    tracemalloc.stop()


@pytest.mark.parametrize("fault", ["skip", "twice", "beyond"])
def test_a_fault_at_a_seam_is_found(prefixes: list[str], fault: str) -> None:
    stages = [Stage((prefixes[:1], [1.0]), 10), Stage((prefixes[:1], [1.0]), 5)]
    staged = StagedBlendedDataset(binidx.GPTDataset, stages, config())
    staged.dataset_sample_index = staged.dataset_sample_index.copy()
    if fault == "beyond":
        staged.order.parts = [np.arange(3)]
    else:
        staged.dataset_sample_index[10:] += 1 if fault == "skip" else -1
    with pytest.raises(BlendError, match="stages: a source"):
        staged.check()


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (((["a", "b"], None), 5), "found no weights"),
        (((["a"], [1.0]), 0), "num_samples is 0"),
        (((["a"], [1.0]), 5, 4), "num_samples is 5, need 1 to 4"),
        (((["a", "a"], [1.0, 1.0]), 5), "a prefix repeats"),
        ((([], []), 5), "no prefix"),
    ],
)
def test_impossible_stages_are_refused(arguments: Any, needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        Stage(*arguments)


def test_no_stage_and_a_source_without_samples_are_refused(prefixes: list[str]) -> None:
    with pytest.raises(ConfigError, match="stages: found none"):
        StagedBlendedDataset(binidx.GPTDataset, [], config())
    stages = [Stage((prefixes[:1], [1.0]), 5)]
    with pytest.raises(BlendError, match="has no valid split"):
        StagedBlendedDataset(binidx.GPTDataset, stages, config(split="1,0,0"), binidx.Split.valid)
