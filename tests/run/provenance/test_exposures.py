"""Exposures against a count over the tokens that were served."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.traceable_runs import random_run

from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset
from binidx.run.global_order import GlobalOrder
from binidx.run.provenance.exposures import count_exposures, total_exposures
from binidx.run.provenance.run_order import RunOrder
from binidx.run.schedule import BatchSchedule


@pytest.mark.parametrize(
    ("kind", "seed"), [*((GPTDataset, seed) for seed in range(25)), *((BestFitGPTDataset, seed) for seed in range(10))]
)
def test_exposures_are_those_of_the_tokens_that_were_served(
    kind: type[GPTDataset], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("binidx.run.provenance.exposures.STRETCH", 5)
    monkeypatch.setattr("binidx.order.source_order.STRETCH", 11)
    monkeypatch.setattr("binidx.order.source_order.MANY", seed % 3 * 2)
    dataset, choose = random_run(tmp_path, seed, kind), random.Random(seed)
    order = RunOrder.of_dataset(
        dataset, GlobalOrder(BatchSchedule(2, 1, 2), len(dataset), ["single", "cyclic"][seed % 2])
    )
    stop = choose.randrange((order.num_steps() or len(dataset)) + 1)
    reads, contents = order.trace(range(stop))
    served = [dataset.read_tokens([sample])[0, :-1] for sample in reads.sample.tolist()]
    for number, source in enumerate(order.sources):
        count = len(source.dataset.document_indices) - 1
        documents = choose.sample(range(count), choose.randrange(1, count))
        found = count_exposures(order, {source.name: documents}, stop)[source.name]
        assert found.document.tolist() == sorted(documents)
        for place, document in enumerate(found.document.tolist()):
            inputs = [
                (int(step), tokens[(tokens >= 0) & (tokens // 1000 == document)])
                for step, own, tokens in zip(reads.step, contents.source, served, strict=True)
                if own == number
            ]
            own = [(step, tokens) for step, tokens in inputs if len(tokens)]
            firsts = sum(int((tokens == document * 1000).sum()) for _, tokens in own)
            steps = [step for step, _ in own] or [-1]
            assert [getattr(found, name)[place] for name in ("times", "samples", "tokens")] == [
                firsts, len(own), sum(len(tokens) for _, tokens in own)
            ]  # fmt: skip
            assert (found.first_step[place], found.last_step[place]) == (min(steps), max(steps))
        total = total_exposures({"a": found}, {"a": found.document})
        assert total["tokens"] == found.tokens.sum()
        assert total["last_step"] == (None if (last := found.last_step.max()) < 0 else last)


def test_samples_before_a_resumed_run_count_without_a_step(tmp_path: Path) -> None:
    dataset = random_run(tmp_path, 1)
    whole = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(2, 1, 2), len(dataset)))
    resumed = replace(whole, reading=GlobalOrder(BatchSchedule(2, 1, 2, consumed_samples=4), len(dataset)))
    documents = np.arange(len(dataset.order.sources[0].dataset.document_indices) - 1)
    steps, name = whole.num_steps() or 0, whole.prefixes[0]
    expected = count_exposures(whole, {name: documents}, steps)[name]
    found = count_exposures(resumed, {name: documents}, steps - 2)[name]
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.last_step.tolist() == np.where(expected.last_step < 2, -1, expected.last_step - 2).tolist()
    later = count_exposures(resumed, {name: documents}, steps - 2, earlier=False)[name]
    assert later.tokens.sum() < found.tokens.sum()
    assert found.samples_trained.tolist() == later.samples.tolist()
