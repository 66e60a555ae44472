"""Batches that are read ahead are the batches, in their order; errors stay at their batch; nothing is left behind."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from binidx.errors import CancelledReadError, ConfigError
from binidx.loader import look_ahead as ahead_module
from binidx.loader import window as window_module
from binidx.loader.look_ahead import LookAhead, num_bytes
from binidx.loader.samplers import build_sampler
from binidx.loader.torch import PretrainingLoader, build_pretraining_data_loader
from binidx.loader.window import Window
from binidx.storage.cancel import cancellable, current_scope


class Numbers:
    """A map dataset: sample i is i times 3. Remembers what it was asked; slow, failing or hanging where it is told."""

    def __init__(
        self, count: int, seconds: float = 0.0, bad: Sequence[int] = (), hangs_from: int | None = None
    ) -> None:
        self.count, self.seconds, self.bad, self.hangs_from = count, seconds, bad, hangs_from
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> torch.Tensor:
        return self.__getitems__([idx])[0]

    def __getitems__(self, idxs: Sequence[int]) -> list[torch.Tensor]:
        self.asked.append([*idxs])
        time.sleep(self.seconds)
        if self.hangs_from is not None and max(idxs) >= self.hangs_from:
            hang()
        if bad := [idx for idx in idxs if idx in self.bad]:
            raise ValueError(f"sample {bad[0]} is bad")
        return [torch.tensor(3 * idx) for idx in idxs]


def hang() -> None:
    """As a read that only its scope can end."""
    scope, woken = current_scope(), threading.Event()
    assert scope is not None
    with scope.watched_by(woken.set):
        woken.wait(60)
    scope.check()


class OneByOne(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, idx: int) -> torch.Tensor:
        return torch.tensor(3 * idx)


def loader(dataset: Any, num_ahead: int | None = 8, consumed: int = 0, m: int = 4, **options: Any) -> PretrainingLoader:
    sampler = build_sampler(options.pop("kind", "single"), dataset, consumed, m, 0, 1)
    return PretrainingLoader(dataset, batch_sampler=sampler, look_ahead=num_ahead, **options)


def plain(dataset: Any, **options: Any) -> Any:
    return loader(dataset, 0, **options)


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "binidx-ahead"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert not ahead_threads()
    yield
    gc.collect()
    wait_for(lambda: not ahead_threads())


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def values(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("num_ahead", [1, 2, 7, 100])
def test_batches_and_their_order_are_the_same(num_ahead: int) -> None:
    assert values(loader(Numbers(100), num_ahead)) == values(plain(Numbers(100)))
    assert values(loader(OneByOne(), num_ahead)) == values(plain(OneByOne()))


def test_each_sample_is_read_once_and_before_it_is_asked_for() -> None:
    dataset = Numbers(100)
    batches = iter(loader(dataset, 5))
    next(batches)
    wait_for(lambda: len(dataset.asked) == 6)
    assert sorted(chain(*dataset.asked)) == [*range(24)]
    values(batches)
    assert sorted(chain(*dataset.asked)) == [*range(100)]


@pytest.mark.parametrize("consumed", [0, 4, 96])
def test_a_resumed_loader_looks_ahead_from_there(consumed: int) -> None:
    dataset = Numbers(100)
    assert values(loader(dataset, consumed=consumed)) == values(plain(Numbers(100), consumed=consumed))
    assert sorted(chain(*dataset.asked)) == [*range(consumed, 100)]


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_epochs_follow_each_other_as_they_do_without(kind: str) -> None:
    ours, needed = loader(Numbers(40), kind=kind), plain(Numbers(40), kind=kind)
    for count in (100, 100, 3, 2, 100):
        assert values(islice(ours, count)) == values(islice(needed, count))


def test_iterations_at_the_same_time_do_not_disturb_each_other() -> None:
    dataset = Numbers(100)
    shared = loader(dataset)
    first, second = iter(shared), iter(shared)
    needed = values(plain(Numbers(100)))
    next(first)
    together = [(one.tolist(), other.tolist()) for one, other in zip(first, second, strict=False)]
    assert together == [*zip(needed[1:], needed, strict=False)]
    assert len(dataset.asked) == 50


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize(("context", "persistent"), [("fork", True), ("fork", False), ("spawn", True)])
def test_workers_give_the_same_batches(kind: str, context: str, persistent: bool) -> None:
    workers = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": persistent}
    ours, needed = loader(Numbers(60), kind=kind, **workers), plain(Numbers(60), kind=kind)
    for _ in range(2):
        assert values(ours) == values(needed)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("num_workers", [1, 3, 4])
def test_persistent_workers_find_their_place_after_a_loader_was_left_early(num_workers: int) -> None:
    """What they were given is exact by itself; that they look ahead again is seen by who was asked for what."""
    for kind in ("single", "cyclic"):
        ours = loader(Told(400), kind=kind, num_workers=num_workers, persistent_workers=True, prefetch_factor=2)
        for count in (5, 3, 100):
            batches = [*islice(ours, count)]
            for batch in batches:
                assert (batch[:, 0] == 3 * batch[:, 1]).all()
        late = batches[4 * num_workers :]
        assert sum(bool(batch[0, 2]) for batch in late) >= len(late) - 2 * num_workers


class Told(OneByOne):
    """Samples of (value, number, whether a thread asked for it)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> torch.Tensor:
        return torch.tensor([3 * idx, idx, threading.current_thread().name == "binidx-ahead"])


