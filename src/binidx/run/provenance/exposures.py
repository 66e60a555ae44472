"""Exposures of documents: how often a model has read each, when first and last, and how many of its tokens.

    documents ─► sequences ─► samples (Order.find) ─► steps before N ─► pieces of the documents in these samples

    document      times  samples    tokens  first step  last step
    12,345,678        3        4     2,310       1,204     40,977      read three times, once across two samples

No token is read. Cost: one pass over the index arrays of the source, 1 to 3 ns an element if they are mapped, and about
2 us for each sample with a token of one of the documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from binidx.dataset.megatron.blended import row_blocks
from binidx.order.order_protocols import Numbers
from binidx.order.source_order import membership, sorted_unique
from binidx.run.provenance.history import find_sources
from binidx.run.provenance.reading import Reading, Steps

STRETCH = 1 << 17
"""Number of samples whose pieces are in memory together."""


COUNTS, STEPS = ("times", "samples", "samples_trained", "tokens"), ("first_step", "last_step")
"""Columns of `Exposures`."""

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Exposures:
    """Exposures of documents of one source before a step; arrays of shape (n,).

    Attributes:
        document: numbers of the documents, ascending.
        times: how often its first token was an input.
        samples: number of samples with an input token of it.
        samples_trained: number of these samples that were trained, which those of iterations to skip are not.
        tokens: number of its tokens that were inputs, repeats included.
        first_step, last_step: steps of the first and the last of these samples; -1 if there is none, or if it was read
            before the first step of a resumed run.
    """

    document: Numbers
    times: Numbers
    samples: Numbers
    samples_trained: Numbers
    tokens: Numbers
    first_step: Numbers
    last_step: Numbers


def count_exposures(
    history: Steps,
    documents: Mapping[str, Sequence[int] | Numbers],
    stop_step: int,
    *,
    earlier: bool = True,
    labels: bool = False,
) -> dict[str, Exposures]:
    """Return how often documents were read in the steps before `stop_step`.

    A sample has S input tokens; the token after them is only a label here, and does not count.

    Args:
        history: the runs of a model, or the order of one run.
        documents: prefix of a source -> numbers of documents in it, in any order. A run without the source reads none.
        stop_step: first step that does not count.
        earlier: also count the samples before the first step of a resumed run, in the order of this run.
        labels: also count tokens that are only the last label of a sample.

    Returns:
        Prefix of a source -> exposures of its documents.

    Raises:
        IndexError: there is no such document or step.
        ConfigError: as `RunOrder.where`.

    Example:
        >>> history = RunHistory.of(Run.load("run.json"))  # doctest: +SKIP
        >>> count_exposures(history, {"s3://corpus/en": [7, 12]}, 41_200)  # doctest: +SKIP

    Source: ours.
    """
    found = {name: _Tally(sorted_unique(np.asarray(numbers, np.int64))) for name, numbers in documents.items()}
    for name, order, source, stop, is_first in find_sources(history, documents.keys(), stop_step):
        found[name].add(order, source, stop, earlier and is_first, labels)
    return {name: tally.exposures() for name, tally in found.items()}


class _Tally:
    """Counts of the documents of one source, over one run after the other."""

    def __init__(self, documents: Numbers) -> None:
        self.documents, self.counts = documents, np.zeros((len(COUNTS), len(documents)), np.int64)
        self.first, self.last = np.full(len(documents), NEVER), np.full(len(documents), -1)

    def add(self, order: Reading, source: int, stop_step: int, earlier: bool, labels: bool) -> None:
        """Add the reads of a run in the steps before `stop_step`."""
        wanted, count = self.documents, len(self.documents)
        is_wanted, length = membership(wanted), order.sequence_length
        reads = order.reads_of(order.samples_with(source, wanted), stop_step, earlier=earlier)
        for rows in row_blocks(0, len(reads.sample), STRETCH):
            spans = order.contents(reads.sample[rows]).spans
            row = np.repeat(np.arange(len(spans.bounds) - 1), np.diff(spans.bounds))
            tokens = spans.length if labels else np.minimum(spans.target + spans.length, length) - spans.target
            hit = is_wanted(spans.document) & (tokens > 0)
            place, row, begins = np.searchsorted(wanted, spans.document[hit]), row[hit], spans.start[hit] == 0
            self.counts[0] += np.bincount(place[begins], minlength=count)
            np.add.at(self.counts[3], place, tokens[hit])
            row, place = np.divmod(sorted_unique(row * count + place), max(count, 1))  # each sample and document once
            step = reads.step[rows][row]
            self.counts[1] += np.bincount(place, minlength=count)
            self.counts[2] += np.bincount(place[(step >= 0) & order.trained(step)], minlength=count)
            np.minimum.at(self.first, place, step)
            np.maximum.at(self.last, place, step)

    def exposures(self) -> Exposures:
        """Return the counts."""
        first = np.where(self.first == NEVER, -1, self.first)
        times, samples, trained, tokens = self.counts
        return Exposures(self.documents, times, samples, trained, tokens, first, self.last)


def total_exposures(exposures: Mapping[str, Exposures], documents: Mapping[str, Numbers]) -> dict[str, int | None]:
    """Return the sums of the exposures of some documents, and their first and last step; None if there is none.

    Args:
        exposures: prefix of each source -> exposures of at least these documents.
        documents: prefix of a source -> numbers of its documents.
    """
    rows = [
        (each, each.document.searchsorted(documents[name])) for name, each in exposures.items() if name in documents
    ]
    sums = {name: sum(int(getattr(each, name)[own].sum()) for each, own in rows) for name in COUNTS}
    steps = {name: [getattr(each, name)[own][each.samples[own] > 0] for each, own in rows] for name in STEPS}
    first, last = (np.concatenate([np.empty(0, np.int64), *columns]) for columns in steps.values())
    known = len(first) > 0 and first.min() >= 0
    return {**sums, "first_step": int(first.min()) if known else None, "last_step": int(last.max()) if known else None}
