"""Requests, bytes, time and cost of a run, computed from its inventory: one formula of `forecast` per kind of source.

source                     cost
local                      nothing
with a cache_dir           each chunk once per node
remote, up to 32 MiB       each chunk once per process, in memory
other remote sources       the requests of each vectored read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

from binidx.format.idx import get_bin_path
from binidx.format.summary import DatasetSummary
from binidx.loader.readahead import FIRST_WINDOW, GROUPS_IN_FLIGHT, SAMPLES_IN_GROUP
from binidx.run.plan.forecast import (
    NOTHING,
    SECONDS_PER_BLENDED_SAMPLE,
    Link,
    Medium,
    ReadCost,
    StartPhase,
    build_seconds,
    cache_fill_cost,
    pieces_per_sample,
    rounds_of_many,
    samples_read_cost,
)
from binidx.run.plan.inventory import MISSING, STALE, THERE, UNPROVEN, IndexInventory, RunInventory, SourceInventory
from binidx.storage.cache.layout import CHUNK_BYTES
from binidx.storage.cache.memory import STORE
from binidx.storage.codecs.checksums import BLOCK_BYTES, SUM_BYTES
from binidx.storage.open import SEGMENTS, open_stored
from binidx.storage.requests.remote_reader import MAX_REQUEST
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.registry import local_path, open_store, prices_of
from binidx.storage.threads import OPENING_THREADS

SUMS_COVER = CHUNK_BYTES // SUM_BYTES * BLOCK_BYTES
"""Bytes of a `.bin` whose checksums are one chunk."""

PROBES = 5
PROBE_BYTES, STREAM_BYTES, STREAMS = 4096, 1 << 20, 8


@dataclass(frozen=True)
class Costs:
    """Store traffic of one source over a whole run, all nodes together.

    Attributes:
        pieces: ranges per sample.
    """

    source: SourceInventory
    store: str
    pieces: float
    reading: ReadCost


def is_remote_prefix(prefix: str) -> bool:
    return local_path(prefix) is None


def samples_at_once(micro_batch_size: int) -> int:
    """Return the samples of one vectored read of a process: a quarter of the first read-ahead window."""
    return min(SAMPLES_IN_GROUP, micro_batch_size * FIRST_WINDOW // GROUPS_IN_FLIGHT)


def source_medium(headline: DatasetSummary, storage_options: Mapping[str, Any] | None) -> Medium:
    """Return the `Medium` of a source: its sizes, and how its ranges become requests."""
    gap = open_store(get_bin_path(headline.prefix), storage_options).max_gap
    return Medium(max(headline.plain_bytes, 1), max(headline.stored_bytes, 1), gap, headline.block_bytes, MAX_REQUEST)


def source_costs(inventory: RunInventory, num_samples: int, *, nodes: int, at_once: float | None = None) -> list[Costs]:
    """Return the costs of each source when training on a number of samples.

    Args:
        nodes: nodes that share the ranks.
        at_once: samples per vectored read; by default the loader's first read-ahead.
    """
    run = inventory.run
    settings = ReadSettings.of(run.config.storage_options)
    each_read = at_once or samples_at_once(run.micro_batch_size)
    compressed_bytes = sum(each.plain_bytes for each in inventory.summaries.values() if _in_segments(each))
    found = []
    for source in inventory.sources(num_samples):
        headline, config = source.headline, run.config
        pieces = pieces_per_sample(
            config.sequence_length,
            source.tokens / max(source.documents, 1),
            add_extra_token=config.add_extra_token_to_sequence,
        )
        sample_bytes = (config.sequence_length + config.add_extra_token_to_sequence) * headline.index.dtype_size
        reading = NOTHING
        if is_remote_prefix(headline.prefix):
            medium = source_medium(headline, config.storage_options)
            share = source.samples / max(num_samples, 1)
            kept = _cache_that_holds(headline, settings, compressed_bytes)
            if kept is None:
                reading = samples_read_cost(medium, source.samples, sample_bytes, pieces, each_read * share)
                reading = reading.times(1 - (SEGMENTS.budget / compressed_bytes if headline.compressed else 0))
            else:
                caches = run.data_parallel_size if kept.by_process else nodes
                part = source.samples * pieces / caches
                reading = cache_fill_cost(medium, part, sample_bytes / pieces, kept.chunk_bytes).times(caches)
            if headline.checked and source.samples:
                reading += ReadCost(run.data_parallel_size * ceil(headline.plain_bytes / SUMS_COVER), 0.0)
        found.append(Costs(source, store_name(headline.prefix), pieces, reading))
    return found


@dataclass(frozen=True)
class _Kept:
    chunk_bytes: int
    by_process: bool


def _cache_that_holds(headline: DatasetSummary, settings: ReadSettings, compressed_bytes: int) -> _Kept | None:
    """Return the cache that holds a whole source, or None."""
    if settings.cache_dir is not None:
        return _Kept(settings.cache_chunk_bytes or CHUNK_BYTES, by_process=False)
    if headline.plain_bytes <= STORE.largest:
        return _Kept(CHUNK_BYTES, by_process=True)
    if headline.compressed and compressed_bytes <= SEGMENTS.budget:
        return _Kept(headline.block_bytes, by_process=True)
    return None


def _in_segments(headline: DatasetSummary) -> bool:
    return headline.compressed and headline.plain_bytes > STORE.largest


def store_name(uri: str) -> str:
    """Return the name under which requests are counted and billed: "s3", "gs", ..."""
    return prices_of(uri).store


def total_costs(costs: Sequence[Costs]) -> ReadCost:
    return sum((each.reading for each in costs), NOTHING)


def request_dollars(costs: Sequence[Costs]) -> Mapping[str, float]:
    """Return the list price of the requests, by store."""
    found: dict[str, float] = {}
    for each in costs:
        if price := prices_of(each.source.headline.prefix).dollars_per_read:
            found[each.store] = found.get(each.store, 0.0) + each.reading.requests * price
    return found


def epoch_bytes_per_node(inventory: RunInventory, *, nodes: int) -> float:
    """Return the bytes that a node's disk cache needs for its part of one epoch of all remote sources."""
    found = 0.0
    settings, length = ReadSettings.of(inventory.run.config.storage_options), inventory.run.config.sequence_length
    for source in inventory.sources(max(inventory.num_samples, 1)):
        if is_remote_prefix(source.headline.prefix) and source.documents:
            pieces = pieces_per_sample(length, source.tokens / source.documents)
            num_pieces = source.tokens / length * pieces / nodes
            piece_bytes = length * source.headline.index.dtype_size / pieces
            chunk = settings.cache_chunk_bytes or CHUNK_BYTES
            medium = source_medium(source.headline, inventory.run.config.storage_options)
            found += cache_fill_cost(medium, num_pieces, piece_bytes, chunk).num_bytes
    return found


