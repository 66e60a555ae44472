"""Batches that are read ahead are the batches, in their order, in workers and after surprises."""

from __future__ import annotations

import threading
from itertools import chain, islice

import numpy as np
import pytest
import torch
from helpers.readahead_loaders import Numbers, OneByOne, loader, no_thread_is_left, plain, values, wait_for  # noqa: F401

from binidx.errors import ConfigError
from binidx.loader.readahead import ReadAheadDataset
from binidx.loader.samplers import build_sampler
from binidx.loader.torch_loader import build_pretraining_data_loader


@pytest.mark.parametrize("num_ahead", [1, 2, 7, 100])
def test_batches_and_their_order_are_the_same(num_ahead: int) -> None:
    assert values(loader(Numbers(100), num_ahead)) == values(plain(Numbers(100)))
    assert values(loader(OneByOne(), num_ahead)) == values(plain(OneByOne()))


def test_each_sample_is_read_once_and_before_it_is_requested() -> None:
    dataset = Numbers(100)
    batches = iter(loader(dataset, 5))
    next(batches)
    wait_for(lambda: len(dataset.requested) == 6)
    assert sorted(chain(*dataset.requested)) == [*range(24)]
    values(batches)
    assert sorted(chain(*dataset.requested)) == [*range(100)]


@pytest.mark.parametrize("consumed", [0, 4, 96])
def test_a_resumed_loader_reads_ahead_from_there(consumed: int) -> None:
    dataset = Numbers(100)
    assert values(loader(dataset, consumed=consumed)) == values(plain(Numbers(100), consumed=consumed))
    assert sorted(chain(*dataset.requested)) == [*range(consumed, 100)]


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
    wait_for(lambda: len(dataset.requested) == 50)  # the last one by a thread


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
        ours = loader(
            ThreadRecorder(400), kind=kind, num_workers=num_workers, persistent_workers=True, prefetch_factor=2
        )
        for count in (5, 3, 100):
            batches = [*islice(ours, count)]
            for batch in batches:
                assert (batch[:, 0] == 3 * batch[:, 1]).all()
        late = batches[4 * num_workers :]
        assert sum(bool(batch[0, 2]) for batch in late) >= len(late) - 2 * num_workers


class ThreadRecorder(OneByOne):
    """Samples of (value, number, whether a thread asked for it)."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> torch.Tensor:
        return torch.tensor([3 * idx, idx, threading.current_thread().name == "binidx-ahead"])


def test_under_another_sampler_every_batch_is_right() -> None:
    rng = np.random.default_rng(0)
    ahead = ReadAheadDataset(Numbers(1000), build_sampler("single", range(1000), 0, 4, 0, 1), num_batches=8)
    for start in range(0, 400, 4):
        batch = [*range(start, start + 4)] if start % 80 < 60 else rng.integers(0, 1000, rng.integers(0, 6)).tolist()
        assert [int(sample) for sample in ahead.__getitems__(batch)] == [3 * idx for idx in batch]
    assert int(ahead[7]) == 21
    assert len(ahead) == 1000


def test_read_ahead_continues_after_an_unexpected_batch() -> None:
    dataset = Numbers(1000)
    ahead = ReadAheadDataset(dataset, build_sampler("single", range(1000), 0, 4, 0, 1), num_batches=4)
    for start in (0, 4, 8, 40, 44, 48, 52):
        ahead.__getitems__([*range(start, start + 4)])
    wait_for(lambda: [68, 69, 70, 71] in dataset.requested)
    assert sum(batch == [44, 45, 46, 47] for batch in dataset.requested) == 1


def test_local_data_is_not_read_ahead_by_default() -> None:
    assert build_pretraining_data_loader(OneByOne(), 0, 4)._reads_ahead is False
    assert build_pretraining_data_loader(OneByOne(), 0, 4, look_ahead=3)._reads_ahead is True
    with pytest.raises(ConfigError, match="look_ahead: found -1"):
        build_pretraining_data_loader(OneByOne(), 0, 4, look_ahead=-1)
