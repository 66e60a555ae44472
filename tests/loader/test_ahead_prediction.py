"""The predicted batches are those that each worker serves."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import numpy as np
import pytest

from binidx.errors import ConfigError
from binidx.loader.prediction import Prediction
from binidx.loader.samplers import build_sampler


def sampler(
    kind: Any, total: int, consumed: int, m: int = 2, rank: int = 0, size: int = 1, sharding: bool = True
) -> Any:
    return build_sampler(kind, range(total), consumed, m, rank, size, sharding)


def predicted_batches(prediction: Prediction) -> list[list[int]]:
    return [*iter(prediction.next, None)]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_the_prediction_of_each_worker_is_its_own_batches(num_workers: int) -> None:
    rng = np.random.default_rng(num_workers)
    for kind, sharding in product(["single", "cyclic"], [True, False]):
        for _ in range(20):
            m, size = (int(each) for each in rng.integers(1, 4, 2))
            total = int(rng.integers(m * size, 60))
            consumed = int(rng.integers(total // (m * size))) * m * size
            drawn = sampler(kind, total, consumed, m, int(rng.integers(size)), size, sharding)
            predictions = [Prediction(drawn, worker, num_workers) for worker in range(num_workers)]
            batches = [*drawn]
            for worker, prediction in enumerate(predictions):
                assert predicted_batches(prediction) == batches[worker::num_workers]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_next_iterations_are_found_and_followed(kind: str, num_workers: int) -> None:
    drawn = sampler(kind, 30, 0, 2)
    worker = num_workers - 1
    prediction = Prediction(drawn, worker, num_workers)
    for _ in range(4):
        mine = [*drawn][worker::num_workers]
        if prediction.next() is None:
            assert prediction.find(mine[0])
            assert prediction.next() == mine[0]
        assert predicted_batches(prediction) == mine[1:]
        for batch in mine:
            prediction.mark_served(batch)


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_loader_that_was_left_early_is_found_again(kind: str, num_workers: int) -> None:
    """The sequential sampler begins at its start again, the random one goes on where it is."""
    drawn = sampler(kind, 200, 0, 2)
    prediction = Prediction(drawn, 0, num_workers)
    for count in (20, 7, 1, 30):
        mine = [*islice(drawn, count)][::num_workers]
        assert prediction.next() == mine[0] or prediction.find(mine[0])
        told = [prediction.next() for _ in range(40)]  # far more than will be asked for
        for batch in mine:
            prediction.mark_served(batch)
        assert [batch for batch in told if batch in mine[1:]] == mine[1:]


def test_skipped_batches_are_forgotten() -> None:
    prediction = Prediction(sampler("single", 1000, 0, 1))
    for _ in range(10):
        prediction.next()
    for idx in (0, 3, 4):
        prediction.mark_served([idx])
    assert [*prediction._walk.drawn] == [[idx] for idx in range(5, 10)]
    assert prediction.next() == [10]


def test_distant_batches_are_not_found() -> None:
    prediction = Prediction(sampler("single", 1000, 0, 1))
    assert not prediction.find([999])
    assert not prediction.find([3, 4])
    assert prediction.find([3])
    assert prediction.next() == [3]


def test_a_failing_sampler_predicts_nothing() -> None:
    drawn = sampler("cyclic", 20, 5, 2)
    with pytest.raises(ConfigError):
        next(iter(drawn))
    assert Prediction(drawn).next() is None


def test_the_sampler_itself_is_not_moved() -> None:
    drawn = sampler("cyclic", 20, 4, 2)
    predicted_batches(Prediction(drawn))
    assert drawn.consumed_samples == 4
