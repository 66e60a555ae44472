"""From a config to the first batch; all data is in a bucket 30 ms away, nothing on this machine.

A blend of 1,000 prefixes; their indices, the blend's and the bundle of their `.idx` are cached in the same bucket by a
start before. Read by a process of its own with an empty index_dir; against Megatron Core in one with data and caches on
this disk, in the page cache. Both read equal tokens. Time is from the end of the imports to the first batch of 8
samples; medians of starts in turns. Then the bytes and the CPU of 8 such processes that start together, as those of a
node do, against those of one. And the requests of another rank, before and after its data is pinned. At the end, whole
processes over local files.

The first start of all is measured too: no index, no bundle, no cache anywhere, on either side. It builds the indices,
writes the bundle and publishes them.

The prefixes are as many documents as in `prefixes`, so their own indices are built, in 60 us, and only the blends' are
cached. BINIDX_BENCH_DOCUMENTS=33000 has all of them cached: 0.7 GB of `.idx` and 0.3 GB of arrays come through a proxy
that shares the cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from servers.latency_proxy import Proxy

import binidx
from binidx.dataset.pinned_run import PinnedFile
from tests.bench.race import DELAY_MS, READERS, far_away, store
from tests.bench.remote import check_reached
from tests.bench.table import MEGATRON, Conditions, Row, seconds

CONDITIONS = Conditions(cores=0, size="1,000 prefixes of 200 documents", cached="see the work")
NUM_PREFIXES = int(os.environ.get("BINIDX_BENCH_PREFIXES", 1000))
NUM_DOCUMENTS = int(os.environ.get("BINIDX_BENCH_DOCUMENTS", 200))
TOKENS_EACH = 500 if NUM_DOCUMENTS < 1000 else 8
SEQUENCE_LENGTH = 1024
ROUNDS = 3
PROCESSES = 8
INDEX_FILES = (".idx", ".npy", ".bundle")


def rows(directory: Path) -> list[Row]:
    """Seconds, requests, and bytes a node."""
    local = directory / "local"
    local.mkdir()
    prefixes = [write_prefix(local / f"p{number:04}", number) for number in range(NUM_PREFIXES)]
    weights = np.random.default_rng(0).uniform(0.5, 1.5, NUM_PREFIXES).tolist()
    theirs = {"side": "megatron", "prefixes": prefixes, "weights": weights, "cache": str(directory / "indices")}
    with store(directory) as (server, bucket):
        upload(prefixes, f"{bucket}/corpus")
        remote = [f"{bucket}/corpus/{Path(prefix).name}" for prefix in prefixes]
        ours = {"side": "binidx", "prefixes": remote, "weights": weights, "cache": f"{bucket}/indices"}
        with far_away(server) as proxy:
            firsts = [first_start(proxy, directory, bucket, ours, theirs, number) for number in range(ROUNDS)]
        start({**theirs, "write": True})
        start(ours)
        times: dict[str, list[dict[str, float]]] = {"binidx": [], "megatron": []}
        with far_away(server) as proxy:
            for _ in range(ROUNDS):
                for side in (ours, theirs):
                    before = proxy.counts()
                    found = start(side)
                    moved = proxy.counts() - before
                    if side is ours:
                        check_reached("a start", moved.requests, found["seconds"], DELAY_MS)
                    times[side["side"]].append({**found, "requests": moved.requests, "bytes": moved.bytes})
            node = [start_node(proxy, ours, processes) for processes in (1, PROCESSES)]
            moved = [requests_of_rank(proxy, ours)]
        pin(remote, weights, ours["cache"])
        with far_away(server) as proxy:
            moved.append(requests_of_rank(proxy, ours))
    assert len({found["tokens"] for each in times.values() for found in each}) == 1
    return [*report_first(firsts), *report(times, node), report_pinned(*moved), *time_processes(prefixes[0])]


def first_start(
    proxy: Proxy, directory: Path, bucket: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], number: int
) -> dict[str, float]:
    """Start both sides with caches in places where nothing is yet."""
    before = proxy.counts()
    found = start({**ours, "cache": f"{bucket}/first-{number}"})
    moved = proxy.counts() - before
    check_reached("the first start of all", moved.requests, found["seconds"], DELAY_MS)
    other = start({**theirs, "cache": str(directory / f"first-{number}"), "write": True})
    assert found["tokens"] == other["tokens"]
    times = {"ours": found["seconds"], "theirs": other["seconds"], "cpu": found["cpu"], "their_cpu": other["cpu"]}
    return {**times, "requests": moved.requests, "bytes": moved.bytes}


def report_first(found: list[dict[str, float]]) -> list[Row]:
    columns = zip(*map(dict.values, found), strict=True)
    ours, theirs, cpu, their_cpu, requests, moved = map(statistics.median, columns)
    work = f"{NUM_PREFIXES:,} prefixes in S3, {DELAY_MS} ms away, first start of all to first batch"
    note = f"{requests:,.0f} requests, {moved / 1e6:,.1f} MB; CPU {cpu:.2f} s, its {their_cpu:.2f}"
    conditions = replace(CONDITIONS, cached="nothing; the peer's data in the page cache")
    return [Row(work, ours, theirs, "s", False, note, f"{MEGATRON}, all on a local disk", conditions=conditions)]


def report(times: Mapping[str, list[dict[str, float]]], node: list[dict[str, float]]) -> list[Row]:
    def median(side: str, name: str) -> float:
        return statistics.median(found[name] for found in times[side])

    work = f"{NUM_PREFIXES:,} prefixes in S3, {DELAY_MS} ms away, start of a new machine to first batch"
    note = (
        f"goal 1x; {median('binidx', 'requests'):,.0f} requests, "
        f"{median('binidx', 'bytes') / 1e6:,.1f} MB; CPU {median('binidx', 'cpu'):.2f} s, "
        f"its {median('megatron', 'cpu'):.2f}"
    )
    against = f"{MEGATRON}, all on a local disk"
    conditions = replace(
        CONDITIONS, cached="indices and the bundle of .idx in the bucket; all of the peer's on its disk"
    )
    both = median("binidx", "seconds"), median("megatron", "seconds")
    return [
        Row(work, *both, "s", False, note, against, conditions=conditions),
        Row(
            f"bytes of index files for a start of {PROCESSES} processes of a node",
            node[1]["index"],
            node[0]["index"],
            "B",
            False,
            f"goal 1x; lists and manifests besides: {node[1]['rest'] / 1e6:.2f} MB, of one {node[0]['rest'] / 1e6:.2f}",
            "of one",
        ),
        Row(
            f"CPU of each of {PROCESSES} processes of a new node that start together, without imports",
            node[1]["cpu"] / PROCESSES,
            node[0]["cpu"],
            "s",
            False,
            f"goal 1.1x; the last first batch {node[1]['seconds']:.2f} s after the first import, of one "
            f"{node[0]['seconds']:.2f}; {node[1]['requests']} requests, of one {node[0]['requests']}",
            "of one",
        ),
    ]


def pin(prefixes: list[str], weights: list[float], cache: str) -> None:
    """Write the pinned file, as `binidx prepare index` does."""
    config = binidx.GPTDatasetConfig(
        random_seed=1234, sequence_length=SEQUENCE_LENGTH, path_to_cache=cache, blend=(prefixes, weights),
        split="90,7,3", tokenizer=binidx.SpecialTokens(eod=0), mid_level_dataset_surplus=0.5,
        create_attention_mask=False, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    builder = binidx.BlendedMegatronDatasetBuilder(
        binidx.GPTDataset, [100_000, 2_000, 1_000], lambda: True, config, pinned=False
    )
    assert PinnedFile.pin(config, PinnedFile.list_indexed(builder.build()))[0]


def requests_of_rank(proxy: Proxy, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Requests of the start of rank 1 on a new node besides tokens, the LISTs of these, and bytes of the LISTs."""
    proxy.reset()
    with tempfile.TemporaryDirectory() as scratch:
        wait(begin(given, scratch, RANK="1", WORLD_SIZE="2"))
    log = [each for each in proxy.log() if not each.path.endswith(".bin")]
    lists = [each for each in log if "." not in each.path]
    return len(log), len(lists), sum(each.bytes for each in lists)


