"""Time of a GPT sample of 4,096 tokens from a local file in the page cache: alone, in a micro-batch, and in parts.

Times are of one core. A sample alone is Megatron's `__getitem__`; its collate is counted where it says so. The limit is
to write the outputs: 112 KiB of int64 tokens, labels and positions and float loss mask, 128 with bounds of documents,
16 of int32 tokens alone. Of a micro-batch, Python and three system calls take about 15 us, whatever its length.

With DataLoader workers a batch crosses from a process to the trainer: wall time, after the first batches. The limit is
a dataset that does nothing: one shared row of int32, which torch stacks and sends.

`next()` is timed as a trainer meets it, a step of 5 ms between two: ours reads in it, Megatron's workers have read
ahead. Memory is that of one process over 10^6 micro-batches of one sample, several epochs; nothing is forked for them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.inter_document_masking import InterDocumentDataset
from helpers.oracle import megatron
from torch.utils.data import DataLoader, default_collate

import binidx
from binidx.loader.collate import collate
from binidx.native.arguments import LEVELS, Level
from binidx.native.gpt_samples import GPTRows
from tests.bench.corpus import SEQUENCE_LENGTH, open_ours, open_theirs, run_config, write_corpus
from tests.bench.table import MEGATRON, Conditions, Row, interleaved_medians

CONDITIONS = Conditions(
    cores=1,
    size="400 samples of 4,096 tokens",
    cached="the file in the page cache, indices mapped",
)
NUM_SAMPLES = 400
BATCH = 8
ROUNDS = 9
WORKERS = 2
STEPS, STEP_SECONDS = 4000, 0.005
SHARES = (50, 75, 90, 95, 99, 99.5, 99.9)
"""Percentiles of the curve of `next()`."""

MANY = 1_000_000
CORPUS_BYTES = 600 << 20
LIMIT = "the outputs written once, no more"
DUMMY = "one shared row of int32 instead of data"
THEIR_RULE = f"{MEGATRON} and the rule of its PR 5298"
STACKED = f"of a stacked micro-batch of {BATCH}"


def drain(samples: Iterable[object]) -> None:
    """Let go of each sample before the next: keeping them times the page faults of new memory instead."""
    deque(samples, maxlen=0)


def rows(directory: Path) -> list[Row]:
    """Microseconds a sample, and tokens a second of tokens alone."""
    return [
        *one_process_rows(prefix := write_corpus(directory / "local", CORPUS_BYTES), directory),
        *workers_rows(prefix, directory),
        *next_rows(prefix, directory),
        memory_row(prefix, directory),
    ]


def quick_rows(directory: Path) -> list[Row]:
    """All of one process."""
    return one_process_rows(write_corpus(directory / "local", CORPUS_BYTES), directory)


def workers_rows(prefix: str, directory: Path) -> list[Row]:
    """Megatron, ours and the dummy through torch's DataLoader with worker processes, in turns."""
    ours, theirs = open_ours(prefix, f"{directory}/ours"), open_theirs(prefix, f"{directory}/theirs")
    dummy: Any = [torch.zeros(SEQUENCE_LENGTH + 1, dtype=torch.int32)] * len(ours)
    options = {"num_workers": WORKERS}
    runs = (
        lambda: binidx.build_pretraining_data_loader(ours, 0, BATCH, **options),
        lambda: DataLoader(theirs, batch_size=BATCH, **options),
        lambda: DataLoader(dummy, batch_size=BATCH, **options),
    )
    times = zip(*([micros_of(run()) for run in runs] for _ in range(ROUNDS)), strict=True)
    own, megatrons, dummy_row = map(statistics.median, times)
    conditions = replace(CONDITIONS, cores=0, workers=WORKERS, size=f"{8 * NUM_SAMPLES:,} samples of 4,096 tokens")
    work = f"a sample of a micro-batch of {BATCH}, {WORKERS} DataLoader workers"
    return [
        Row(work, own, megatrons, "µs", False, "wall", conditions=conditions),
        Row(f"{work}, to the limit", own, dummy_row, "µs", False, "wall; goal 0.77x", DUMMY, conditions=conditions),
    ]


