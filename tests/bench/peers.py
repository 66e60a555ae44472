"""Random-order samples from a real S3 server 30 ms away, by the readers that people use: each as its documents advise.

    binidx       Megatron's order: documents shuffled, packed, samples shuffled, all globally; ranges of the .bin
    Streaming    packed samples in shards of 64 MiB, downloaded whole. py1e, its default, spreads each shard's samples
                 over blocks of 4,000,000, more than this corpus has: a global shuffle that fetches every shard at once.
                 py1s shuffles shards, and samples within them, on 64 paths through the shards side by side
    LitData      packed tokens in chunks of 16,416,000, downloaded whole, one permuted after the other
    OLMo-core    slices of one flat array, globally permuted, one GET each
    Lance        rows of packed samples, batches of neighbours in random order
    LanceDB      the same rows by its StreamingDataset, shuffled one by one, as by default, or in clumps of 64

Grain is not here: ArrayRecord, which its documents advise, opens local files only (0.8.6: "No such file" for s3://).

All but binidx pack documents in the order of the corpus: neighbours stay neighbours in every sample, unless somebody
shuffles the documents beforehand, which changes no figure here. A larger corpus costs Streaming's py1e more, the others
the same. Nothing is compressed. Bandwidth is what this machine has, which is kind to those who move more; and then 90
MB/s a connection, which is what S3 gives one (85 to 90 says AWS in its performance guidelines).

`peers_long` reads 25,000 samples, a fifth of the corpus: there whole chunks pay, as most of their samples are used.

All times begin when a reader's imports are done, torch among them. One process each, so no worker processes, which
would cost everybody as much as they gain. Order is what the samples show, not what is promised: see `Lap.places`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.bench.corpus import PLACES, SEQUENCE_LENGTH
from tests.bench.machine import PEERS_PYTHON
from tests.bench.race import (
    BATCH,
    DELAY_MS,
    NUM_SAMPLES,
    ROUNDS,
    Entrant,
    Lap,
    far_away,
    medians,
    publish_corpus,
    publish_packed,
    store,
)
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=0, size="1 GiB of tokens in S3, samples of 4,096", cached="nothing")
OURS = {"documents shuffled": False, "contiguous": True}
"""What binidx reads: documents of web length, or so long that a sample is one range, as it is for those who pack."""
LANCEDB = {"rows": {"clump": None, "io_queue_depth": 4}, "clumps of 64": {"clump": 64, "io_queue_depth": 16}}
"""Batches of 64 rows in flight: 4 by default, of rows one by one 16 and more are slower."""
DTYPES = ("uint16", "int32")
WEATHERS: dict[str, dict[str, float]] = {"": {}, ", 90 MB/s a connection": {"megabytes_per_second": 90.0}}


def rows(directory: Path) -> list[Row]:
    """Time to the first batch, samples a second over the first thousand, bytes and requests: each peer, each dtype."""
    check_environment()
    return [row for dtype in DTYPES for row in rows_of(directory / dtype, dtype)]


def check_environment() -> None:
    if not PEERS_PYTHON.exists():
        raise RuntimeError("peers: no environment for them found; needed the one that `make bench-peers` makes")


def rows_of(
    directory: Path,
    dtype: str,
    weathers: Mapping[str, Mapping[str, float]] = WEATHERS,
    caches: Mapping[int, Sequence[str]] = {NUM_SAMPLES: ("never",)},
    rounds: int = ROUNDS,
) -> list[Row]:
    """Rows of each of ours, without a cache ("never") and with one that is filled so, against each peer.

    Args:
        caches: by the number of samples that are read.
    """
    directory.mkdir()
    with store(directory) as (server, bucket):
        corpora = {name: publish_corpus(directory, bucket, dtype, long_documents=long) for name, long in OURS.items()}
        prefix, uri = corpora["documents shuffled"]
        peers = peers_of(bucket, uri)
        for packed in {each.uri: each for each in peers if each.uri != uri}.values():
            publish_packed(packed, prefix, dtype, directory)
        rows = dict[tuple[str, str], Row]()
        for (weather, options), (num_samples, fills) in itertools.product(weathers.items(), caches.items()):
            ours = [
                Entrant(data if fill == "never" else f"{data}, cache_dir", "read_binidx.py", each, {"fill": fill})
                for fill in fills
                for data, (_, each) in corpora.items()
            ]
            with far_away(server, **options) as proxy:
                entrants = [replace(each, num_samples=num_samples) for each in (*ours, *peers)]
                laps = medians(entrants, proxy, dtype, rounds)
            fastest = max(peers, key=lambda peer: laps[peer.name].through).name
            for own, peer in itertools.product(ours, peers):
                data, sides = f"{dtype}, {own.name}{weather}", (laps[own.name], peer.name, laps[peer.name])
                for row in compare(data, dtype, *sides, peer.name == fastest, num_samples):
                    rows.setdefault((row.work, row.against), row)  # the first batch is of fewer samples, too
    return [*rows.values()]


def peers_of(bucket: str, uri: str) -> Sequence[Entrant]:
    """Those who pack documents themselves lay the same tokens end to end: how long these were changes nothing."""
    python = str(PEERS_PYTHON)
    shards, chunks, rows_of_samples = f"{bucket}/shards", f"{bucket}/chunks", f"{bucket}/lance"
    return (
        *(
            Entrant(f"Streaming 0.13.0, {each}", "read_streaming.py", shards, {"shuffle_algo": each}, python)
            for each in ("py1e", "py1s")
        ),
        Entrant("LitData 0.2.76", "read_litdata.py", chunks, {"num_workers": 0}, python),
        *(
            Entrant(f"OLMo-core 3.0.0, {each or 4} threads", "read_olmo.py", uri, {"num_threads": each}, python)
            for each in (None, 32)
        ),
        *(
            Entrant(f"LanceDB 0.40.0, {each}", "read_lancedb.py", rows_of_samples, options, python)
            for each, options in LANCEDB.items()
        ),
        # Last, as it writes the rows.
        Entrant("Lance 14.0.2", "read_lance.py", rows_of_samples, python=python),
    )


def compare(data: str, dtype: str, ours: Lap, name: str, theirs: Lap, best: bool, num_samples: int) -> list[Row]:
    """Two rows; what the samples cost stands in the note. The peer with the highest rate is the "best" of them."""
    taken = f"{ours.num_samples:,.0f} samples in time, theirs {theirs.num_samples:,.0f}; "
    conditions = replace(CONDITIONS, size=f"1 GiB of {dtype} tokens in S3, {num_samples:,} samples of 4,096")
    used = SEQUENCE_LENGTH * (2 if dtype == "uint16" else 4)
    started = f"from process start {ours.from_start:.2f} s, theirs {theirs.from_start:.2f} s"
    shuffled = PLACES * (1 - (1 - 1 / PLACES) ** min(ours.num_samples, theirs.num_samples))
    micros = [1e6 * lap.cpu_per_sample for lap in (ours, theirs)]
    cost = (
        f"CPU a sample {micros[0]:,.0f} µs, theirs {micros[1]:,.0f}; "
        f"{taken if min(ours.num_samples, theirs.num_samples) < num_samples else ''}"
        f"bytes moved per byte used {ours.bytes_per_sample / used:.2f}, theirs {theirs.bytes_per_sample / used:.2f}; "
        f"requests a sample {ours.requests_per_sample:.2f}, theirs {theirs.requests_per_sample:.2f}; thousandths of "
        f"the data they begin in {ours.places:.0f}, theirs {theirs.places:.0f}, of a global shuffle {shuffled:.0f}"
    )
    setting, options = ("best", name) if best else (name, "")
    return [
        Row(f"first batch of {BATCH}, {DELAY_MS} ms away, {data}", ours.first_batch, theirs.first_batch, "s", False,
            started, name, setting, options, conditions),
        Row(f"first {num_samples:,} samples, {data}", ours.through, theirs.through, "samples/s", True, cost, name,
            setting, options, conditions),
    ]  # fmt: skip
