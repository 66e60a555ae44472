"""The forecast of a start against the requests that a proxy logs, and the arithmetic of a fleet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER
from servers.latency_proxy import Proxy, latency_proxy

import binidx
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.run.plan.fleet import PlaceRate, StartRequests
from binidx.run.plan.run_plan import RunPlan, plan_run
from binidx.storage.stores.gcs import GcsStore
from binidx.storage.stores.s3 import S3Store
from binidx.tools import main

START = "import sys, binidx; datasets = binidx.Run.load(sys.argv[1]).build()"
READ = """
for each in datasets:
    print([sample["tokens"].tolist() for sample in each.__getitems__(range(8))])
"""
KINDS = {
    "one": (1, StorageFormat()),
    "three": (3, StorageFormat()),
    "compressed": (2, StorageFormat(codec="zstd")),
    "checked": (2, StorageFormat(checksums=True)),
    "virtual": (3, StorageFormat()),
    "listed": (10, StorageFormat()),
    "listed, checked": (9, StorageFormat(checksums=True)),
    "virtual, listed": (10, StorageFormat()),
}


@pytest.fixture(scope="module")
def proxy(s3: Bucket) -> Iterator[Proxy]:
    with latency_proxy(s3.server.endpoint, delay_ms=1) as found, found.in_environment():
        yield found


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A local dataset with more documents than a small index has."""
    prefix = tmp_path_factory.mktemp("stored") / "p"
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for length in np.random.default_rng(0).integers(1, 9, 36_500).tolist():
            builder.add_document(np.ones(length, np.uint16), [length])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def save(path: Path, prefixes: Sequence[str], cache: str | None, **changes: Any) -> binidx.Run:
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=4, split="90,5,5", tokenizer=TOKENIZER, path_to_cache=cache,
        blend=([*prefixes], None if len(prefixes) == 1 else [1.0] * len(prefixes)),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    run = binidx.Run(config, [40_000 * len(prefixes), 100, 100], 4, **{"data_parallel_size": 16, **changes})
    run.save(str(path))
    return run


def start(proxy: Proxy, run: Path, index_dir: str, program: str = START, **variables: str) -> tuple[StartRequests, int]:
    """Requests of a process that starts, and the bytes of its GETs."""
    proxy.reset()
    environment = {**os.environ, "BINIDX_INDEX_DIR": index_dir, "BINIDX_HEDGE": "0", **variables}
    subprocess.run([sys.executable, "-c", program, str(run)], env=environment, check=True)
    kinds = Counter("LIST" if each.path.count("/") == 1 else each.method for each in proxy.log())
    assert {*kinds} <= {"HEAD", "LIST", "GET"}
    num_bytes = sum(each.bytes for each in proxy.log() if each.method == "GET")
    return StartRequests(kinds["HEAD"], kinds["LIST"], kinds["GET"]), num_bytes


IN_SUITE = ("one", "checked", "virtual, listed")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in IN_SUITE]


@pytest.mark.parametrize("kind", [*IN_SUITE, *SLOW])
def test_a_start_sends_the_requests_of_the_plan(
    kind: str, s3: Bucket, proxy: Proxy, stored: str, tmp_path: Path
) -> None:
    count, way = KINDS[kind]
    base, prefixes = s3.fresh(), list[str]()
    for number in range(count):
        convert_dataset(stored, f"{base}/p{number}", way=way, verify="size")
        prefixes.append(f"{base}/p{number}")
    if "virtual" in kind:
        merge_virtually(prefixes, f"{base}/all")
        prefixes = [f"{base}/all"]
    path = tmp_path / "run.json"
    run = save(path, prefixes, f"{base}/cache")
    run.build()
    [planned] = plan_run(run, nodes=1).starts
    first, node_bytes = start(proxy, path, f"{tmp_path}/node")
    second, _ = start(proxy, path, f"{tmp_path}/node")
    assert plan_run(replace(run, data_parallel_size=1)).starts[0].requests == first
    assert planned.requests == first + second.times(15)
    assert planned.num_bytes == pytest.approx(node_bytes, rel=0.02)  # manifests and lists come on top


