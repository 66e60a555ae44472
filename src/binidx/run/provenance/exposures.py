"""Exposures: which reads of samples had a token range of a document as inputs, whole or in part, when first and last.

    document 12,345,678                     0 ........................... 5,900
    passage: tokens 2,900 to 2,950                    [==]
    samples                                 |  step 9  |  step 1,400  |  step 4 |

                           samples  whole  in steps   part  in steps
    the document                 3      0              3    4 to 1,400
    the passage                  2      1  1,400       1    9

A document is the range of all its tokens, so documents and passages are counted by one function. A sample that is read
again counts again. No token is read. Cost: one pass over the index arrays of the source, 1 to 3 ns an element if they
are mapped, and about 2 us for each sample with a token of one of the documents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.format.document_blocks import batch_by_size
from binidx.format.tokens import index_of
from binidx.jobs.parts import Workers, make_parts
from binidx.order.order_protocols import Numbers
from binidx.order.reads import TokenReads
from binidx.order.source_order import join_ranges, sorted_unique
from binidx.run.global_order import SampleReads
from binidx.run.history import RunHistory, Runs
from binidx.run.run_order import RunOrder
from binidx.run.run_parts import PerProcess, RangePart
from binidx.storage.ranges import cut

STRETCH_SAMPLES = 1 << 17
"""Number of samples whose pieces are in memory together."""

PART_RANGES = 1 << 16
"""Number of documents, or ranges of them, whose reads a worker counts."""

PAIRS = 1 << 21
"""Number of pieces of samples and ranges in them that are in memory together, unless one sample has more."""

EXPOSURE_STEPS = tuple(f"{end}_step{of}" for of in ("", "_whole", "_part") for end in ("first", "last"))
"""Columns of `Exposures` that are steps."""

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Exposures:
    """Exposures of token ranges of one source before a step; arrays of shape (n,).

    A sample holds a range whole if all of its tokens are inputs of the sample, wherever they stand in it.

    Attributes:
        document: numbers of the documents, ascending.
        first_token, stop_token: the range in the document; 0 and -1 stand for the whole document.
        samples: number of reads of samples with an input token of the range.
        samples_whole, samples_part: those that hold all of its tokens, and those that hold some.
        samples_trained: number of reads that were trained, which those of iterations to skip are not.
        times_started: how often its first token was an input.
        tokens: number of its tokens that were inputs, repeats included.
        first_step, last_step: steps of the first and the last of the samples; -1 if there is none, or if it was read
            before the first step of a resumed run.
        first_step_whole, last_step_whole, first_step_part, last_step_part: the same of those samples alone.
    """

    document: Numbers
    first_token: Numbers
    stop_token: Numbers
    samples: Numbers
    samples_whole: Numbers
    samples_part: Numbers
    samples_trained: Numbers
    times_started: Numbers
    tokens: Numbers
    first_step: Numbers
    last_step: Numbers
    first_step_whole: Numbers
    last_step_whole: Numbers
    first_step_part: Numbers
    last_step_part: Numbers


def count_exposures(
    history: Runs,
    documents: Mapping[str, Sequence[int] | Numbers],
    stop_step: int,
    *,
    earlier: bool | None = True,
    workers: Workers | None = None,
    part_ranges: int = PART_RANGES,
) -> dict[str, Exposures]:
    """Return how often documents, or token ranges of them, were read in the steps before `stop_step`.

    A sample has S input tokens; the token after them is only a label here, and does not count.

    Args:
        history: the runs of a model, or the order of one run.
        documents: prefix of a source -> numbers of documents in it, in any order; or ranges, such as matches of a text:
            (document, first token, token after the last), shape (n, 3). A run without the source reads none.
        stop_step: first step that does not count.
        earlier: also count the samples before the first step of a resumed run, in the order of this run; None: if the
            order knows them.
        workers: workers that count the reads of `part_ranges` documents or ranges a part; by default this process. It
            keeps 120 bytes for each document.

    Returns:
        Prefix of a source -> exposures of its documents, each once; or of its ranges, by document and first token.

    Raises:
        IndexError: there is no such document or step.
        ConfigError: as `RunOrder.where`, or a run with fill in the middle; or `workers` have a shard.

    Example:
        >>> history = RunHistory.of(Run.load("run.json"))  # doctest: +SKIP
        >>> count_exposures(history, {"s3://corpus/en": [7, 12]}, 41_200)  # doctest: +SKIP

    Source: ours.
    """
    ranges = {name: _as_ranges(np.asarray(numbers, np.int64)) for name, numbers in documents.items()}
    bounds = np.cumsum([0, *map(len, ranges.values())]).tolist()
    places = {name: slice(*pair) for name, pair in zip(ranges, pairwise(bounds), strict=True)}
    if workers is None:
        groups = {name: np.column_stack([np.arange(bounds[-1])[places[name]], rows]) for name, rows in ranges.items()}
        columns = count_groups(history, groups, bounds[-1], stop_step, earlier)
    else:
        workers.refuse_shard()
        for name, order, source, *_ in find_sources(history, ranges.keys(), stop_step):
            order.reads.sequences_of(source, ranges[name][[0, -1][: len(ranges[name])], 0])  # checks their numbers
        parts = [
            RangesPart(
                f"{name} from {first - own.start}", range(first, stop), name, rows[first - own.start : stop - own.start]
            )
            for (name, rows), own in zip(ranges.items(), places.values(), strict=True)
            for first, stop in cut((own.start, own.stop), part_ranges)
        ]
        columns = {field.name: np.empty(bounds[-1], np.int64) for field in fields(Exposures)[3:]}  # besides the range

        def fill(part: RangesPart, counted: dict[str, Numbers]) -> None:
            for name, values in counted.items():
                columns[name][part.items.start : part.items.stop] = values

        make_parts(partial(_count_part, history.per_process(), stop_step, earlier), parts, workers, keep=fill)
    return {
        name: Exposures(*rows.T, **{column: values[places[name]] for column, values in columns.items()})
        for name, rows in ranges.items()
    }


@dataclass(frozen=True, eq=False)
class RangesPart(RangePart):
    """Part that is some ranges of the documents of one source; `items` are their numbers among those of all sources.

    Attributes:
        source: prefix of the source.
        ranges: document, first token, token after the last, shape (n, 3).
    """

    source: str
    ranges: Numbers


def _count_part(shared: PerProcess[Any], stop_step: int, earlier: bool | None, part: RangesPart) -> dict[str, Numbers]:
    """Count the reads of each range of a part, as `count_groups`, in a worker."""
    groups = np.column_stack([np.arange(part.size), part.ranges])
    return count_groups(shared.get(), {part.source: groups}, part.size, stop_step, earlier)


def _as_ranges(documents: Numbers) -> Numbers:
    """Return ranges in ascending order; of documents, each once, to its end."""
    if documents.ndim == 2:
        return documents[np.lexsort(documents.T[::-1])]
    numbers = sorted_unique(documents)
    return np.stack([numbers, 0 * numbers, 0 * numbers - 1], axis=1)


def count_groups(
    history: Runs,
    ranges: Mapping[str, Numbers],
    num_groups: int,
    stop: int,
    earlier: bool | None = True,
) -> dict[str, Numbers]:
    """Return how often groups of token ranges were read: by samples that hold one of the group whole, or only parts.

    Args:
        history, earlier: as for `count_exposures`.
        ranges: prefix of a source -> rows (group, document, first token, token after the last), shape (n, 4); -1 after
            the last stands for the end of the document.
        num_groups: number of groups.
        stop: first step that does not count.

    Returns:
        Column of `Exposures` -> its value for each group, shape (num_groups,).
    """
    trained, started, tokens = np.zeros((3, num_groups), np.int64)
    samples = np.zeros((2, num_groups), np.int64)  # with a part, and whole
    first, last = np.full((2, num_groups), NEVER), np.full((2, num_groups), -1)
    for name, order, source, end, is_first in find_sources(history, ranges.keys(), stop):
        for reads, found in read_ranges(order, source, ranges[name], end, earlier if is_first else False):
            np.add.at(started, found.group, found.starts)
            np.add.at(tokens, found.group, found.tokens)
            keys = sorted_unique((found.read * num_groups + found.group) * 2 + found.is_whole)
            keys = keys[np.diff(keys >> 1, append=-1) != 0]  # each read and group once: whole if one of its ranges is
            (read, group), is_whole = np.divmod(keys >> 1, num_groups), keys & 1
            step = reads.step[read]
            np.add.at(trained, group[(step >= 0) & order.reading.schedule.trains(step)], 1)
            np.add.at(samples, (is_whole, group), 1)
            np.minimum.at(first, (is_whole, group), step)
            np.maximum.at(last, (is_whole, group), step)
    steps = [first.min(0), last.max(0), first[1], last[1], first[0], last[0]]
    counts = {"samples": samples.sum(0), "samples_whole": samples[1], "samples_part": samples[0]}
    counts |= {"samples_trained": trained, "times_started": started, "tokens": tokens}
    return counts | {name: np.where(step == NEVER, -1, step) for name, step in zip(EXPOSURE_STEPS, steps, strict=True)}


class RangeReads(NamedTuple):
    """Input tokens of ranges in samples, a row for each read of a sample and range in it.

    Attributes:
        read: number of the read.
        group: group of the range.
        tokens: number of input tokens of the range, repeats in the sample included.
        starts: how often its first token is an input.
        is_whole: whether all tokens of the range are inputs of the sample.
    """

    read: Numbers
    group: Numbers
    tokens: Numbers
    starts: Numbers
    is_whole: NDArray[np.bool_]


def read_ranges(
    order: RunOrder, source: int, ranges: Numbers, stop_step: int, earlier: bool | None = True
) -> Iterator[tuple[SampleReads, RangeReads]]:
    """Yield the reads of token ranges of documents of a source, some samples at a time.

    Args:
        order: the order of one run.
        source: number of the source in it.
        ranges: as for `count_groups`, in any order.
        stop_step, earlier: as for `count_exposures`.

    Returns:
        All reads of the documents, and those of the ranges, by number of the read; those of a sample come together.
    """
    if order.given_config and order.given_config.moves_text:
        raise ConfigError("fim_rate: the order does not say which tokens are inputs; count those of loaded batches")
    ranges = ranges[np.lexsort((ranges[:, 2], ranges[:, 1]))]
    wanted = sorted_unique(ranges[:, 1])
    place = wanted.searchsorted(ranges[:, 1])
    ranges[:, 3] = np.where(ranges[:, 3] < 0, count_document_tokens(order, source, wanted)[place], ranges[:, 3])
    width, longest = int(ranges[:, 3].max(initial=0)) + 1, int((ranges[:, 3] - ranges[:, 2]).max(initial=0))
    keys = place * width + ranges[:, 2]
    reads = order.reads_of(order.reads.find(source, wanted), stop_step, earlier=earlier)
    for first, stop in cut((0, len(reads.sample)), STRETCH_SAMPLES):
        pieces = order.contents(reads.sample[first:stop])
        own = np.minimum(wanted.searchsorted(pieces.document), len(wanted) - 1)
        hit = (wanted[own] == pieces.document) & (pieces.inputs > 0)
        read, begin = first + pieces.owner[hit], pieces.start[hit]
        own, end = own[hit], begin + pieces.inputs[hit]
        below, above = own, own + 1
        if len(ranges) > len(wanted):  # those that begin before the end of a piece, and not too early to reach it
            above = keys.searchsorted(own * width + np.minimum(end, width - 1))
            below = np.minimum(keys.searchsorted(own * width + np.maximum(begin - longest + 1, 0)), above)
        ends = np.concatenate([[0], np.cumsum(above - below)])
        edges = np.append(np.flatnonzero(np.diff(read, prepend=-1)), len(read))  # first piece of each read
        for part in (slice(*edges[[*pair]]) for pair in batch_by_size(ends[edges], PAIRS)):
            piece = np.repeat(np.arange(part.start, part.stop), np.diff(ends)[part])
            number = join_ranges(below[part], above[part])
            yield reads, _join_pieces(read[piece], number, begin[piece], end[piece], ranges)


def count_document_tokens(order: RunOrder, source: int, documents: Numbers) -> Numbers:
    """Return the number of tokens of documents, which are in ascending order; IndexError if there is no such one."""
    dataset, sequences = order.sources[source].dataset, order.reads.sequences_of(source, documents)
    bounds = index_of(dataset).document_indices
    lengths = np.concatenate([[0], dataset.sequence_lengths[sequences]]).cumsum(dtype=np.int64)
    return np.diff(lengths[np.cumsum(bounds[documents + 1] - bounds[documents])], prepend=0)


def _join_pieces(read: Numbers, number: Numbers, begin: Numbers, end: Numbers, ranges: Numbers) -> RangeReads:
    """Return the tokens of ranges in pieces of documents, those of one sample and range together.

    Args:
        read, number: read and range of each pair of a piece and a range, shape (n,).
        begin, end: the piece, in its document.
        ranges: as for `count_groups`.
    """
    _, _, first, stop = ranges[number].T
    begin, end = np.maximum(begin, first), np.minimum(end, stop)
    order = np.lexsort((begin, number, read))
    read, number, begin, end = (column[order[(end > begin)[order]]] for column in (read, number, begin, end))
    is_new = (np.diff(read, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0)
    starts, shift = np.flatnonzero(is_new), np.cumsum(is_new) * (int(end.max(initial=0)) + 1)
    # A document that is read in two epochs may have two pieces in a sample: a token of both counts once for the whole.
    reached = np.maximum.accumulate(np.concatenate([[0], end + shift]))[:-1]
    fresh = np.maximum(end + shift - np.maximum(begin + shift, reached), 0)
    columns = end - begin, begin == ranges[number, 2], fresh
    tokens, begun, covered = (np.add.reduceat(column, starts, dtype=np.int64) for column in columns)
    group, _, first, stop = ranges[number[starts]].T
    return RangeReads(read[starts], group, tokens, begun, covered == stop - first)


def find_sources(
    history: Runs, names: Collection[str], stop_step: int
) -> Iterator[tuple[str, RunOrder, int, int, bool]]:
    """Yield each source of each run that is the dataset of one of these names, also if the run names it otherwise.

    Args:
        history: the runs of a model, or the order of one run.
        names: prefixes of sources, as any run has them.
        stop_step: first step that is not searched.

    Returns:
        The name, the order of a run, the number of the source there, the first step that the run does not have or that
        is not searched, and whether the run is the first one.

    Raises:
        ConfigError: no run has a source of this name, or one was replaced between two runs; or the history begins with
            packed files whose documents are not known.
    """
    joined = history.joined
    if unknown := [name for name in names if name not in joined.names]:
        raise ConfigError(f"source: found {unknown[0]}, needs a source of the run: {', '.join(joined.sources)}")
    for number, (order, steps) in enumerate(history.orders(range(history.first_step, stop_step))):
        asks_history = bool(names) and isinstance(history, RunHistory)
        if problems := order.list_unknown() if asks_history else ():
            raise ConfigError(
                f"{problems[0]}, and their blocks may hold any document; restore the file beside them, as export "
                "litpkds writes it, or ask about a later run without its previous"
            )
        for source, own in enumerate(joined.names_of(order.sources)):
            for name in (name for name in names if joined.names[name] == own):
                joined.check_data([order.sources[source]])
                yield name, order, source, steps.stop, number == 0


def find_reads(
    history: Runs,
    documents: Mapping[str, Sequence[int] | Numbers],
    stop_step: int,
    *,
    earlier: bool | None = True,
) -> Iterator[tuple[RunOrder, SampleReads, TokenReads]]:
    """Yield the order of each run, its reads of samples with a token of some documents, and what these hold.

    Args:
        history: the runs of a model, or the order of one run.
        documents: prefix of a source -> numbers of documents in it.
        stop_step: first step that is not searched.
        earlier: as for `RunOrder.where`, of the first run.

    Raises:
        IndexError: there is no such document.
        ConfigError: as `find_sources` and `RunOrder.where`.
    """
    for name, order, source, end, is_first in find_sources(history, documents.keys(), stop_step):
        yield order, *order.where(source, documents[name], end, earlier=earlier if is_first else False)