def next_rows(prefix: str, directory: Path) -> list[Row]:
    """Percentiles of `next()`: ours without workers, theirs with them."""
    ours = binidx.build_pretraining_data_loader(open_ours(prefix, f"{directory}/ours"), 0, BATCH)
    theirs = DataLoader(open_theirs(prefix, f"{directory}/theirs"), batch_size=BATCH, num_workers=WORKERS)
    waits = {"binidx, no workers": waits_of(ours), f"{MEGATRON}, {WORKERS} workers": waits_of(theirs)}
    series = {
        name: {f"p{share:g}": float(np.percentile(times, share)) for share in SHARES} for name, times in waits.items()
    }
    size = f"{STEPS:,} micro-batches of {BATCH} x 4,096 tokens"
    conditions = replace(CONDITIONS, cores=0, workers=WORKERS, size=size)
    return [
        Row(f"next() of a trainer, {point}", *(line[point] for line in series.values()), "µs", False,
            "ours without workers", conditions=conditions, series=series if point == "p50" else {})
        for point in ("p50", "p99", "p99.9")
    ]  # fmt: skip


def waits_of(loader: Any) -> list[float]:
    """Microseconds that each `next()` takes, after the first ones, with a step between them that needs no CPU."""
    batches, waits = iter(loader), []
    drain(itertools.islice(batches, 2 * WORKERS))
    for _ in range(STEPS):
        began = time.perf_counter()
        next(batches)
        waits.append(1e6 * (time.perf_counter() - began))
        time.sleep(STEP_SECONDS)
    return waits


