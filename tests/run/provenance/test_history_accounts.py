"""Accounts, tables and losses of histories, against the tokens that their loaders served."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.copied_runs import BATCH, account_served, open_history, run_over, save_history, write_corpus

import binidx
from binidx import RunOrder
from binidx.errors import ConfigError
from binidx.explore.loss_curve import LossCurve
from binidx.format.arrow import pa
from binidx.loader.losses import LossRecorder
from binidx.run.display.timeline import build_timeline
from binidx.run.provenance.accounts import IN_RUN, account
from binidx.run.provenance.spikes import find_spikes, read_run_losses
from binidx.storage.location import Location
from binidx.tools import main

STOP = 25


def counts_of(found: Any) -> list[tuple[int, int, int, int]]:
    return [(each.samples_read, each.tokens_read, each.samples_trained, each.tokens_trained) for each in found]


def test_samples_in_the_run_of_a_history_are_those_read_and_those_that_the_last_run_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpora = [write_corpus(tmp_path / name, number) for number, name in ((1, "en"), (2, "code"))]
    runs = (
        run_over((corpora, [0.7, 0.3]), num_samples=400),
        run_over((corpora, [0.5, 0.5]), 10, 200, consumed_samples=0, earlier_samples=40),
        run_over((corpora, [0.5, 0.5]), 20, 200, consumed_samples=40, earlier_samples=40, iterations_to_skip=[22]),
    )
    file, served = save_history(tmp_path, *runs, stop=60)  # the last run to its end
    history, expected = open_history(file), account_served(served)
    for stop in (60, 30):
        found = account(history, stop)
        assert sum(each.samples_in_run for each in found) == len(served)
        assert [each.samples_in_run for each in found] == [expected[number][0] for number in (1, 2)]
        assert found.notes == [IN_RUN]
    assert counts_of(account(history, 60)) == [expected[number] for number in (1, 2)]
    assert account(RunOrder.open(binidx.Run.load(f"{tmp_path}/run0.json")), 10).notes == []
    assert main(["account", file]) == 0
    assert f"\n{IN_RUN}\nconsumed_train_samples" in capsys.readouterr().out


def test_runs_with_the_same_rounds_have_one_note(tmp_path: Path) -> None:
    corpora = [write_corpus(tmp_path / name, number) for number, name in ((1, "en"), (2, "code"))]
    stages = [binidx.Stage((corpora, [0.7, 0.3]), 40, 120), binidx.Stage((corpora, [0.9, 0.1]), 160)]
    file, _ = save_history(
        tmp_path, *(run_over((corpora, [0.7, 0.3]), step, stages=stages) for step in (0, 10)), stop=50
    )
    notes = account(open_history(file), 50).notes
    assert any("rounds" in note for note in notes)
    assert len({*notes}) == len(notes)


def test_rounds_of_a_source_after_a_stage_are_one_row_and_a_note(tmp_path: Path) -> None:
    corpora = [write_corpus(tmp_path / name, number) for number, name in ((1, "en"), (2, "code"))]
    stages = [binidx.Stage((corpora, [0.7, 0.3]), 40, 120), binidx.Stage((corpora, [0.9, 0.1]), 160)]
    runs = run_over((corpora, [0.7, 0.3])), run_over((corpora, [0.7, 0.3]), 10, stages=stages)
    file, served = save_history(tmp_path, *runs, stop=50)
    history, expected = open_history(file), account_served(served)
    assert len(history.last.sources) > 2
    for repeats in (False, True):
        found = account(history, 50, repeats=repeats)
        assert [each.source for each in found] == corpora
        assert counts_of(found) == [expected[number] for number in (1, 2)]
        assert [note for note in found.notes if "rounds" in note] == [
            f"{prefix}: {rounds} rounds, each in an order of its own, are one source here"
            for prefix in corpora if (rounds := history.last.prefixes.count(prefix)) > 1
        ]  # fmt: skip
    firsts = [sum(token % 1_000_000 // 1000 == 7 and token % 1000 == 1 for each in served if each.corpus == 1
                  for token in each.tokens)]  # fmt: skip
    assert sum(found[0].seen) == 30
    assert found[0].seen[firsts[0]] > 0
    timeline = build_timeline(history, range(50))
    assert timeline.epochs[-1].tolist() == pytest.approx([each.epochs_read for each in found])


@pytest.mark.parametrize("order", ["first_fit", "best_fit"])
def test_pads_of_packed_orders_are_no_tokens(order: str, tmp_path: Path) -> None:
    corpora = [write_corpus(tmp_path / name, number) for number, name in ((1, "en"), (2, "code"))]
    for blend, names in (((corpora, [0.7, 0.3]), corpora), (([corpora[1]], None), corpora[1:])):
        runs = run_over(blend, order=order), run_over(blend, 10, order=order, iterations_to_skip=[12])
        file, served = save_history(tmp_path, *runs, stop=STOP)
        history, expected = open_history(file), account_served(served)
        found = account(history, STOP)
        assert counts_of(found) == [expected[corpora.index(name) + 1] for name in names]
        assert sum(each.tokens_read for each in found) < 16 * len(served)
        timeline = build_timeline(history, range(STOP), 5)
        assert timeline.epochs[-1].tolist() == pytest.approx([each.epochs_read for each in found])
        for seam in timeline.seams:
            before, after = (account(history, step)[seam.source].epochs_read for step in (seam.step, seam.step + 1))
            assert before < seam.epoch + 1e-9
            assert after > seam.epoch - 1e-9


def test_a_changed_order_is_told_only_if_samples_that_were_read_are_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    corpora = [write_corpus(tmp_path / name, number) for number, name in ((1, "en"), (2, "code"))]
    config = {"path_to_cache": f"{tmp_path}/cache", "cache_small_indices": True}

    def over(blend: Any, *arguments: Any, **options: Any) -> binidx.Run:
        run = run_over(blend, *arguments, **options)
        return replace(run, config=replace(run.config, **config))

    first = over((corpora, [0.7, 0.3]), num_samples=60)
    stages = [binidx.Stage((corpora, [0.7, 0.3]), 40, 60), binidx.Stage((corpora, [0.5, 0.5]), 160)]
    longer = [stages[0], binidx.Stage((corpora, [0.5, 0.5]), 400)]
    phase = over((corpora, [0.7, 0.3]), 10, 300, consumed_samples=0, earlier_samples=40)
    for run in (over((corpora, [0.7, 0.3]), 10, stages=stages), over((corpora, [0.7, 0.3]), 10, stages=longer), phase):
        first.save(f"{tmp_path}/first.json")
        replace(run, previous=f"{tmp_path}/first.json").save(f"{tmp_path}/run.json")
        history = open_history(f"{tmp_path}/run.json")
        assert not any("otherwise" in note for note in account(history, 30).notes)
        assert "another place" not in caplog.text
        served: list[Any] = [each.build(warns=False)[0] for each in history.runs]
        same = served[0].read_tokens([*range(40)]).tolist() == served[1].read_tokens([*range(40)]).tolist()
        assert same is (run is not phase)
    changed = over((corpora, [0.7, 0.3]), 10, 300)  # two epochs instead of one
    replace(changed, previous=f"{tmp_path}/first.json").save(f"{tmp_path}/run.json")
    history = open_history(f"{tmp_path}/run.json")
    notes = account(history, 30).notes
    assert [note for note in notes if "otherwise" in note] == [
        "step 10: the run from there orders the samples before it otherwise than they were read: some come again, some "
        "never"
    ]


def test_tables_of_a_history_have_one_schema(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "en", 1)
    runs = run_over(([corpus], [1.0])), run_over(([corpus], [1.0]), 10, iterations_to_skip=[12])
    file, served = save_history(tmp_path, *runs, stop=STOP)
    for docs in ("ends", "spans", None):
        tables = [order.table(steps, docs=docs) for order, steps in open_history(file).orders(range(STOP))]
        assert pa.concat_tables(tables)["trained"].to_pylist() == [each.trained for each in served]


def test_explore_takes_the_losses_of_each_run(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "en", 1)
    runs = run_over(([corpus], [1.0])), run_over(([corpus], [1.0]), 10, consumed_samples=0, earlier_samples=40)
    file, _ = save_history(tmp_path, *runs, stop=STOP)
    history, recorded = open_history(file), list[np.ndarray]()
    for number, (order, steps) in enumerate(history.orders(range(STOP))):
        reads = order.readings(steps)
        losses = (3 + np.arange(len(reads.step)) % 7 + 20 * (reads.step == 20)).astype(np.float32)
        recorder = LossRecorder(f"{tmp_path}/losses{number}")
        for position, loss in zip(reads.position.tolist(), losses.tolist(), strict=True):
            recorder.record(position, [loss])
        recorder.close()
        recorded.append(losses)
    places = [Location(f"{tmp_path}/losses{number}") for number in (0, 1)]
    curve = LossCurve.read(places, history, file)
    assert curve.steps.tolist() == [*range(STOP)]
    assert curve.losses.tolist() == pytest.approx(np.concatenate(recorded).reshape(-1, BATCH).mean(axis=1).tolist())
    runs_losses = read_run_losses(history, [place.uri for place in places], file, None)
    (spike,) = [each for each in find_spikes(runs_losses) if each.step == 20]
    reads = history.order_of(history.runs[1]).readings(range(20, 21))
    found = curve.of_samples(history.order_of(history.runs[1]), 20, reads)
    assert found is not None
    by_position = dict(zip(reads.position.tolist(), found, strict=True))
    for position, loss, excess in zip(spike.reads.position.tolist(), spike.losses, spike.excess, strict=True):
        assert by_position[position] == (loss, pytest.approx(excess))
    with pytest.raises(ConfigError, match="found 3 folders, needs one, or one of each of 2 runs"):
        LossCurve.read([*places, places[0]], history, file)
    assert (
        main(["explore", file, "--loss", places[0].uri, "--loss", places[1].uri, "--html", f"{tmp_path}/a.html"]) == 0
    )
    assert "loss" in Path(f"{tmp_path}/a.html").read_text()


def test_a_document_of_several_sequences_is_one_document(tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        for number in range(21):
            builder.add_document(range(number, number + 40), [15, 0, 25])
            builder.add_document([], [])
        builder.finalize(f"{tmp_path}/en.idx")
    for split, documents in (("1,0,0", 21), ("1,2,0", 7), ("7,2,0", 17)):  # of 63 sequences 63, 21 and 49
        run = run_over(([f"{tmp_path}/en"], None))
        order = RunOrder.open(replace(run, config=replace(run.config, split=split)))
        (row,) = account(order, 3, repeats=True)
        assert row.documents == sum(row.seen) == documents
