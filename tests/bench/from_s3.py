"""Random-order samples from a real S3 server, 30 ms to the first byte of every answer, against Megatron's S3 reader.

Both read the same samples in the same order, cold, no cache kept, one process each: Megatron's by torch's DataLoader,
ours by `build_pretraining_data_loader` with its defaults. Its reader asks for a block around each miss, one at a time.
At its default of 256 MiB a sample costs a block for each of its places, where the last block does not happen to hold
it: four blocks are all of this corpus, in a larger one nothing would be found. Small blocks cost a round trip for each
place. Its best block is looked for anew in each data.

The limit of ours is requests in flight / 30 ms, over 5 requests a sample where documents are shuffled, 1 where a sample
is one range; before that the machine's: server, proxy and reader share its cores.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.bench.corpus import SEQUENCE_LENGTH
from tests.bench.race import BATCH, DELAY_MS, Entrant, Lap, far_away, medians, publish_corpus, run, store
from tests.bench.table import Row

DATA = tuple((dtype, long) for dtype in ("uint16", "int32") for long in (False, True))
DEFAULT_BLOCK = 256 << 20
BLOCKS = tuple(1 << power for power in range(12, 21, 2))
# Of its reader, which is slow at the same pace all the time; at 256 MiB a block one by one.
TRIED, FEW, LEAST = 2 * BATCH, 8 * BATCH, 4


def rows(directory: Path) -> list[Row]:
    """Samples a second, bytes and requests; for both dtypes, documents shuffled and contiguous."""
    return [row for dtype, long in DATA for row in rows_of(directory / f"{dtype}{long:d}", dtype, long)]


def rows_of(directory: Path, dtype: str, long_documents: bool) -> list[Row]:
    directory.mkdir()
    with store(directory) as (server, bucket):
        _, uri = publish_corpus(directory, bucket, dtype, long_documents=long_documents)
        with far_away(server) as proxy:
            tries = [megatron(uri, block, TRIED) for block in BLOCKS]
            best = max(tries, key=lambda entrant: run(entrant, proxy, dtype).per_second)
            best = dataclasses.replace(best, num_samples=FEW)
            default = megatron(uri, DEFAULT_BLOCK, LEAST, batch=1)
            found = medians([Entrant("ours", "read_binidx.py", uri), default, best], proxy, dtype)
    data = f"{dtype}, {'contiguous' if long_documents else 'documents shuffled'}"
    notes = {default.name: "its S3 reader at its default", best.name: f"the best of blocks from {size(BLOCKS[0])} up"}
    return [row for name, note in notes.items() for row in compare(data, dtype, found["ours"], found[name], note, name)]


def megatron(uri: str, block_bytes: int, num_samples: int, batch: int = BATCH) -> Entrant:
    name = f"Megatron Core 0.16.1, blocks of {size(block_bytes)}"
    return Entrant(name, "read_megatron.py", uri, {"block_bytes": block_bytes, "batch": batch}, num_samples=num_samples)


def size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def compare(data: str, dtype: str, ours: Lap, theirs: Lap, note: str, name: str) -> list[Row]:
    used = SEQUENCE_LENGTH * (2 if dtype == "uint16" else 4)
    requests = (
        f"{ours.requests_per_sample:.2f} requests a sample, its {theirs.requests_per_sample:.2f}; opening included"
    )
    return [
        Row(f"from S3, {DELAY_MS} ms away, {data}", ours.per_second, theirs.per_second, "samples/s", True, note, name),
        Row("bytes moved per byte used", ours.bytes_per_sample / used, theirs.bytes_per_sample / used, "B", False,
            requests, name),
    ]  # fmt: skip
