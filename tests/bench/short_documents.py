"""Short documents in long samples: 40 documents a sample of 8,192 tokens, so 40 ranges, from S3, 30 ms away.

The loader with its defaults, one process, everything cold, by ranges alone and with a `cache_dir` that is filled while
it serves, over the beginning of an epoch and over a whole one. Requests and bytes are those of the proxy's log, opening
included.
"""

from __future__ import annotations

from pathlib import Path

from binidx.corpus.convert import convert_dataset
from tests.bench.corpus import write_corpus
from tests.bench.race import DELAY_MS, Entrant, Lap, far_away, medians, store
from tests.bench.table import Conditions, Row

SEQUENCE_LENGTH, MEAN_TOKENS, CORPUS_BYTES = 8192, 200, 256 << 20
NUM_SAMPLES, EPOCH = 400, 16_000
CONDITIONS = Conditions(
    cores=0,
    size=f"256 MiB of uint16 tokens in S3, documents of {MEAN_TOKENS} tokens, samples of 8,192",
    cached="nothing",
)
RANGES = "ranges alone, 400 samples"
LAPS = {"ranges": ("never", NUM_SAMPLES), "400 samples": ("auto", NUM_SAMPLES), "an epoch": ("auto", EPOCH)}
"""Name -> how the cache_dir is filled, and the samples that are read."""


def rows(directory: Path) -> list[Row]:
    """Requests and bytes a sample, and samples a second, against ranges alone."""
    with store(directory) as (server, bucket):
        prefix = write_corpus(directory / "short", CORPUS_BYTES, mean_tokens=MEAN_TOKENS)
        convert_dataset(prefix, f"{bucket}/short", verify="size")
        with far_away(server) as proxy:
            entrants = [entrant(f"{bucket}/short", *each) for each in LAPS.items()]
            laps = medians(entrants, proxy, "uint16", rounds=1)
    ranges, used = laps.pop("ranges"), 2 * SEQUENCE_LENGTH
    return [row for name, lap in laps.items() for row in rows_of(name, lap, ranges, used)]


def entrant(uri: str, name: str, lap: tuple[str, int]) -> Entrant:
    options = {"sequence_length": SEQUENCE_LENGTH, "fill": lap[0]}
    return Entrant(name, "read_binidx.py", uri, options, num_samples=lap[1])


def rows_of(name: str, lap: Lap, ranges: Lap, used: int) -> list[Row]:
    work = f"short documents, {DELAY_MS} ms away, a cache_dir, {name}"
    requests = lap.requests_per_sample, ranges.requests_per_sample
    moved = lap.bytes_per_sample / used, ranges.bytes_per_sample / used
    return [
        Row(f"{work}: requests", *requests, "a sample", False, "", RANGES),
        Row(f"{work}: bytes moved per byte used", *moved, "B", False, "", RANGES),
        Row(work, lap.through, ranges.through, "samples/s", True, "opening counts", RANGES),
    ]