def test_under_another_sampler_every_batch_is_right() -> None:
    rng = np.random.default_rng(0)
    ahead = LookAhead(Numbers(1000), build_sampler("single", range(1000), 0, 4, 0, 1), num_batches=8)
    for start in range(0, 400, 4):
        batch = [*range(start, start + 4)] if start % 80 < 60 else rng.integers(0, 1000, rng.integers(0, 6)).tolist()
        assert [int(sample) for sample in ahead.__getitems__(batch)] == [3 * idx for idx in batch]
    assert int(ahead[7]) == 21
    assert len(ahead) == 1000


def test_looking_ahead_goes_on_after_a_surprise() -> None:
    dataset = Numbers(1000)
    ahead = LookAhead(dataset, build_sampler("single", range(1000), 0, 4, 0, 1), num_batches=4)
    for start in (0, 4, 8, 40, 44, 48, 52):
        ahead.__getitems__([*range(start, start + 4)])
    wait_for(lambda: [68, 69, 70, 71] in dataset.asked)
    assert sum(batch == [44, 45, 46, 47] for batch in dataset.asked) == 1


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


def test_an_error_in_a_group_is_raised_at_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "is_ours", lambda dataset: True)
    dataset = Numbers(400, bad=[101])
    batches = iter(loader(dataset, 32, m=2))
    needed = values(plain(Numbers(400), m=2))
    assert values(islice(batches, 50)) == needed[:50]
    assert max(map(len, dataset.asked)) == 16
    with pytest.raises(ValueError, match="sample 101 is bad"):
        next(batches)
    assert values(batches) == needed[51:]