def report_pinned(unpinned: tuple[int, int, int], pinned: tuple[int, int, int]) -> Row:
    (theirs, lists, moved), (ours, own_lists, own_moved) = unpinned, pinned
    return Row(
        f"{NUM_PREFIXES:,} prefixes in S3, pinned: requests of the start of a rank on a new machine, without tokens",
        ours,
        theirs,
        "requests",
        False,
        f"{own_lists} LISTs, {own_moved / 1e6:.2f} MB; unpinned {lists}, {moved / 1e6:.2f} MB",
        "unpinned",
    )


def start(given: Mapping[str, Any]) -> dict[str, float]:
    """One start in a process of its own, in an empty directory for index files."""
    with tempfile.TemporaryDirectory() as scratch:
        return wait(begin(given, scratch))


def start_node(proxy: Proxy, given: Mapping[str, Any], processes: int) -> dict[str, float]:
    """Start so many processes together: bytes of index files, and of all else but tokens; requests, CPU, seconds."""
    proxy.reset()
    with tempfile.TemporaryDirectory() as scratch:
        found = [wait(each) for each in [begin(given, scratch) for _ in range(processes)]]
    log = [each for each in proxy.log() if not each.path.endswith(".bin")]
    last, first = max(each["first"] for each in found), min(each["imported"] for each in found)
    check_reached(f"a start of {processes} processes", len(log), last - first, DELAY_MS)
    index = sum(each.bytes for each in log if each.path.endswith(INDEX_FILES))
    rest, cpu = sum(each.bytes for each in log) - index, sum(each["cpu"] for each in found)
    return {"index": index, "rest": rest, "requests": len(log), "cpu": cpu, "seconds": last - first}


