"""Metrics of a loader, and what dashboards get of them by examples/metrics.py."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from conftest import Bucket

import binidx
from binidx.errors import MissingDriverError
from binidx.storage import stats, usage_report

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def prefix(s3: Bucket) -> str:
    prefix = f"{s3.fresh()}/en"
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for number in range(21):  # 65 samples of 16 tokens, 8 batches of 8
            builder.add_document([number] * 50, [50])
        builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def loader(prefix: str) -> Any:
    return binidx.load_dataset(prefix, 16).loader(batch_size=8, look_ahead=2)


@pytest.fixture(scope="module")
def example() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import metrics
    finally:
        sys.path.remove(str(EXAMPLES))
    return metrics


def test_metrics_count_what_the_loader_served_read_and_paid(loader: Any) -> None:
    assert loader.metrics()["samples"] == loader.metrics()["tokens_per_second"] == 0.0
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    found = loader.metrics()
    assert (found["samples"], found["tokens"]) == (16, 256)
    assert found["samples_ahead"] >= 0
    assert found["tokens_per_second"] == 256 / found["seconds"]
    assert 0 < found["wait_share"] == found["wait_seconds"] / found["seconds"] <= 1
    assert found["memory_hits"] + found["memory_misses"] > 0
    assert found["bytes_wanted"] > 0
    assert all(isinstance(value, float) for value in found.values())
    rest = sum(1 for _ in batches)
    later = loader.metrics(since=found)
    assert (later["samples"], later["tokens"]) == (8 * rest, 128 * rest) == (48, 768)
    assert loader.metrics()["samples"] == 64


def test_metrics_count_the_reads_of_workers(prefix: str) -> None:
    loader = binidx.load_dataset(prefix, 16).loader(8, num_workers=1, look_ahead=2)
    assert len([*loader]) == 8
    found = loader.metrics()
    assert found["samples"] == 64
    assert found["memory_hits"] + found["memory_misses"] > 0


def test_samples_read_ahead_are_no_overhead_of_a_report() -> None:
    used = dict.fromkeys(stats.NAMES, 0.0) | {
        "samples": 8, "tokens": 8 * 4096, "seconds": 1.0, "samples_ahead": 24, "dollars": 0.4,
        "remote requests": 10, "remote bytes_asked": 1e6, "remote bytes_moved": 1e6,
        "layers added": 9e5, "caches added": 9e5,
    }  # fmt: skip
    line = usage_report.report_line(used, run_tokens=4 * 8 * 4096)
    assert "32,768 tokens in 1.00 s, waited 0.00 s (0.0%), 24 samples read ahead; " in line
    assert "10 requests moved 1 MB for 100 kB wanted and 900 kB more cached (1.00x); " in line
    assert line.endswith("requests $0.4 at list price, $0.40 for 1.31e+05 tokens")  # of the tokens that were read


def test_tensorboard_gets_the_metrics_of_each_interval(loader: Any, example: Any, tmp_path: Path) -> None:
    from tensorboardX import SummaryWriter
    from tensorboardX.proto.event_pb2 import Event

    with SummaryWriter(str(tmp_path)) as writer:
        show = example.to_tensorboard(loader, writer)
        for step, _ in enumerate(loader):
            show(step)
    [events] = tmp_path.glob("events.*")
    data, found = events.read_bytes(), list[tuple[str, float, int]]()
    while data:  # of each record: its length, a checksum of that, the record, a checksum of it
        stop = 12 + int.from_bytes(data[:8], "little")
        event, data = Event.FromString(data[12:stop]), data[stop + 4 :]
        found += [(value.tag, value.simple_value, event.step) for value in event.summary.value]
    assert [row for row in found if row[0] == "data/tokens"] == [("data/tokens", 128.0, step) for step in range(8)]
    assert {tag.removeprefix("data/") for tag, *_ in found} == {*loader.metrics()}


def test_wandb_gets_the_metrics_of_each_interval(loader: Any, example: Any) -> None:
    class Run:
        """As much of `wandb.Run` as is called: its `log(dict, step=)`."""

        def __init__(self) -> None:
            self.logged: list[tuple[int, dict[str, float]]] = []

        def log(self, data: dict[str, float], step: int) -> None:
            self.logged.append((step, data))

    show = example.to_wandb(loader, run := Run())
    for step, _ in enumerate(loader):
        show(step)
    assert [(step, data["data/samples"]) for step, data in run.logged] == [(step, 8.0) for step in range(8)]
    assert run.logged[0][1].keys() == {f"data/{name}" for name in loader.metrics()}


def test_prometheus_scrapes_sums_as_counters_and_ratios_as_gauges(loader: Any) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with binidx.serve_metrics(loader, 0, address="127.0.0.1") as server:
        for expected in (64.0, 128.0):
            assert len([*loader]) == 8
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
                families = {each.name: each for each in text_string_to_metric_families(response.read().decode())}
            assert families["binidx_samples"].type == "counter"
            assert families["binidx_samples"].samples[0].value == expected
        assert families["binidx_wait_share"].type == "gauge"
        assert families["binidx_wait_share"].samples[0].value == loader.metrics()["wait_share"]
        assert {name.removeprefix("binidx_") for name in families} == {*loader.metrics()}
        assert {name for name, family in families.items() if family.type == "gauge"} == {
            "binidx_tokens_per_second", "binidx_wait_share", "binidx_memory_hit_rate", "binidx_disk_hit_rate",
            "binidx_samples_ahead", "binidx_request_limit", "binidx_goodput",
        }  # fmt: skip
    with pytest.raises(URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics")


def test_metrics_are_not_served_without_prometheus_client(loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDriverError, match=r"needs prometheus_client; pip install 'binidx\[telemetry\]'"):
        binidx.serve_metrics(loader, 0)


def test_opentelemetry_exports_every_metric(loader: Any, example: Any) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    provider = MeterProvider(metric_readers=[reader := InMemoryMetricReader()])
    example.to_opentelemetry(loader, provider.get_meter("binidx"))
    assert len([*loader]) == 8
    exported = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
    values = {each.name: each.data.data_points[0].value for each in exported}
    assert values.keys() == {f"binidx.{name}" for name in loader.metrics()}
    assert values["binidx.samples"] == 64.0
    assert values["binidx.tokens_per_second"] == loader.metrics()["tokens_per_second"]
    provider.shutdown()
