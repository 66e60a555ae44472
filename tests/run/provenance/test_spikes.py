"""Losses are read as they were recorded last, and spikes are found where they were put."""

from __future__ import annotations

import math
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Bucket
from helpers.gpt_data import Tokenizer
from helpers.readahead_loaders import wait_for
from helpers.research_run import build_research_run
from helpers.spike_model import limits_of, mixture_losses, neighbours
from helpers.traceable_runs import random_run, write_source

import binidx
from binidx import RunOrder
from binidx.errors import ConfigError, FormatError, ObjectNotFoundError, StorageError
from binidx.loader.losses import LossRecorder, read_losses
from binidx.run.global_order import GlobalOrder
from binidx.run.provenance.spikes import RunLosses, find_spikes
from binidx.run.schedule import BatchSchedule


def test_a_replayed_step_replaces_at_any_topology(tmp_path: Path) -> None:
    for rank in range(4):
        first = LossRecorder(tmp_path, rank)
        for step in range(6):
            first.record(step * 8 + rank * 2, [rank, step])
        first.close()
    resumed = LossRecorder(f"{tmp_path}")
    for step in (8, 9, 10):  # of two ranks, after a resume at sample 32
        resumed.record(step * 4, np.full(4, 9.5))
    resumed.close()
    positions, losses = read_losses(tmp_path)
    assert positions.tolist() == list(range(48))
    expected = [[position % 8 // 2, position // 8][position % 2] for position in range(48)]
    assert losses.tolist() == expected[:32] + [9.5] * 12 + expected[44:]


def test_a_file_is_written_when_it_is_full_and_takes_few_bytes_a_sample(tmp_path: Path) -> None:
    recorder = LossRecorder(tmp_path, 3, most_rows=40_000)
    for step in range(5000):
        recorder.record(step * 512 + 24, np.random.default_rng(step).random(8))
    wait_for(lambda: any(tmp_path.glob("*.parquet")))
    (file,) = tmp_path.glob("*.parquet")
    assert file.name.endswith("-00003.parquet")
    assert file.stat().st_size <= 6 * 40_000
    assert len(read_losses(tmp_path)[0]) == 40_000


def test_rows_are_written_in_time_without_a_further_call(tmp_path: Path) -> None:
    recorder = LossRecorder(tmp_path, most_seconds=0.01)
    recorder.record(5, [0.5, 0.25])
    wait_for(lambda: any(tmp_path.glob("*.parquet")))
    assert [column.tolist() for column in read_losses(tmp_path)] == [[5, 6], [0.5, 0.25]]
    assert LossRecorder(tmp_path).most_seconds == 60


RECORDING = """
import os, signal, sys, threading
from binidx.loader.losses import LossRecorder
recorder = LossRecorder(sys.argv[1])
for step in range(25):
    recorder.record(step * 10, [0.5] * 10)
    if step == 19 and sys.argv[2] in ("kill", "terminate", "closed"):
        recorder.close()
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "terminate":
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
if sys.argv[2] == "error":
    raise ValueError("training failed")
if sys.argv[2] == "fork" and os.fork():
    os.wait()  # for a child that ends as this process does, and must not write its rows, too
"""
ENDS = {"kill": -signal.SIGKILL, "terminate": -signal.SIGTERM, "exit": 0, "error": 1, "fork": 0, "closed": 0}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_leaves_its_losses_in_whole_files(end: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RECORDING, str(tmp_path), end], check=False, capture_output=True)
    assert done.returncode == ENDS[end]
    assert read_losses(tmp_path)[0].tolist() == list(range(200 if ENDS[end] < 0 else 250))
    assert len([*tmp_path.iterdir()]) == (2 if end == "closed" else 1)


@pytest.mark.parametrize("end", ["exit", "error", "closed"])
def test_a_process_that_ends_writes_its_losses_to_a_store_and_logs_nothing(end: str, s3: Bucket) -> None:
    folder = s3.fresh()
    command = [sys.executable, "-c", RECORDING, folder, end]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr if end != "error" else "") == (ENDS[end], "")
    assert read_losses(folder)[0].tolist() == list(range(250))


