"""The document index and the sample index: alone, together, in memory and into their files.

Documents of lognormal length, 1,000 tokens on average, in samples of 4,096. Megatron Core's sample index is its C++
function without the Python around it; its document index is its Python. Times are CPU time of the one thread, medians
of runs in turn; those of two threads and of files are wall time. BINIDX_BENCH_DOCUMENTS=100000000 needs 8 GiB.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from oracle import megatron

from binidx import native
from binidx.index.document_sample import Indices, build_document_and_sample_index, empty_indices
from binidx.index.epochs import EpochPlan, plan_epochs
from binidx.index.sample import count_tokens
from binidx.native import RandomState
from tests.bench.table import Row, interleaved_medians, peak_bytes

NUM_DOCUMENTS = int(os.environ.get("BINIDX_BENCH_DOCUMENTS", 10**7))
SEQUENCE_LENGTH = 4096
SEED = 1234
ROUNDS = 5 if NUM_DOCUMENTS <= 10**7 else 3


def rows(directory: Path) -> list[Row]:
    """Nanoseconds a document, then bytes a document and epoch."""
    lengths, documents = corpus(NUM_DOCUMENTS)
    plan = planned(lengths, documents)
    out = empty_indices(len(documents), plan.num_epochs, plan.num_samples)
    ours(lengths, documents, plan, out)
    return [
        *sample_rows(lengths, plan, out),
        token_row(lengths, out[0]),
        *together_rows(lengths, documents, plan, out, directory),
        *memory_rows(),
    ]


def corpus(num_documents: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.random.default_rng(0).lognormal(np.log(1000) - 0.5, 1.0, num_documents)
    return np.maximum(lengths, 1).astype(np.int32), np.arange(num_documents, dtype=np.int32)


def planned(lengths: np.ndarray, documents: np.ndarray, epochs: float = 1) -> EpochPlan:
    tokens = count_tokens(lengths, documents)
    asked = None if epochs == 1 else int(epochs * tokens / SEQUENCE_LENGTH)
    return plan_epochs(tokens, SEQUENCE_LENGTH, asked, add_extra_token=True, drop_last_partial=True)


def ours(lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan, out: Indices | None = None) -> Indices:
    return build_document_and_sample_index(lengths, documents, plan, RandomState(SEED), SEQUENCE_LENGTH, out=out)


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
        native.sample_index(
            lengths, out[0], SEQUENCE_LENGTH, plan.num_tokens, out[1], add_extra_token=True, threads=threads
        )

    def check() -> None:
        assert (out[1] == their_samples(lengths, out[0], plan)).all()

    check()
    one, peer = thread_medians(lambda: build(1), lambda: their_samples(lengths, out[0], plan))
    two, wall = interleaved_medians(lambda: build(2), lambda: their_samples(lengths, out[0], plan), rounds=ROUNDS)
    check()
    return [
        row("sample index, one core", one, peer, "one cache miss a document"),
        row("the same, two threads", two, wall, "wall; the same misses on two cores"),
    ]


def token_row(lengths: np.ndarray, index: np.ndarray) -> Row:
    found, needed = thread_medians(
        lambda: count_tokens(lengths, index), lambda: int(np.sum(lengths[index], dtype=np.int64))
    )
    return row("tokens of shuffled documents", found, needed, "the same misses; NumPy copies the lengths first")


def together_rows(
    lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan, out: Indices, directory: Path
) -> list[Row]:
    def to_files() -> None:
        files = tuple(
            np.lib.format.open_memmap(directory / f"ours{n}.npy", "w+", array.dtype, array.shape)
            for n, array in enumerate(out)
        )
        ours(lengths, documents, plan, files)  # type: ignore[arg-type]

    def their_files() -> None:
        for n, array in enumerate(theirs(lengths, documents, plan)):
            np.save(directory / f"theirs{n}.npy", array)

    for array, needed in zip(ours(lengths, documents, plan, out), theirs(lengths, documents, plan), strict=True):
        assert (array == needed).all()
    warm, new, peer = thread_medians(
        warmed(lengths, documents, plan, out),
        lambda: ours(lengths, documents, plan, out),
        lambda: theirs(lengths, documents, plan),
        rounds=3,
    )
    cold, their_cold = interleaved_medians(to_files, their_files, rounds=2)
    for n in range(2):
        assert (directory / f"ours{n}.npy").read_bytes() == (directory / f"theirs{n}.npy").read_bytes()
    return [
        row("document and sample index, warm memory", warm, peer, "one cache miss a shuffle step, 46 bytes of streams"),
        row("the same, records in new memory", new, peer, "and the first touch of 8 bytes, dear in a VM"),
        row("the same into new .npy files", cold, their_cold, "wall; first touch of memory and of files"),
    ]


def warmed(lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan, out: Indices) -> Callable[[], None]:
    """What `ours` does for one epoch, on records that are there already."""
    records, epoch = np.zeros(len(documents), np.int64), native.Samples(lengths, documents)
    samples = native.Samples(lengths, out[0], SEQUENCE_LENGTH, plan.num_tokens, plan.num_samples, add_extra_token=True)

    def run() -> None:
        tokens = native.fill_records(epoch, records)
        native.shuffle_records(samples, RandomState(SEED), records, 0, 0, tokens, out[1])
        native.put_end(samples, out[1], tokens)

    return run


def memory_rows() -> list[Row]:
    lengths, documents = corpus(10**6)
    return [memory_row(lengths, documents, epochs) for epochs in (1, 3.5)]


def memory_row(lengths: np.ndarray, documents: np.ndarray, epochs: float) -> Row:
    """What NumPy allocates beside the results of `out`, by tracemalloc; it does not see Megatron's C++ sample index."""
    plan = planned(lengths, documents, epochs)
    out = empty_indices(len(documents), plan.num_epochs, plan.num_samples)
    each = len(documents) * plan.num_epochs
    found = peak_bytes(lambda: ours(lengths, documents, plan, out)) / each
    shuffled = plan.num_epochs - (plan.separate_final_epoch and plan.num_epochs > 1)
    assert found < 8 * shuffled / plan.num_epochs + 0.1  # the formula of its docstring
    needed = peak_bytes(lambda: theirs(lengths, documents, plan)) / each
    work = f"peak memory a document and epoch, {plan.num_epochs} epochs"
    return Row(work, found, needed, "B", False, "records of 8 bytes; results lie in files")


def row(work: str, seconds: float, peer: float, note: str) -> Row:
    nano = 1e9 / NUM_DOCUMENTS
    return Row(f"{work}, {NUM_DOCUMENTS:,} documents", seconds * nano, peer * nano, "ns", False, note)


def thread_medians(*runs: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Median CPU seconds of this thread, in turns; the first round warms up."""
    times = [[thread_seconds(run) for run in runs] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def thread_seconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return time.thread_time() - start
