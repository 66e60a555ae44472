"""Runs of Megatron's command lines."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from helpers.gpt_data import write_with_megatron

import binidx
from binidx.errors import ConfigError
from binidx.run.megatron_command import parse_megatron_command
from binidx.tools import main

COMMAND = """torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 12 --hidden-size 768 --bf16
 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --seq-length 24 --micro-batch-size 2 --seed 7
 --split 8,1,1 --eval-interval 50 --eval-iters 2 --eod-mask-loss --tokenizer-type NullTokenizer --vocab-size 600"""


def parsed(*more: str, **options: object) -> binidx.Run:
    return parse_megatron_command([*COMMAND.split(), "--data-path", "0.7", "en", "0.3", "code", *more], **options)  # type: ignore[arg-type]


def test_options_become_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = parsed("--global-batch-size", "16", "--train-iters", "200", "--iterations-to-skip", "9", "4")
    assert "tokenizer: not described" in caplog.text
    assert (run.data_parallel_size, run.micro_batch_size, run.schedule.global_batch_size) == (4, 2, 16)
    assert [*run.sizes] == [3200, 5 * 2 * 16, 32]
    assert (run.stop_step, run.schedule.skipped_steps) == (200, (3, 8))
    config = run.config
    assert (config.random_seed, config.split, config.eod_mask_loss) == (7, "8,1,1", True)
    assert config.blend is not None
    assert [*(config.blend[1] or ())] == [0.7, 0.3]


def test_schedules_and_phases_become_the_run() -> None:
    run = parsed("--step-batch-size-schedule", "0:8 2400:16", "--train-samples", "1000", "--dataloader-type", "cyclic")
    assert (run.schedule.thresholds, run.dataloader_type) == (((0, 8), (100, 16)), "cyclic")
    assert run.stop_step == 13 + -(-(1000 - 104) // 16)
    phases = parsed(
        "--global-batch-size", "8", "--train-samples", "800", "--phase-transition-iterations", "60,20"
    ).phases
    assert [(phase.first_step, phase.stop_step, phase.sizes[0]) for phase in phases] == [
        (0, 20, 160), (20, 60, 320), (60, 100, 320),
    ]  # fmt: skip
    ramped = ["--rampup-batch-size", "8", "8", "300", "--global-batch-size", "16", "--train-samples", "1000"]
    assert parsed(*ramped, rampup="kept").schedule.rampup == (8, 8, 300)
    assert parsed(*ramped, rampup="ignored").schedule.rampup is None
    with pytest.raises(ConfigError, match=r"rampup: found --rampup-batch-size, .*need kept or ignored"):
        parsed(*ramped)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sft"], "found --sft, with which samples or steps are others"),
        (["--train-iters", "many"], "from_megatron: argument --train-iters: invalid int value"),
        ([], "length: found train_iters None, train_samples None"),
        (["--train-iters", "9", "--phase-transition-iterations", "3"], "without --train-samples"),
        (["--train-iters", "9", "--context-parallel-size", "3"], "num_processes: found 16, need a multiple of 12"),
    ],
)
def test_what_a_run_file_cannot_say_is_an_error(more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(*more)


def test_a_resume_continues_the_run_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(8)
    for name in ("en", "code"):
        write_with_megatron(tmp_path / name, np.full(40, 30, np.int32), rng)
    monkeypatch.chdir(tmp_path)
    data = ["--train-iters", "40", "--split", "1,0,0", "--data-path", "0.7", "en", "0.3", "code"]
    first = ["plan", "--from-megatron", *COMMAND.split(), *data, "--global-batch-size", "8"]
    assert main([*first, "--to", "run1.json"]) == 0
    told = capsys.readouterr()
    assert "run1.json: written, steps 0 to 40 of 8 samples on 4 ranks, 2 at a time" in told.err
    parse_megatron_command(first[2:]).save("same.json")
    assert Path("same.json").read_bytes() == Path("run1.json").read_bytes()
    assert "samples are not read" not in told.out
    for same in (first, ["plan", "run1.json"]):
        assert main(same) == 0
        assert capsys.readouterr().out == told.out
    second = ["plan", "--previous", "run1.json", "--first-step", "25", "--gpus", "32", "--from-megatron"]
    assert main([*second, *COMMAND.split(), *data, "--global-batch-size", "16", "--to", "run2.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 15
    run = binidx.Run.load("run2.json")
    assert (run.data_parallel_size, run.consumed_samples, run.earlier_samples) == (8, 200, 0)
    assert main(["trace", "run2.json", "--steps", "24:26", "--json", "--no-lineage"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(row["sample"] for row in rows) == list(range(192, 216))


def test_a_file_is_written_without_its_data_and_the_error_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["plan", "--gpus", "4", "--from-megatron", *COMMAND.split(), "--train-iters", "40", "--data-path", "none"]
    assert main([*given, "--to", "run.json", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)["error"]
    reason = f"{tmp_path}/none.bin: no such file"
    assert (told["kind"], told["message"]) == (
        "ObjectNotFoundError",
        f"run.json: is written, but there is no plan of it yet: {reason}",
    )
    assert binidx.Run.load("run.json").stop_step == 40
    assert main(given) == 2
    assert capsys.readouterr().err.endswith(f"binidx plan: {reason}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
