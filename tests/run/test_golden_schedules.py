"""Counters of runs against those of Megatron-LM, drawn by `tests/golden/draw_schedules.py`."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.gpt_data import TOKENIZER

import binidx
from binidx.run.schedule import split_sizes

DRAWN = gzip.decompress((Path(__file__).parents[1] / "golden/schedules.jsonl.gz").read_bytes()).decode().splitlines()


def as_run(options: dict[str, Any], **changes: Any) -> binidx.Run:
    config = binidx.GPTDatasetConfig(
        1, options["seq_length"], (["data"], None), split="1,0,0", tokenizer=TOKENIZER, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    given = {name: value for name, value in options.items() if name in binidx.Run.__dataclass_fields__ and value}
    return binidx.Run(config, [options["train_samples"], 0, 0], **{**given, **changes})


def counters(run: binidx.Run, skipped: int, stop: int) -> list[tuple[int, int]]:
    """Both counters before each iteration of a run without phases."""
    schedule = run.schedule
    return [
        (schedule.samples_before(step) + run.earlier_samples, skipped + schedule.skipped_before(step))
        for step in range(run.first_step, stop + 1)
    ]


@pytest.mark.parametrize("part", range(8))
def test_counters_and_phases_are_those_of_megatron(part: int) -> None:
    for line in DRAWN[part::8]:
        drawn = json.loads(line)
        options, stop = drawn["options"], drawn["train_iters"]
        whole = as_run(options)
        sizes = split_sizes(whole.schedule, train_samples=options["train_samples"], eval_interval=10, eval_iters=2)
        assert [whole.phases[0].sizes[0], *sizes[1:]] == drawn["sizes"]
        every, starts = [], [*(start[0] for start in drawn["starts"]), stop]
        for (first, consumed, skipped, position, samples), after in zip(drawn["starts"], starts[1:], strict=True):
            resumed = as_run(options, first_step=first, stop_step=stop, consumed_samples=consumed)
            phase = resumed.phases[0]
            if options["phase_transition_iterations"]:
                assert (phase.consumed_samples, phase.sizes[0]) == (position, samples)
            assert phase.stop_step >= after
            every += counters(phase, skipped, after)[:-1]
            last = counters(phase, skipped, after)[-1]
        assert [stop, *last] == drawn["final"]
        assert hashlib.md5(repr(every).encode()).hexdigest() == drawn["digest"]


def test_phases_of_one_file_are_those_of_each_start() -> None:
    chains = 0
    for line in DRAWN:
        drawn = json.loads(line)
        transitions = drawn["options"]["phase_transition_iterations"] or []
        if any(restart not in transitions for restart in drawn["restarts"] if restart < drawn["train_iters"]):
            continue
        phases = as_run(drawn["options"], stop_step=drawn["train_iters"]).phases
        starts = [(phase.first_step, phase.consumed_samples + phase.earlier_samples) for phase in phases]
        assert starts == [(first, consumed) for first, consumed, *_ in drawn["starts"]]
        chains += len(starts) > 1
    assert chains > 50