def time_processes(prefix: str) -> list[Row]:
    """Seconds of whole processes over local files, in turns: the help, and the first batch beyond torch's import."""
    batch = f"import torch, binidx; next(iter(binidx.load_dataset({prefix!r}, {SEQUENCE_LENGTH}).loader({PROCESSES})))"
    main = "import sys; from binidx.tools import main; sys.exit(main())"
    programs = {"torch": ["import torch"], "batch": [batch], "help": [main, "--help"]}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run(program: list[str]) -> None:
        subprocess.run([sys.executable, "-c", *program], env=environment, check=True, stdout=subprocess.DEVNULL)

    times = [{name: seconds(lambda: run(program)) for name, program in programs.items()} for _ in range(2 * ROUNDS + 1)]  # noqa: B023
    torch, first, help_ = (statistics.median(found[name] for found in times) for name in programs)
    local = replace(CONDITIONS, cached="files and bytecode in the page cache")
    return [
        Row("process start to the first batch of local files, beyond the import of torch", first - torch, 0.5, "s",
            False, f"torch alone {torch:.2f} s", "goal", conditions=local),
        Row("binidx --help, from the start of the process", help_, 0.15, "s", False, "", "goal", conditions=local),
    ]  # fmt: skip


def begin(given: Mapping[str, Any], index_dir: str, **variables: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, str(READERS / "start.py")], subprocess.PIPE
    environment = {**os.environ, "BINIDX_INDEX_DIR": index_dir, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling takes 0.2 s of each process
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin
    with process.stdin as given_to:  # 4,096 prefixes are too much for an argument
        json.dump({"sequence_length": SEQUENCE_LENGTH, **given}, given_to)
    process.stdin = None  # `communicate` would flush it
    return process


def wait(process: subprocess.Popen[str]) -> dict[str, float]:
    out, error = process.communicate()
    if process.returncode:
        raise RuntimeError(f"start: ended with {process.returncode}\n{error[-3000:]}")
    found = dict(json.loads(out.splitlines()[-1]))
    return {**found, "seconds": found["first"] - found["imported"]}


def write_prefix(prefix: Path, seed: int) -> str:
    """A pair of about NUM_DOCUMENTS documents."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(NUM_DOCUMENTS * 3 // 4, NUM_DOCUMENTS * 5 // 4)) if NUM_DOCUMENTS < 1000 else NUM_DOCUMENTS
    lengths = np.maximum(1, rng.lognormal(np.log(TOKENS_EACH) - 0.5, 1.0, count)).astype(np.int32)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        tokens, ends = rng.integers(2, 999, int(lengths.sum()), np.uint16), np.cumsum(lengths)
        for length, end in zip(lengths.tolist(), ends.tolist(), strict=True):
            builder.add_document(tokens[end - length : end], [length])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def upload(prefixes: list[str], uri: str) -> None:
    fs = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    files = [f"{prefix}.{end}" for prefix in prefixes for end in ("bin", "idx")]
    fs.put(files, [f"{uri}/{Path(file).name}" for file in files])
