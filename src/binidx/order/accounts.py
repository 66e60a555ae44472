"""Tokens and epochs of each source: what there is, what the run has built, what was read up to a step.

    source          documents   tokens   samples built   samples read   tokens read   epochs   seen 0, 1, .. times
    s3://corpus/en      9,000  9.2e6           2,300          1,800         7.4e6      0.80    1,731 7,269

A sample counts S tokens, those that are fed; the one after, which is only a label, is fed by another sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.index.sample import count_tokens
from binidx.order.run_order import RunOrder
from binidx.order.samples import contents_of, documents_of, sources_at

Numbers = NDArray[np.int64]

STRETCH = 1 << 20
"""Samples looked at together: about 200 MiB with their documents, 20 without."""


@dataclass(frozen=True)
class SourceAccount:
    """What one source gives and gave.

    Attributes:
        source: its prefix.
        documents: sequences of the split, as Megatron counts documents of GPT data.
        tokens: of these.
        samples_built: that the source's own index has.
        samples_in_run: of those, in the run's dataset.
        samples_read, tokens_read: up to the step.
        epochs_read: how often the source was gone through, tokens_read / tokens.
        seen: of how many documents the first token was fed 0, 1, 2, ... times; empty unless asked for.
    """

    source: str
    documents: int
    tokens: int
    samples_built: int
    samples_in_run: int
    samples_read: int
    tokens_read: int
    epochs_read: float
    seen: tuple[int, ...] = ()


def account(order: RunOrder, stop_step: int, *, repeats: bool = False) -> list[SourceAccount]:
    """What each source gave in the steps before `stop_step`.

    Args:
        repeats: count for each document how often it was begun: 1 us a sample, 8 bytes a document.
    """
    stop = order.reading.schedule.samples_before(stop_step)
    in_run = _count(order, _stretches(len(order.dataset)))
    read = _count(order, map(order.reading.samples_at, _stretches(stop)))
    seen = _times_seen(order, stop) if repeats else [()] * len(order.sources)
    length = order.dataset.config.sequence_length
    accounts = []
    for number, source in enumerate(order.sources):
        tokens = count_tokens(source.dataset.sequence_lengths[:], source.indices)
        tokens_read = int(read[number]) * length
        accounts.append(
            SourceAccount(
                order.prefixes[number],
                len(source.indices),
                tokens,
                len(source),
                int(in_run[number]),
                int(read[number]),
                tokens_read,
                tokens_read / max(tokens, 1),
                seen[number],
            )
        )
    return accounts


def _stretches(stop: int) -> Iterator[Numbers]:
    for first in range(0, stop, STRETCH):
        yield np.arange(first, min(first + STRETCH, stop))


def _count(order: RunOrder, samples: Iterator[Numbers]) -> Numbers:
    """Samples of each source."""
    total = np.zeros(len(order.sources), np.int64)
    for part in samples:
        total += np.bincount(sources_at(order.dataset, part)[0], minlength=len(total))
    return total


def _times_seen(order: RunOrder, stop: int) -> list[tuple[int, ...]]:
    """For each source of how many of the split's documents the first token was fed 0, 1, 2, ... times."""
    times = [np.zeros(len(source.dataset.document_indices) - 1, np.int64) for source in order.sources]
    length = order.dataset.config.sequence_length
    for positions in _stretches(stop):
        contents = contents_of(order.dataset, order.reading.samples_at(positions))
        spans = contents.spans
        source = np.repeat(contents.source, np.diff(spans.bounds))
        # What begins at S is the last label; the next sample of the stream feeds it.
        begun = (spans.start == 0) & (spans.length > 0) & (spans.target < length)
        for number, counts in enumerate(times):
            counts += np.bincount(spans.document[begun & (source == number)], minlength=len(counts))
    return [_histogram(source, counts) for source, counts in zip(order.sources, times, strict=True)]


def _histogram(source: Any, counts: Numbers) -> tuple[int, ...]:
    own, _ = documents_of(source.dataset.index, np.asarray(source.indices, np.int64))
    return tuple(np.bincount(counts[np.unique(own)]).tolist())