def test_groups_give_the_batches_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "is_ours", lambda dataset: True)
    for m, num_ahead in ((1, 8), (2, 100), (30, 100), (4, 1), (4, 2)):
        dataset = Numbers(600)
        assert values(loader(dataset, num_ahead, m=m)) == values(plain(Numbers(600), m=m))
        assert max(map(len, dataset.asked)) == max(m, min(num_ahead // 4 * m, 64 // m * m))
        assert sorted(chain(*dataset.asked)) == [*range(600)]


def test_no_more_is_read_ahead_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "is_ours", lambda dataset: True)
    for num_ahead in (1, 2, 5, 16):
        dataset = Numbers(2000)
        for served, _ in enumerate(loader(dataset, num_ahead, m=2), 1):
            time.sleep(0.0002)
            assert sum(map(len, dataset.asked)) <= 2 * (served + num_ahead)


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


def test_stop_cancels_and_the_next_batch_begins_anew() -> None:
    dataset = Numbers(1000, hangs_from=8)
    ahead = LookAhead(dataset, build_sampler("single", range(1000), 0, 4, 0, 1), num_batches=8)
    ahead.__getitems__([0, 1, 2, 3])
    ahead.stop()
    wait_for(lambda: not ahead_threads())
    dataset.hangs_from = None
    for start in (4, 8, 12):
        assert [int(each) for each in ahead.__getitems__([*range(start, start + 4)])] == [
            *range(3 * start, 3 * start + 12, 3)
        ]
    assert ahead_threads()
    ahead.stop()
    ahead.stop()


def test_a_trainer_that_waits_can_be_cancelled() -> None:
    batches = iter(loader(Numbers(1000, hangs_from=4), 8))
    next(batches)
    with cancellable() as scope:
        threading.Timer(0.1, scope.cancel).start()
        with pytest.raises(CancelledReadError):
            next(batches)


def test_a_fork_in_flight_starts_anew_in_the_child() -> None:
    dataset = Numbers(400, seconds=0.01)
    ahead = LookAhead(dataset, build_sampler("single", range(400), 0, 4, 0, 1), num_batches=8)
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


def test_it_pickles_without_what_it_read_and_passes_attributes_on() -> None:
    ahead = LookAhead(Numbers(400), build_sampler("cyclic", range(400), 0, 4, 0, 1), num_batches=8)
    ahead.__getitems__([0, 1, 2, 3])
    again = pickle.loads(pickle.dumps(ahead))
    assert [int(each) for each in again.__getitems__([5, 6])] == [15, 18]
    assert again.count == 400
    with pytest.raises(AttributeError, match="nonsense"):
        _ = again.nonsense
    assert values(DataLoader(again, batch_size=100)) == [[*range(3 * s, 3 * s + 300, 3)] for s in range(0, 400, 100)]


def test_two_threads_that_ask_at_once_both_get_what_they_asked_for() -> None:
    ahead = LookAhead(Numbers(4000, seconds=0.001), build_sampler("single", range(4000), 0, 4, 0, 1), num_batches=8)
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


def test_the_window_opens_with_waiting_and_only_as_far_as_the_budget() -> None:
    window = Window(None, budget_bytes=1000)
    assert window.batches == 1
    window.measure(10)
    opened = []
    for step in range(400):
        window.serve(waiting=step % 2 == 0)
        opened.append(window.batches)
    assert sorted(set(opened)) == [8, 16, 32, 64, 100]
    for size, needed in ((1000, 2), (400, 2), (300, 3), (100, 8)):
        window = Window(None, budget_bytes=1000)
        window.measure(size)
        assert window.batches == needed
    calm = Window(None, budget_bytes=1000)
    calm.measure(10)
    for _ in range(1000):
        calm.serve(waiting=False)
    assert calm.batches == 8


def test_a_trainer_that_is_faster_than_the_link_does_not_open_the_window_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four threads, groups of up to 64 samples: more than that in the window would only lie in a queue."""
    monkeypatch.setattr(ahead_module, "is_ours", lambda dataset: True)
    ahead = LookAhead(Numbers(8000, seconds=0.1), build_sampler("single", range(8000), 0, 8, 0, 1))
    for start in range(0, 3000, 8):
        ahead.__getitems__([*range(start, start + 8)])
    assert ahead._reading is not None
    assert 32 <= ahead._reading._window.batches <= 128


def test_where_nothing_has_to_be_waited_for_nobody_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_module, "is_ours", lambda dataset: True)
    monkeypatch.setattr(window_module, "QUICK_SECONDS", 0.1)  # for a machine that is busy with other things
    dataset = Numbers(10_000)
    ahead = LookAhead(dataset, build_sampler("cyclic", range(10_000), 0, 4, 0, 1))
    order = [*build_sampler("cyclic", range(10_000), 0, 4, 0, 1)]

    def ask(first: int, stop: int) -> None:
        for batch in order[first:stop]:
            assert [int(sample) for sample in ahead.__getitems__(batch)] == [3 * idx for idx in batch]

    ask(0, 500)
    time.sleep(0.02)
    assert sorted(chain(*dataset.asked)) == sorted(chain(*order[:500]))
    assert dataset.asked[-1] == order[499]
    dataset.seconds = 0.11
    ask(500, 505)
    wait_for(lambda: order[507][0] in chain(*dataset.asked))  # it looks ahead again, and from the right place
    dataset.seconds = 0.0
    ask(505, 1000)
    assert sorted(chain(*dataset.asked)) == sorted(chain(*order[:1000]))


def test_whatever_is_asked_for_and_however_slow_it_is_the_batches_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jumps, restarts and strangers, while looking ahead begins and ends all the time."""
    monkeypatch.setattr(ahead_module, "is_ours", lambda dataset: True)
    monkeypatch.setattr(window_module, "QUICK_SECONDS", 0.002)
    monkeypatch.setattr(window_module, "QUICK_BATCHES", 4)
    monkeypatch.setattr(window_module, "SLOW_COUNTS", 2)
    rng = np.random.default_rng(3)
    dataset = Numbers(100_000)
    ahead = LookAhead(dataset, build_sampler("single", range(100_000), 0, 3, 0, 1))
    place, modes = 0, set()
    for _ in range(2000):
        dataset.seconds = 0.003 if rng.integers(200) == 0 else 0 if rng.integers(20) == 0 else dataset.seconds
        place = 0 if rng.integers(200) == 0 else place + 3 * int(rng.integers(5) if rng.integers(10) == 0 else 1)
        batch = [*range(place, place + 3)] if rng.integers(30) else rng.integers(0, 100_000, 5).tolist()
        assert [int(sample) for sample in ahead.__getitems__(batch)] == [3 * idx for idx in batch]
        assert ahead._reading is not None
        modes.add((ahead._reading._pace.is_quick, bool(ahead._reading._groups)))
    assert len(modes) == 4


def test_samples_are_weighed_each_tensor_once() -> None:
    shared = torch.zeros(1000, dtype=torch.int64)
    samples = [{"tokens": torch.zeros(10, dtype=torch.int64), "positions": shared, "id": 3} for _ in range(4)]
    assert num_bytes(samples) == 4 * 80 + 8000
    assert num_bytes("text") == 0


def test_a_budget_is_held_by_a_loader_that_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MiB of a budget for samples of 64 KiB each, in batches of 4: 8 batches at most wait to be asked for."""
    monkeypatch.setattr(ahead_module, "is_ours", lambda dataset: True)
    monkeypatch.setattr(ahead_module, "is_remote", lambda dataset: True)
    monkeypatch.setattr(ahead_module, "BUDGET_BYTES", 2 << 20)

    class Large(Numbers):
        def __getitems__(self, idxs: Sequence[int]) -> list[torch.Tensor]:
            super().__getitems__(idxs)
            return [torch.full((1 << 16,), idx % 256, dtype=torch.uint8) for idx in idxs]

    dataset = Large(600, seconds=0.01)
    ahead = LookAhead(dataset, build_sampler("single", range(600), 0, 4, 0, 1))
    opened = []
    for served, start in enumerate(range(0, 600, 4), 1):
        assert ahead.__getitems__([*range(start, start + 4)])[3][0] == (start + 3) % 256
        opened.append(sum(map(len, dataset.asked)) - 4 * served)
    assert max(opened) <= 4 * 8
    assert ahead._reading is not None
    assert ahead._reading._window.batches == 8


def test_what_is_local_is_not_read_ahead_unless_asked() -> None:
    assert build_pretraining_data_loader(OneByOne(), 0, 4)._looks_ahead is False
    assert build_pretraining_data_loader(OneByOne(), 0, 4, look_ahead=3)._looks_ahead is True
    with pytest.raises(ConfigError, match="look_ahead: found -1"):
        build_pretraining_data_loader(OneByOne(), 0, 4, look_ahead=-1)
