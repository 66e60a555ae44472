"""Runs with phase transitions in the commands: plan, prepare index and prune count the indices of every phase."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, write_with_megatron

import binidx
from binidx.errors import ConfigError
from binidx.run.plan.needed_indices import NeededIndices
from binidx.run.run_file import format_run, parse_run
from binidx.tools import main


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A run of 60 iterations of 4 samples, whose datasets are built anew after 20 and 50."""
    rng = np.random.default_rng(8)
    prefixes = [write_with_megatron(tmp_path / name, np.full(40, 30, np.int32), rng) for name in ("en", "code")]
    config = binidx.GPTDatasetConfig(
        1, 24, (prefixes, [0.7, 0.3]), split="8,1,1", tokenizer=TOKENIZER, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, path_to_cache=f"{tmp_path}/cache", cache_small_indices=True,
    )  # fmt: skip
    transitions = {"phase_transition_iterations": [20, 50], "iterations_to_skip": [21], "stop_step": 60}
    binidx.Run(config, [240, 4, 0], 2, 2, **transitions).save(f"{tmp_path}/run.json")
    return f"{tmp_path}/run.json"


def test_a_file_with_phases_is_read_back(saved: str) -> None:
    run = binidx.Run.load(saved)
    assert format_run(parse_run(format_run(run))) == format_run(run)
    assert json.loads(Path(saved).read_text())["config"]["steps"] == {
        "iterations_to_skip": [21],
        "phase_transition_iterations": [20, 50],
        "stop_step": 60,
    }
    assert [(phase.sizes[0], phase.first_step, phase.stop_step) for phase in run.phases] == [
        (80, 0, 20), (120, 20, 50), (40, 50, 60),
    ]  # fmt: skip
    assert [phase.consumed_samples for phase in run.phases] == [0, 0, 0]


def test_indices_of_all_phases_are_planned_built_and_kept(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", saved, "--json"]) == 0
    assert [plan["steps"] for plan in json.loads(capsys.readouterr().out)] == [20, 30, 10]
    assert main(["plan", saved]) == 0
    assert "phase from step 20 to before step 50" in capsys.readouterr().out
    assert main(["prepare", "index", saved, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["indices"]
    names = {file.rpartition("-")[0] for row in rows for file in row["files"]}
    needed = NeededIndices.of([binidx.Run.load(saved)]).names
    assert names <= needed
    assert len([name for name in names if name.endswith("BlendedDataset-train")]) == 3
    assert main(["prepare", "index", saved, "--json"]) == 0
    assert {row["how"] for row in json.loads(capsys.readouterr().out)["indices"]} == {"found"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"phase_transition_iterations": [0]},
            "phase_transition_iterations: found .0., needs iterations, counted from 1",
        ),
        ({"iterations_to_skip": [-3]}, "iterations_to_skip: found"),
        ({"stop_step": 3, "first_step": 4}, "first_step, stop_step: found 4, 3, need them in order"),
        ({"step_batch_size_schedule": "0:4", "global_batch_size": 4}, "found global_batch_size, too"),
        ({"step_batch_size_schedule": "0:4", "decrease_batch_size_if_needed": True}, "needs no rampup_batch_size"),
        ({"step_batch_size_schedule": "1K:4"}, "needs thresholds that ascend from 0"),
        ({"step_batch_size_schedule": "0:4 1:8"}, r"ascend from 0.*found \[\(0, 4\), \(0, 8\)\]"),
        ({"step_batch_size_schedule": "0=4"}, "needs .THRESHOLD:SIZE"),
        ({"step_batch_size_schedule": "0:inf"}, "needs .THRESHOLD:SIZE"),
        ({"step_batch_size_schedule": [[0, 3]]}, "batch size: 3 after 0 samples, needs a multiple of 4"),
        ({"first_step": 90}, "found no samples after iteration 90"),
    ],
)
def test_what_megatron_refuses_is_an_error(saved: str, changes: dict[str, object], message: str) -> None:
    described = json.loads(Path(saved).read_text())
    described |= {name: value for name, value in changes.items() if name in described}
    described["config"]["steps"] = {
        "phase_transition_iterations": [20, 50], **{k: v for k, v in changes.items() if k not in described},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        parse_run(json.dumps(described).encode()).phases  # noqa: B018


def test_a_batch_that_does_not_divide_ends_the_steps(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    described = json.loads(Path(saved).read_text())
    described["config"]["steps"] = {"step_batch_size_schedule": [[0, 4], [80, 6]]}
    Path(saved).write_text(json.dumps(described))
    run = binidx.Run.load(saved)
    assert (run.reading_order.num_steps(), run.schedule.blocked_by) == (20, 6)
    assert main(["plan", saved]) == 0
    assert "step 20 needs a batch of 6, no multiple of 4" in " ".join(capsys.readouterr().out.split())
