"""Exposures of documents: how often a run has read each, when first and last, and how many of its tokens.

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
from binidx.run.provenance.contents import trace_contents
from binidx.run.provenance.run_order import RunOrder, samples_with

STRETCH = 1 << 17
"""Number of samples whose pieces are in memory together."""


COUNTS, STEPS = ("times", "samples", "tokens"), ("first_step", "last_step")
"""Columns of `Exposures`."""


@dataclass(frozen=True)
class Exposures:
    """Exposures of documents of one source before a step; arrays of shape (n,).

    Attributes:
        document: numbers of the documents, ascending.
        times: how often its first token was an input.
        samples: number of samples with an input token of it.
        tokens: number of its tokens that were inputs, repeats included.
        first_step, last_step: steps of the first and the last of these samples; -1 if there is none, or if it was read
            before step 0 of a resumed run.
    """

    document: Numbers
    times: Numbers
    samples: Numbers
    tokens: Numbers
    first_step: Numbers
    last_step: Numbers


def count_exposures(
    order: RunOrder, source: int, documents: Sequence[int] | Numbers, stop_step: int, *, earlier: bool = True
) -> Exposures:
    """Return how often documents were read in the steps before `stop_step`.

    A sample has S input tokens; the token after them is only a label here, and does not count.

    Args:
        order: order of the run.
        source: number of the source.
        documents: numbers of documents in that source, in any order.
        stop_step: first step that does not count.
        earlier: also count the samples before step 0 of a resumed run, in the order of this run.

    Raises:
        IndexError: there is no such source or document.
        ConfigError: as `RunOrder.where`.

    Example:
        >>> count_exposures(RunOrder.open(Run.load("run.json")), 0, [7, 12], 41_200).times  # doctest: +SKIP

    Source: ours.
    """
    wanted = sorted_unique(np.asarray(documents, np.int64))
    counts = np.zeros((3, len(wanted)), np.int64)  # times, samples, tokens
    steps = np.full((2, len(wanted)), -1, np.int64)
    seen, length, is_wanted = np.zeros(len(wanted), bool), order.config.sequence_length, membership(wanted)
    reads = order.reads_of(samples_with(order.order, source, wanted), stop_step, earlier=earlier)
    for rows in row_blocks(0, len(reads.sample), STRETCH):
        spans = trace_contents(order.order, reads.sample[rows]).spans
        owner = np.repeat(np.arange(len(spans.bounds) - 1), np.diff(spans.bounds))
        inputs = np.minimum(spans.target + spans.length, length) - spans.target
        hit = is_wanted(spans.document) & (inputs > 0)
        place, owner, begins = np.searchsorted(wanted, spans.document[hit]), owner[hit], spans.start[hit] == 0
        counts[0] += np.bincount(place[begins], minlength=len(wanted))
        np.add.at(counts[2], place, inputs[hit])
        pairs = sorted_unique(owner * len(wanted) + place)  # by sample: of equal indices the last one is assigned
        owner, place = np.divmod(pairs, max(len(wanted), 1))
        counts[1] += np.bincount(place, minlength=len(wanted))
        step, new = reads.step[rows][owner], ~seen[place]
        steps[1, place] = step
        steps[0, place[new][::-1]] = step[new][::-1]
        seen[place] = True
    return Exposures(wanted, *counts, *steps)


def total_exposures(
    exposures: Sequence[tuple[str, Exposures]], documents: Mapping[str, Numbers]
) -> dict[str, int | None]:
    """Return the sums of the exposures of some documents, and their first and last step; None if there is none.

    Args:
        exposures: prefix of each source, and the exposures of at least these documents.
        documents: prefix of a source -> numbers of its documents.
    """
    rows = [(each, each.document.searchsorted(documents[name])) for name, each in exposures if name in documents]
    sums = {name: sum(int(getattr(each, name)[own].sum()) for each, own in rows) for name in COUNTS}
    steps = {name: [getattr(each, name)[own][each.samples[own] > 0] for each, own in rows] for name in STEPS}
    first, last = (np.concatenate([np.empty(0, np.int64), *columns]) for columns in steps.values())
    known = len(first) > 0 and first.min() >= 0
    return {**sums, "first_step": int(first.min()) if known else None, "last_step": int(last.max()) if known else None}
