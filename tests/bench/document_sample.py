"""The document index and the sample index: alone, together, in memory and into their files.

Documents of lognormal length, 1,000 tokens on average, in samples of 4,096. Megatron Core's sample index is its C++
function without the Python around it; its document index is its Python. Times are CPU time of the one thread, medians
of runs in turn; those of two threads and of files are wall time. `large` is the same with 10^8 documents.
"""

from __future__ import annotations

import filecmp
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from helpers.oracle import megatron

from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_files import IndexFiles
from binidx.index.document_sample import (
    EpochPlan,
    build_document_index,
    build_sample_index,
    count_tokens,
    plan_epochs,
)
from binidx.index.documents import Documents
from binidx.index.gpt_indices import ARRAYS, build_gpt_index
from binidx.native.permutations import RandomState
from binidx.native.sample_index import SampleArrays
from binidx.storage.location import Location
from tests.bench.table import Conditions, Row, interleaved_medians, peak_bytes

CONDITIONS = Conditions(
    cores=1,
    size="documents of 1,000 tokens on average, samples of 4,096",
    cached="lengths in memory",
)
Indices = tuple[np.ndarray, np.ndarray]

NUM_DOCUMENTS = 10**7
THREADS = 2
SEQUENCE_LENGTH = 4096
SEED = 1234
ROUNDS = 3


def rows(directory: Path) -> list[Row]:
    """Nanoseconds a document, then bytes a document and epoch."""
    return [*time_rows(directory, NUM_DOCUMENTS), *memory_rows()]


def quick_rows(directory: Path) -> list[Row]:
    """The sample index, and both together."""
    lengths, documents = corpus(NUM_DOCUMENTS)
    plan = planned(lengths, documents)
    out = ours(lengths, documents, plan)
    return [*sample_rows(lengths, plan, out), *together_rows(lengths, documents, plan, out)]


def time_rows(directory: Path, num_documents: int) -> list[Row]:
    lengths, documents = corpus(num_documents)
    plan = planned(lengths, documents)
    out = ours(lengths, documents, plan)
    return [
        *sample_rows(lengths, plan, out),
        token_row(lengths, out[0]),
        *together_rows(lengths, documents, plan, out),
        files_row(lengths, documents, plan, directory),
    ]


