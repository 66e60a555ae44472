"""The history of a model: runs one after the other, as resumes, forks and phases left them.

    run1.json   steps 0 ........ 999 | 1000 ...        64 ranks; its later steps were given up
    run2.json   previous run1.json   | 1000 .. 1799    128 ranks, and iterations to skip
                                     | 1800 ....       phase 2: datasets of its own

Every question takes steps of the whole history, and is answered run by run, each by its own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from binidx.errors import ConfigError
from binidx.order.order_protocols import Numbers
from binidx.run.global_order import SampleReads
from binidx.run.provenance.contents import SampleContents
from binidx.run.provenance.run_order import RunOrder
from binidx.run.run_file import Run
from binidx.run.schedule import check_steps


@dataclass(frozen=True)
class RunHistory:
    """The runs of a model in the order in which they trained it.

    Args:
        runs: runs, each without phases, up to its `stop_step`, with which the next one begins.
        whole: load indices whole, as `RunOrder.of`, instead of reading what a query needs, as `RunOrder.open`.

    Example:
        history = RunHistory.of(binidx.Run.load("run2.json"))
        for order, steps in history.orders(range(900, 1100)):
            print(order.table(steps))

    Source: ours.
    """

    runs: Sequence[Run]
    whole: bool = False
    _opened: dict[int, RunOrder] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, run: Run, *, whole: bool = False) -> RunHistory:
        """Return the history of a run: those that its `previous` names, up to its first step, and all phases.

        Args:
            run: the last run.
            whole: as for the class.

        Returns:
            The history; the runs before are loaded, and no data is opened.

        Raises:
            ConfigError: a run that follows itself, or begins later than the one after it.
        """
        history, names = [run], list[str]()
        while (uri := history[0].previous) is not None:
            names.append(uri)
            earlier, first_step = Run.load(uri, run.config.storage_options), history[0].first_step
            if earlier.first_step > first_step or earlier.previous in names:
                found = f"step {earlier.first_step:,}" + f" after {earlier.previous}" * (earlier.previous in names)
                raise ConfigError(f"previous: {uri} begins with {found}, needs a run from before step {first_step:,}")
            stop = first_step if earlier.stop_step is None else min(earlier.stop_step, first_step)
            history.insert(0, replace(earlier, stop_step=stop))
        runs = [each for each in history[:-1] if each.stop_step != each.first_step]
        return cls([phase for each in [*runs, run] for phase in each.phases], whole)

    @property
    def first_step(self) -> int:
        """The first step that the history knows."""
        return self.runs[0].first_step

    @property
    def last(self) -> RunOrder:
        """The order of the last run."""
        return self._order(len(self.runs) - 1)

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
        for number, run in enumerate(self.runs):
            stops = [steps.stop, *(later.first_step for later in self.runs[number + 1 : number + 2])]
            part = range(max(run.first_step, steps.start), min(stops))
            if part or (number == 0 and not steps):
                order = self._order(number)
                check_steps(part, order.num_steps(), first_step=run.first_step)
                yield order, part

    def _order(self, number: int) -> RunOrder:
        if number not in self._opened:
            run = self.runs[number]
            self._opened[number] = RunOrder.of(run) if self.whole else RunOrder.open(run)
        return self._opened[number]


@dataclass(frozen=True)
class DocumentReads:
    """Number of reads of a document, and their first and last step.

    Attributes:
        source, document: prefix, and number of the document there.
        samples_read, samples_trained: samples with a token of it that were read, and those that were trained.
        tokens_read: its tokens in these samples, as inputs or as the last label.
        first_step, last_step: None if the steps are not known, or there is none.
    """

    source: str
    document: int
    samples_read: int
    samples_trained: int
    tokens_read: int
    first_step: int | None
    last_step: int | None

    def __add__(self, later: DocumentReads) -> DocumentReads:
        """Return the reads of the same document in this run and a later one."""
        names = ("samples_read", "samples_trained", "tokens_read")
        sums = {name: getattr(self, name) + getattr(later, name) for name in names}
        first = later.first_step if self.first_step is None else self.first_step
        last = self.last_step if later.last_step is None else later.last_step
        return replace(later, first_step=first, last_step=last, **sums)


def count_reads(
    order: RunOrder, source: int, documents: Sequence[int] | Numbers, readings: SampleReads, contents: SampleContents
) -> list[DocumentReads]:
    """Return the reads of each document among the samples that `RunOrder.where` returned for them.

    Args:
        order: the order of the run.
        source: number of the documents' source.
        documents: numbers of documents.
        readings, contents: as `where` returns them.
    """
    spans, trained = contents.spans, order.reading.trained(readings.step)
    row_of = np.repeat(np.arange(len(readings.step)), np.diff(spans.bounds))
    rows = []
    for document in dict.fromkeys(map(int, documents)):
        pieces = (spans.document == document) & (spans.length > 0)
        samples = np.unique(row_of[pieces])
        steps = readings.step[samples]
        known = steps[steps >= 0]
        ends = (int(known.min()), int(known.max())) if len(known) else (None, None)
        counted = len(samples), int((trained[samples] & (steps >= 0)).sum()), int(spans.length[pieces].sum())
        rows.append(DocumentReads(order.prefixes[source], document, *counted, *ends))
    return rows
