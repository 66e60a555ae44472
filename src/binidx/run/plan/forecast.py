"""Cost of reading, computed from sizes alone: pieces of documents, requests, bytes, time. Pure arithmetic.

    S + 1 tokens of shuffled documents of m tokens     1 + S / m pieces: one, and one more for each boundary
    a piece                                            a range somewhere in the .bin, of S / pieces tokens
    n ranges of L bytes in B, read together            neighbours nearer than the gap share a request

The starts of n ranges divide B at random: a spacing is longer than x with probability q^n, q = 1 - x / B. With
x = L + gap

    requests    1 + (n - 1) q^n
    bytes       L + (n - 1) (the spacings up to x, and L for each longer one)

Source: ours; uniform spacings, as in any book on order statistics. `tests/run/plan/test_forecast.py` compares
the formulas with the counts of a proxy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, expm1

import numpy as np

from binidx.index.cache.index_files import NpyLayout
from binidx.index.document_sample import EpochPlan, index_shapes, row_dtype, shuffle_dtype

SECONDS_PER_DOCUMENT = 20e-9
"""Of a build, for each document of each epoch, its samples included: `python -m tests.bench billion` on two cores."""

SECONDS_PER_BLENDED_SAMPLE = 16e-9
"""Of 2,048 datasets, on two cores; 11 ns of 512."""

RECORD_BYTES, RECORDS_UP_TO = 8, 2**27
LARGE_ARRAY_BYTES = 1 << 30


@dataclass(frozen=True)
class ReadCost:
    """Requests and bytes of a set of reads."""

    requests: float
    num_bytes: float

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(self.requests + other.requests, self.num_bytes + other.num_bytes)

    def times(self, count: float) -> ReadCost:
        return ReadCost(self.requests * count, self.num_bytes * count)


NOTHING = ReadCost(0.0, 0.0)


@dataclass(frozen=True)
class Medium:
    """Parameters by which ranges of one `.bin` become requests.

    Args:
        plain_bytes: size of its tokens.
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
    """Return the mean number of ranges per sample: each of its S inner boundaries may end a document."""
    boundaries = sequence_length - 1 + add_extra_token
    return 1 + boundaries / max(tokens_per_document, 1.0)


def vectored_read_cost(medium: Medium, num_ranges: float, range_bytes: float) -> ReadCost:
    """Return the cost of one vectored read of `num_ranges` ranges of `range_bytes` plain bytes each, anywhere."""
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


def samples_read_cost(
    medium: Medium, num_samples: float, sample_bytes: float, pieces: float, samples_at_once: float
) -> ReadCost:
    """Return the cost of reading samples of one source, a fixed number of them in each vectored read.

    Args:
        sample_bytes: plain bytes of a sample.
        pieces: ranges per sample.
    """
    if num_samples <= 0:
        return NOTHING
    # Fewer than one of this source in a read: then as many reads as samples have one of it.
    at_once = max(samples_at_once, 1.0)
    return vectored_read_cost(medium, pieces * at_once, sample_bytes / pieces).times(num_samples / at_once)


def cache_fill_cost(medium: Medium, num_pieces: float, piece_bytes: float, chunk_bytes: int) -> ReadCost:
    """Return the cost of filling a cache that holds the whole source, for pieces read in any order.

    Of N chunks, t reads of k chunks leave N exp(-t k / N) unread. A piece is a request while it finds a chunk missing.
    """
    chunks = max(1.0, medium.plain_bytes / chunk_bytes)
    touched = 1 + max(0.0, piece_bytes - 1) / chunk_bytes
    there = -expm1(-num_pieces * touched / chunks) * chunks
    shrunk = medium.stored_bytes / max(medium.plain_bytes, 1)
    return ReadCost(there / touched, min(there * chunk_bytes, medium.plain_bytes) * shrunk)


def gpt_index_bytes(num_documents: int, plan: EpochPlan) -> int:
    """Return the bytes of the three files of a GPT index."""
    positions, rows = index_shapes(num_documents, plan)
    samples = NpyLayout((plan.num_samples,), shuffle_dtype(plan.num_samples))
    return NpyLayout(positions, np.int32).size + NpyLayout(rows, row_dtype(positions[0])).size + samples.size


def blend_bytes(size: int) -> int:
    """Return the bytes of the two files of a blend."""
    return NpyLayout((size,), np.int16).size + NpyLayout((size,), np.int64).size


def build_memory_bytes(num_documents: int, plan: EpochPlan) -> int:
    """Return the anonymous memory that building an index for a local disk takes."""
    entries, samples = num_documents * plan.num_epochs, plan.num_samples
    records = RECORD_BYTES * entries if entries <= RECORDS_UP_TO else 4 * entries
    shuffled = samples * np.dtype(shuffle_dtype(samples)).itemsize
    return (2 << 20) + max(records, shuffled if shuffled > LARGE_ARRAY_BYTES else 0)


def build_seconds(num_documents: int, plan: EpochPlan) -> float:
    """Return the seconds that building an index takes with its `.idx` in memory, on two cores of 2025."""
    return max(num_documents * plan.num_epochs, plan.num_samples) * SECONDS_PER_DOCUMENT


@dataclass(frozen=True)
class Link:
    """Measured properties of the connection to a store.

    Attributes:
        latency_seconds: time to the first byte of a response.
        bytes_per_second: throughput of several concurrent requests.
        requests_in_flight: limit of a process.
    """

    latency_seconds: float
    bytes_per_second: float
    requests_in_flight: int

    def seconds(self, round_trips: float, num_bytes: float) -> float:
        """Return the time of consecutive round trips and of a number of bytes."""
        return round_trips * self.latency_seconds + num_bytes / self.bytes_per_second

    def most_samples_per_second(self, requests_per_sample: float, sample_bytes: float) -> float:
        """Return the limit of one process: requests in flight / latency (Little's law), bounded by throughput."""
        by_requests = self.requests_in_flight / max(self.latency_seconds * requests_per_sample, 1e-9)
        return min(by_requests, self.bytes_per_second / max(sample_bytes, 1e-9))


@dataclass(frozen=True)
class StartPhase:
    """One phase of a start.

    Attributes:
        seconds: time besides round trips and bytes.
    """

    what: str
    round_trips: float
    num_bytes: float = 0.0
    seconds: float = 0.0


def start_seconds(waits: Sequence[StartPhase], link: Link | None) -> float:
    """Return the time of a whole start; without a link, the time of its local phases."""
    return sum(each.seconds + (link.seconds(each.round_trips, each.num_bytes) if link else 0.0) for each in waits)


def rounds_of_many(count: int, round_trips: float, at_once: int) -> float:
    """Return the consecutive round trips of `count` operations, `at_once` of them concurrently."""
    return ceil(count / at_once) * round_trips


def sample_memory_bytes(sequence_length: int, *, attention_mask: bool = False) -> int:
    """Return the memory of a sample: three int64 columns and a float32 one; and the mask on request."""
    return sequence_length * (3 * 8 + 4) + (sequence_length**2 if attention_mask else 0)
