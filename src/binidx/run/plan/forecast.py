"""Forecast of a run's reads, from its inventory: pieces of documents, requests, bytes, and the link to the store.

    S + 1 tokens of shuffled documents of m tokens     1 + S / m pieces: one, and one more for each boundary
    a piece                                            a range somewhere in the .bin, of S / pieces tokens
    n ranges of L bytes in B, read together            neighbours nearer than the gap share a request

The starts of n ranges divide B at random: a spacing is longer than x with probability q^n, q = 1 - x / B. With
x = L + gap

    requests    1 + (n - 1) q^n
    bytes       L + (n - 1) (the spacings up to x, and L for each longer one)

    source                     reads
    local                      nothing
    with a cache_dir           each chunk once per node; whole extents once per node, where a loader fills it
    remote, up to 32 MiB       each chunk once per process, in memory
    other remote sources       the requests of each vectored read

Source: ours; uniform spacings, as in any book on order statistics. `tests/run/plan/test_forecast.py` compares
the formulas with the counts of a proxy.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, expm1, floor
from statistics import median
from time import perf_counter
from typing import Self

import numpy as np

from binidx.format.source import DatasetFiles
from binidx.index.cache.array_writer import SHUFFLED_IN_FILE
from binidx.index.cache.index_files import NpyLayout
from binidx.index.document_sample import EpochPlan
from binidx.loader.readahead_window import count_first_reads
from binidx.run.plan.inventory import RunInventory
from binidx.run.run_file import Run
from binidx.storage.cache.block_files import CHUNK_BYTES
from binidx.storage.cache.fill_plan import EXTENT_BYTES, paying_share
from binidx.storage.cache.memory import STORE
from binidx.storage.codecs.checksums import SUM_SHARE
from binidx.storage.open import SEGMENTS, open_stored
from binidx.storage.requests.remote_object import MAX_REQUEST
from binidx.storage.settings import ReadSettings
from binidx.storage.store_protocols import Prices

SECONDS_PER_DOCUMENT = 20e-9
"""Build time for each document of each epoch, samples included: `python -m tests.bench billion` on two cores."""

SECONDS_PER_BLENDED_SAMPLE = 16e-9
"""Time to draw one sample of a blend of 2,048 datasets on two cores; of 512 datasets it is 11 ns."""


class Amounts:
    """Base of dataclasses whose fields are amounts, which are added and multiplied one by one."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    def times(self, count: float) -> Self:
        return type(self)(*(amount * count for amount in vars(self).values()))


@dataclass(frozen=True)
class ReadCost(Amounts):
    """Requests and bytes of a set of reads."""

    requests: float
    num_bytes: float


NOTHING = ReadCost(0.0, 0.0)


@dataclass(frozen=True)
class Medium:
    """Parameters by which ranges of one `.bin` become requests.

    Args:
        plain_bytes: size of the tokens.
        stored_bytes: size of the object; smaller than plain_bytes if it is compressed.
        max_gap_bytes: largest unneeded gap that is fetched to save a request.
        block_bytes: unit of reading: checksum block, zstd frame or cache chunk; 1 if ranges are read exactly.
        max_request_bytes: longest request; longer ranges are split.
    """

    plain_bytes: int
    stored_bytes: int
    max_gap_bytes: int
    block_bytes: int = 1
    max_request_bytes: int = 8 << 20


def pieces_per_sample(sequence_length: int, tokens_per_document: float, *, add_extra_token: bool = True) -> float:
    """Return the mean number of ranges per sample: a document may end at each of the S boundaries between tokens.

    Args:
        sequence_length: S.
        tokens_per_document: mean length of a document.
        add_extra_token: whether a sample has one more token, its last label.
    """
    return 1 + (sequence_length - 1 + add_extra_token) / max(tokens_per_document, 1.0)


