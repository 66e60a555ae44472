"""Reading ahead: errors stay at their batch, nothing is left behind, threads and forks do not disturb each other."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import chain, islice

import numpy as np
import pytest
from helpers.readahead_loaders import (  # noqa: F401
    Numbers,
    ahead_threads,
    grouped,
    loader,
    no_thread_is_left,
    plain,
    values,
    wait_for,
)
from torch.utils.data import DataLoader

from binidx.errors import CancelledReadError
from binidx.loader.readahead import GroupRead, ReadAheadDataset
from binidx.loader.samplers import build_sampler
from binidx.storage.requests.cancellation import cancellable
from binidx.storage.threads import background


def test_an_error_is_raised_at_its_batch_with_its_traceback_and_reading_goes_on() -> None:
    batches = iter(loader(Numbers(40, bad=[13]), 8))
    needed = values(plain(Numbers(40)))
    assert values(islice(batches, 3)) == needed[:3]
    with pytest.raises(ValueError, match="sample 13 is bad") as raised:
        next(batches)
    assert "__getitems__" in [entry.name for entry in raised.traceback]
    assert values(batches) == needed[4:]


def test_an_error_in_a_worker_is_raised_at_its_batch_and_reading_goes_on() -> None:
    batches = iter(loader(Numbers(40, bad=[13]), 8, num_workers=2))
    needed = values(plain(Numbers(40)))
    assert values(islice(batches, 3)) == needed[:3]
    with pytest.raises(ValueError, match="sample 13 is bad"):
        next(batches)
    assert values(batches) == needed[4:]


def test_an_error_in_a_group_is_raised_at_its_batch() -> None:
    dataset = Numbers(400, bad=[101])
    batches = iter(grouped(dataset, 32, m=2))
    needed = values(plain(Numbers(400), m=2))
    assert values(islice(batches, 50)) == needed[:50]
    assert max(map(len, dataset.requested)) == 16
    with pytest.raises(ValueError, match="sample 101 is bad"):
        next(batches)
    assert values(batches) == needed[51:]


def test_groups_give_the_batches_one_by_one() -> None:
    for m, num_ahead in ((1, 8), (2, 100), (30, 100), (4, 1), (4, 2)):
        dataset = Numbers(600)
        assert values(grouped(dataset, num_ahead, m=m)) == values(plain(Numbers(600), m=m))
        assert max(map(len, dataset.requested)) == max(m, min(num_ahead // 4 * m, 64 // m * m))
        assert sorted(chain(*dataset.requested)) == [*range(600)]


def test_no_more_is_read_ahead_than_look_ahead_allows() -> None:
    for num_ahead in (1, 2, 5, 16):
        dataset = Numbers(2000)
        for served, _ in enumerate(grouped(dataset, num_ahead, m=2), 1):
            time.sleep(0.0002)
            assert sum(map(len, dataset.requested)) <= 2 * (served + num_ahead)


def test_dropping_an_iteration_ends_what_is_in_flight() -> None:
    batches = iter(loader(Numbers(1000, hangs_from=8), 8))
    assert values(islice(batches, 2)) == [[0, 3, 6, 9], [12, 15, 18, 21]]
    assert ahead_threads()
    del batches
    wait_for(lambda: not ahead_threads())


def test_an_iteration_that_ends_leaves_no_thread() -> None:
    batches = iter(loader(Numbers(20)))
    values(batches)
    ours = loader(Numbers(20))
    values(ours)
    del batches
    wait_for(lambda: not ahead_threads())


def test_a_failed_group_is_freed_without_the_garbage_collector() -> None:
    def fail(batch: Sequence[int]) -> None:
        raise ValueError("unread")

    group = GroupRead([[0]])
    group.run(fail)
    freed = weakref.ref(group)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            group.take()
        del group
        assert freed() is None
    finally:
        gc.enable()


def test_a_trainer_that_waits_can_be_cancelled() -> None:
    batches = iter(loader(Numbers(1000, hangs_from=4), 8))
    next(batches)
    with cancellable() as scope:
        threading.Timer(0.1, scope.cancel).start()
        with pytest.raises(CancelledReadError):
            next(batches)


def test_a_fork_in_flight_starts_anew_in_the_child() -> None:
    dataset = Numbers(400, seconds=0.01)
    ahead = ReadAheadDataset(dataset, build_sampler("single", range(400), 0, 4, 0, 1), num_batches=8)
    needed = [[3 * idx for idx in range(start, start + 4)] for start in range(0, 400, 4)]
    for step in range(5):
        assert [int(each) for each in ahead.__getitems__([*range(4 * step, 4 * step + 4)])] == needed[step]
    if (child := os.fork()) == 0:
        right = False
        try:
            right = all(
                [int(each) for each in ahead.__getitems__([*range(4 * step, 4 * step + 4)])] == needed[step]
                for step in range(5, 15)
            )
            gc.collect()
        finally:
            os._exit(0 if right and len(ahead_threads()) == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for step in range(5, 15):
        assert [int(each) for each in ahead.__getitems__([*range(4 * step, 4 * step + 4)])] == needed[step]


def test_batches_requested_after_the_end_are_read_by_the_thread_that_requests_them() -> None:
    """As by functions that run at exit."""
    ahead = ReadAheadDataset(Numbers(400), build_sampler("single", range(400), 0, 4, 0, 1), num_batches=8)
    ahead.__getitems__([0, 1, 2, 3])
    assert ahead._queue is not None
    ahead._queue.stop()
    assert not ahead_threads()
    for start in range(4, 80, 4):
        assert int(ahead.__getitems__([*range(start, start + 4)])[0]) == 3 * start


def test_without_threads_batches_are_read_by_the_thread_that_requests_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ahead = ReadAheadDataset(Numbers(400), build_sampler("single", range(400), 0, 4, 0, 1), num_batches=8)
    background()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for start in range(0, 80, 4):
        assert int(ahead.__getitems__([*range(start, start + 4)])[0]) == 3 * start


def test_a_batch_from_elsewhere_late_in_the_order_does_not_end_the_read_ahead() -> None:
    dataset = Numbers(4000)
    ahead = ReadAheadDataset(dataset, build_sampler("single", range(4000), 0, 4, 0, 1), num_batches=4)
    for start in range(0, 800, 4):
        ahead.__getitems__([*range(start, start + 4)])
    ahead.__getitems__([3, 1, 2])
    ahead.__getitems__([*range(800, 804)])
    wait_for(lambda: [812, 813, 814, 815] in dataset.requested)


def test_it_pickles_without_what_it_read_and_passes_attributes_on() -> None:
    ahead = ReadAheadDataset(Numbers(400), build_sampler("cyclic", range(400), 0, 4, 0, 1), num_batches=8)
    ahead.__getitems__([0, 1, 2, 3])
    again = pickle.loads(pickle.dumps(ahead))
    assert [int(each) for each in again.__getitems__([5, 6])] == [15, 18]
    assert again.count == 400
    with pytest.raises(AttributeError, match="nonsense"):
        _ = again.nonsense
    assert values(DataLoader(again, batch_size=100)) == [[*range(3 * s, 3 * s + 300, 3)] for s in range(0, 400, 100)]


def test_threads_that_request_batches_at_once_get_theirs() -> None:
    ahead = ReadAheadDataset(
        Numbers(4000, seconds=0.001), build_sampler("single", range(4000), 0, 4, 0, 1), num_batches=8
    )
    wrong = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for start in range(0, 400, 4):
            batch = [*range(start, start + 4)] if seed == 0 else rng.integers(0, 4000, 3).tolist()
            if [int(each) for each in ahead.__getitems__(batch)] != [3 * idx for idx in batch]:
                wrong.append(batch)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
