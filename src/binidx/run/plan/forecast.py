"""What reading will cost, told from sizes alone: pieces of documents, requests, bytes, time. Pure arithmetic.

    S + 1 tokens of shuffled documents of m tokens     1 + S / m pieces: one, and one more for each boundary
    a piece                                            a range somewhere in the .bin, of S / pieces tokens
    n ranges of L bytes in B, read together            neighbours nearer than the gap share a request

The starts of n ranges divide B at random: a spacing is longer than x with probability q^n, q = 1 - x / B. With
x = L + gap

    requests    1 + (n - 1) q^n
    bytes       L + (n - 1) (what lies in spacings up to x, and L in longer ones)

Source: ours; uniform spacings, as in any book on order statistics. `tests/loader/test_forecast.py` compares with what a
proxy counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, expm1

import numpy as np

from binidx.index.cache.index_files import npy_of
from binidx.index.document_sample import EpochPlan, index_shapes, row_dtype, shuffle_dtype

SECONDS_PER_DOCUMENT = 20e-9


"""Of a build, for each document of each epoch, its samples included: `python -m tests.bench billion` on two cores."""


SECONDS_PER_BLENDED_SAMPLE = 16e-9


"""Of 2,048 datasets, on two cores; 11 ns of 512."""


RECORD_BYTES, RECORDS_UP_TO = 8, 2**27


LARGE_ARRAY_BYTES = 1 << 30


@dataclass(frozen=True)
class ReadCost:
    """What some reads take of a store."""

    requests: float
    num_bytes: float

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(self.requests + other.requests, self.num_bytes + other.num_bytes)

    def times(self, count: float) -> ReadCost:
        return ReadCost(self.requests * count, self.num_bytes * count)


NOTHING = ReadCost(0.0, 0.0)


@dataclass(frozen=True)
class Medium:
    """How ranges of one `.bin` become requests.

    Args:
        plain_bytes: of its tokens.
        stored_bytes: of the object; fewer where it is compressed.
        max_gap_bytes: fetched in vain rather than a second request.
        block_bytes: what is read whole where one byte is asked: of checksums, zstd frames, chunks of a cache; 1: exact.
        max_request_bytes: longer ranges are several requests.
    """

    plain_bytes: int
    stored_bytes: int
    max_gap_bytes: int
    block_bytes: int = 1
    max_request_bytes: int = 8 << 20


def pieces_per_sample(sequence_length: int, tokens_per_document: float, *, add_extra_token: bool = True) -> float:
    """Ranges that a sample is read in, on average: of S + 1 tokens, each boundary between two may end a document."""
    boundaries = sequence_length - 1 + add_extra_token
    return 1 + boundaries / max(tokens_per_document, 1.0)


def vectored_read_cost(medium: Medium, num_ranges: float, range_bytes: float) -> ReadCost:
    """One vectored read of `num_ranges` ranges of `range_bytes` plain bytes each, anywhere."""
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


def samples_read(
    medium: Medium, num_samples: float, sample_bytes: float, pieces: float, samples_at_once: float
) -> ReadCost:
    """Many samples of one source, so many of its samples in each vectored read.

    Args:
        sample_bytes: plain bytes of one.
        pieces: ranges of one.
    """
    if num_samples <= 0:
        return NOTHING
    # Fewer than one of this source in a read: then as many reads as samples have one of it.
    at_once = max(samples_at_once, 1.0)
    return vectored_read_cost(medium, pieces * at_once, sample_bytes / pieces).times(num_samples / at_once)


def kept_once(medium: Medium, num_pieces: float, piece_bytes: float, chunk_bytes: int) -> ReadCost:
    """What comes into a cache that has room for all, in whole chunks, for so many pieces read in any order.

    Of N chunks k at a time t are left out exp(-t k / N). A piece is one request while it finds a chunk missing.
    """
    chunks = max(1.0, medium.plain_bytes / chunk_bytes)
    touched = 1 + max(0.0, piece_bytes - 1) / chunk_bytes
    there = -expm1(-num_pieces * touched / chunks) * chunks
    shrunk = medium.stored_bytes / max(medium.plain_bytes, 1)
    return ReadCost(there / touched, min(there * chunk_bytes, medium.plain_bytes) * shrunk)


def index_bytes(num_documents: int, plan: EpochPlan) -> int:
    """Of the three files of a GPT index."""
    positions, rows = index_shapes(num_documents, plan)
    samples = npy_of((plan.num_samples,), shuffle_dtype(plan.num_samples))
    return npy_of(positions, np.int32).size + npy_of(rows, row_dtype(positions[0])).size + samples.size


def blend_bytes(size: int) -> int:
    """Of the two files of a blend."""
    return npy_of((size,), np.int16).size + npy_of((size,), np.int64).size


def build_memory_bytes(num_documents: int, plan: EpochPlan) -> int:
    """Anonymous memory of building an index for a local disk: `index.gpt.build_gpt_index`."""
    entries, samples = num_documents * plan.num_epochs, plan.num_samples
    records = RECORD_BYTES * entries if entries <= RECORDS_UP_TO else 4 * entries
    shuffled = samples * np.dtype(shuffle_dtype(samples)).itemsize
    return (2 << 20) + max(records, shuffled if shuffled > LARGE_ARRAY_BYTES else 0)


def build_seconds(num_documents: int, plan: EpochPlan) -> float:
    """Of building an index, once the `.idx` is here: on two cores of 2025."""
    return max(num_documents * plan.num_epochs, plan.num_samples) * SECONDS_PER_DOCUMENT


@dataclass(frozen=True)
class Link:
    """The way to a store, as measured.

    latency_seconds: to the first byte of an answer.
    bytes_per_second: of several requests at once.
    requests_in_flight: of a process, at most.
    """

    latency_seconds: float
    bytes_per_second: float
    requests_in_flight: int

    def seconds(self, round_trips: float, num_bytes: float) -> float:
        """Of round trips one after the other, and what comes with them."""
        return round_trips * self.latency_seconds + num_bytes / self.bytes_per_second

    def most_samples_per_second(self, requests_per_sample: float, sample_bytes: float) -> float:
        """That one process can have: requests in flight / latency (Little's law), and no more than the bytes allow."""
        by_requests = self.requests_in_flight / max(self.latency_seconds * requests_per_sample, 1e-9)
        return min(by_requests, self.bytes_per_second / max(sample_bytes, 1e-9))


@dataclass(frozen=True)
class Wait:
    """A part of a start: what is waited for.

    seconds: besides round trips and bytes.
    """

    what: str
    round_trips: float
    num_bytes: float = 0.0
    seconds: float = 0.0


def start_seconds(waits: Sequence[Wait], link: Link | None) -> float:
    """Of a whole start; without a link, of what takes no store."""
    return sum(each.seconds + (link.seconds(each.round_trips, each.num_bytes) if link else 0.0) for each in waits)


def rounds_of_many(count: int, round_trips: float, at_once: int) -> float:
    """Round trips one after the other of `count` things, `at_once` of them together."""
    return ceil(count / at_once) * round_trips


def sample_memory_bytes(sequence_length: int, *, attention_mask: bool = False) -> int:
    """Of a sample in memory: three int64 columns and a float32; and the mask, on request."""
    return sequence_length * (3 * 8 + 4) + (sequence_length**2 if attention_mask else 0)
