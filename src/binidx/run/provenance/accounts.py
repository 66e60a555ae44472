"""Tokens and epochs of each source of a run, up to a step.

    source          documents   tokens   samples built   samples read   tokens read   epochs   seen 0, 1, .. times
    s3://corpus/en      9,000  9.2e6           2,300          1,800         7.4e6      0.80    1,731 7,269

A sample counts its S input tokens; the token after them is only a label here, and an input of another sample.

Cost: if the indices are read by ranges, some kilobytes per source; of a blend two bytes per sample, in memory too.
Counting the repeats of documents reads every sample, 2 to 5 us each, and takes a byte per document, two if a document
may repeat more than 255 times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.megatron.blended import row_blocks, samples_per_dataset
from binidx.errors import ConfigError, redacted, trims_traceback
from binidx.html_table import format_html_table
from binidx.order.blended_order import list_members, map_sources
from binidx.order.order_protocols import ComposedOrder, Numbers, Source
from binidx.run.provenance.contents import find_documents, trace_contents
from binidx.run.provenance.history import RunHistory
from binidx.run.provenance.run_order import RunOrder

STRETCH = 1 << 18
"""Number of samples or sequences processed together: samples with their documents take 50 MiB."""


@dataclass(frozen=True)
class SourceAccount:
    """Size of one source, and its use up to a step.

    Attributes:
        source: prefix of the source.
        documents: number of sequences of the split, as Megatron counts documents of GPT data.
        tokens: number of tokens of these documents.
        samples_built: number of samples in the source's own index.
        samples_in_run: number of these samples in the run's dataset.
        samples_read, tokens_read: counts up to the step.
        epochs_read: tokens_read / tokens.
        samples_trained, tokens_trained: the same counts without those that iterations to skip only read.
        seen: numbers of documents whose first token was read 0, 1, 2, ... times; empty unless requested.
    """

    source: str
    documents: int
    tokens: int
    samples_built: int
    samples_in_run: int
    samples_read: int
    tokens_read: int
    epochs_read: float
    samples_trained: int
    tokens_trained: int
    seen: tuple[int, ...] = ()


class Accounts(list[SourceAccount]):
    """Accounts of the sources of a run: a list, with a table in notebooks, and a figure."""

    def plot(self, width: float = 3.3) -> Any:
        """Return a figure of the repeats of documents if they were counted, else of the tokens read.

        Args:
            width: width in inches, by default that of a paper's column.

        Returns:
            A matplotlib figure; its `savefig` writes PNG, SVG or PDF.

        Raises:
            MissingDriverError: matplotlib is not installed.
        """
        from binidx.run.display.figures import draw_accounts

        return draw_accounts(self, width)

    def _repr_html_(self) -> str:
        names = ("documents", "tokens", "samples_in_run", "samples_read", "tokens_read", "epochs_read")
        rows = [(redacted(source.source), *(getattr(source, name) for name in names)) for source in self]
        return format_html_table("account", rows, ("source", *(name.replace("_", " ") for name in names)))


@trims_traceback
def account(order: RunOrder | RunHistory, stop_step: int, *, repeats: bool = False) -> Accounts:
    """Return the use of each source in the steps before `stop_step`, and in samples consumed before the first of them.

    Args:
        order: the order of a run, or the history of several.
        stop_step: first step that is not counted.
        repeats: also count how often each document was started.

    Returns:
        One `SourceAccount` per source, in the order of the blend; in a history, with the sizes of the last run that has
        it. The list can `plot`.

    Raises:
        IndexError: the run has fewer steps.
        ConfigError: of a history, repeats in a source that was replaced between two runs.

    Source: ours.
    """
    first = order.runs[0] if isinstance(order, RunHistory) else order.run
    return _sum_parts(
        (
            (each, 0 if each.run is first else each.reading.schedule.consumed_samples, steps.stop)
            for each, steps in order.orders(range(order.first_step, stop_step))
        ),
        repeats,
    )


def _sum_parts(parts: Iterable[tuple[RunOrder, int, int]], repeats: bool) -> Accounts:
    """Return the accounts of several orders together, each from a position to before a step."""
    accounts: dict[tuple[str, int], SourceAccount] = {}
    times: dict[tuple[str, int], NDArray[Any]] = {}
    for order, first, stop_step in parts:
        stop, names = order.reading.schedule.samples_before(stop_step), order.prefixes
        # A blend may name a prefix twice.
        keys = [(name, names[:number].count(name)) for number, name in enumerate(names)]
        for key, found in zip(keys, _account_sources(order, first, stop, stop_step), strict=True):
            if (before := accounts.get(key)) is not None:  # over two runs
                found = replace(found, **{name: getattr(before, name) + getattr(found, name) for name in SUMMED})
            accounts[key] = found
        seen = _times_seen(order, first, stop) if repeats else []
        for key, source, counts in zip(keys, order.sources, seen, strict=False):
            if len(times.setdefault(key, np.zeros(len(counts), np.int64))) != len(counts):
                raise ConfigError(
                    f"{key[0]}: replaced between two runs (found {len(counts):,} documents, an earlier run read "
                    f"{len(times[key]):,}); account them one by one"
                )
            times[key] += counts
            accounts[key] = replace(accounts[key], seen=_histogram(source, times[key]))
    return Accounts(accounts.values())


SUMMED = ("samples_in_run", "samples_read", "tokens_read", "epochs_read", "samples_trained", "tokens_trained")


def _account_sources(order: RunOrder, first: int, stop: int, stop_step: int) -> list[SourceAccount]:
    """Return the use of each source at the positions from `first` to before `stop`, with which `stop_step` begins."""
    schedule = order.reading.schedule
    steps = [step for step in schedule.skipped_steps if step < stop_step]
    skipped = [slice(schedule.samples_before(step), schedule.samples_before(step + 1)) for step in steps]
    in_run, read, trained = _samples_of_each(order, first, stop, skipped)
    length, members = order.config.sequence_length, list_members(order.order)

    def account_source(number: int) -> SourceAccount:
        source, num_read, num_trained = order.sources[number], int(read[number]), int(trained[number])
        tokens, tokens_read = tokens_of_source(source), num_read * length
        built = len(source.sequences), tokens, len(members[number]), int(in_run[number])
        used = num_read, tokens_read, tokens_read / max(tokens, 1)
        return SourceAccount(source.name, *built, *used, num_trained, num_trained * length)

    return map_sources(order.order, range(len(order.sources)), account_source)


def tokens_of_source(source: Source) -> int:
    """Return the number of stored tokens in the split of a source (of one epoch)."""
    own, index = source.sequences, source.dataset.index
    if not isinstance(own, range):
        return int(index.sequence_lengths[own].sum(dtype=np.int64))
    return index.tokens_of(own)


def _samples_of_each(
    order: RunOrder, first: int, stop: int, skipped: Sequence[slice]
) -> tuple[Numbers, Numbers, Numbers]:
    """Return the number of samples of each source: in the run, read at positions from `first` to before `stop`, and
    trained there, which are those not at the positions `skipped`.
    """
    if not isinstance(order.order, ComposedOrder):
        num_skipped = sum(rows.stop - rows.start for rows in skipped)
        return np.array([len(order.order)]), np.array([stop - first]), np.array([stop - first - num_skipped])
    sources = order.order.list_sources()
    in_run, read = np.array(samples_per_dataset(sources, len(order.sources))), np.zeros(len(order.sources), np.int64)
    untrained = np.zeros_like(read)
    for counts, stretches in ((read, row_blocks(first, stop, STRETCH)), (untrained, skipped)):
        for rows in stretches:
            samples = order.reading.samples_at(np.arange(rows.start, rows.stop))
            counts += np.bincount(sources[samples], minlength=len(counts))
    return in_run, read, read - untrained


def _times_seen(order: RunOrder, first: int, stop: int) -> list[NDArray[Any]]:
    """Return, for each source, how often the first token of each document was read at positions `first` to `stop`."""
    rounds = stop // len(order.order) + 1
    times = [
        np.zeros(len(source.dataset.document_indices) - 1, np.min_scalar_type(rounds * member.num_epochs))
        for source, member in zip(order.sources, list_members(order.order), strict=True)
    ]
    length, count = order.config.sequence_length, 0
    for rows in row_blocks(first, stop, STRETCH):
        contents = trace_contents(order.order, order.reading.samples_at(np.arange(rows.start, rows.stop)))
        spans = contents.spans
        # What begins at S is the last label; the next sample of the stream feeds it.
        begun = (spans.start == 0) & (spans.length > 0) & (spans.target < length)
        source = np.repeat(contents.source, np.diff(spans.bounds))[begun]
        document = spans.document[begun]
        count += len(document)
        for number in np.unique(source).tolist():
            np.add.at(times[number], document[source == number], 1)
    assert sum(int(counts.sum(dtype=np.int64)) for counts in times) == count, "once an epoch and round: none ran over"
    return times


def _histogram(source: Source, counts: NDArray[Any]) -> tuple[int, ...]:
    own, histogram, last = source.sequences, np.zeros(int(counts.max(initial=0)) + 1, np.int64), -1
    parts = (own[rows] for rows in row_blocks(0, len(own), STRETCH)) if isinstance(own, range) else [own]
    for part in parts:
        documents = np.unique(find_documents(source.dataset.index, np.asarray(part, np.int64))[0])
        # A document whose sequences lie in two stretches counts in the first.
        histogram += np.bincount(counts[documents[documents > last]], minlength=len(histogram))
        last = int(documents[-1]) if len(documents) else last
    return tuple(np.trim_zeros(histogram, "b").tolist())
