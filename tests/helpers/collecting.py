"""Process that collects garbage at each opcode of a path in turn; `helpers.forked_ranks` forks it: {"path": PATH}.

For each opcode the path runs anew, with a garbage loader, recorder or builder at hand whose own code the path is. A
lock that is held there and that the finalizer takes would stop the process for good, which ends it after 20 s.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from types import FrameType
from typing import Any

from helpers.readahead_loaders import Numbers, loader, wait_for

from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.loader.losses import LossRecorder
from binidx.loader.readahead import GroupRead, ReadAheadDataset
from binidx.loader.samplers import build_sampler
from binidx.storage.cache.filling import CacheFilling
from binidx.storage.stats import add_usage, usage
from binidx.storage.usage_report import log_report

HANG_SECONDS = 20
TRACED = (
    *(
        "readahead.py",
        "readahead_window.py",
        "filling.py",
        "fill_progress.py",
        "fill_plan.py",
        "losses.py",
        "threads.py",
        "stats.py",
        "memory.py",
    ),
    *("cancellation.py", "threading.py", "_base.py", "torch_loader.py", "logging/__init__.py"),
    "indexed_dataset_builder.py",
)

Scene = tuple[Callable[[], object], Callable[[], object]]
"""Path to run while its owner is garbage, and whether the owner was cleaned up."""


def read_ahead() -> Scene:
    """A thread that pauses before it reads a group, and the trainer that hurries it and waits for it."""
    ahead, group = _queue()

    def path() -> None:
        group.run(lambda batch: [0])
        group.hurry()
        group.wait()

    return path, lambda: ahead.threads._scope.cancelled


def filling() -> Scene:
    """Threads that fill a cache, and wait for each other."""
    ahead, _ = _queue()
    fill = ahead.filling = CacheFilling([], lambda: None, is_expected=False)  # type: ignore[arg-type, return-value]

    def path() -> None:
        with fill.progress.trainer_waiting(), fill.progress.measuring_ranges(1):
            fill.progress._arrival.wait(0.0)
        fill.progress.note_arrival()

    return path, lambda: ahead.threads._scope.cancelled and fill._scope.cancelled


def _queue() -> tuple[Any, GroupRead]:
    owner: Any = ReadAheadDataset(Numbers(40), build_sampler("single", range(40), 0, 4, 0, 1), num_batches=4)
    ahead = owner._queue = owner._start()
    ahead.window.groups.append(group := GroupRead([[0]], pause=0.0001))
    owner.cycle = owner
    return ahead, group


def losses() -> Scene:
    """The thread that writes the losses of a recorder."""
    folder = tempfile.mkdtemp()
    recorder: Any = LossRecorder(folder)
    recorder.record(0, [0.5])
    recorder.cycle, write, rows = recorder, recorder._write, recorder._rows
    recorder.record(1, [0.5])
    return write, lambda: not rows and os.listdir(folder)


def counters() -> Scene:
    """The counters of the process, and the log to which an iteration's report goes."""
    iteration: Any = iter(loader(Numbers(40), 0))
    next(iteration)
    iteration.cycle = iteration
    before, logged = usage(), len(reports)

    def path() -> None:
        add_usage({"seconds": 0.0})
        log_report(before)

    return path, lambda: len(reports) >= logged + 2


def builder() -> Scene:
    """A builder that writes while another one, which was not finalized, is garbage."""
    folder = tempfile.mkdtemp()
    unfinished: Any = IndexedDatasetBuilder(f"{folder}/unfinished.bin")
    unfinished.add_document([1, 2], [2])
    unfinished.cycle = unfinished

    def path() -> None:
        with IndexedDatasetBuilder(f"{folder}/en.bin") as other:
            other.add_document([1, 2], [2])

    return path, lambda: not os.listdir(folder)


reports: list[logging.LogRecord] = []


def run(make: Callable[[], Scene]) -> int:
    """Run a path once for each of its opcodes; return their number."""
    count_opcodes(make, 0)  # imports what the path does: else each collection looks at all of pandas
    gc.freeze()
    stop = 1
    while count_opcodes(make, stop) >= stop:
        stop += 1
    return stop - 1


def count_opcodes(make: Callable[[], Scene], stop: int) -> int:
    """Run a path, and the collector at one of its opcodes; return their number."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    gc.collect()
    path, is_done = make()
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = frame.f_code.co_filename.endswith(TRACED)
        if event == "opcode":
            count += 1
            if count == stop:
                gc.collect()
        return trace

    sys.settrace(trace)
    path()
    sys.settrace(None)
    gc.collect()
    wait_for(is_done, 2 * HANG_SECONDS)
    return count


class Kept(logging.Handler):
    """Handler that keeps what is logged, as one with a lock of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        reports.append(record)


def main(how: dict[str, str]) -> None:
    logging.getLogger("binidx").addHandler(Kept())
    logging.getLogger("binidx").setLevel(logging.INFO)
    gc.disable()
    print(run(globals()[how["path"]]))
