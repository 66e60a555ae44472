"""Forecasts against what a proxy counts, and against arithmetic that one can check by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER
from servers.latency_proxy import Proxy, latency_proxy

import binidx
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.index.cache.index_files import NpyLayout
from binidx.index.document_sample import plan_epochs
from binidx.run.plan.forecast import (
    Link,
    Medium,
    blend_bytes,
    build_memory_bytes,
    cache_fill_cost,
    gpt_index_bytes,
    pieces_per_sample,
    source_costs,
    total_costs,
    vectored_read_cost,
)
from binidx.run.plan.inventory import take_inventory
from binidx.run.plan.run_plan import plan_run

SEQUENCE_LENGTH = 2048
TOKENS = 18_500_000
MICRO = 8
NUM_SAMPLES = 4000


def write(prefix: Path, num_tokens: int, mean: float, seed: int) -> str:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1.0, int(num_tokens / mean))).astype(np.int64)
    tokens, ends = rng.integers(1, 500, int(lengths.sum())).astype(np.uint16), np.cumsum(lengths)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
            builder.add_document(tokens[end - length : end], [length])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def corpus(s3: Bucket, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of datasets of 35 MiB, which are larger than what is kept in memory, and of a small one."""
    directory, base = tmp_path_factory.mktemp("forecast"), s3.fresh()
    large = write(directory / "plain", TOKENS, 700, 0)
    convert_dataset(large, f"{base}/plain", verify="size")
    convert_dataset(large, f"{base}/checked", verify="size", way=StorageFormat(checksums=True))
    convert_dataset(large, f"{base}/zst", verify="size", way=StorageFormat(codec="zstd", level=1))
    convert_dataset(write(directory / "small", 400_000, 300, 1), f"{base}/small", verify="size")
    return base


@pytest.fixture(scope="module")
def proxy(s3: Bucket) -> Iterator[Proxy]:
    with latency_proxy(s3.server.endpoint, delay_ms=20) as found, found.in_environment():
        yield found


def make(blend: Any, **changes: Any) -> binidx.Run:
    config = binidx.GPTDatasetConfig(
        random_seed=3, sequence_length=SEQUENCE_LENGTH, split="1,0,0", blend=blend, tokenizer=TOKENIZER,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        storage_options=changes.pop("storage_options", None),
    )  # fmt: skip
    return binidx.Run(config, [changes.pop("size", NUM_SAMPLES), 0, 0], MICRO, **changes)


def counted(run: binidx.Run, proxy: Proxy, samples: int) -> tuple[int, int]:
    """Requests and bytes of reading so many samples, one micro-batch after the other."""
    train: Any = run.build()[0]
    before = proxy.counts()
    for first in range(0, samples, MICRO):
        train.__getitems__([*range(first, first + MICRO)])
    moved = proxy.counts() - before
    return moved.requests, moved.bytes


@pytest.mark.parametrize(
    ("name", "ours", "tolerance"),
    [
        ("plain", {"max_gap": 0}, 0.04),
        ("plain", {}, 0.04),
        ("plain", {"max_gap": 65536}, 0.06),
        ("checked", {}, 0.06),
        ("zst", {}, 0.1),
    ],
    ids=["exact ranges", "plain", "wide gaps", "checked", "zst"],
)
def test_requests_and_bytes_are_as_counted(
    name: str, ours: dict[str, Any], tolerance: float, corpus: str, proxy: Proxy
) -> None:
    run = make(([f"{corpus}/{name}"], None), storage_options={"binidx": ours})
    samples = 50 * MICRO
    told = total_costs(source_costs(take_inventory(run), samples, nodes=1, at_once=MICRO))
    requests, num_bytes = counted(run, proxy, samples)
    assert told.requests == pytest.approx(requests, rel=tolerance)
    assert told.num_bytes == pytest.approx(num_bytes, rel=tolerance)


def test_a_blend_is_the_sum_of_its_sources(corpus: str, proxy: Proxy) -> None:
    run = make(([f"{corpus}/plain", f"{corpus}/small"], [0.75, 0.25]))
    samples = 60 * MICRO
    costs = source_costs(take_inventory(run), samples, nodes=1, at_once=MICRO)
    requests, num_bytes = counted(run, proxy, samples)
    assert total_costs(costs).requests == pytest.approx(requests, rel=0.08)
    assert total_costs(costs).num_bytes == pytest.approx(num_bytes, rel=0.08)
    assert costs[1].reading.num_bytes <= 1.05 * 800_000  # the small one stays in memory


def test_a_disk_cache_takes_each_chunk_once(corpus: str, proxy: Proxy, tmp_path: Path) -> None:
    ours = {"cache_dir": str(tmp_path), "cache_chunk_bytes": 16384, "cache_fill": "never"}
    run = make(([f"{corpus}/plain"], None), storage_options={"binidx": ours})
    samples = 150 * MICRO
    told = total_costs(source_costs(take_inventory(run), samples, nodes=1))
    requests, num_bytes = counted(run, proxy, samples)
    assert told.num_bytes == pytest.approx(num_bytes, rel=0.08)
    assert told.requests == pytest.approx(requests, rel=0.3)  # neighbours that are missing come together


