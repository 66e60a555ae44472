"""Where the microseconds of a sample, a batch through workers, and a ranged request go: CPU by part.

cProfile runs with the CPU clock of its thread. A C function counts for the Python function that calls it, unless a part
names it. The profiler's own time, which is taken as equal for all calls, is subtracted: parts add up to the CPU of the
same work without a profiler. From Python 3.12 on cProfile mixes the threads of a process: there only one is profiled.

The limits: the outputs written once; a dataset that does nothing, through the same workers; the system calls of a
request.
"""

from __future__ import annotations

import asyncio
import cProfile
import functools
import json
import multiprocessing.util
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.loader.collate import collate
from binidx.storage.threads import io_loop
from tests.bench.corpus import SEQUENCE_LENGTH, open_ours, write_corpus
from tests.bench.item_time import BATCH, DUMMY, LIMIT, WORKERS, drain, write_once
from tests.bench.race import DELAY_MS, far_away, store
from tests.bench.remote import check_reached, own_requests
from tests.bench.table import Conditions, Row, seconds

CORPUS_BYTES, NUM_SAMPLES, NUM_DIFFERENT = 256 << 20, 6400, 400
SAMPLES_A_READ, READS, ROUNDS = 64, 10, 9
CONDITIONS = Conditions(
    cores=1, size=f"{NUM_SAMPLES:,} samples of 4,096 tokens", cached="the file in the page cache, indices mapped"
)
LOOKUP = r"binidx_(served|count|sample|locate)"
SAMPLE = {
    r"binidx_read_samples": "C: bytes to tokens, labels, masks, positions",
    r"posix\.stat|_check_unchanged": "stat: did the file change?",
    r"torch_bridge|collate|torch\.": "collate: tensors over the rows",
    r"/native/|_cffi_backend|frombuffer": "memory of a batch, arguments of the call",
    r"storage/stats|storage/usage_report": "statistics",
    r"": "Python between them",
}
BATCHES = {
    r"multiprocessing|utils/data|pickle|queue|select\.|threading|posix|torch_bridge|torch\.": "queues, pipes, tensors",
    r"loader/|shared_|_slot|binidx_gather": "the batch to a block of int32, and back",
    r"": "samples, memory of batches",
}
SYSTEM = "system calls: send, receive, poll"
REQUEST = {
    r"_socket|select\.epoll|posix\.": SYSTEM,
    r"asyncio|selectors": "event loop",
    r"range_client|direct\.py": "heads of requests and responses, connections",
    r"identity\.py": "check of each response",
    r"/requests/|storage/": "scheduler: requests of a read, retries, statistics",
    r"": "samples: numbers to ranges, bytes to rows",
}


Timer = Callable[[], float]
Function = tuple[str, float, float]
"""Name, own seconds under the profiler, and seconds of the profiler among them if a call costs what it does alone."""


WAYS: dict[str, Timer | None] = {"plain": None, "profiled": time.thread_time}
"""Timers of the two runs of work that waits."""


class Spent(NamedTuple):
    """CPU seconds of a thread and of its process, and the functions of the thread if it was profiled."""

    thread: float
    process: float
    functions: list[Function]


class Clock:
    """Counts the CPU of the thread that starts and stops it.

    Args:
        timer: of a profile; None: none is made.
    """

    def __init__(self, timer: Timer | None = None) -> None:
        self.costs = costs_of_calls(timer) if timer else {}
        self.began = time.thread_time(), time.process_time()
        self.profile = cProfile.Profile(timer) if timer else None
        if self.profile:
            self.profile.enable()

    def stop(self) -> Spent:
        if self.profile:
            self.profile.disable()
        now = time.thread_time(), time.process_time()
        functions = [*functions_of(self.profile, self.costs)] if self.profile else []
        return Spent(now[0] - self.began[0], now[1] - self.began[1], functions)