IN_THE_LOOP = """
import gc, sys
from binidx.loader.losses import LossRecorder, read_losses
from binidx.storage.threads import io_loop
gc.disable()
LossRecorder(sys.argv[1] + "/other").record(0, [0.5])
recorder = LossRecorder(sys.argv[1] + "/losses")
recorder.cycle = recorder
recorder.record(0, [0.5] * 10)
del recorder
io_loop().call_soon_threadsafe(gc.collect)  # in the thread that sends all requests
"""


def test_a_recorder_that_is_collected_in_the_thread_of_requests_loses_nothing(s3: Bucket) -> None:
    folder = s3.fresh()
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_LOOP, folder], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_losses(f"{folder}/losses")[0]) == 10


def test_losses_that_cannot_be_written_are_logged_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "losses").write_text("no folder")
    recorder = LossRecorder(tmp_path / "losses", most_rows=2)
    recorder.record(0, [0.5, 0.25])
    wait_for(lambda: "binidx-losses: " in caplog.text)
    with pytest.raises(StorageError, match="losses"):
        recorder.close()
    (tmp_path / "losses").unlink()
    recorder.close()
    assert [column.tolist() for column in read_losses(tmp_path / "losses")] == [[0, 1], [0.5, 0.25]]


def test_rows_of_a_collected_recorder_are_written_when_the_store_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "losses").write_text("no folder")
    recorder = LossRecorder(tmp_path / "losses", most_seconds=0.05)
    recorder.record(0, [0.5, 0.25])
    del recorder
    wait_for(lambda: caplog.text.count("binidx-losses: ") > 3)
    (tmp_path / "losses").unlink()
    wait_for(lambda: any(tmp_path.glob("losses/*.parquet")))
    assert [column.tolist() for column in read_losses(tmp_path / "losses")] == [[0, 1], [0.5, 0.25]]


def test_a_replayed_step_replaces_also_if_the_first_one_is_written_later(tmp_path: Path) -> None:
    first, second = LossRecorder(tmp_path / "losses"), LossRecorder(tmp_path / "losses")
    first.record(0, [1.0])
    second.record(0, [2.0])
    second.close()
    first.close()
    assert read_losses(tmp_path / "losses")[1].tolist() == [2.0]


def test_a_file_that_is_written_again_replaces_itself(tmp_path: Path) -> None:
    """As after an answer of the store that was lost."""
    recorder = LossRecorder(tmp_path)
    recorder.record(0, [1.0])
    rows = [*recorder._rows]
    recorder.close()
    recorder._rows[:0] = rows
    recorder.close()
    assert len([*tmp_path.iterdir()]) == 1


def test_a_handler_of_a_signal_may_close_a_recorder_that_is_being_closed(tmp_path: Path) -> None:
    recorder = LossRecorder(tmp_path)

    class Interrupting:
        """Losses whose conversion is interrupted by a signal."""

        def __len__(self) -> int:
            return 1

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            signal.raise_signal(signal.SIGUSR1)
            return np.ones(1, np.float32)

    recorder.record(0, [0.5])
    recorder._rows[0] = (0, Interrupting(), bool, 1)
    before = signal.signal(signal.SIGUSR1, lambda *_: (recorder.record(7, [0.25]), recorder.close()))
    try:
        recorder.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [column.tolist() for column in read_losses(tmp_path)] == [[0, 7], [1.0, 0.25]]


def test_a_recorder_is_pickled_without_its_rows(tmp_path: Path) -> None:
    recorder = LossRecorder(tmp_path, 3)
    recorder.record(0, [1.0, 2.0])
    copied = pickle.loads(pickle.dumps(recorder))
    copied.record(2, [3.0])
    for each in (recorder, copied):
        each.close()
    assert read_losses(tmp_path)[1].tolist() == [1, 2, 3]