def test_what_a_loader_fills_is_forecast_where_it_pays(corpus: str, tmp_path: Path) -> None:
    def forecast(samples: int, **settings: Any) -> Any:
        ours = {"cache_dir": str(tmp_path), **settings}
        run = make(([f"{corpus}/plain"], None), storage_options={"binidx": ours})
        link = Link(0.03, 273e6, 128)
        [cost] = source_costs(take_inventory(run), samples, nodes=2, link=link)
        return cost

    filled, size = forecast(8000), 2 * TOKENS
    assert filled.fill.share == pytest.approx(4000 * 2049 * 2 / size, rel=0.05)
    assert filled.reading.num_bytes == pytest.approx(2 * size, rel=0.05)
    assert filled.reading.requests == 2 * 5  # of 8 MiB, on two nodes
    assert filled.fill.seconds == pytest.approx(size / 273e6, rel=0.05)
    few = forecast(20)
    assert few.fill.node_bytes == 0
    assert few.fill.share < few.fill.paying_share < filled.fill.share
    assert forecast(20, cache_fill="all").fill.node_bytes == pytest.approx(size, rel=0.05)
    assert forecast(8000, cache_bytes=size // 2).fill.node_bytes == pytest.approx(size / 2, rel=0.05)
    assert forecast(8000, cache_fill="never").fill is None


def test_the_link_is_measured(corpus: str, proxy: Proxy, tmp_path: Path) -> None:
    options = {"binidx": {"index_dir": str(tmp_path)}}
    found = plan_run(make(([f"{corpus}/plain"], None), storage_options=options))
    assert found.link is not None
    assert 0.02 <= found.link.latency_seconds < 3


def test_what_is_local_asks_nothing(tmp_path: Path) -> None:
    prefix = write(tmp_path / "local", 100_000, 300, 2)
    found = plan_run(make(([prefix], None), size=40))
    assert (found.link, found.reading.requests, dict(found.dollars)) == (None, 0, {})


# Pure arithmetic


def test_pieces_are_those_of_a_drawn_stream() -> None:
    rng = np.random.default_rng(0)
    for mean in (20, 300, 5000):
        lengths = np.maximum(1, rng.lognormal(np.log(mean) - 0.5, 1.0, 400_000 // mean + 2000)).astype(np.int64)
        ends = np.cumsum(lengths)
        starts = np.arange(0, ends[-1] - 513, 512)
        pieces = np.searchsorted(ends, starts + 512, "right") - np.searchsorted(ends, starts, "right") + 1
        assert pieces_per_sample(512, lengths.mean()) == pytest.approx(pieces.mean(), rel=0.03)


@pytest.mark.parametrize("num_ranges", [1, 2, 10, 300])
@pytest.mark.parametrize("gap", [0, 4096, 200_000])
def test_ranges_at_random_coalesce_as_told(num_ranges: int, gap: int) -> None:
    from binidx.storage.ranges import coalesce

    rng, size, length = np.random.default_rng(1), 4_000_000, 500
    medium = Medium(size, size, gap)
    requests, num_bytes, rounds = 0, 0, max(300, 20_000 // num_ranges)
    for _ in range(rounds):
        found = coalesce(
            [(start, start + length) for start in rng.integers(0, size - length, num_ranges).tolist()],
            max_gap=gap,
            max_request=1 << 30,
        )
        requests += len(found)
        num_bytes += sum(stop - start for start, stop in found)
    told = vectored_read_cost(medium, num_ranges, length)
    assert told.requests == pytest.approx(requests / rounds, rel=0.05)
    assert told.num_bytes == pytest.approx(num_bytes / rounds, rel=0.05)


def test_a_cache_never_takes_more_than_there_is() -> None:
    medium = Medium(10_000_000, 10_000_000, 0)
    few, many = (cache_fill_cost(medium, count, 3000, 65536) for count in (10, 1_000_000))
    assert few.num_bytes == pytest.approx(10 * 65536 * (1 + 2999 / 65536), rel=0.05)
    assert many.num_bytes == pytest.approx(10_000_000)


def test_index_bytes_are_those_of_the_files() -> None:
    for documents, tokens, samples in ((100, 5000, 300), (7, 900, 0), (1000, 100_000, 12_345)):
        plan = plan_epochs(tokens, 64, samples, add_extra_token=True, drop_last_partial=True)
        arrays = [
            NpyLayout((documents * plan.num_epochs,), np.int32),
            NpyLayout((plan.num_samples + 1, 2), np.int32),
            NpyLayout((plan.num_samples,), np.uint32),
        ]
        assert gpt_index_bytes(documents, plan) == sum(each.size for each in arrays)
    assert blend_bytes(1000) == 10 * 1000 + 2 * 128


def test_memory_of_a_build_is_that_of_its_docstring() -> None:
    """Of 10^9 documents of 1,000 tokens in samples of 4,096: 4 GB. Of 10^8: 2 MiB a thread, the rest is in files."""
    plan = plan_epochs(10**12, 4096, None, add_extra_token=True, drop_last_partial=True)
    assert build_memory_bytes(10**9, plan) == pytest.approx(4e9, rel=0.01)
    plan = plan_epochs(10**11, 4096, None, add_extra_token=True, drop_last_partial=True)
    assert [build_memory_bytes(10**8, plan, threads) for threads in (1, 8)] == [2 << 20, 16 << 20]
    plan = plan_epochs(10**11, 256, None, add_extra_token=True, drop_last_partial=True)
    assert build_memory_bytes(10**8, plan) == (2 << 20) + 4 * plan.num_samples  # of its shuffle index


def test_requests_in_flight_over_latency() -> None:
    link = Link(latency_seconds=0.05, bytes_per_second=1e9, requests_in_flight=100)
    assert link.most_samples_per_second(4, 1000) == pytest.approx(100 / 0.05 / 4)
    assert link.most_samples_per_second(4, 1e8) == pytest.approx(10)
