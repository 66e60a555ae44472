"""DataLoader workers, forked and spawned, over every transport, while the parent goes on reading.

Every sample is the local one; and the proxy's log proves that a connection is used by one process only, so none that
was opened before a fork is used after it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from helpers.proxied_store import TRANSPORTS, Distant, distant_store

import binidx
from binidx.storage.interfaces import RangeReader
from binidx.storage.threads import rare_collections
from binidx.testing import ended_well, forked

SAMPLES = 96
PROBE_BYTES = 64
PARENTS = 6_000
"""The first of the probes that only the parent reads."""


@dataclass
class Place:
    """A GPT dataset in one store, and an object beside it."""

    distant: Distant
    samples: Any
    probe: RangeReader


class Probed(torch.utils.data.Dataset[Any]):
    """Samples of each place, with the process that read them, and with a read that only this sample makes."""

    def __init__(self, places: list[tuple[Any, RangeReader]]) -> None:
        self.places = places

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, int, list[Any]]:
        return number, os.getpid(), [(read_probe(probe, number), samples[number]) for samples, probe in self.places]


def read_probe(probe: RangeReader, number: int) -> bytes:
    start = number * PROBE_BYTES
    return bytes(probe.read([(start, start + PROBE_BYTES)])[0])


def as_it_is(batch: list[Any]) -> list[Any]:
    return batch


PROBES = np.random.default_rng(0).bytes(2 * PARENTS * PROBE_BYTES)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(1)
    return write_with_megatron(tmp_path_factory.mktemp("local") / "en", rng.integers(1, 90, 300).astype(np.int32), rng)


def build(prefix: str, caches: Path, **options: Any) -> Any:
    config = binidx.GPTDatasetConfig(
        random_seed=3,
        sequence_length=64,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=str(caches),
        **options,
    )
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [SAMPLES, 0, 0], lambda: True, config).build()[0]


@contextlib.contextmanager
def reading(probe: RangeReader, pause: float = 0.05) -> Iterator[list[int]]:
    """A thread of this process reads all the time; the probes it has read."""
    read: list[int] = []
    stop = threading.Event()

    def work() -> None:
        for number in range(PARENTS, 2 * PARENTS):
            if stop.wait(pause):
                return
            assert read_probe(probe, number) == probe_bytes(number)
            read.append(number)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield read
    finally:
        stop.set()
        thread.join()


def probe_bytes(number: int) -> bytes:
    return PROBES[number * PROBE_BYTES : (number + 1) * PROBE_BYTES]


@pytest.fixture
def place(local: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """Puts the dataset into a store by name, and opens it there through a proxy."""
    with contextlib.ExitStack() as stack:

        def placed(name: str) -> Place:
            distant = stack.enter_context(distant_store(name, request, tmp_path / name, delay_ms=2))
            for end in (".bin", ".idx"):
                distant.put(f"en{end}", Path(local + end).read_bytes())
            samples = build(f"{distant.base}/en", tmp_path / "caches" / name, storage_options=distant.options())
            return Place(distant, samples, distant.open(distant.put("probes", PROBES)))

        yield placed


@pytest.mark.parametrize(
    ("names", "context", "num_workers"),
    [*(([name], "fork", 2) for name in TRANSPORTS), (TRANSPORTS, "spawn", 1)],
    ids=str,
)
def test_workers_and_their_parent_read_right_bytes_on_connections_of_their_own(
    names: list[str], context: str, num_workers: int, place: Callable[[str], Place], local: str, tmp_path: Path
) -> None:
    here = build(local, tmp_path / "here")
    places = [place(name) for name in names]
    pids: defaultdict[int, set[int]] = defaultdict(set)
    with contextlib.ExitStack() as stack:
        # The parent has read samples, and reads on while its children are made and read.
        for each in places:
            assert_same_sample(each.samples[5], here[5])
        parents = [stack.enter_context(reading(each.probe)) for each in places]
        loader = torch.utils.data.DataLoader(
            Probed([(each.samples, each.probe) for each in places]),
            batch_size=8,
            num_workers=num_workers,
            multiprocessing_context=context,
            collate_fn=as_it_is,
            timeout=1200,
        )
        for batch in loader:
            for number, pid, found in batch:
                pids[number].add(pid)
                for probe, sample in found:
                    assert probe == probe_bytes(number)
                    assert_same_sample(sample, here[number])
            for each in places:
                assert_same_sample(each.samples[batch[0][0]], here[batch[0][0]])
    assert sorted(pids) == list(range(SAMPLES))
    workers = set.union(*pids.values())
    assert len(workers - {os.getpid()}) == num_workers
    for each, read in zip(places, parents, strict=True):
        assert read
        check_connections(each.distant, {**pids, **{number: {os.getpid()} for number in read}})


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSPORTS)
def test_children_that_are_forked_at_any_moment_of_first_reads_read(name: str, place: Callable[[str], Place]) -> None:
    """Threads change places every 10 us, so that a fork finds them anywhere: 1 of 234 children waited for a lock so."""
    here, rng, usual = place(name), random.Random(0), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def read(probe: RangeReader) -> None:
        assert read_probe(probe, 1) == read_probe(here.probe, 1) == probe_bytes(1)
        assert len(here.samples[3]["tokens"]) == 64

    try:
        for number in range(60):
            probe = here.distant.open(here.distant.put(f"probes{number}", PROBES))
            with reading(probe, pause=0.0), reading(here.probe, pause=0.0):
                for _ in range(3):
                    time.sleep(rng.random() * 0.01)
                    assert ended_well(forked(functools.partial(read, probe)))
    finally:
        sys.setswitchinterval(usual)


def check_connections(distant: Distant, pids: dict[int, set[int]]) -> None:
    """No connection was used by two processes, and each process has used one."""
    users: defaultdict[int, set[int]] = defaultdict(set)
    for each in distant.proxy.log():
        if each.path.endswith("probes") and each.range:
            users[each.connection] |= pids[int(each.range.removeprefix("bytes=").partition("-")[0]) // PROBE_BYTES]
    assert max(map(len, users.values())) == 1
    assert set.union(*users.values()) == set.union(*pids.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_proof_sees_a_connection_that_two_processes_used(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("http", request, tmp_path, delay_ms=0) as distant:
        distant.put("probes", PROBES)
        connection = HTTPConnection(distant.proxy.endpoint.removeprefix("http://"))

        def get(number: int) -> None:
            start = number * PROBE_BYTES
            connection.request("GET", "/probes", headers={"Range": f"bytes={start}-{start + PROBE_BYTES - 1}"})
            assert connection.getresponse().read() == probe_bytes(number)

        get(0)
        child = forked(lambda: get(1))
        assert ended_well(child)
        connection.close()
        check_connections(distant, {0: {os.getpid()}, 1: {os.getpid()}})
        with pytest.raises(AssertionError):
            check_connections(distant, {0: {os.getpid()}, 1: {child}})


def test_a_child_that_is_forked_within_rare_collections_collects_as_usual() -> None:
    usual = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold() != usual
        if (child := os.fork()) == 0:
            with rare_collections():
                is_rare = gc.get_threshold() != usual
            os._exit(0 if is_rare and gc.get_threshold() == usual else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gc.get_threshold() != usual
    assert gc.get_threshold() == usual
