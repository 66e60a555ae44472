"""Minutes of bad weather: a blend over three stores, read by several processes at once, every sample compared."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import fuzzing
from helpers.gpt_data import write_with_megatron
from helpers.proxied_store import Distant, distant_store
from helpers.reader_stress import content

from binidx.corpus.convert import StorageFormat, convert_dataset

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # gcsfs sends the objects we put; that is not what is tested here.
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]

SAMPLES = 6_000
BUDGET = 8 << 20
RANKS = [{"workers": 0, "context": None}, {"workers": 2, "context": "fork"}, {"workers": 2, "context": "spawn"}]
FAULTS = {
    "503": 0.01,
    "500": 0.005,
    "429": 0.005,
    "reset": 0.01,
    "close": 0.005,
    "reset-late": 0.005,
    "truncate": 0.01,
    "short": 0.005,
    "long": 0.002,
    "whole": 0.001,
    "slow": 0.005,
    "hang": 0.0005,
    "stall": 0.0005,
}
WRONG = {"faults": {**FAULTS, "wrong": 0.0005}}
"""Where sums tell. The second try is as likely to be wrong: one range in 4 million would be given up."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three datasets of a million tokens: plain, with checksums, compressed."""
    directory = tmp_path_factory.mktemp("local")
    rng = np.random.default_rng(2)
    ways = {"plain": StorageFormat(), "summed": StorageFormat(checksums=True), "zstd": StorageFormat(codec="zstd")}
    for name, way in ways.items():
        lengths = rng.integers(1, 2_000, 1_000).astype(np.int32)
        convert_dataset(write_with_megatron(directory / f"{name}-source", lengths, rng), f"{directory / name}", way=way)
    return [str(directory / name) for name in ways]


@contextlib.contextmanager
def far_away(local: list[str], request: pytest.FixtureRequest, directory: Path) -> Iterator[dict[str, Distant]]:
    """Each dataset in a store of its own; the environment leads there through the proxies. Prefix -> store."""
    stores = {"http": None, "gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
    weather: dict[str, Any] = {"delay_ms": 3, "spread": 0.5, "slow_ms": 800, "faults": FAULTS, "seed": 11}
    places = {"summed.bin": WRONG, "zstd.bin": WRONG}
    with contextlib.ExitStack() as stack:
        found = {}
        for (store, variable), prefix in zip(stores.items(), local, strict=True):
            distant = stack.enter_context(distant_store(store, request, directory, **weather))
            for path in sorted(Path(prefix).parent.glob(f"{Path(prefix).name}.*")):
                distant.put(path.name, path.read_bytes())
            if variable:
                stack.enter_context(distant.proxy.in_environment(variable))
            # The sums of an object are not summed themselves.
            distant.proxy.become(places={".xxh3": {"faults": FAULTS}, **places})
            found[f"{distant.base}/{Path(prefix).name}"] = distant
        yield found


@pytest.mark.parametrize("on_disk", [True, False], ids=["caches in memory and on disk", "in memory"])
def test_every_sample_of_every_rank_is_right_in_bad_weather(
    local: list[str], on_disk: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # The ranks share a cache in which half of the data fits: it evicts while it is read. Nothing stays in memory long.
    settings = {"cache_dir": str(tmp_path / "cache"), "cache_bytes": 3_000_000} if on_disk else {}
    with far_away(local, request, tmp_path) as far:
        told = {"remote": [*far], "local": local, "samples": SAMPLES, "settings": settings, "memory": 500_000}
        ranks = [start({**told, "rank": rank, "ranks": len(RANKS), **how}) for rank, how in enumerate(RANKS)]
        ended = [(*each.communicate(timeout=1000), each.returncode) for each in ranks]
        counts = {prefix: distant.proxy.counts() for prefix, distant in far.items()}
    assert [code for _, _, code in ended] == [0] * len(RANKS), "\n".join(errors for _, errors, _ in ended)
    told_back = [json.loads(out.splitlines()[-1]) for out, _, _ in ended]
    assert sum(each["compared"] for each in told_back) == SAMPLES
    met = sum((each.faults for each in counts.values()), Counter[str]())
    assert met.keys() >= ({*FAULTS, "wrong"} if not on_disk else {"503", "reset", "truncate", "short"}), met
    for prefix, each in counts.items():
        assert each.most_at_once <= 64 * 5, prefix  # three ranks and four workers, two of them idle parents


def start(told: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "helpers.training_soak", json.dumps(told)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("transport", ["s3", "s3 fast"])
def test_a_reader_that_never_rests_holds_no_more_at_the_end_than_in_the_middle(
    transport: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    weather = {**FAULTS, "reset": 0.02, "truncate": 0.02, "stall": 0.002}
    with distant_store(transport, request, tmp_path, delay_ms=1, faults=weather) as distant:
        told = {"seconds": 40, "budget": BUDGET, "options": distant.options(concurrency=16)}
        told["uri"] = distant.put("data", content(32 << 20))
        ended = subprocess.run(
            [sys.executable, "-m", "helpers.reader_stress", json.dumps(told)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr
    holds = [json.loads(line) for line in ended.stdout.splitlines()]
    first, middle, last = (holds[len(holds) * part // 3 : len(holds) * (part + 1) // 3] for part in range(3))
    assert middle[-1]["reads"] > first[-1]["reads"] > 100
    most = {name: [max(each[name] for each in part) for part in (middle, last)] for name in holds[0]}
    assert max(most["most_kept"]) <= BUDGET
    assert most["rss"][1] < most["rss"][0] + 6_000_000, most
    # 16 connections, those that were lost and are being closed, and what a process has anyhow.
    assert max(most["descriptors"]) < 16 * 2 + 40, most
    assert most["threads"][1] <= most["threads"][0], most


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", fuzzing.KINDS)
def test_a_damaged_file_is_read_or_refused_in_one_line(kind: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "helpers.fuzzing", kind, "100000", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert sum(json.loads(ended.stdout.splitlines()[-1]).values()) == 100_000
