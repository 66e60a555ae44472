"""Random-order samples from a real S3 server, 30 ms to the first byte of every answer, against Megatron's S3 reader.

Both read the same samples in the same order, cold, no cache kept: Megatron's by torch's DataLoader, ours by
`build_pretraining_data_loader` with its defaults, one process. Megatron's reader requests a block around each miss, one
at a time, so its rate depends on two settings, and the bench searches both:

    default    one process, blocks of 256 MiB: a sample costs a block for each of its places that the last block does
               not hold. Four blocks are all of this corpus; a larger one would be slower
    workers    DataLoader workers 0, 8, 16 and 32, each with its best block. Each worker is a process and holds a block
    best       the fastest of these on this machine

A rate begins after the first batch, with workers after the first batch of each worker. The limit of ours is requests in
flight / 30 ms, over 5 requests a sample where documents are shuffled, 1 where a sample is one range; before that the
machine's: server, proxy and reader share its cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from servers.latency_proxy import Proxy

from tests.bench.corpus import SEQUENCE_LENGTH
from tests.bench.race import BATCH, DELAY_MS, Entrant, Lap, far_away, medians, publish_corpus, run, store
from tests.bench.table import MEGATRON, Conditions, Row

DTYPE = "uint16"
CONDITIONS = Conditions(
    cores=0, size="1 GiB of uint16 tokens in S3, 1,000 samples of 4,096", cached="nothing; opening is not timed"
)
DEFAULT_BLOCK = 256 << 20
BLOCKS = tuple(1 << power for power in range(12, 21, 2))
WORKERS = (8, 16, 32)
# Megatron's reader without workers keeps one pace all the time; at 256 MiB it is asked block by block.
TRIED, FEW, LEAST = 2 * BATCH, 8 * BATCH, 4
TRIED_BATCHES, BATCHES = 3, 4
"""Batches of each worker: to find the best block, and to measure it."""
ROUNDS = 2
DATA = {"documents shuffled": False, "contiguous": True}
CPU_GOALS = {"documents shuffled": "goal 350 µs", "contiguous": "goal 60 µs"}


def rows(directory: Path) -> list[Row]:
    """Samples a second, bytes and requests; documents shuffled and contiguous."""
    return [row for data in DATA for row in rows_of(directory, data)]


def quick_rows(directory: Path) -> list[Row]:
    """Documents shuffled, against one process at a block that is near the best."""
    return rows_of(directory, "documents shuffled", [256 << 10], workers=(), default=False)


def rows_of(
    directory: Path, data: str, blocks: Sequence[int] = BLOCKS, workers: Sequence[int] = WORKERS, default: bool = True
) -> list[Row]:
    folder = directory / data.replace(" ", "-")
    folder.mkdir()
    with store(folder) as (server, bucket):
        _, uri = publish_corpus(folder, bucket, DTYPE, long_documents=DATA[data])
        with far_away(server) as proxy:
            entrants = find_best_blocks(proxy, uri, blocks, workers)
            peers = [megatron("default", uri, DEFAULT_BLOCK, 0, LEAST, batch=1)] if default else []
            ours = Entrant("ours", "read_binidx.py", uri)
            laps = medians([ours, *peers, *entrants], proxy, DTYPE, ROUNDS)
    if workers:
        best = max(entrants, key=lambda entrant: laps[entrant.name].per_second)
        laps["best"] = laps[best.name]
        peers.append(dataclasses.replace(best, name="best"))
    return [row for peer in [*peers, *entrants] for row in compare(data, laps["ours"], laps[peer.name], peer)]


def find_best_blocks(proxy: Proxy, uri: str, blocks: Sequence[int], workers: Sequence[int]) -> list[Entrant]:
    """Return Megatron's reader for each count of workers, with the block that was fastest there."""
    best = fastest(proxy, [megatron(workers_name(0), uri, block, 0, TRIED) for block in blocks])
    block = int(best.options["block_bytes"])
    found = [dataclasses.replace(best, num_samples=FEW)]
    for count in workers:
        tried = [
            megatron(workers_name(count), uri, near, count, TRIED_BATCHES * BATCH * count)
            for near in (block // 4, block, 4 * block)
        ]
        found.append(dataclasses.replace(fastest(proxy, tried), num_samples=BATCHES * BATCH * count))
    return found


def fastest(proxy: Proxy, entrants: Sequence[Entrant]) -> Entrant:
    if len(entrants) == 1:
        return entrants[0]
    return max(entrants, key=lambda entrant: run(entrant, proxy, DTYPE).per_second)


def workers_name(count: int) -> str:
    return f"{count} workers" if count else "no workers"


def megatron(name: str, uri: str, block_bytes: int, num_workers: int, num_samples: int, batch: int = BATCH) -> Entrant:
    options = {"block_bytes": block_bytes, "num_workers": num_workers, "batch": batch}
    return Entrant(name, "read_megatron.py", uri, options, num_samples=num_samples)


def size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def compare(data: str, ours: Lap, theirs: Lap, peer: Entrant) -> list[Row]:
    used = SEQUENCE_LENGTH * 2
    workers, block = int(peer.options["num_workers"]), int(peer.options["block_bytes"])
    requests = (
        f"{ours.requests_per_sample:.2f} requests a sample, its {theirs.requests_per_sample:.2f}; opening included"
    )
    options = f"{workers_name(workers)}, blocks of {size(block)}"
    conditions = dataclasses.replace(CONDITIONS, workers=workers)
    rates = Row(
        f"samples from S3, {DELAY_MS} ms away, {data}", ours.per_second, theirs.per_second, "samples/s", True,
        f"the peer reads {theirs.num_samples:,.0f} samples", MEGATRON, peer.name, options, conditions,
    )  # fmt: skip
    moved = [lap.bytes_per_sample / used for lap in (ours, theirs)]
    work = f"bytes moved per byte used, {data}"
    bytes_moved = Row(work, *moved, "B", False, requests, MEGATRON, peer.name, options, conditions)
    if workers:  # whose CPU is not that of the reader's process
        return [rates, bytes_moved]
    micros = [1e6 * lap.cpu_per_sample for lap in (ours, theirs)]
    work, goal = f"CPU a sample from S3, {data}", CPU_GOALS[data]
    return [rates, bytes_moved, Row(work, *micros, "µs", False, goal, MEGATRON, peer.name, options, conditions)]
