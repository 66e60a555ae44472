"""The history of a model: runs one after the other, as resumes, forks and phases left them.

    run1.json   steps 0 ........ 999 | 1000 ...        64 ranks; its later steps were given up
    run2.json   previous run1.json   | 1000 .. 1799    128 ranks, and iterations to skip
                                     | 1800 ....       phase 2: datasets of its own

The first may be a run over packed files, which a function of the caller opens: `packed` is a layer above this one.

Every question takes steps of the whole history, and is answered run by run, each by its own order.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from binidx.errors import ConfigError
from binidx.forks import cached_property
from binidx.order.order_protocols import Numbers, Source
from binidx.order.view import describe_place, find_read
from binidx.run.joined_sources import JoinedSources, join_sources
from binidx.run.run_file import Run
from binidx.run.run_kind import is_packed_run
from binidx.run.run_order import RunOrder, check_fingerprint
from binidx.run.run_parts import PerProcess
from binidx.run.schedule import check_steps
from binidx.storage.location import Location

LoadPacked = Callable[[str, Mapping[str, Any] | None], RunOrder]
"""Function that opens the order of a run over packed files, by the URI of its description and the options of stores."""


@dataclass(frozen=True)
class RunHistory:
    """The runs of a model in the order in which they trained it.

    Args:
        runs: runs, each without phases, up to its `stop_step`, with which the next one begins.
        whole: load indices whole, as `RunOrder.of`, instead of reading what a query needs, as `RunOrder.open`.
        files: path or URI of the file of each run; None for the last run, which was given.
        packed: order of the run over packed files with which the history begins, up to the first of `runs`; None: it
            begins with a run of `runs`.

    Example:
        history = RunHistory.of(binidx.Run.load("run2.json"))
        for order, steps in history.orders(range(900, 1100)):
            print(order.table(steps))

    Source: ours.
    """

    runs: Sequence[Run]
    whole: bool = False
    files: Sequence[str | None] = ()
    packed: RunOrder | None = None
    _opened: dict[int, RunOrder] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, run: Run, *, whole: bool = False, load_packed: LoadPacked | None = None) -> RunHistory:
        """Return the history of a run: those that its `previous` names, up to its first step, and all phases.

        Args:
            run: the last run.
            whole: as for the class.
            load_packed: `binidx.packed.load_packed_run`, if the first run may be one over packed files.

        Returns:
            The history; the runs before are loaded, and no data is opened, except the headers of packed files.

        Raises:
            ConfigError: a run that follows itself, or begins later than the one after it; or a run over packed files
                without `load_packed`, or with fewer steps or another number of samples than the run after it needs.
        """
        history, names, packed = [run], list[str](), None
        while (uri := history[0].previous) is not None:
            if is_packed_run(Location.of(uri, run.config.storage_options)):
                packed = _open_packed(uri, history[0], load_packed)
                break
            names.insert(0, uri)
            earlier, first_step = Run.load(uri, run.config.storage_options), history[0].first_step
            if earlier.first_step > first_step or earlier.previous in names:
                found = f"step {earlier.first_step:,}" + f" after {earlier.previous}" * (earlier.previous in names)
                raise ConfigError(f"previous: {uri} begins with {found}, needs a run from before step {first_step:,}")
            stop = first_step if earlier.stop_step is None else min(earlier.stop_step, first_step)
            history.insert(0, replace(earlier, stop_step=stop))
        used = [each is run or each.stop_step != each.first_step for each in history]
        runs = [(phase, name) for each, name, is_used in zip(history, [*names, None], used, strict=True) if is_used
                for phase in each.phases]  # fmt: skip
        return cls([phase for phase, _ in runs], whole, [name for _, name in runs], packed)

    @property
    def parts(self) -> Sequence[Run | RunOrder]:
        """The runs, and before them the order of the one over packed files, if there is one."""
        return self.runs if self.packed is None else [self.packed, *self.runs]

    @property
    def first_step(self) -> int:
        """The first step that the history knows."""
        return self.parts[0].first_step

    @property
    def consumed_samples(self) -> int:
        """Number of samples that were read before the first step, by runs that the history does not know."""
        return self.parts[0].consumed_samples

    @property
    def last(self) -> RunOrder:
        """The order of the last run."""
        return self.order_of(self.runs[-1])

    @cached_property
    def joined(self) -> JoinedSources:
        """The datasets of all runs, those of the same data as one.

        Raises:
            ConfigError: as `join_sources`, or `same_data` of a run names no dataset of the history.
        """
        datasets = [self.order_of(run).sources for run in self.parts]
        same_data = [run.same_data if isinstance(run, Run) else {} for run in self.parts]
        joined = join_sources(datasets, same_data)
        for name in (name for each in same_data for name in each.values() if name not in joined.names):
            raise ConfigError(f"same_data: found {name}, needs a source of an earlier run: {', '.join(joined.names)}")
        return joined

    @property
    def sources(self) -> Mapping[str, Source]:
        """The datasets of all runs by their prefix, as the file of the first run that has it names it."""
        return self.joined.sources

    def select_sources(self, name: str | None = None) -> Mapping[str, Source]:
        """Return the sources by their prefix: the one with a prefix, or all; ConfigError if there is none."""
        return self.joined.select(name)

    def samples_named(self, name: str) -> Numbers:
        """Return the samples that are a block of packed files, as `RunOrder`; those of documents have no names."""
        return np.empty(0, np.int64) if self.packed is None else self.packed.samples_named(name)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything on which the orders of the runs depend, and of their data, 32 hex digits."""
        parts = [self.order_of(run).fingerprint for run in self.parts]
        return parts[0] if len(parts) == 1 else hashlib.md5("".join(parts).encode(), usedforsecurity=False).hexdigest()

    def per_process(self) -> PerProcess[RunHistory]:
        """Return the history for the parts of a job; other processes open its runs."""
        runs = [replace(run, directory=run.directory or os.getcwd()) for run in self.runs]
        return PerProcess(self, functools.partial(check_fingerprint, replace(self, runs=runs), self.fingerprint))

    def num_steps(self) -> int | None:
        """Count the steps of the history.

        Returns:
            The first step after the last run; None if it has no end.
        """
        return self.last.num_steps()

    def orders(self, steps: range) -> Iterator[tuple[RunOrder, range]]:
        """Yield the order of each run that has some of these steps, and those steps.

        Args:
            steps: steps of the history.

        Returns:
            Pairs in the order of the steps; an order is opened when its pair is taken.

        Raises:
            IndexError: the history has no such steps.
        """
        check_steps(range(steps.start, steps.start), None, first_step=self.first_step)
        for number, run in enumerate(self.parts):
            stops = [steps.stop, *(later.first_step for later in self.parts[number + 1 : number + 2])]
            part = range(max(run.first_step, steps.start), min(stops))
            if part or (number == 0 and not steps):
                order = self.order_of(run)
                check_steps(part, order.num_steps(), first_step=run.first_step)
                yield order, part

    def describe_continuations(self) -> Iterator[str]:
        """Yield a line for each run that begins with another option `order` than the run before it.

        Returns:
            The numbers of samples of its order that the runs before have read, that are read again or never, and that
            the option leaves out; and of those that were read of sources with another index or none, or of packed
            files, which is not compared. They are located whole, some milliseconds for each million samples.
        """
        for number, (before, run) in enumerate(pairwise(self.runs), 1):
            if run.config.order == before.config.order:
                continue
            opened, begin = [self.order_of(each) for each in self.runs[: number + 1]], run.consumed_samples
            reads = [(each.order, each.reading.schedule.consumed_samples, each.reading.end or 0) for each in opened]
            if self.packed is None:
                reads[0] = reads[0][0], 0, reads[0][2]  # samples of earlier runs, which the history does not know
            was_read, left_out, num_apart = find_read(reads[:-1], order := opened[-1].order)
            option = run.config.order
            text = f"step {run.first_step:,}: order {'of Megatron' if option is None else option.kind_name}"
            if "cyclic" in {each.dataloader_type for each in self.runs[: number + 1]} or not was_read.any():
                yield f"{text} is another one: no place in it continues the run before"
                continue
            text += f" begins at sample {begin:,}: {was_read.sum():,} were read before, {was_read[begin:].sum():,} are "
            text += f"read again, {(~was_read[:begin]).sum():,} are never read; it leaves out {left_out:,} others"
            text += f"; {num_apart:,} more were read, of sources whose index is another one" if num_apart else ""
            blocks = self.packed and self.packed.reading.schedule.samples_before(self.runs[0].first_step)
            text += f"; {blocks:,} reads of packed files are not compared" if blocks else ""
            place = f"; {describe_place(order, was_read, run.schedule.batch_size(begin))}"
            yield text if was_read[:begin].all() else text + place

    def order_of(self, run: Run | RunOrder) -> RunOrder:
        """Return the order of a run, opened at the first call.

        Args:
            run: one of `parts`.
        """
        if isinstance(run, RunOrder):
            return run
        number = next(number for number, each in enumerate(self.runs) if each is run)
        if number not in self._opened:
            # The history itself compares orders, over the samples that were read: `account`.
            warns = len(self.parts) == 1
            self._opened[number] = RunOrder.of(run, warns=warns) if self.whole else RunOrder.open(run, warns=warns)
        return self._opened[number]


