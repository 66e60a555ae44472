"""The line for people says what was counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest

import binidx
from binidx.errors import ConfigError
from binidx.storage import stats, usage_report
from binidx.storage.cache.memory import ChunkCache
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject


def used(**counts: float) -> dict[str, float]:
    """Counters by name, a blank for each underscore that is doubled."""
    table = dict.fromkeys(stats.NAMES, 0.0)
    for name, count in counts.items():
        assert name.replace("__", " ") in table
        table[name.replace("__", " ")] = count
    return table


def test_a_line_names_all_that_happened() -> None:
    line = usage_report.report_line(used(
        samples=200, tokens=819_200, seconds=4.1, wait_seconds=0.0205,
        remote__requests=1412, remote__bytes_asked=1.8e6, remote__bytes_moved=1.96e6, remote__retries=2,
        remote__hedges=1, layers__added=0.16e6, memory__hits=12, memory__misses=88, dollars=1412 * 0.0004 / 1_000,
    ))  # fmt: skip
    assert line == (
        "819,200 tokens in 4.10 s, waited 0.02 s (0.5%); 1,412 requests (2 retries, 1 hedge) moved 1.96 MB for "
        "1.64 MB wanted (1.20x); chunk cache 12% hits; requests $0.00056 at list price, $689.45 for 1e+12 tokens"
    )


def test_a_loader_in_the_place_of_a_number_is_an_error_that_names_its_metrics() -> None:
    loader: Any = ["a loader"]
    with pytest.raises(ConfigError, match=r"run_tokens: found \['a loader'\], needs a number .*loader.metrics\(\)"):
        usage_report.report(loader)


def test_a_line_says_how_long_a_store_throttled_and_at_which_rates() -> None:
    throttled = {"throttled_seconds": 10.0, "throttled_allowed": 5200.0, "throttled_served": 4980.0}
    assert usage_report.report_line(used(**throttled)) == "throttled 10.0 s at 498 requests/s of 520 sent"
    line = usage_report.report_line(used(**throttled, throttled_alone=10.0))
    assert line == "throttled 10.0 s at 498 requests/s of 520 sent (each process by itself)"
    rates = usage_report.rates(usage_report.sum_usage(used(**throttled)))
    assert (rates["goodput"], rates["request_limit"]) == (498.0, 520.0)


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ({}, "nothing was read"),
        ({"local__requests": 3, "local__bytes_asked": 999}, "999 bytes from local files"),
        (
            {"samples": 1, "tokens": 512, "seconds": 2.0, "dollars": 2.4e-6},
            "512 tokens in 2.00 s, waited 0.00 s (0.0%); requests $2.4e-06 at list price",
        ),
        ({"samples": 8, "seconds": 2.0}, "8 samples in 2.00 s, waited 0.00 s (0.0%)"),
        (
            {"remote__requests": 1, "remote__bytes_asked": 5, "remote__bytes_moved": 6},
            "1 request moved 6 bytes for 5 bytes wanted (1.20x)",
        ),
    ],
)
def test_a_line_leaves_out_what_did_not_happen(counts: dict[str, float], line: str) -> None:
    assert usage_report.report_line(used(**counts)) == line


@pytest.mark.parametrize(
    ("uri", "dollars"), [("s3://b/k", 0.4), ("gs://b/k", 0.4), ("http://h/k", 0), ("/a", 0), ("memory://a", 0)]
)
def test_requests_cost_what_the_stores_ask(uri: str, dollars: float) -> None:
    before = stats.usage()
    stats.ObjectStats(Location(uri).store.prices()).add(requests=1_000_000)
    assert stats.usage_since(before)["dollars"] == pytest.approx(dollars)


def test_the_cost_of_a_run_is_that_of_its_tokens() -> None:
    twice = usage_report.report_line(used(dollars=0.4, tokens=1e9, samples=1, seconds=1), run_tokens=2e9)
    assert twice.endswith("requests $0.4 at list price, $0.80 for 2e+09 tokens")


def test_all_stores_and_caches_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    with fsspec.open("memory://report/a", "wb") as out:
        out.write(bytes(200_000))
    before = stats.usage()
    open_object(tmp_path / "a").read([(0, 100)])
    cache = ChunkCache(RemoteObject(Location.of("memory://report/a")))
    cache.read([(0, 10)])
    cache.read([(5, 20)])
    found = stats.usage_since(before)
    counted = [name for name in stats.NAMES if not name.endswith("seconds")]
    assert {name: count for name, count in found.items() if count and name in counted} == {
        "local requests": 1, "local bytes_asked": 100, "local bytes_moved": 100,
        "remote requests": 1, "remote bytes_asked": 65536, "remote bytes_moved": 65536,
        "memory hits": 1, "memory misses": 1, "layers added": 65536 - 25, "caches added": 65536 - 25,
    }  # fmt: skip
    assert "moved 65.5 kB for 25 bytes wanted and 65.5 kB more cached (1.00x)" in usage_report.report_line(found)


def test_what_others_tell_is_counted(caplog: Any) -> None:
    before = stats.usage()
    stats.add_usage({"remote requests": 7, "samples": 1, "seconds": 0.5})
    found = stats.usage_since(before)
    assert found["remote requests"] == 7
    with caplog.at_level(logging.INFO, "binidx"):
        usage_report.log_report(found)
    assert "7 requests" in caplog.text
    assert "requests" in binidx.report()
