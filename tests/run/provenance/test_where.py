"""Trace and where are inverses."""

import random
from pathlib import Path

import numpy as np
import pytest
from helpers.traceable_runs import random_run

from binidx.dataset.megatron.gpt import GPTDataset
from binidx.dataset.megatron.gpt_variants import BestFitGPTDataset
from binidx.order.reads import OrderReads
from binidx.order.source_order import find_positions


@pytest.mark.parametrize(
    ("kind", "seed"), [*((GPTDataset, seed) for seed in range(60)), *((BestFitGPTDataset, seed) for seed in range(15))]
)
def test_the_samples_with_a_document_are_those_that_trace_to_it(
    kind: type[GPTDataset], seed: int, tmp_path: Path
) -> None:
    dataset, choose = random_run(tmp_path, seed, kind), random.Random(seed)
    contents = OrderReads(dataset.order).trace(np.arange(len(dataset)))
    spans = contents
    owner = np.repeat(np.arange(len(dataset)), np.diff(spans.bounds))
    for number, source in enumerate(dataset.order.sources):
        count = len(source.dataset.document_indices) - 1
        for documents in ([choose.randrange(count)], choose.sample(range(count), 3), range(count)):
            here = (contents.source[owner] == number) & np.isin(spans.document, list(documents)) & (spans.length > 0)
            assert OrderReads(dataset.order).find(number, list(documents)).tolist() == np.unique(owner[here]).tolist()


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    dataset = random_run(tmp_path, 0)
    with pytest.raises(IndexError, match=r"document 10000, it has \d+, counted from 0"):
        OrderReads(dataset.order).find(0, [0, 10_000])
    with pytest.raises(IndexError, match="source 9: the run has"):
        OrderReads(dataset.order).find(9, [0])
    assert OrderReads(dataset.order).find(0, []).tolist() == []


def test_places_are_found_across_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("binidx.order.source_order.STRETCH", 7)
    index = np.random.default_rng(0).integers(0, 9, 100)
    for values in ([3], [3, 4, 5], [1, 7], []):
        needed = np.flatnonzero(np.isin(index, values)).tolist()
        assert find_positions(index, np.array(values, np.int64)).tolist() == needed
