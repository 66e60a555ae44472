"""Nanoseconds an item of one core: the shuffle against NumPy's, and the document index against Megatron Core's.

The limit is memory: a swap moves a cache line of 64 bytes in and out again, 3 ns at the 40 GB/s of one core, and about
half of that where the array, 40 MB, is not much larger than the last cache. Both sides shuffle the same array, with
huge pages, in turns, and what they make of it is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from helpers.oracle import megatron

from binidx.index.document_sample import build_document_index
from binidx.native.arguments import LEVELS
from binidx.native.permutations import RandomState
from tests.bench.table import Conditions, Row, interleaved_medians, peak_bytes

CONDITIONS = Conditions(cores=1, size="int32 numbers in memory", cached="nothing")
NUM_ITEMS = (10**7, 10**8)
NUM_DOCUMENTS = 10**7
ROUNDS = 3
SEED = 1234


def rows(directory: Path) -> list[Row]:
    """The shuffle at every level of this machine, then the document index at the best one."""
    return [row for num_items in NUM_ITEMS for row in shuffle_rows(num_items)] + [document_row(1), document_row(4)]


def quick_rows(directory: Path) -> list[Row]:
    """The shuffle of the smaller array."""
    return shuffle_rows(NUM_ITEMS[0])


def shuffle_rows(num_items: int) -> list[Row]:
    array = np.arange(num_items, dtype=np.int32)
    check_equal(array)
    runs = [lambda level=level: RandomState(SEED, level=level).shuffle(array) for level in LEVELS]
    *ours, theirs = medians(num_items, *runs, lambda: np.random.RandomState(SEED).shuffle(array))
    return [
        Row(f"shuffle of {num_items:,} int32, {level.name}", each, theirs, "ns", False, "128 B of lines moved", "NumPy")
        for level, each in zip(LEVELS, ours, strict=True)
    ]


def check_equal(array: np.ndarray) -> None:
    """Every level makes what NumPy makes, here too."""
    needed = array.copy()
    np.random.RandomState(SEED).shuffle(needed)
    for level in LEVELS:
        found = array.copy()
        RandomState(SEED, level=level).shuffle(found)
        assert (found == needed).all()


def document_row(num_epochs: int) -> Row:
    documents = np.arange(NUM_DOCUMENTS, dtype=np.int32)
    theirs = partial(megatron.gpt._build_document_index, documents, num_epochs, separate_final_epoch=False)
    ours = partial(build_document_index, documents, num_epochs, separate_final_epoch=False)
    runs = [lambda: ours(rng=RandomState(SEED)), lambda: theirs(numpy_random_state=np.random.RandomState(SEED))]
    assert (runs[0]() == runs[1]()).all()
    size = NUM_DOCUMENTS * num_epochs
    peaks = [peak_bytes(run) / size for run in runs]
    assert peaks[0] < 4.01
    work = f"document index of {NUM_DOCUMENTS:,} documents x {num_epochs}"
    note = f"peak of {peaks[0]:.0f} B against {peaks[1]:.0f} B a document and epoch; pages of new memory included"
    return Row(work, *medians(size, *runs), "ns", False, note)


def medians(num_items: int, *runs: Callable[[], object]) -> list[float]:
    """Nanoseconds of a core for each item."""
    return [1e9 / num_items * each for each in interleaved_medians(*runs, rounds=ROUNDS, clock=time.thread_time)]
