"""The read-ahead window: it grows with the trainer's waiting, within a budget."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.readahead_loaders import Numbers, no_thread_is_left, wait_for  # noqa: F401

from binidx.loader import readahead as ahead_module
from binidx.loader.dataset_protocols import batch_bytes
from binidx.loader.readahead import ReadAheadDataset
from binidx.loader.readahead_window import WindowSize
from binidx.loader.samplers import build_sampler


def test_the_window_opens_with_waiting_and_only_as_far_as_the_budget() -> None:
    window = WindowSize(None, budget_bytes=1000)
    assert window.batches == 1
    window.measure(10)
    opened = []
    for step in range(400):
        window.request(is_waiting=step % 2 == 0)
        opened.append(window.batches)
    assert sorted(set(opened)) == [8, 16, 32, 64, 100]
    for size, needed in ((1000, 2), (400, 2), (300, 3), (100, 8)):
        window = WindowSize(None, budget_bytes=1000)
        window.measure(size)
        assert window.batches == needed
    calm = WindowSize(None, budget_bytes=1000)
    calm.measure(10)
    for _ in range(1000):
        calm.request(is_waiting=False)
    assert calm.batches == 8


def test_a_trainer_that_is_faster_than_the_link_does_not_open_the_window_for_nothing() -> None:
    """Four threads, groups of up to 64 samples: more than that in the window would only lie in a queue."""
    ahead = ReadAheadDataset(
        Numbers(8000, seconds=0.1), build_sampler("single", range(8000), 0, 8, 0, 1), in_groups=True
    )
    for start in range(0, 3000, 8):
        ahead.__getitems__([*range(start, start + 8)])
    assert ahead._queue is not None
    assert 32 <= ahead._queue.window.size.batches <= 128


def test_batches_are_right_for_any_order_of_requests_and_any_delay() -> None:
    """Jumps, restarts and strangers, while looking ahead begins and ends all the time."""
    rng = np.random.default_rng(3)
    dataset = Numbers(100_000)
    ahead = ReadAheadDataset(dataset, build_sampler("single", range(100_000), 0, 3, 0, 1), in_groups=True)
    place = 0
    for _ in range(2000):
        dataset.seconds = 0.003 if rng.integers(200) == 0 else 0 if rng.integers(20) == 0 else dataset.seconds
        place = 0 if rng.integers(200) == 0 else place + 3 * int(rng.integers(5) if rng.integers(10) == 0 else 1)
        batch = [*range(place, place + 3)] if rng.integers(30) else rng.integers(0, 100_000, 5).tolist()
        assert [int(sample) for sample in ahead.__getitems__(batch)] == [3 * idx for idx in batch]
        assert ahead._queue is not None


def test_what_is_in_memory_is_read_by_the_thread_that_requests_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And ahead again, in threads, once a store is asked."""
    monkeypatch.setattr(ahead_module, "count_fetches", lambda: dataset.fetches)

    class Cached(Numbers):
        fetches, in_memory = 0, False

        def __getitems__(self, idxs: Sequence[int]) -> list[torch.Tensor]:
            readers.append(threading.current_thread())
            self.fetches += not self.in_memory
            return super().__getitems__(idxs)

    dataset, readers = Cached(100_000), list[threading.Thread]()
    sampler = build_sampler("single", range(100_000), 0, 4, 0, 1)
    ahead = ReadAheadDataset(dataset, sampler, in_groups=True, budget_bytes=16 * 4 * 8)
    place = 0

    def serve(count: int) -> set[bool]:
        """Whether this thread read what it got, or others."""
        nonlocal place
        readers.clear()
        for start in range(place, place := place + 4 * count, 4):
            assert [int(sample) for sample in ahead.__getitems__([*range(start, start + 4)])][-1] == 3 * start + 9
        return {thread is threading.current_thread() for thread in readers}

    for _ in range(2):
        dataset.in_memory = False
        serve(500)
        assert serve(100) == {False}
        dataset.in_memory = True
        serve(500)
        assert serve(100) == {True}


def test_bytes_of_a_batch_count_each_tensor_once() -> None:
    shared = torch.zeros(1000, dtype=torch.int64)
    samples = [{"tokens": torch.zeros(10, dtype=torch.int64), "positions": shared, "id": 3} for _ in range(4)]
    assert batch_bytes(samples) == 4 * 80 + 8000
    assert batch_bytes("text") == 0


def test_a_busy_loader_stays_within_the_budget() -> None:
    """2 MiB of a budget for samples of 64 KiB each, in batches of 4: 8 batches at most wait to be asked for."""

    class Large(Numbers):
        def __getitems__(self, idxs: Sequence[int]) -> list[torch.Tensor]:
            super().__getitems__(idxs)
            return [torch.full((1 << 16,), idx % 256, dtype=torch.uint8) for idx in idxs]

    dataset = Large(600, seconds=0.01)
    sampler = build_sampler("single", range(600), 0, 4, 0, 1)
    ahead = ReadAheadDataset(dataset, sampler, in_groups=True, budget_bytes=2 << 20)
    opened = []
    for served, start in enumerate(range(0, 600, 4), 1):
        assert ahead.__getitems__([*range(start, start + 4)])[3][0] == (start + 3) % 256
        opened.append(sum(map(len, dataset.requested)) - 4 * served)
    assert max(opened) <= 4 * 8
    assert ahead._queue is not None
    assert ahead._queue.window.size.batches == 8


def test_while_a_store_refuses_requests_one_batch_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "is_throttled", lambda: True)
    ahead = ReadAheadDataset(
        Numbers(800), build_sampler("single", range(800), 0, 8, 0, 1), num_batches=16, in_groups=True
    )
    for start in range(0, 800, 8):
        assert [*ahead.__getitems__([*range(start, start + 8)])] == [
            *Numbers(800).__getitems__([*range(start, start + 8)])
        ]
        assert ahead._queue is not None
        groups = [*ahead._queue.window.groups]
        assert all(group.num_batches == 1 for group in groups)
        assert sum(not group.is_read for group in groups) <= 1
