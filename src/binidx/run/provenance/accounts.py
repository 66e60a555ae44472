"""Tokens and epochs of each source of a run, up to a step; and the documents that two parts of runs have read.

    source          documents   tokens   samples built   samples read   tokens read   epochs   seen 0, 1, .. times
    s3://corpus/en      9,000  9.2e6           2,300          1,800         7.4e6      0.80    1,731 7,269

    documents of en      0 1 2 3 4 5 6 7
    steps 0 to 300       x x   x     x        two parts of one run, or of two runs of the same data
    steps 300 to 600     x x x x

A sample counts its S input tokens without pads; the token after them is only a label here, and an input of another
sample.

Cost: if the indices are read by ranges, some kilobytes per source; of a blend two bytes per sample, in memory too.
Counting the tokens of samples with pads reads every sample, 2 us each. Counting the repeats of documents does, too, 2
to 5 us each, and takes twelve bytes per document. So does the comparison of two parts, with a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import redacted, trims_traceback
from binidx.format.tokens import index_of
from binidx.html_table import format_html_table
from binidx.jobs.parts import Workers, make_parts
from binidx.order.order_protocols import Numbers
from binidx.order.view import key_samples
from binidx.run.display.figures import COLUMN_INCHES, draw_figure, short_name
from binidx.run.history import Runs
from binidx.run.joined_sources import JoinedSources, join_sources
from binidx.run.run_order import STRETCH_POSITIONS, RunOrder, count_source
from binidx.run.run_parts import PerProcess, RangePart
from binidx.run.schedule import check_steps
from binidx.storage.ranges import cut

PART_POSITIONS = 1 << 17
"""Number of samples whose repeats a worker counts."""


@dataclass(frozen=True)
class SourceAccount:
    """Size of one source, and its use up to a step.

    Attributes:
        source: prefix of the source.
        documents: number of documents with a sequence in the split. Megatron's documents of GPT data are the sequences.
        tokens: number of tokens of the split.
        samples_built: number of samples in the source's own index.
        samples_in_run: number of these samples in the run's dataset; in a history those that the earlier runs read, and
            those of the last run's dataset from there to its end. Of packed files those that were read.
        samples_read, tokens_read: counts up to the step; pads are no tokens.
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
    """Accounts of the sources of a run: a list, with a table in notebooks, and a figure.

    Attributes:
        notes: remarks about the numbers, a line each.
    """

    def __init__(self, rows: Iterable[SourceAccount] = (), notes: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.notes = notes

    def plot(self, width: float = COLUMN_INCHES) -> Any:
        """Return a figure of the repeats of documents of each source if they were counted, else of the tokens read.

        Args:
            width: width in inches, by default that of a paper's column.

        Returns:
            A matplotlib figure; its `savefig` writes PNG, SVG or PDF.

        Raises:
            MissingDriverError: matplotlib is not installed.
        """

        def draw(axes: Any) -> None:
            if not any(source.seen for source in self):
                axes.barh([short_name(source.source) for source in self], [source.tokens_read for source in self])
                axes.invert_yaxis()
                axes.set(xlabel="tokens read")
                return
            room = 0.8 / len(self)
            for place, source in enumerate(self):
                shares, label = np.array(source.seen) / max(sum(source.seen), 1), short_name(source.source)
                axes.bar(np.arange(len(shares)) + (place + 0.5) * room - 0.4, shares, room, label=label)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set(xlabel="times started", ylabel="share of documents")

        return draw_figure(draw, width)

    def _repr_html_(self) -> str:
        names = ("documents", "tokens", "samples_in_run", "samples_read", "tokens_read", "epochs_read")
        rows = [(redacted(source.source), *(getattr(source, name) for name in names)) for source in self]
        return format_html_table("account", rows, ("source", *(name.replace("_", " ") for name in names)))


@trims_traceback
def account(
    order: Runs, stop_step: int, *, repeats: bool = False, by_name: bool = False, workers: Workers | None = None
) -> Accounts:
    """Return the use of each source in the steps before `stop_step`, and in samples consumed before the first of them.

    Args:
        order: the order of a run, or the history of several.
        stop_step: first step that is not counted.
        repeats: also count how often each document was started.
        by_name: count a prefix that a blend names twice as one source.
        workers: workers that count the repeats, 131,072 samples a part; by default this process. It adds each part as
            it comes: 12 bytes a document of the sources.

    Returns:
        One `SourceAccount` per source, in the order of the blend; in a history, with the sizes of the last run that has
        it. A prefix that a blend names twice is two sources, unless `by_name`; the rounds of a source of a run in
        stages are one, and so are packed files of one dataset. A set of packed files whose dataset is not known is a
        source after those of its run, whose documents are its blocks; `notes` names them. The list can `plot`.

    Raises:
        IndexError: the run has fewer steps.
        ConfigError: `workers` have a shard; of a history, a source that was replaced between two runs, or as
            `RunHistory.joined`.

    Source: ours.
    """
    if workers is not None:
        workers.refuse_shard()
    check_steps(range(order.first_step, stop_step), order.num_steps(), "stop_step", order.first_step)
    joined, parts = order.joined, [*order.orders(range(order.first_step, stop_step))]
    accounts, times, notes = dict[Key, SourceAccount](), dict[Key, NDArray[Any]](), list[str]()
    for number, (each, steps) in enumerate(parts):
        joined.check_data(each.sources)
        names = joined.names_of(each.sources)
        # A blend may name a prefix twice; a stage may not.
        is_one, is_last = each.is_packed or (each.run and each.run.stages is not None), number + 1 == len(parts)
        keys = [(name, 0 if is_one or by_name else names[:place].count(name)) for place, name in enumerate(names)]
        first = each.reading.schedule.consumed_samples if number else 0
        for key, found in _account(each, keys, first, steps.stop, is_last=is_last and not each.is_packed).items():
            before = accounts.get(key, NONE)
            accounts[key] = replace(found, **{name: getattr(before, name) + getattr(found, name) for name in SUMMED})
            if (rounds := keys.count(key)) > 1 and is_one and not each.is_packed:
                notes.append(f"{redacted(key[0])}: {rounds} rounds, each in an order of its own, are one source here")
        stop = each.reading.schedule.samples_before(steps.stop)
        for place, (name, size, num_read, length) in enumerate(each.count_unknown(stop), 1):
            use = num_read, num_read * length, num_read / size, num_read, num_read * length
            accounts[name, -place] = SourceAccount(name, size, size * length, size, num_read, *use)
        notes += [f"{redacted(problem)}; {OF_BLOCKS}" for problem in each.list_unknown()]
        seen = _times_seen(each, first, stop, workers) if repeats else []
        for place, (key, counts) in enumerate(zip(keys, seen, strict=False)):
            times[key] = times.get(key, np.zeros(len(counts), np.int64)) + counts
            accounts[key] = replace(accounts[key], seen=_histogram(each, place, times[key]))
    if len(parts) > 1:
        notes += [IN_RUN, *find_changes([each for each, _ in parts], joined)]
    return Accounts(accounts.values(), [*dict.fromkeys(notes)])  # two runs may have the same rounds


Key = tuple[str, int]
"""Name of a source, and the number of other sources of its name before it in the blend; of blocks one below 0."""

NONE = SourceAccount("", 0, 0, 0, 0, 0, 0, 0.0, 0, 0)
SUMMED = ("samples_in_run", "samples_read", "tokens_read", "epochs_read", "samples_trained", "tokens_trained")

IN_RUN = "samples in run: those that the earlier runs read, and the plan of the last run from there to its end"
OF_BLOCKS = "its blocks are counted as the documents of a source named as their set, and in no other source"


def _account(order: RunOrder, keys: Sequence[Key], first: int, end: int, *, is_last: bool) -> dict[Key, SourceAccount]:
    """Return the use of the sources from the position `first` to before the step `end`.

    Args:
        order: the order of a run.
        keys: key of each source; those of one key are counted together.
        first, end: first position and end step of the counted samples.
        is_last: whether the samples after `end` are samples in the run, too.
    """
    if not keys:  # packed files of which no dataset is known
        return {}
    schedule, numbers = order.reading.schedule, dict[Key, list[int]]()
    steps = [step for step in schedule.skipped_steps if step < end]
    skipped = [(schedule.samples_before(step), schedule.samples_before(step + 1)) for step in steps]
    read, untrained = (order.count_reads(spans) for spans in ([(first, schedule.samples_before(end))], skipped))
    planned = read[0]
    if is_last:
        blocks = (order.list_sources[slice(*rows)] for rows in cut((0, len(order.list_sources)), STRETCH_POSITIONS))
        sizes = sum(np.bincount(block, minlength=len(keys)) for block in blocks)
        planned = sizes - order.count_reads([(0, first * order.reading.knows_earlier)])[0]
    counts, members = np.array([planned, *read, *(read - untrained)]), order.reads.members
    for number, key in enumerate(keys):
        numbers.setdefault(key, []).append(number)

    def account_source(number: int) -> SourceAccount:
        source, own = order.sources[number], numbers[keys[number]]
        documents, tokens = sum(map(len, _documents(order, number))), count_source(source)[1]
        in_run, num_read, tokens_read, *trained = counts[:, own].sum(axis=1).tolist()
        built = documents, tokens, sum(len(members[each]) for each in own), in_run
        return SourceAccount(keys[number][0], *built, num_read, tokens_read, tokens_read / max(tokens, 1), *trained)

    rows = order.reads.map_sources([own[0] for own in numbers.values()], account_source)
    return dict(zip(numbers, rows, strict=True))


def _times_seen(
    order: RunOrder, first: int, stop: int, workers: Workers | None, part_positions: int = PART_POSITIONS
) -> list[NDArray[Any]]:
    """Return, for each source, how often the first token of each document was read at positions `first` to `stop`."""
    times = [np.zeros(len(index_of(source.dataset).document_indices) - 1, np.uint32) for source in order.sources]
    parts = [RangePart(f"samples {a} to {b}", range(a, b)) for a, b in cut((first, stop), part_positions)]
    count = partial(_count_starts, order.per_process())

    def add(part: RangePart, counted: list[tuple[int, Numbers, Numbers]]) -> None:
        for number, documents, counts in counted:
            times[number][documents] += counts.astype(np.uint32)

    if workers is not None:
        make_parts(count, parts, workers, keep=add)
    for part in parts if workers is None else ():
        add(part, count(part))
    return times


def _count_starts(shared: PerProcess[RunOrder], part: RangePart) -> list[tuple[int, Numbers, Numbers]]:
    """Return, for each source, the documents whose first token some positions read, and counts."""
    pieces = _pieces_read(shared.get(), part.items.start, part.items.stop)
    found = [(number, np.unique(own[starts == 0], return_counts=True)) for number, own, starts in pieces]
    return [(number, as_narrow(documents), as_narrow(counts)) for number, (documents, counts) in found]


def as_narrow(numbers: Numbers) -> Numbers:
    """Return numbers that are not negative as the smallest type that holds them."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def _pieces_read(order: RunOrder, first: int, stop: int) -> Iterator[tuple[int, Numbers, Numbers]]:
    """Yield a source, and document and first token of each piece with an input that some positions read."""
    for stretch in cut((first, stop), STRETCH_POSITIONS):
        reads = order.reads.trace(order.reading.samples_at(np.arange(*stretch)))
        sources, is_input = reads.piece_source, reads.inputs > 0
        for number in np.unique(reads.source[reads.source >= 0]).tolist():
            own = is_input & (sources == number)
            yield number, reads.document[own], reads.start[own]


def _histogram(order: RunOrder, number: int, counts: NDArray[Any]) -> tuple[int, ...]:
    histogram = np.zeros(int(counts.max(initial=0)) + 1, np.int64)
    for documents in _documents(order, number):
        histogram += np.bincount(counts[np.asarray(documents)], minlength=len(histogram))
    return tuple(np.trim_zeros(histogram, "b").tolist())


def _documents(order: RunOrder, number: int) -> Iterator[Numbers | range]:
    """Yield the documents with a sequence in the split of a source, each once, ascending, in stretches."""
    source, last = order.sources[number], -1
    if isinstance(own := source.sequences, range) and index_of(source.dataset).documents_are_sequences:
        yield own
        return
    for part in cut((0, len(own)), STRETCH_POSITIONS) if isinstance(own, range) else [(0, len(own))]:
        documents = np.unique(order.reads.find_documents(number, np.asarray(own[slice(*part)], np.int64))[0])
        yield documents[documents > last]  # one whose sequences lie in two stretches counts in the first
        last = int(documents[-1]) if len(documents) else last


REORDERED = "the run from there orders the samples before it otherwise than they were read: some come again, some never"


def find_changes(orders: Sequence[RunOrder], joined: JoinedSources) -> Iterator[str]:
    """Yield a line for each run that goes on with the samples of the one before it, and orders those otherwise."""
    for one, other in pairwise(orders):
        before, after = one.reading.schedule, other.reading.schedule
        knows = one.reading.knows_earlier and other.reading.knows_earlier
        stop = min(after.consumed_samples, len(one.order), len(other.order))
        stop *= before.earlier_samples == after.earlier_samples and knows
        known, line = dict[tuple[str, int], int](), f"step {other.first_step:,}: {REORDERED}"
        if stop and one.is_packed:
            yield line
            continue
        for rows in cut((0, stop), STRETCH_POSITIONS) if one.order.identity != other.order.identity else ():
            ours, theirs = (
                key_samples(known, each.order, *rows, joined.names_of(each.sources)) for each in (one, other)
            )
            if not np.array_equal(ours, theirs):
                yield line
                break


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
    for number, documents, _ in _pieces_read(order, first, stop):
        marks[names[number]][documents] = True
    return marks