@pytest.mark.parametrize("kind", [pytest.param("three", marks=pytest.mark.slow), "listed, checked"])
def test_a_rank_of_a_pinned_run_sends_the_requests_of_the_plan(
    kind: str, s3: Bucket, proxy: Proxy, stored: str, tmp_path: Path
) -> None:
    count, way = KINDS[kind]
    base, path = s3.fresh(), tmp_path / "run.json"
    for number in range(count):
        convert_dataset(stored, f"{base}/p{number}", way=way, verify="size")
    run = save(path, [f"{base}/p{number}" for number in range(count)], f"{base}/cache")
    assert main(["prepare", "index", str(path)]) == 0
    second_rank = {"RANK": "1", "WORLD_SIZE": "16"}  # the first one compares the pairs with the store
    first, node_bytes = start(proxy, path, f"{tmp_path}/node", **second_rank)
    second, _ = start(proxy, path, f"{tmp_path}/node", **second_rank)
    assert second.lists == 0
    [planned] = plan_run(run, nodes=1).starts
    assert planned.requests == first + second.times(15)
    assert planned.num_bytes == pytest.approx(node_bytes, rel=0.02)


def test_a_saved_run_starts_from_the_read_plans_that_were_prepared(
    s3: Bucket, proxy: Proxy, stored: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    base, path, program = s3.fresh(), tmp_path / "run.json", START + READ
    prefixes = [f"{base}/p{number}" for number in range(2)]
    for prefix in prefixes:
        convert_dataset(stored, prefix, verify="size")
    run = save(path, prefixes, f"{base}/cache")
    run.build()
    by_indices = start(proxy, path, f"{tmp_path}/first", program)[1]
    needed = capfd.readouterr().out
    assert main(["prepare", "read-plan", str(path)]) == 0
    assert main(["prepare", "index", str(path)]) == 0
    capfd.readouterr()
    by_plans = start(proxy, path, f"{tmp_path}/second", program)[1]
    assert not [each.path for each in proxy.log() if each.path.endswith((".idx", ".npy")) and each.method == "GET"]
    assert capfd.readouterr().out == needed
    assert by_indices - by_plans > run_bytes(run)
    second_rank = {"RANK": "1", "WORLD_SIZE": "16"}
    first, second = (start(proxy, path, f"{tmp_path}/node", **second_rank) for _ in range(2))
    [planned] = plan_run(run, nodes=1).starts
    assert planned.requests == first[0] + second[0].times(15)
    assert first[1] < 10_000


def run_bytes(run: binidx.Run) -> int:
    """Bytes of the index files of a run."""
    return sum(row["num_bytes"] for row in plan_run(run).index_rows())


def test_a_start_from_gcs_sends_as_many_requests(gs: str, stored: str, tmp_path: Path) -> None:
    base, prefixes, path = f"{gs}/fleet", list[str](), tmp_path / "run.json"
    for number in range(2):
        prefixes.append(f"{base}/p{number}")
        convert_dataset(stored, prefixes[-1], verify="size")
    run = save(path, prefixes, f"{base}/cache", data_parallel_size=2)
    run.build()
    emulator = "STORAGE_EMULATOR_HOST"
    with latency_proxy(os.environ[emulator], delay_ms=1) as proxy, proxy.in_environment(emulator):
        requests = [start(proxy, path, f"{tmp_path}/node")[0].total for _ in range(2)]
    assert plan_run(run, nodes=1).starts[0].requests.total == sum(requests)


def test_many_folders_and_missing_pins_are_said(s3: Bucket, stored: str, tmp_path: Path) -> None:
    base, path = s3.fresh(), tmp_path / "run.json"
    prefixes = [f"{base}/{number}/{'x' * (number % 2)}/en" for number in range(8)]
    for prefix in prefixes:
        convert_dataset(stored, prefix, verify="size")
    run = save(path, prefixes, f"{base}/cache")
    text = advice(run, nodes=2)
    assert "binidx prepare index: pins the data; without it each rank looks up 8 prefixes in 8 folders" in text
    assert main(["prepare", "index", str(path)]) == 0
    assert "pins the data" not in advice(run, nodes=2)


def test_without_a_directory_of_index_files_each_process_is_the_first(
    s3: Bucket, proxy: Proxy, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, path = s3.fresh(), tmp_path / "run.json"
    convert_dataset(stored, f"{base}/p", verify="size")
    run = save(path, [f"{base}/p"], None)
    run.build()
    first, _ = start(proxy, path, "off")
    monkeypatch.setenv("BINIDX_INDEX_DIR", "off")
    plan = plan_run(run, nodes=2)
    [planned] = plan.starts
    assert planned.requests == first.times(16)
    assert planned.num_bytes == 16 * plan.index_dir_bytes


def test_a_start_of_local_files_sends_nothing(stored: str, tmp_path: Path) -> None:
    run = save(tmp_path / "run.json", [stored], None)
    plan = plan_run(run, nodes=4)
    assert (plan.starts, plan.index_dir_bytes, plan.exceeds_a_limit) == ([], 0, False)


def test_sources_of_two_tokenizers_are_a_warning(stored: str, tmp_path: Path) -> None:
    sources = [f"{tmp_path}/{name}" for name in "abc"]
    for source, digest in zip(sources, ("1" * 64, None, "2" * 64), strict=True):
        for suffix in (".bin", ".idx"):
            shutil.copy(stored + suffix, source + suffix)
        if digest:
            job = {"tokenizer": {"uri": f"tokenizer-{digest[0]}.json", "digest": digest}}
            Path(f"{source}.manifest.json").write_text(json.dumps({"binidx_manifest": 1, "job": job}))
    warnings = plan_run(save(tmp_path / "run.json", sources, None)).cautions
    (told,) = [line for line in warnings if "tokenizer" in line]
    assert told.startswith(f"{sources[2]}: made by the tokenizer tokenizer-2.json (222222222222), {sources[0]} by")
    alike = plan_run(save(tmp_path / "run.json", sources[:2], None)).cautions
    assert not any("tokenizer" in line for line in alike)


# Arithmetic


def test_a_bucket_of_gcs_grants_more_every_20_minutes() -> None:
    prices = GcsStore.list_prices
    rates = [PlaceRate("gs://b", rate, prices) for rate in (4_000, 5_000, 10_000, 40_000)]
    assert [rate.is_exceeded for rate in rates] == [False, False, True, True]
    assert [rate.ramp_seconds for rate in rates] == [0.0, 0.0, 1_200.0, 3_600.0]
    assert PlaceRate("s3://b", 11_000, S3Store.list_prices).ramp_seconds is None


def advice(run: binidx.Run, **options: Any) -> str:
    return "\n".join(plan_run(run, **options).advice)


def test_advice_has_the_figure_that_is_its_reason(s3: Bucket, stored: str, tmp_path: Path) -> None:
    base = s3.fresh()
    prefixes = [f"{base}/p{number}" for number in range(2)]
    for prefix in prefixes:
        convert_dataset(stored, prefix, verify="size")
    run = save(tmp_path / "run.json", prefixes, f"{base}/cache")
    assert advice(run) == ""
    assert "binidx prepare index: 5 indices are not built, and 16 ranks would wait 0.0 s" in advice(run, nodes=2)
    run.build()
    assert advice(run, nodes=2) == ""
    plan: RunPlan = plan_run(replace(run, data_parallel_size=8_000), nodes=1_000)
    text = "\n".join(plan.advice)
    [begun] = plan.starts
    requests = f"{begun.requests.total:,} requests to {s3.uri}, {begun.seconds_at_limit:,.0f} s at the 5,500 a second"
    assert begun.seconds_at_limit > 10
    assert begun.requests.total / 5_500 > begun.seconds_at_limit  # data and caches lie in two folders
    assert "merge" not in text  # which would put all requests behind one object
    assert (
        f"binidx prepare read-plan: a start with it reads no .idx and no index; without it all ranks send {requests}"
        in text
    )
    assert "binidx prepare bake" not in text
    assert "cache_dir on a file system that all nodes share: they fetch" in text