def vectored_read_cost(medium: Medium, num_ranges: float, range_bytes: float) -> ReadCost:
    """Return the cost of one vectored read of `num_ranges` ranges of `range_bytes` plain bytes, at random places.

    Args:
        medium: parameters of the `.bin`.
        num_ranges: ranges of one read; may be a mean.
        range_bytes: plain bytes of each.
    """
    if num_ranges <= 0 or medium.plain_bytes <= 0:
        return NOTHING
    shrunk = medium.stored_bytes / medium.plain_bytes
    length = min((range_bytes + medium.block_bytes - 1) * shrunk, float(medium.stored_bytes))
    free, near = float(medium.stored_bytes), min(length + medium.max_gap_bytes, float(medium.stored_bytes))
    apart = 1 - near / free
    more = max(0.0, num_ranges - 1)
    longer = apart**num_ranges
    shorter = free / (num_ranges + 1) * (1 - apart ** (num_ranges + 1)) - near * longer
    requests = 1 + more * longer
    num_bytes = min(length + more * (shorter + length * longer), free)
    return ReadCost(requests + num_bytes // medium.max_request_bytes, num_bytes)


def cache_fill_cost(medium: Medium, num_pieces: float, piece_bytes: float, chunk_bytes: int) -> ReadCost:
    """Return the cost of filling a cache that holds the whole source, for pieces read in any order.

    Of N chunks, t reads of k chunks leave N exp(-t k / N) unread. A piece costs a request if it finds a chunk missing.

    Args:
        medium: parameters of the `.bin`.
        num_pieces: pieces that are read, t.
        piece_bytes: plain bytes of each.
        chunk_bytes: plain bytes of a chunk.
    """
    chunks = max(1.0, medium.plain_bytes / chunk_bytes)
    touched = 1 + max(0.0, piece_bytes - 1) / chunk_bytes
    there = -expm1(-num_pieces * touched / chunks) * chunks
    shrunk = medium.stored_bytes / max(medium.plain_bytes, 1)
    return ReadCost(there / touched, min(there * chunk_bytes, medium.plain_bytes) * shrunk)


def gpt_index_bytes(num_documents: int, plan: EpochPlan) -> int:
    """Return the size of the three files of a GPT index, in bytes.

    Args:
        num_documents: number of sequences of the split.
        plan: the epochs of the index.
    """
    return sum(NpyLayout(*array).size for array in plan.arrays(num_documents))


def blend_bytes(size: int) -> int:
    """Return the size of the two index files of a blend of `size` samples, in bytes."""
    return NpyLayout((size,), np.int16).size + NpyLayout((size,), np.int64).size


def build_memory_bytes(num_documents: int, plan: EpochPlan, threads: int = 1) -> int:
    """Return the most anonymous memory, in bytes, that building an index for a local disk takes: `build_gpt_index`.

    Args:
        num_documents: documents of the split.
        plan: of the epochs.
        threads: threads that build.
    """
    documents, _, samples = plan.arrays(num_documents)
    shuffled = (length * np.dtype(dtype).itemsize for (length, *_), dtype in (documents, samples))
    return threads * (2 << 20) + max((size for size in shuffled if size > SHUFFLED_IN_FILE), default=0)


def build_seconds(num_documents: int, plan: EpochPlan) -> float:
    """Return the seconds that building an index takes with its `.idx` in memory, on two cores of 2025.

    Args:
        num_documents: number of sequences of the split.
        plan: the epochs of the index.
    """
    return max(num_documents * plan.num_epochs, plan.num_samples) * SECONDS_PER_DOCUMENT


@dataclass(frozen=True)
class Link:
    """Measured properties of the connection to a store.

    Attributes:
        latency_seconds: time to the first byte of a response.
        bytes_per_second: throughput of several concurrent requests.
        requests_in_flight: largest number of concurrent requests of a process.
    """

    latency_seconds: float
    bytes_per_second: float
    requests_in_flight: int

    def most_samples_per_second(self, requests_per_sample: float, sample_bytes: float) -> float:
        """Return the limit of one process: requests in flight / latency (Little's law), bounded by throughput.

        Args:
            requests_per_sample: requests to the store for each sample.
            sample_bytes: bytes that are transferred for each sample.
        """
        by_requests = self.requests_in_flight / max(self.latency_seconds * requests_per_sample, 1e-9)
        return min(by_requests, self.bytes_per_second / max(sample_bytes, 1e-9))


@dataclass(frozen=True)
class CacheFill:
    """Forecast of the bytes of one source that loaders fill into the disk cache of a node, and the reason.

    Attributes:
        share: bytes that a node reads divided by those of the source, which may be above 1.
        paying_share: least share that pays: rate of ranges divided by the rate of extents, of the measured link.
        node_bytes: bytes that are filled on each node; 0.0 if the share does not pay.
        seconds: time until these are there at the measured rate; 0.0 if it is unknown.
    """

    share: float
    paying_share: float
    node_bytes: float
    seconds: float


def forecast_fill(
    settings: ReadSettings, medium: Medium, link: Link | None, ranges: tuple[float, float], samples: float, room: float
) -> CacheFill | None:
    """Return what is filled of a source; None without a disk cache, or if it is never filled.

    Args:
        settings: of the source.
        medium: parameters of its `.bin`.
        link: to its store, if it is known.
        ranges: number of ranges per sample, and plain bytes of each range.
        samples: samples that a node reads.
        room: share of all sources that the cache has room for.
    """
    if settings.cache_dir is None or settings.cache_fill == "never":
        return None
    pieces, piece_bytes = ranges
    share = samples * pieces * piece_bytes / medium.plain_bytes
    paying = 0.0 if settings.cache_fill == "all" else paying_share()
    if link is not None and paying:
        sample_bytes = pieces * piece_bytes
        by_ranges = link.most_samples_per_second(pieces, sample_bytes) * sample_bytes
        paying = paying_share(by_ranges, link.bytes_per_second)
    num_bytes = medium.plain_bytes * min(room, 1.0) if share >= paying else 0.0
    stored = num_bytes * medium.stored_bytes / medium.plain_bytes
    return CacheFill(share, paying, num_bytes, stored / link.bytes_per_second if link else 0.0)


PROBES = 5
PROBE_BYTES, STREAM_BYTES, STREAMS = 4096, 1 << 20, 8


@dataclass(frozen=True)
class Costs:
    """Forecast for one source of a training run: its size, its use, and the requests and bytes of reading it.

    Attributes:
        dataset: sizes and counts of the source's files.
        documents: number of sequences in the source's train split.
        tokens: number of tokens in the source's train split.
        samples: number of samples served from the source, summed over all ranks.
        epochs: number of passes over the train split, with a fraction for a partial pass; 0.0 if it has no tokens.
        prices: list prices of the store; `prices.store` is the name by which its requests are counted: "s3", "gs", ...
        pieces_per_sample: mean number of token ranges read per sample.
        reading: requests and bytes from the store for these samples, summed over all nodes; zero for a local source.
        epoch_bytes: bytes that the disk cache of one node needs for its part of one epoch; 0.0 for a local source.
        fill: forecast of the background fill of that cache; None: loaders fill nothing, whatever the share.
    """

    dataset: DatasetFiles
    documents: int
    tokens: int
    samples: float
    epochs: float
    prices: Prices
    pieces_per_sample: float
    reading: ReadCost
    epoch_bytes: float
    fill: CacheFill | None = None

    @property
    def store(self) -> str:
        """Name of the store."""
        return self.prices.store

    @property
    def repeated_documents(self) -> int:
        """Number of documents that are read more than once, over whole and partial epochs."""
        return floor(min(max(self.epochs - 1, 0.0), 1.0) * self.documents)


def source_costs(
    inventory: RunInventory, num_samples: int, *, nodes: int, at_once: float | None = None, link: Link | None = None
) -> list[Costs]:
    """Return the costs of each source when training on a number of samples.

    Args:
        inventory: state of the run's data and caches.
        num_samples: number of samples of the train split that are read.
        nodes: number of nodes that share the ranks.
        at_once: samples per vectored read; by default that of the loader's first read-ahead, a quarter of its window.
        link: to the store of the remote sources, if it is known.
    """
    run, length = inventory.run, inventory.run.config.sequence_length
    extra = run.config.add_extra_token_to_sequence
    each_read = at_once or count_first_reads(run.micro_batch_size)
    datasets = inventory.datasets.values()
    remote_bytes = sum(own.index.num_bytes for own in datasets if own.prefix.local_path is None)
    compressed = [own.index.num_bytes for own in datasets if own.compressed]
    compressed_bytes = sum(num_bytes for num_bytes in compressed if num_bytes > STORE.largest)
    costs = []
    for index, share in inventory.shares():
        dataset, samples, epoch = inventory.datasets[index.wanted.prefix], num_samples * share, index.tokens / length
        pieces = pieces_per_sample(length, index.tokens / max(index.documents, 1), add_extra_token=extra)
        reading, epoch_bytes, fill = NOTHING, 0.0, None
        if dataset.prefix.local_path is None:
            ranges = pieces, (length + extra) * dataset.index.dtype_size / pieces
            medium, settings = medium_of(dataset), dataset.prefix.settings
            limit = math.inf if settings.cache_bytes is None else settings.cache_bytes
            fill = forecast_fill(settings, medium, link, ranges, samples / nodes, limit / max(remote_bytes, 1))
            reading, epoch_bytes = _traffic(
                run, dataset, samples, epoch, ranges, each_read * share, nodes, compressed_bytes
            )
            if fill is not None and fill.node_bytes:
                part = fill.node_bytes / medium.plain_bytes
                filled = ReadCost(ceil(fill.node_bytes / EXTENT_BYTES), part * medium.stored_bytes)
                reading = filled.times(nodes) + reading.times(1 - part)
        counts = index.documents, index.tokens, samples, samples / epoch if epoch else 0.0
        prices = dataset.prefix.store.prices()
        costs.append(Costs(dataset, *counts, prices, pieces, reading, epoch_bytes, fill))
    return costs


def medium_of(dataset: DatasetFiles) -> Medium:
    """Return the parameters of the `.bin` of a remote source."""
    sizes = max(dataset.index.num_bytes, 1), max(dataset.stored_bytes, 1)
    return Medium(*sizes, dataset.prefix.store.max_gap, dataset.block_bytes, MAX_REQUEST)


def _traffic(
    run: Run,
    dataset: DatasetFiles,
    samples: float,
    epoch_samples: float,
    ranges: tuple[float, float],
    at_once: float,
    nodes: int,
    compressed_bytes: int,
) -> tuple[ReadCost, float]:
    """Return the cost of reading samples of a remote source, and the size of a node's disk cache for an epoch.

    Args:
        ranges: number of ranges per sample, and plain bytes of each range.
        compressed_bytes: plain bytes of all compressed sources that are cached in segments.
    """
    pieces, piece_bytes = ranges
    settings, medium = dataset.prefix.settings, medium_of(dataset)

    def fill(samples: float, caches: int, chunk_bytes: int) -> ReadCost:
        return cache_fill_cost(medium, samples * pieces / caches, piece_bytes, chunk_bytes)

    disk_chunk, ranks = settings.cache_chunk_bytes or CHUNK_BYTES, run.data_parallel_size
    if settings.cache_dir is not None:
        reading = fill(samples, nodes, disk_chunk).times(nodes)
    elif dataset.index.num_bytes <= STORE.largest:
        reading = fill(samples, ranks, CHUNK_BYTES).times(ranks)
    elif dataset.compressed and compressed_bytes <= SEGMENTS.budget:
        reading = fill(samples, ranks, dataset.block_bytes).times(ranks)
    else:
        # Fewer than one sample of this source in a read: then as many reads as samples have one of it.
        at_once = max(at_once, 1.0)
        missing = 1 - (SEGMENTS.budget / compressed_bytes if dataset.compressed else 0)
        reading = vectored_read_cost(medium, pieces * at_once, piece_bytes).times(samples / at_once * missing)
    if dataset.checked and samples:
        reading += ReadCost(ranks * ceil(dataset.index.num_bytes * SUM_SHARE / CHUNK_BYTES), 0.0)
    return reading, fill(epoch_samples, nodes, disk_chunk).num_bytes


def total_costs(costs: Sequence[Costs]) -> ReadCost:
    return sum((cost.reading for cost in costs), NOTHING)


def measure_link(dataset: DatasetFiles) -> Link:
    """Measure the link to a store by requests for tokens of a dataset: PROBES small ones, then 8 MiB at once.

    Raises:
        StorageError: the store does not respond.
    """
    tokens = dataset.bin
    reader = open_stored(tokens)
    times = []
    for number in range(PROBES + 1):
        at = reader.size * number // (PROBES + 1)
        began = perf_counter()
        reader.read([(at, min(at + PROBE_BYTES, reader.size))])
        times.append(perf_counter() - began)
    latency = median(times[1:])  # the first one connects
    streams = min(STREAMS, max(1, reader.size // STREAM_BYTES))
    step = reader.size // streams
    wanted = [(stream * step, stream * step + min(STREAM_BYTES, step)) for stream in range(streams)]
    began = perf_counter()
    moved = sum(map(len, reader.read(wanted)))
    seconds = max(perf_counter() - began - latency, 1e-4)
    return Link(latency, moved / seconds, tokens.store.max_in_flight)
