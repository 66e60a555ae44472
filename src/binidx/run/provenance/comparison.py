"""Documents that two parts of runs have read: exact sets, and what is in one of them alone.

    documents of en      0 1 2 3 4 5 6 7
    steps 0 to 300       x x   x     x        two parts of one run, or of two runs of the same data
    steps 300 to 600       x x x x

Cost: every sample of both parts is looked at, some microseconds each, and a byte a document and part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.format.tokens import index_of
from binidx.index.blend import row_blocks
from binidx.order.order_protocols import Numbers
from binidx.order.reads import trace_reads
from binidx.run.provenance.history import STRETCH
from binidx.run.provenance.joined_sources import JoinedSources, join_sources
from binidx.run.provenance.run_order import RunOrder
from binidx.run.schedule import check_steps

Marks = dict[str, NDArray[np.bool_]]
"""Prefix of a source -> whether each of its documents was read."""


@dataclass(frozen=True)
class DocumentComparison:
    """Documents of one source in two parts of runs.

    Attributes:
        source: prefix of the source.
        first, second, both: numbers of documents with an input token in the first part, the second, and both.
        only_first, only_second: documents in one part alone, ascending.
    """

    source: str
    first: int
    second: int
    both: int
    only_first: Numbers
    only_second: Numbers

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each document that is in one part alone, as JSON values."""
        for part, documents in (("first", self.only_first), ("second", self.only_second)):
            for document in documents.tolist():
                yield {"source": self.source, "document": document, "only_in": part}


def compare_documents(
    first: RunOrder, first_steps: range, second: RunOrder, second_steps: range
) -> list[DocumentComparison]:
    """Return for each source the documents that two parts of runs have read.

    Args:
        first, second: orders of the runs; the same for two parts of one run.
        first_steps, second_steps: their steps.

    Returns:
        One comparison for each source of either run, with the name of the first run.

    Raises:
        ConfigError: a source of both runs has other data in one of them, or as `join_sources`.
        IndexError: a run has no such step.
    """
    orders = first, second
    same_data = [order.run.same_data if order.run else {} for order in orders]
    joined = join_sources([order.sources for order in orders], same_data)
    joined.check_data(second.sources)
    marks = [mark_documents(first, first_steps, joined), mark_documents(second, second_steps, joined)]
    found = []
    for name in dict.fromkeys([*marks[0], *marks[1]]):
        size = len(next(own[name] for own in marks if name in own))
        one, other = (own.get(name, np.zeros(size, np.bool_)) for own in marks)
        only_first, only_second = np.flatnonzero(one & ~other), np.flatnonzero(other & ~one)
        read_first, read_second, both = (int(np.count_nonzero(own)) for own in (one, other, one & other))
        found.append(DocumentComparison(name, read_first, read_second, both, only_first, only_second))
    return found


def mark_documents(order: RunOrder, steps: range, joined: JoinedSources) -> Marks:
    """Return which documents have an input token in the samples of some steps."""
    check_steps(steps, order.num_steps(), first_step=order.first_step)
    names = joined.names_of(order.sources)
    marks = {
        name: np.zeros(len(index_of(source.dataset).document_indices) - 1, np.bool_)
        for name, source in zip(names, order.sources, strict=True)
    }
    first, stop = (order.reading.schedule.samples_before(step) for step in (steps.start, steps.stop))
    for rows in row_blocks(first, stop, STRETCH):
        reads = trace_reads(order.order, order.reading.samples_at(np.arange(rows.start, rows.stop)))
        for source in np.unique(reads.source).tolist():
            own = (reads.piece_source == source) & (reads.inputs > 0)
            marks[names[source]][reads.document[own]] = True
    return marks
