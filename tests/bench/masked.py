"""Masked datasets: nanoseconds a document of the sample index, against Megatron Core's C++; and microseconds a sample.

Documents of 1 to 59 sentences of 23 tokens. Samples are of S = 512, out of a local file, one at a time as Megatron
gives them and in batches. Times are CPU time of the one thread, medians of runs in turn.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from helpers.masked_datasets import BERT, OPTIONS, OWN, T5, build, megatrons, process_group, write_sentences
from helpers.oracle import megatron

import binidx
from binidx.index.masked_samples import build_mapping
from tests.bench.table import Conditions, Row, interleaved_medians

CONDITIONS = Conditions(cores=1, size="1,000,000 documents; samples of 512 tokens", cached="the file in the page cache")
NUM_DOCUMENTS = 10**6
MANY = 10**15
ROUNDS = 3
SAMPLES = 300
BATCH = 20


def rows(directory: Path) -> list[Row]:
    return [
        mapping_row("one epoch", 1, 0.1),
        mapping_row("5 epochs", 5, 0.1),
        mapping_row("5 epochs, no short samples", 5, 0.0),
        *sample_rows("BERT", BERT, directory),
        *sample_rows("T5", T5, directory),
    ]


def mapping_row(work: str, num_epochs: int, short: float) -> Row:
    rng = np.random.default_rng(0)
    docs = np.concatenate([[0], np.cumsum(rng.integers(1, 60, NUM_DOCUMENTS))])
    sizes = (1 + rng.lognormal(3, 0.5, docs[-1])).astype(np.int32)
    args = (docs, sizes, num_epochs, MANY, 509, short, 1234, False, 2)
    assert (build_mapping(*args) == megatron.helpers.build_mapping(*args)).all()
    runs = (partial(build_mapping, *args), partial(megatron.helpers.build_mapping, *args))
    times = interleaved_medians(*runs, rounds=ROUNDS, clock=time.thread_time)
    ours, needed = (each / NUM_DOCUMENTS / num_epochs * 1e9 for each in times)
    return Row(f"masked sample index, {work}", ours, needed, "ns a document", False)


def sample_rows(name: str, kind: Any, directory: Path) -> list[Row]:
    own = directory / name
    own.mkdir()
    prefix = write_sentences(own / "en", 2000, np.random.default_rng(0), longest=90)
    options = {**OPTIONS, **OWN[kind], "sequence_length": 512}
    ours = build(kind, [prefix], (SAMPLES, 0, 0), **options)[0]
    with process_group(own):
        needed = megatrons(kind, prefix, binidx.Split.train, SAMPLES, str(own / "cache"), **options)

    def batches() -> None:
        for first in range(0, SAMPLES, BATCH):
            ours.__getitems__(range(first, first + BATCH))

    def singly(dataset: Any) -> None:
        for idx in range(SAMPLES):
            dataset[idx]

    runs = (batches, partial(singly, ours), partial(singly, needed))
    times = interleaved_medians(*runs, rounds=ROUNDS, clock=time.thread_time)
    batch, one, their = (each / SAMPLES * 1e6 for each in times)
    return [
        Row(f"{name} sample, in batches of {BATCH}", batch, their, "us", False, "Megatron has no batches"),
        Row(f"{name} sample", one, their, "us", False),
    ]
