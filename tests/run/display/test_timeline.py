"""Timelines against a count of what was read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.traceable_runs import random_run, write_source

import binidx
from binidx import RunOrder
from binidx.run.display.figures import FORMATS, draw_blend, draw_epochs, figure_bytes
from binidx.run.display.timeline import build_timeline
from binidx.run.global_order import GlobalOrder
from binidx.run.provenance.accounts import account
from binidx.run.schedule import BatchSchedule


def random_order(folder: Path, seed: int) -> RunOrder:
    dataset = random_run(folder, seed)
    schedule = BatchSchedule(2, 1, 2, consumed_samples=2 * (seed % 3))
    return RunOrder.of_dataset(dataset, GlobalOrder(schedule, len(dataset), ["single", "cyclic"][seed % 2]))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_bins_hold_the_samples_that_are_read(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binidx.run.run_order.STRETCH_POSITIONS", 5)
    order = random_order(tmp_path, seed)
    num_steps = order.num_steps() or 2 * len(order.order)
    steps = range(num_steps // 4, num_steps)
    timeline = build_timeline(order, steps, 7)
    reads, contents = order.trace(steps)
    for source in range(len(timeline.names)):
        read = reads.step[contents.source == source]
        assert timeline.counts[:, source].tolist() == np.histogram(read, timeline.bounds)[0].tolist()
    accounts = account(order, num_steps)
    assert timeline.epochs[-1].tolist() == [source.epochs_read for source in accounts]
    assert [timeline.names[row] for row in range(len(accounts))] == [source.source for source in accounts]


@pytest.mark.parametrize("seed", range(12))
def test_a_seam_is_the_first_step_after_which_an_epoch_is_read(seed: int, tmp_path: Path) -> None:
    order = random_order(tmp_path, seed)
    steps = range(1, order.num_steps() or 2 * len(order.order))
    for seam in build_timeline(order, steps, 4).seams:
        before, after = (account(order, step)[seam.source].epochs_read for step in (seam.step, seam.step + 1))
        assert before < seam.epoch <= after


def test_planned_shares_of_stages_change_where_stages_begin(tmp_path: Path) -> None:
    import random

    prefixes = [write_source(tmp_path / name, random.Random(seed), False) for seed, name in enumerate("ab")]
    stages = [binidx.Stage((prefixes, weights), 40) for weights in ([0.9, 0.1], [0.25, 0.75])]
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=8, blend=(prefixes, [0.5, 0.5]), split="1,0,0",
        tokenizer=binidx.SpecialTokens(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    order = RunOrder.open(binidx.Run(config, [0, 0, 0], 2, 2, stages=stages))
    timeline = build_timeline(order, range(order.num_steps() or 0), 20)
    assert timeline.names == prefixes
    assert timeline.planned is not None
    assert timeline.planned[[0, 9, 10, 19], 0].tolist() == [0.9, 0.9, 0.25, 0.25]
    assert np.abs(timeline.counts[:10, 0].sum() / 40 - 0.9) < 0.05


def test_planned_shares_of_stages_change_where_a_view_moves_their_begin(tmp_path: Path) -> None:
    import random

    prefixes = [write_source(tmp_path / name, random.Random(seed), False) for seed, name in enumerate("ab")]
    (tmp_path / "drop.txt").write_text(f"{prefixes[0]}\t0\n{prefixes[0]}\t1\n{prefixes[0]}\t2\n")
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=8, blend=(prefixes, [0.5, 0.5]), split="1,0,0",
        tokenizer=binidx.SpecialTokens(), order=binidx.View(f"{tmp_path}/drop.txt"),
    )  # fmt: skip
    stages = [binidx.Stage((prefixes, weights), 40) for weights in ([0.9, 0.1], [0.25, 0.75])]
    order = RunOrder.of(binidx.Run(config, [0, 0, 0], micro_batch_size=1, stages=stages))
    (start,) = order.stage_starts
    assert start < 40  # samples of the first stage are left out
    steps = order.num_steps()
    assert steps is not None
    planned = build_timeline(order, range(steps), steps).planned
    assert planned is not None
    assert planned[:, 0].tolist() == [0.9] * start + [0.25] * (steps - start)


@pytest.mark.parametrize("kind", FORMATS)
def test_equal_figures_are_equal_files(kind: str, tmp_path: Path) -> None:
    order = random_order(tmp_path, 4)
    timeline, accounts = build_timeline(order, range(20)), account(order, 20, repeats=True)
    for draw in (partial(draw_blend, timeline), partial(draw_epochs, timeline), accounts.plot):
        first, second = (figure_bytes(draw(), kind) for _ in range(2))
        assert first == second
        assert len(first) > 1000