def memory_row(prefix: str, directory: Path) -> Row:
    """Resident memory over 10^6 batches, of it what is not a mapped file."""
    ours: Any = binidx.build_pretraining_data_loader(open_ours(prefix, f"{directory}/ours"), 0, 1)
    batches = itertools.chain.from_iterable(itertools.repeat(ours))
    resident, private = dict[str, float](), dict[str, float]()
    for batch in range(0, MANY + 1, MANY // 10):
        drain(itertools.islice(batches, MANY // 10 if batch else 1000))
        point = f"{batch or 1000:,}"
        resident[point], private[point] = memory_mib("VmRSS"), memory_mib("RssAnon")
    assert not multiprocessing.active_children()
    conditions = replace(CONDITIONS, size=f"{MANY:,} micro-batches of 4,096 tokens")
    most, first = max(list(resident.values())[1:]), resident[f"{MANY // 10:,}"]
    against, series = f"after the first {MANY // 10:,}", {"resident": resident, "without mapped files": private}
    return Row("most resident memory", most, first, "MiB", False, "no process started", against,
               conditions=conditions, series=series)  # fmt: skip


def memory_mib(field: str) -> float:
    """Return a field of this process's status, such as VmRSS."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def micros_of(loader: Any) -> float:
    """Wall time of a sample, after the first batch of each worker."""
    batches = iter(loader)
    drain(itertools.islice(batches, 2 * WORKERS))
    began = time.perf_counter()
    drain(itertools.islice(batches, 8 * NUM_SAMPLES // BATCH))
    taken = time.perf_counter() - began
    return 1e6 * taken / (8 * NUM_SAMPLES)


def one_process_rows(prefix: str, directory: Path) -> list[Row]:
    runs = works(prefix, directory)
    medians = interleaved_medians(*runs.values(), rounds=ROUNDS, clock=time.thread_time)
    micros = {name: 1e6 / NUM_SAMPLES * seconds for name, seconds in zip(runs, medians, strict=True)}
    return [
        row("one sample", micros["one"], micros["their one"], "of it 2 µs to see whether the file changed"),
        row(f"a sample {STACKED}, against one", micros["stacked"], micros["their one"], "goal 10x and 6 µs"),
        row(f"a sample {STACKED}, against the same", micros["stacked"], micros["their stacked"]),
        row(f"a sample {STACKED}, to the limit", micros["stacked"], micros["write"], against=LIMIT),
        row(
            "one sample, with bounds of documents",
            micros["one, bounds"],
            micros["their one, bounds"],
            against=THEIR_RULE,
        ),
        row(
            f"a sample {STACKED}, with bounds of documents, against one",
            micros["stacked, bounds"],
            micros["their one, bounds"],
            "goal 18x",
            THEIR_RULE,
        ),
        row(f"a sample {STACKED}, EODs reset", micros["stacked, resets"], micros["their one, resets"]),
        *(
            row(f"the C alone, {level.name}", micros[level.name], micros["write"], "from numbers to rows", LIMIT)
            for level in map(Level, LEVELS)
        ),
        Row(
            f"int32 tokens alone, (B, S + 1) of {BATCH}",
            SEQUENCE_LENGTH / micros["tokens alone"],
            SEQUENCE_LENGTH / micros["their one"],
            "Mtok/s",
            True,
            "goal 1,500; labels are a view",
        ),
    ]


def row(work: str, ours: float, theirs: float, note: str = "", against: str = MEGATRON) -> Row:
    return Row(work, ours, theirs, "µs", False, note, against)


def works(prefix: str, directory: Path) -> dict[str, Callable[[], object]]:
    """All that is timed: each goes over the same samples."""
    ours, theirs = open_ours(prefix, f"{directory}/ours"), open_theirs(prefix, f"{directory}/theirs")
    bounds, their_bounds = with_option(prefix, directory, inter_document_masking=True), between_documents(theirs)
    resets = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
    our_resets, their_resets = with_option(prefix, directory, **resets), their_option(prefix, directory, **resets)
    idxs = np.random.default_rng(0).integers(0, len(ours), NUM_SAMPLES).tolist()
    batches = [idxs[i : i + BATCH] for i in range(0, NUM_SAMPLES, BATCH)]

    def stacked(dataset: Any) -> Callable[[], object]:
        return lambda: drain(collate(dataset.__getitems__(batch)) for batch in batches)

    return {
        "one": lambda: drain(map(ours.__getitem__, idxs)),
        "their one": lambda: drain(map(theirs.__getitem__, idxs)),
        "stacked": stacked(ours),
        "their stacked": lambda: drain(default_collate([theirs[idx] for idx in batch]) for batch in batches),
        "one, bounds": lambda: drain(map(bounds.__getitem__, idxs)),
        "their one, bounds": lambda: drain(map(their_bounds.__getitem__, idxs)),
        "stacked, bounds": stacked(bounds),
        "stacked, resets": stacked(our_resets),
        "their one, resets": lambda: drain(map(their_resets.__getitem__, idxs)),
        "tokens alone": lambda: drain(map(ours.read_tokens, batches)),
        "write": lambda: drain(write_once(len(batch)) for batch in batches),
        **{level.name: in_c(ours, batches, level) for level in map(Level, LEVELS)},
    }


def with_option(prefix: str, directory: Path, **options: Any) -> Any:
    config = binidx.GPTDatasetConfig(**{**run_config(prefix, f"{directory}/ours"), **options})
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None, 0, 0], lambda: True, config).build()[0]


def their_option(prefix: str, directory: Path, **options: Any) -> Any:
    config = megatron.gpt.GPTDatasetConfig(**{**run_config(prefix, f"{directory}/theirs"), **options})
    builder = megatron.builder.BlendedMegatronDatasetBuilder(
        megatron.gpt.GPTDataset, [None, 0, 0], lambda: True, config
    )
    return builder.build()[0]


def between_documents(theirs: Any) -> Any:
    arguments = (theirs.dataset_path, theirs.indices, theirs.num_samples, theirs.index_split, theirs.config)
    return InterDocumentDataset(theirs.dataset, *arguments)


def write_once(num_samples: int) -> None:
    np.empty(28 * num_samples * SEQUENCE_LENGTH // 8, np.int64).fill(7)


def in_c(dataset: Any, batches: list[list[int]], level: Level) -> Callable[[], object]:
    """The call of C for each batch, into rows that are there."""
    rows = GPTRows(dataset.assemble_function.recipe, BATCH)
    about = dataset.dataset.bin_reader._content.taking(ask_ahead=False)
    return lambda: drain(rows.read(dataset.order.index, about, batch, range(BATCH), level) for batch in batches)
