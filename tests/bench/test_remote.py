"""A remote row that did not read from the store fails its bench."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.traceable_runs import random_run
from servers.latency_proxy import latency_proxy

from binidx import RunOrder
from binidx.dataset.stored.baked import BakedDataset
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule
from binidx.run.stored.baking import bake, plan_bake
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.writing.publish import create_object
from tests.bench import order
from tests.bench.__main__ import BENCHES, ON_REQUEST
from tests.bench.remote import NotRemoteError, check_reached, own_requests, remote_seconds

SERVERS = re.compile(r"\b(far_away|latency_proxy|far_object|range_server)\(")
CHECKS = re.compile(r"\b(check_reached|remote_seconds)\(")
BY_RACE = ("from_s3", "peers", "short_documents")
"""Benches whose passes are all run, and checked, by `tests.bench.race`."""


@pytest.mark.parametrize("counted_by", ["proxy", "process"])
def test_a_second_pass_over_one_object_is_no_remote_row(counted_by: str, s3: Bucket) -> None:
    uri = f"{s3.fresh()}/object"
    with create_object(Location.of(uri)) as out:
        out.write(np.arange(1000).tobytes())
    with latency_proxy(s3.server.endpoint, delay_ms=1) as proxy, proxy.in_environment():
        count = (lambda: proxy.counts().requests) if counted_by == "proxy" else own_requests
        reader = open_object(uri)
        assert remote_seconds("a pass", 1, lambda: reader.read([(0, 100)]), count) > 0.001
        with pytest.raises(NotRemoteError, match="the second: found no request to the store, needs one; open the"):
            remote_seconds("the second", 1, lambda: reader.read([(0, 100)]), count)


def test_what_is_faster_than_one_round_trip_is_no_remote_row() -> None:
    check_reached("a pass", 60, 0.030, 30)
    with pytest.raises(NotRemoteError, match="a pass: took 29 ms, one round trip is 30 ms"):
        check_reached("a pass", 60, 0.029, 30)


def test_a_baked_run_that_was_read_before_fails_its_bench(
    s3: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "NUM_BATCHES", 2)
    dataset, where = random_run(tmp_path, 2), s3.fresh()
    run = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(4, 1, 2), len(dataset)))
    bake(run, where, plan_bake(run, range(6)))
    with latency_proxy(s3.server.endpoint, delay_ms=order.DELAY_MS) as proxy, proxy.in_environment():
        assert min(order.measure(proxy, lambda: BakedDataset(where, dataset.config), 2)) > 0
        opened = BakedDataset(where, dataset.config)
        with pytest.raises(NotRemoteError, match=r"BakedDataset\(.*look_ahead=None: found no request"):
            order.measure(proxy, lambda: opened, 2)


def test_every_bench_that_reads_from_a_server_checks_its_passes() -> None:
    sources = {name: Path(str(importlib.import_module(f"tests.bench.{name}").__file__)).read_text()
               for name in ("race", *BENCHES, *ON_REQUEST)}  # fmt: skip
    remote = {name for name, source in sources.items() if SERVERS.search(source)}
    assert {"race", "order", "step_wait", *BY_RACE} <= remote
    assert [name for name in sorted(remote) if name not in BY_RACE and not CHECKS.search(sources[name])] == []