def test_a_recorder_without_a_folder_is_an_error_at_the_first_record() -> None:
    with pytest.raises(ConfigError, match="losses_to: found none"):
        LossRecorder(None).record(0, [1.0])


def test_losses_of_tokens_are_refused(tmp_path: Path) -> None:
    recorder = LossRecorder(tmp_path)
    for losses in (np.zeros((2, 3)), torch.zeros(2, 3), [[1.0], [2.0]]):
        with pytest.raises(ConfigError, match=r"losses: found shape \(2, \d\), needs \(n,\), one of each sample"):
            recorder.record(0, losses)
    recorder.close()
    with pytest.raises(ObjectNotFoundError):
        read_losses(tmp_path)


def test_folders_without_losses_and_damaged_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match="no losses"):
        read_losses(tmp_path)
    (tmp_path / "losses-1-0.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(FormatError, match="parquet: no losses"):
        read_losses(tmp_path)


def test_the_loader_records_the_positions_of_its_samples(tmp_path: Path) -> None:
    build_research_run(tmp_path)
    train = binidx.Run.load(f"{tmp_path}/run.json").build()[0]
    for rank in range(2):
        loader = binidx.build_pretraining_data_loader(train, 0, 2, rank, 2, losses_to=tmp_path / "losses")
        for batch, _ in zip(loader, range(4), strict=False):
            loader.record_losses(None, batch["tokens"].double().mean(1))
        loader.state_dict()  # of a checkpoint: writes what is recorded
        assert len(read_losses(tmp_path / "losses")[0]) == (rank + 1) * 8
        loader.record_losses(1, [7.0, 8.0])
        loader.close()  # before a preemption
    positions, losses = read_losses(tmp_path / "losses")
    assert positions.tolist() == list(range(16))
    expected = [float(train[number]["tokens"].double().mean()) for number in range(16)]
    assert losses.tolist() == pytest.approx([*expected[:4], 7, 8, 7, 8, *expected[8:]])
    with pytest.raises(ConfigError, match="losses: found 1, needs 2"):
        binidx.build_pretraining_data_loader(train, 0, 2, 0, 1, losses_to=tmp_path).record_losses(0, [1.0])
    with pytest.raises(ConfigError, match="losses_to: found none"):
        binidx.build_pretraining_data_loader(train, 0, 2, 0, 1).record_losses(0, [1.0, 2.0])


LEVELS = {"a": 2.0, "b": 3.0, "c": 5.0}
"""Loss of each source in a synthetic log."""


def synthetic_run(directory: Path, noise: float, planted: tuple[int, ...] = ()) -> list[RunLosses]:
    """Losses of 300 steps in which the blend changes twice, and each source has its own loss throughout."""
    for name in LEVELS:
        write_source(directory / name, random.Random(name), True)
    a, b, c = (f"{directory}/{name}" for name in LEVELS)
    stages = [
        binidx.Stage(([a, b], [0.8, 0.2]), 400),
        binidx.Stage(([a, b, c], [0.2, 0.3, 0.5]), 402),
        binidx.Stage(([c, b], [0.1, 0.9]), 398),
    ]
    config = binidx.GPTDatasetConfig(1, 16, blend=([a], None), split="1,0,0", tokenizer=Tokenizer(pad=-5, eod=-6))
    order = RunOrder.of(binidx.Run(config, [0, 0, 0], 2, 2, stages=stages))
    reads = order.reading.readings(range(300))
    names = [Path(order.sources[source].prefix).name for source in order.sources_of(reads.sample).tolist()]
    losses = np.array([LEVELS[name] for name in names]) + noise * np.random.default_rng(3).standard_normal(len(names))
    losses += np.isin(reads.step, planted)
    rows = np.argsort(reads.position)
    return [RunLosses.of(order, reads.position[rows], losses[rows].astype(np.float32))]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_changes_of_the_blend_are_no_spikes_while_each_loss_is_flat(noise: float, tmp_path: Path) -> None:
    assert not [*find_spikes(synthetic_run(tmp_path, noise))]
    means = synthetic_run(tmp_path, noise)[0].means
    assert means[101:199].mean() > means[:100].mean() + 1  # the loss of the mixture is not


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("first", [30, 120, 296])
def test_three_neighbouring_steps_above_their_limit_are_one_spike(noise: float, first: int, tmp_path: Path) -> None:
    planted = (first, first + 1, first + 2)
    (spike,) = find_spikes(synthetic_run(tmp_path, noise, planted))
    assert (spike.step, spike.last_step) == (first, first + 2)
    assert sorted({*spike.reads.step.tolist()}) == [*planted]
    assert len(spike.reads.step) == 12
    assert spike.loss > spike.limit > spike.expected
    assert spike.excess == pytest.approx(np.ones(12), abs=6 * noise + 1e-5)


def test_a_copy_of_the_data_is_no_change_of_the_blend(tmp_path: Path) -> None:
    rng, orders = np.random.default_rng(0), []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        prefix = write_source(tmp_path / folder / "en", random.Random(1), False)
        dataset = binidx.load_dataset(prefix, 16, num_samples=80, tokenizer=Tokenizer()).wrapped
        first = 20 * (folder == "b")
        schedule = BatchSchedule(2, 2, 1, consumed_samples=first * 2, first_step=first)
        orders.append(RunOrder.of_dataset(dataset, GlobalOrder(schedule, len(dataset))))
    losses = (3 + 0.01 * rng.standard_normal(80)).astype(np.float32)
    losses[42:44] += 4  # step 21, the second one of the copy
    names = {order.sources[0].prefix: "en" for order in orders}
    runs = [
        RunLosses.of(order, np.arange(80), losses, stop, names) for order, stop in zip(orders, (20, 40), strict=True)
    ]
    assert [len(run.steps) for run in runs] == [20, 20]
    (spike,) = find_spikes(runs)
    assert (spike.step, spike.last_step) == (21, 21)
    assert spike.excess == pytest.approx([4, 4], abs=0.1)


@pytest.mark.parametrize("seed", range(12))
def test_spikes_are_those_of_the_formula(seed: int, tmp_path: Path) -> None:
    dataset, rng = random_run(tmp_path, seed), np.random.default_rng(seed)
    order = RunOrder.of_dataset(
        dataset, GlobalOrder(BatchSchedule(2, 1, 2), len(dataset), ["single", "cyclic"][seed % 2])
    )
    steps = order.num_steps() or len(dataset)
    positions = np.flatnonzero(rng.random(steps * 2) < 0.9)
    losses = (3 + 0.1 * rng.standard_normal(len(positions))).astype(np.float32)
    losses[rng.random(len(losses)) < 0.03] += 2
    losses[-3:] = math.nan if seed % 4 == 0 else 3
    runs = [RunLosses.of(order, positions, losses)]
    found = [*find_spikes(runs, window=15, threshold=4)]
    rows = {step: np.flatnonzero(positions // 2 == step) for step in np.unique(positions // 2).tolist()}
    sources = order.sources_of(order.reading.samples_at(positions))
    mean = {step: losses[own].astype(float).mean() for step, own in rows.items()}
    added = mixture_losses(rows, sources, losses)
    expected = limits_of(mean, added, 15, 4)
    assert [(spike.step, spike.last_step) for spike in found] == neighbours([*mean], [*expected])
    for spike in found:
        peak = max((step for step in mean if spike.step <= step <= spike.last_step), key=lambda step: mean[step])
        if not math.isnan(mean[peak]):
            assert (spike.loss, spike.limit) == pytest.approx((mean[peak], expected[peak]))
        within = (positions // 2 >= spike.step) & (positions // 2 <= spike.last_step)
        assert sorted(spike.reads.position.tolist()) == positions[within].tolist()
        known = spike.excess[~np.isnan(spike.excess)]
        assert (np.diff(known) <= 0).all()
        assert np.isnan(spike.excess[: len(spike.excess) - len(known)]).all()
        own = losses[np.searchsorted(positions, spike.reads.position)]
        assert np.array_equal(spike.losses, own, equal_nan=True)