def _open_packed(uri: str, run: Run, load_packed: LoadPacked | None) -> RunOrder | None:
    """Return the order of the run over packed files before a run; None if it has no step before it.

    Args:
        uri: the `previous` of the run.
        run: the run.
        load_packed: as for `RunHistory.of`.
    """
    if load_packed is None:
        raise ConfigError(
            f"previous: {uri} is a run over packed files, which is not opened here; trace, where, account, "
            "order and grep --run open it, and RunHistory.of(run, load_packed=binidx.packed.load_packed_run)"
        )
    packed = load_packed(uri, run.config.storage_options)
    stop, schedule, num_steps = run.first_step, packed.reading.schedule, packed.num_steps()
    if num_steps is not None and num_steps < stop:
        raise ConfigError(
            f"previous: {uri} ends too early (found {num_steps:,} steps, first_step after it needs {stop:,}); "
            f"correct first_step, or the files, ranks or batch sizes in {uri}"
        )
    found, needed = run.consumed_samples + run.earlier_samples, schedule.samples_before(stop)
    if found not in (0, needed):
        raise ConfigError(
            f"previous: {uri} reads another number of samples than the run after it counts (found {found:,} as "
            f"consumed_samples + earlier_samples, needs {needed:,}: {stop:,} steps of {schedule.global_batch_size:,} "
            f"on {schedule.data_parallel_size:,} ranks; or 0); correct these, or num_ranks, micro_batch_size or "
            f"accumulation in {uri}"
        )
    return packed if stop else None


Runs = RunHistory | RunOrder
"""The runs of a model, or one run, as a history of itself."""