def functions_of(profile: cProfile.Profile, costs: Mapping[bool, tuple[float, float]]) -> Iterator[Function]:
    """Yield the functions of a profile; C functions by caller.

    Args:
        costs: seconds that the profiler adds to a called function and to its caller, by whether the former is of C.
    """
    for entry in profile.getstats():
        caller = entry.code if isinstance(entry.code, str) else f"{entry.code.co_filename}:{entry.code.co_name}"
        calls = entry.calls or ()
        if not isinstance(entry.code, str):
            added = sum(call.callcount * costs[isinstance(call.code, str)][1] for call in calls)
            yield caller, entry.inlinetime, entry.callcount * costs[False][0] + added
        for call in calls:
            if isinstance(call.code, str):
                yield f"{call.code} {caller}", call.inlinetime, call.callcount * costs[True][0]


@functools.cache
def costs_of_calls(timer: Timer, count: int = 200_000) -> dict[bool, tuple[float, float]]:
    """Return the `costs` of `functions_of`, by calls of functions that do nothing."""

    def nothing() -> None:
        pass

    def call(function: Callable[[], object]) -> None:
        for _ in range(count):
            function()

    found = {}
    for function in (nothing, [].clear):
        plain, profile = seconds(lambda f=function: call(f), time.thread_time), cProfile.Profile(timer)
        profile.runcall(call, function)
        stats = {str(getattr(entry.code, "co_name", entry.code)): entry.inlinetime for entry in profile.getstats()}
        called = sum(stats.values()) - stats["call"]
        found[function is not nothing] = called / count, (stats["call"] - plain) / count
    return found


def parts_of(plain: Spent, profiled: Spent, names: Mapping[str, str]) -> dict[str, float]:
    """Return CPU seconds by part: each function counts for the first pattern that its name matches."""
    _, times, added = zip(*profiled.functions, strict=True)
    factor = (sum(times) - plain.thread) / sum(added)
    found = dict.fromkeys(names.values(), 0.0)
    for function, own, more in profiled.functions:
        found[next(name for pattern, name in names.items() if re.search(pattern, function))] += own - factor * more
    return {name: max(value, 0.0) for name, value in found.items()}


def rows(directory: Path) -> list[Row]:
    """Microseconds, and their parts."""
    prefix = write_corpus(directory / "local", CORPUS_BYTES)
    found = [sample_row(prefix, directory)]
    if sys.version_info < (3, 12):
        found += [workers_row(prefix, directory), request_row(prefix, directory)]
    return found


def row(work: str, parts: Mapping[str, float], count: float, limit: float, against: str, **more: Any) -> Row:
    """Return the row of a work that was done `count` times."""
    micros = {name: 1e6 * value / count for name, value in parts.items()}
    total = sum(micros.values())
    return Row(work, total, 1e6 * limit / count, "µs", False, "CPU", against, series={"µs": micros}, **more)


def spent_on(run: Callable[[], object], timer: Timer | None = None) -> Spent:
    clock = Clock(timer)
    run()
    return clock.stop()


def both(run: Callable[[], object]) -> tuple[Spent, Spent]:
    """Return what a run that never waits costs without a profiler and with it: the least of runs in turns."""
    pairs = [(spent_on(run), spent_on(run, time.perf_counter)) for _ in range(ROUNDS)]
    plain, profiled = zip(*pairs, strict=True)
    return min(plain), min(profiled)