def start_phases(inventory: RunInventory, costs: Sequence[Costs]) -> list[StartPhase]:
    """Return the phases of a start of one process, from the builder to its first batch; imports come on top."""
    remote = [each for each in inventory.summaries.values() if is_remote_prefix(each.prefix)]
    waits = []
    if remote:
        waits.append(StartPhase("connections", 2))
        rounds = rounds_of_many(len(remote), 3, OPENING_THREADS)
        waits.append(StartPhase("opening", rounds, sum(each.idx_bytes for each in remote)))
    waits += _index_waits(inventory, bool(remote))
    if remote:
        run = inventory.run
        share = run.micro_batch_size / max(inventory.num_samples, 1)
        whole = total_costs(costs)
        batch_bytes = run.micro_batch_size * (run.config.sequence_length + 1) * 2
        waits.append(StartPhase("first batch", 1, max(whole.num_bytes * share, batch_bytes)))
    return waits


def _index_waits(inventory: RunInventory, remote: bool) -> list[StartPhase]:
    """Return the phases of loading caches: splits of a prefix in sequence, prefixes concurrently, then blends."""
    cached = [each for each in inventory.indices if each.cache.state in (THERE, UNPROVEN)]
    built = [each for each in inventory.indices if each.plan and each.cache.state in (MISSING, STALE)]
    blends = [each for each in inventory.blends if each.cache.state in (THERE, UNPROVEN)]
    new_blends = [each for each in inventory.blends if each not in blends]
    directory = inventory.run.config.path_to_cache
    far = remote if directory is None else is_remote_prefix(directory)

    def deepest(indices: Sequence[IndexInventory]) -> int:
        return len({each.wanted.split for each in indices})

    waits = []
    if cached or blends:
        manifests = [each.cache.manifest for each in cached] + [each.cache.manifest for each in blends]
        num_bytes = sum(array.bytes for each in manifests if each for array in each.arrays.values())
        rounds = 2 * (deepest(cached) + len(blends)) if far else 0
        waits.append(StartPhase("indices from their caches", rounds, num_bytes if far else 0))
    if built:
        seconds = sum(build_seconds(each.documents, each.plan) for each in built if each.plan)
        waits.append(
            StartPhase("indices to be built, by one process of all", 9 * deepest(built) if far else 0, 0, seconds)
        )
    if new_blends:
        seconds = sum(each.size for each in new_blends) * SECONDS_PER_BLENDED_SAMPLE
        rounds = 9 * len(new_blends) if far and directory is not None else 0
        waits.append(StartPhase("blends to be drawn", rounds, 0, seconds))
    return waits


def measure_link(headline: DatasetSummary, storage_options: Mapping[str, Any] | None) -> Link:
    """Measure the link to a store by requests for tokens of a dataset: PROBES small ones, then 8 MiB at once.

    Raises:
        StorageError: the store does not respond.
    """
    uri = get_bin_path(headline.prefix) + (".zst" if headline.compressed else "")
    reader = open_stored(uri, storage_options=storage_options)
    times = []
    for number in range(PROBES + 1):
        at = reader.size * number // (PROBES + 1)
        began = perf_counter()
        reader.read([(at, min(at + PROBE_BYTES, reader.size))])
        times.append(perf_counter() - began)
    latency = median(times[1:])  # the first one connects
    streams = min(STREAMS, max(1, reader.size // STREAM_BYTES))
    step = reader.size // streams
    wanted = [(each * step, each * step + min(STREAM_BYTES, step)) for each in range(streams)]
    began = perf_counter()
    moved = sum(map(len, reader.read(wanted)))
    seconds = max(perf_counter() - began - latency, 1e-4)
    return Link(latency, moved / seconds, open_store(uri, storage_options).max_in_flight)
