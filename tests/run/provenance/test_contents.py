"""What samples hold, against the tokens they serve: each token names its document and place."""

from pathlib import Path

import numpy as np
import pytest
from helpers.traceable_runs import random_run

from binidx import RunOrder
from binidx.errors import ConfigError
from binidx.order.reads import OrderReads
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule


@pytest.mark.parametrize("seed", range(60))
def test_documents_are_those_whose_tokens_are_served(seed: int, tmp_path: Path) -> None:
    dataset = random_run(tmp_path, seed)
    numbers = np.random.default_rng(seed).permutation(len(dataset)).astype(np.int64)
    contents = OrderReads(dataset.order).trace(numbers)
    spans = contents
    for place, number in enumerate(numbers.tolist()):
        sample = dataset[number]
        text = np.append(sample["tokens"], sample["labels"][-1])
        if not dataset.config.add_extra_token_to_sequence:
            text = text[:-1]
        assert contents.source[place] == sample.get("dataset_id", 0)
        pieces = slice(*spans.bounds[place : place + 2])
        told = [
            document * 1000 + start + np.arange(length)
            for document, start, length in zip(
                spans.document[pieces], spans.start[pieces], spans.length[pieces], strict=True
            )
        ]
        assert np.concatenate(told).tolist() == text.tolist()
        lengths = spans.length[pieces]
        assert (spans.target[pieces] == np.cumsum(lengths) - lengths).all()


@pytest.mark.parametrize("seed", range(10))
def test_epochs_count_how_often_a_source_was_gone_through(seed: int, tmp_path: Path) -> None:
    dataset = random_run(tmp_path, seed)
    contents = OrderReads(dataset.order).trace(np.arange(len(dataset)))
    for number, source in enumerate(getattr(dataset, "datasets", [dataset])):
        here = np.flatnonzero(contents.source == number)
        rows = source.shuffle_index[contents.sample[here]].astype(np.int64)
        first = source.sample_index[rows, 0]
        assert contents.epoch[here].tolist() == [int(place) // len(source.indices) for place in first]


def test_other_kinds_of_datasets_are_refused() -> None:
    with pytest.raises(ConfigError, match="found a list, needs GPT datasets"):
        RunOrder.of_dataset([], GlobalOrder(BatchSchedule(1, 1, 1), 1))