def sample_row(prefix: str, directory: Path) -> Row:
    """From sample numbers to a stacked batch; the order is looked up once more by itself, as the C does all at once."""
    ours = open_ours(prefix, f"{directory}/ours")
    idxs = np.random.default_rng(0).integers(0, len(ours), NUM_DIFFERENT).tolist()
    batches = [idxs[i : i + BATCH] for i in range(0, NUM_DIFFERENT, BATCH)] * (NUM_SAMPLES // NUM_DIFFERENT)
    parts = parts_of(*both(lambda: drain(collate(ours.__getitems__(batch)) for batch in batches)), SAMPLE)
    index = ours.order.index
    looked_up = parts_of(
        *both(lambda: drain(index.sequences.locate(index.spans(batch)[0]) for batch in batches)),
        {LOOKUP: "C: numbers to spans to byte ranges", r"": ""},
    )
    del looked_up[""]
    parts[SAMPLE[r"binidx_read_samples"]] -= sum(looked_up.values())
    limit = seconds(lambda: drain(write_once(len(batch)) for batch in batches), time.thread_time)
    return row("a sample of a stacked micro-batch of 8, local", {**looked_up, **parts}, NUM_SAMPLES, limit, LIMIT)


def workers_row(prefix: str, directory: Path) -> Row:
    """A batch through workers: the parts of both sides, and of the threads that write to their queues."""
    ours = open_ours(prefix, f"{directory}/ours")
    dummy: Any = [torch.zeros(SEQUENCE_LENGTH + 1, dtype=torch.int32)] * len(ours)
    build = partial(binidx.build_pretraining_data_loader, ours, 0, BATCH)
    plain, profiled = (through_workers(build, directory / name, timer) for name, timer in WAYS.items())
    limit = through_workers(partial(DataLoader, dummy, batch_size=BATCH), directory / "dummy")
    parts = defaultdict[str, float](float)
    for side, ours_of, with_profiler in zip(("trainer", *["workers"] * WORKERS), plain, profiled, strict=True):
        for name, value in parts_of(ours_of, with_profiler, BATCHES).items():
            parts[f"{side}: {name}"] += value
        parts[f"{side}: threads that write to queues"] += ours_of.process - ours_of.thread
    conditions = replace(CONDITIONS, cores=0, workers=WORKERS)
    return row(f"a sample of a micro-batch of 8 through {WORKERS} workers", parts, NUM_SAMPLES,
               sum(each.process for each in limit), DUMMY, conditions=conditions)  # fmt: skip


def through_workers(build: Callable[..., Any], folder: Path, timer: Timer | None = None) -> list[Spent]:
    """Return what the trainer spent, and each worker, after the first batches."""
    folder.mkdir()
    batches = iter(build(num_workers=WORKERS, worker_init_fn=partial(start_worker, folder, timer)))
    drain(islice(batches, 2 * WORKERS))
    spent = [spent_on(partial(drain, islice(batches, NUM_SAMPLES // BATCH)), timer)]
    del batches  # the workers end
    return [*spent, *(Spent(*json.loads(path.read_text())) for path in sorted(folder.iterdir()))]


def start_worker(folder: Path, timer: Timer | None, number: int) -> None:
    """Count from here to the end of a worker."""
    clock = Clock(timer)

    def write() -> None:
        (folder / str(number)).write_text(json.dumps(clock.stop()))

    multiprocessing.util.Finalize(None, write, exitpriority=100)


def request_row(prefix: str, directory: Path) -> Row:
    """Reads of many samples from S3: the parts of the event loop's thread, and of the thread that reads."""
    with store(directory) as (server, bucket):
        convert_dataset(prefix, f"{bucket}/parts", verify="size")
        with far_away(server):
            ours = open_ours(f"{bucket}/parts", f"{directory}/remote")
            reads = [range(first * SAMPLES_A_READ, (first + 1) * SAMPLES_A_READ) for first in range(3 * READS)]
            run_of = [lambda part=part: drain(map(ours.__getitems__, reads[part::3])) for part in range(3)]
            run_of[0]()
            (plain, requests), (profiled, _) = map(spent_on_requests, run_of[1:], WAYS.values())
    parts = dict.fromkeys(REQUEST.values(), 0.0)
    for without, with_profiler in zip(plain, profiled, strict=True):
        for name, value in parts_of(without, with_profiler, REQUEST).items():
            parts[name] += value
    parts["other threads"] = max(plain[0].process - sum(each.thread for each in plain), 0.0)
    conditions = Conditions(0, f"{READS} reads of {SAMPLES_A_READ} samples, documents shuffled", "open connections")
    return row(f"a ranged request, {DELAY_MS} ms away", parts, requests, parts[SYSTEM], SYSTEM, conditions=conditions)


def spent_on_requests(run: Callable[[], object], timer: Timer | None) -> tuple[list[Spent], float]:
    """Return what this thread and that of the event loop spent, and the number of requests."""

    async def call(function: Callable[[], Any]) -> Any:
        return function()

    def on_loop(function: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call(function), io_loop()).result()

    before, began = own_requests(), time.perf_counter()
    clock = on_loop(partial(Clock, timer))
    spent = [spent_on(run, timer), on_loop(clock.stop)]
    check_reached("reads of samples", requests := own_requests() - before, time.perf_counter() - began, DELAY_MS)
    return spent, requests
