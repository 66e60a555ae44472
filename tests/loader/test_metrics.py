"""Metrics of a loader, and what dashboards get of them by examples/metrics.py."""

from __future__ import annotations

import socket
import subprocess
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
from binidx.loader.worker_usage import WorkerUsage
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
    before = loader.metrics()
    assert before["samples"] == loader.metrics(since=before)["tokens_per_second"] == 0.0
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    found = loader.metrics(since=before)
    assert (found["samples"], found["tokens"]) == (16, 256)
    assert found["samples_ahead"] >= 0
    assert found["tokens_per_second"] == 256 / found["seconds"]
    assert 0 < found["wait_share"] == found["wait_seconds"] / found["seconds"] <= 1
    assert found["memory_hits"] + found["memory_misses"] > 0
    assert found["bytes_wanted"] > 0
    assert all(isinstance(value, float) for value in found.values())
    rest = sum(1 for _ in batches)
    later = loader.metrics(since={name: value for name, value in found.items() if name in before})
    assert (later["samples"], later["tokens"]) == (8 * rest, 128 * rest) == (48, 768)
    assert loader.metrics()["samples"] == 64


def test_metrics_count_the_reads_of_workers(prefix: str) -> None:
    loader = binidx.load_dataset(prefix, 16).loader(8, num_workers=1, look_ahead=2)
    assert len([*loader]) == 8
    found = loader.metrics()
    assert found["samples"] == 64
    assert found["memory_hits"] + found["memory_misses"] > 0


def test_workers_have_the_histograms_of_buckets_that_they_alone_open() -> None:
    shared = WorkerUsage(1, {"s3://of-workers"})
    shared.write()
    stats.note_request("s3://of-workers", 0.02, 100)
    stats.note_request("s3://of-workers", 2.0, 1 << 20)
    shared.write()
    found = stats.find_histograms({**dict.fromkeys(stats.usage(), 0.0), **shared.read_new()})
    for kind, num_bytes in (("request", 100), ("large_request", 1 << 20)):
        label = stats.open_histogram(kind, "s3://of-workers")[0].split(" ")[1]  # "other" after those of other tests
        assert (found[kind, label].count, found[kind, label].bytes) == (1, num_bytes)


def test_samples_read_ahead_are_no_overhead_of_a_report() -> None:
    used = dict.fromkeys(stats.NAMES, 0.0) | {
        "samples": 8, "tokens": 8 * 16_384, "seconds": 1.0, "samples_ahead": 24, "dollars": 0.4,
        "remote requests": 10, "remote bytes_asked": 1e6, "remote bytes_moved": 1e6,
        "layers added": 9e5, "caches added": 9e5,
    }  # fmt: skip
    line = usage_report.report_line(used, run_tokens=4 * 8 * 16_384)
    assert "131,072 tokens in 1.00 s, waited 0.00 s (0.0%), 24 samples read ahead; " in line
    assert "10 requests moved 1 MB for 100 kB wanted and 900 kB more cached (1.00x); " in line
    assert line.endswith("requests $0.4 at list price, $0.40 for 5.24e+05 tokens")  # of the tokens that were read


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
    assert {tag.removeprefix("data/") for tag, *_ in found} == {*loader.metrics(since=loader.metrics())}


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
    assert run.logged[0][1].keys() == {f"data/{name}" for name in loader.metrics(since=loader.metrics())}


def scrape(port: int) -> dict[str, Any]:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        return {each.name: each for each in text_string_to_metric_families(response.read().decode())}


def test_prometheus_scrapes_sums_as_counters_and_waits_as_histograms(loader: Any, prefix: str) -> None:
    with binidx.serve_metrics(loader, 0, address="127.0.0.1") as server:
        before = scrape(server.port)["binidx_next_seconds"]
        for expected in (64.0, 128.0):
            assert len([*loader]) == 8
            families = scrape(server.port)
            assert families["binidx_samples"].type == "counter"
            assert families["binidx_samples"].samples[0].value == expected
        kinds = {f"binidx_{kind}_{of}" for kind, _ in loader.histograms() for of in ("seconds", "bytes")}
        assert {*families} == {f"binidx_{name}" for name in loader.metrics()} | kinds
        gauges = {name for name, family in families.items() if family.type == "gauge"}
        assert gauges == {"binidx_samples_ahead"}, "a mean since the start would hide what happens now"
        labels = {"rank": "0", "node": socket.gethostname()}
        assert all(labels.items() <= each.labels.items() for one in families.values() for each in one.samples)
        count = {each.name: each.value for each in families["binidx_next_seconds"].samples}
        was = {each.name: each.value for each in before.samples}
        assert count["binidx_next_seconds_count"] - was["binidx_next_seconds_count"] == 16
        buckets = {each.labels["bucket"] for each in families["binidx_request_seconds"].samples}
        assert any(prefix.startswith(f"{bucket}/") for bucket in buckets)
    with pytest.raises(URLError):
        scrape(server.port)


def test_buckets_beyond_some_share_one_histogram(tmp_path: Path) -> None:
    code = """
from binidx.storage import stats
for number in range(50):
    for _ in range(number):
        stats.note_seconds("request", 0.02, 100, f"s3://key:secret@bucket-{number} b")
histograms = stats.find_histograms(stats.usage())
found = {bucket: each.count for (kind, bucket), each in histograms.items() if kind == "request"}
assert [*found] == [*(f"s3://bucket-{number}%20b" for number in range(1, 5)), "other"], found
assert [*found.values()] == [1, 2, 3, 4, sum(range(5, 50))]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_histogram_counts_each_wait_up_to_its_bounds() -> None:
    before, waits = stats.usage(), [0.0005, 0.001, 0.002, 0.5, 29.9, 31.0, 4000.0]
    for seconds in waits:
        stats.note_seconds("cache_read", seconds, 10)
    found = stats.find_histograms(stats.usage_since(before))["cache_read", ""]
    assert found.counts == [sum(each <= bound for each in waits) for bound in stats.BOUNDS]
    assert (found.count, found.bytes, found.seconds) == (7, 70, pytest.approx(sum(waits)))


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
    points = {each.name: each.data.data_points for each in exported}
    kinds = {f"binidx.{kind}_seconds_{end}" for kind, _ in loader.histograms() for end in ("sum", "bucket")}
    assert points.keys() == {f"binidx.{name}" for name in loader.metrics()} | kinds
    assert points["binidx.samples"][0].value == 64.0
    assert {"rank": "0", "node": socket.gethostname()}.items() <= points["binidx.samples"][0].attributes.items()
    counts = {point.attributes["le"]: point.value for point in points["binidx.next_seconds_bucket"]}
    assert counts["inf"] == loader.histograms()["next", ""].count >= 8
    provider.shutdown()
