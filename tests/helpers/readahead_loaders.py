"""A map-style dataset that records its requests, and loaders of it with and without read-ahead."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from binidx.loader.readahead import ReadAheadDataset
from binidx.loader.samplers import build_sampler
from binidx.loader.torch_loader import PretrainingLoader
from binidx.storage.requests.cancellation import current_scope
from binidx.storage.stats import add_usage


class Numbers:
    """A map dataset: sample i is i times 3. Records its requests; slow (as from a store), failing or hanging."""

    def __init__(
        self, count: int, seconds: float = 0.0, bad: Sequence[int] = (), hangs_from: int | None = None
    ) -> None:
        self.count, self.seconds, self.bad, self.hangs_from = count, seconds, bad, hangs_from
        self.requested: list[list[int]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, idx: int) -> torch.Tensor:
        return self.__getitems__([idx])[0]

    def __getitems__(self, idxs: Sequence[int]) -> list[torch.Tensor]:
        self.requested.append([*idxs])
        if self.seconds:
            add_usage({"remote requests": 1})
            time.sleep(self.seconds)
        if self.hangs_from is not None and max(idxs) >= self.hangs_from:
            hang()
        if bad := [idx for idx in idxs if idx in self.bad]:
            raise ValueError(f"sample {bad[0]} is bad")
        return [torch.tensor(3 * idx) for idx in idxs]


def hang(woken: threading.Event | None = None) -> None:
    """As a read that its scope can end, and `woken`."""
    scope, woken = current_scope(), woken or threading.Event()
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


def grouped(dataset: Any, num_ahead: int, m: int = 4) -> Any:
    """Loader that reads several batches of a dataset in one call, as of a class of ours."""
    sampler: Any = build_sampler("single", dataset, 0, m, 0, 1)
    ahead: Any = ReadAheadDataset(dataset, sampler, num_batches=num_ahead, in_groups=True)
    return torch.utils.data.DataLoader(ahead, batch_sampler=sampler)


def plain(dataset: Any, **options: Any) -> Any:
    return loader(dataset, 0, **options)


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "binidx-ahead"]


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def values(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Of each test in a module that imports this name."""
    gc.collect()  # loaders that a test of another module left
    wait_for(lambda: not ahead_threads())
    yield
    gc.collect()
    wait_for(lambda: not ahead_threads())