def corpus(num_documents: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.random.default_rng(0).lognormal(np.log(1000) - 0.5, 1.0, num_documents)
    return np.maximum(lengths, 1).astype(np.int32), np.arange(num_documents, dtype=np.int32)


def planned(lengths: np.ndarray, documents: Documents, epochs: float = 1) -> EpochPlan:
    tokens = count_tokens(lengths, documents, threads=THREADS)
    asked = None if epochs == 1 else int(epochs * tokens / SEQUENCE_LENGTH)
    return plan_epochs(tokens, SEQUENCE_LENGTH, asked, add_extra_token=True, drop_last_partial=True)


def ours(lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan) -> Indices:
    index = build_document_index(documents, plan.num_epochs, RandomState(SEED), plan.separate_final_epoch)
    return index, build_sample_index(lengths, index, SEQUENCE_LENGTH, plan.num_tokens)


def theirs(lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan) -> Indices:
    rng = np.random.RandomState(SEED)
    index = megatron.gpt._build_document_index(documents, plan.num_epochs, rng, plan.separate_final_epoch)
    return index, their_samples(lengths, index, plan)


def their_samples(lengths: np.ndarray, index: np.ndarray, plan: EpochPlan) -> np.ndarray:
    return megatron.helpers.build_sample_idx_int32(
        lengths, index, SEQUENCE_LENGTH, plan.num_epochs, plan.tokens_per_epoch, True, 1
    )


def sample_rows(lengths: np.ndarray, plan: EpochPlan, out: Indices) -> list[Row]:
    def build(threads: int) -> None:
        samples = SampleArrays(lengths, out[0], SEQUENCE_LENGTH, plan.num_tokens, add_extra_token=True)
        samples.fill_starts(out[1], threads)

    def check() -> None:
        assert (out[1] == their_samples(lengths, out[0], plan)).all()

    check()
    one, peer = thread_medians(lambda: build(1), lambda: their_samples(lengths, out[0], plan))
    two, wall = interleaved_medians(lambda: build(2), lambda: their_samples(lengths, out[0], plan), rounds=ROUNDS)
    check()
    return [
        row("sample index, one core", one, peer, lengths, "one cache miss a document, 2.6 ns"),
        row("sample index, two threads", two, wall, lengths, "wall; the same misses on two cores, then 1 ns of rows"),
    ]


def token_row(lengths: np.ndarray, index: np.ndarray) -> Row:
    found, needed = thread_medians(
        lambda: count_tokens(lengths, index), lambda: int(np.sum(lengths[index], dtype=np.int64))
    )
    note = "the same misses; NumPy copies the lengths first"
    return row("tokens of shuffled documents", found, needed, lengths, note)


def together_rows(lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan, out: Indices) -> list[Row]:
    for array, needed in zip(out, theirs(lengths, documents, plan), strict=True):
        assert (array == needed).all()
    found, peer = thread_medians(lambda: ours(lengths, documents, plan), lambda: theirs(lengths, documents, plan))
    note = "one cache miss a shuffle step, one a length"
    return [row("document and sample index, one core", found, peer, lengths, note)]


def files_row(lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan, directory: Path) -> Row:
    """From lengths to the three published files, tokens counted and bytes summed; theirs by numpy.save."""

    files = IndexFiles(Location.of(directory), "0f")

    def to_files() -> None:
        writer = ArrayWriter(files)
        counted, rng = planned(lengths, range(len(documents))), RandomState(SEED)
        exposed = range(len(documents))
        build_gpt_index(writer, lengths, exposed, counted, rng, SEQUENCE_LENGTH, threads=THREADS)

    def their_files() -> None:
        assert int(np.sum(lengths[documents])) == plan.tokens_per_epoch
        rng = np.random.RandomState(SEED)
        index = megatron.gpt._build_document_index(documents, plan.num_epochs, rng, plan.separate_final_epoch)
        samples = their_samples(lengths.copy(), index, plan)
        shuffled = megatron.gpt._build_shuffle_index(plan.num_samples_shuffled_first, plan.num_samples, rng)
        for name, array in zip(ARRAYS, (index, samples, shuffled), strict=True):
            np.save(directory / f"their_{name}.npy", array)

    cold, their_cold = interleaved_medians(to_files, their_files, rounds=2)
    for name in ARRAYS:
        assert filecmp.cmp(str(files.array_file(name).local_path), directory / f"their_{name}.npy", shallow=False)
    note = f"wall, {THREADS} threads; first touch of 8 bytes of memory and 7 of files a document"
    return row("all three indices to their files", cold, their_cold, lengths, note)


def memory_rows() -> list[Row]:
    lengths, documents = corpus(10**6)
    return [memory_row(lengths, documents, epochs) for epochs in (1, 3.5)]


def memory_row(lengths: np.ndarray, documents: np.ndarray, epochs: float) -> Row:
    """What NumPy allocates, results included, by tracemalloc; it does not see Megatron's C++ sample index."""
    plan = planned(lengths, documents, epochs)
    each = len(documents) * plan.num_epochs
    found = peak_bytes(lambda: ours(lengths, documents, plan)) / each
    needed = peak_bytes(lambda: theirs(lengths, documents, plan)) / each
    work = f"peak memory a document and epoch, {plan.num_epochs} epochs"
    return Row(work, found, needed, "B", False, "the two arrays")


def row(work: str, seconds: float, peer: float, lengths: np.ndarray, note: str) -> Row:
    nano = 1e9 / len(lengths)
    return Row(f"{work}, {len(lengths):,} documents", seconds * nano, peer * nano, "ns", False, note)


def thread_medians(*runs: Callable[[], object]) -> list[float]:
    """Median CPU seconds of this thread, in turns; the first round warms up."""
    return interleaved_medians(*runs, rounds=ROUNDS, clock=time.thread_time)
