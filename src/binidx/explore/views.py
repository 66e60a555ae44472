"""Contents of the pages: for each address the template and its values. Every number is computed as by the commands.

/                               the run, or the dataset          binidx account
/step/7                         samples of a step                binidx trace
/step/7/seen                    its documents that were read before
/compare                        documents of two parts of a run, or of two runs
/step/7/3/0                     sample of rank 3, slot 0: text   binidx trace --tokenizer
/source/0                       counts, documents                binidx inspect, binidx account
/source/0/document/5            text and tokens, reads           binidx where
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from binidx.errors import ConfigError, redacted
from binidx.explore.charts import draw_timeline
from binidx.explore.explored import Explored
from binidx.explore.loss_curve import LossCurve
from binidx.explore.token_counts import (
    count_frequent_tokens,
    count_lengths,
    find_duplicates,
    read_token_ranges,
    token_bounds,
)
from binidx.format.indexed_dataset import IndexedDataset, as_pair
from binidx.format.sidecars.lineage import find_named
from binidx.run.display.sample_rows import build_rows, known_origins
from binidx.run.display.timeline import Timeline
from binidx.run.global_order import SampleReads
from binidx.run.history import RunHistory
from binidx.run.provenance.accounts import SUMMED, compare_documents
from binidx.run.provenance.exposures import count_exposures, count_groups, find_reads
from binidx.run.run_order import RunOrder
from binidx.run.schedule import check_steps
from binidx.search.document_search import find_token_table
from binidx.search.matches import find_ranges, search_sources

Values = dict[str, Any]
Query = Mapping[str, str]

BINS = 120
"""Bins of the timeline."""

NUM_COLOURS = 8
SAMPLES_SHOWN, DOCUMENTS_SHOWN, TOKENS_SHOWN, READS_SHOWN = 64, 25, 2048, 200
"""Rows of one page, and tokens of a document on one."""

STARTING_TOKENS = 48
"""Tokens at the start of each document in a list."""


SEQUENCES_FETCHED = 1 << 22
"""Most sequences of a remote dataset whose lengths, 4 bytes each, are fetched without a click."""


def show_run(explored: Explored, query: Query) -> Values:
    """Return the values of the page of a run: its course over some steps, and the account of its sources."""
    order, whole = explored.order or _run_of(explored), explored.steps
    steps = parse_range(query.get("steps"), whole)
    check_steps(steps, order.num_steps(), first_step=whole.start)
    timeline = explored.timeline(steps, BINS)
    counts = timeline.counts.sum(axis=0)
    colours = _colours(counts.tolist())
    planned = None if timeline.planned is None else timeline.planned.mean(axis=0).tolist()
    rows = []
    for row in explored.accounts():
        source = timeline.names.index(row["source"])
        shares = {"planned": planned and planned[source], "share": counts[source] / max(int(counts.sum()), 1)}
        number = explored.numbers.get(row["source"])  # None: a set of packed files
        rows.append({**row, "number": number, "colour": colours[source], **shares})
    return {
        "steps": steps,
        **show_charts(timeline, colours, explored.losses),
        "rows": rows,
        "command": ["account", *([] if order.num_steps() else ["--steps", f":{whole.stop}"])],
    }


def show_charts(timeline: Timeline, colours: Sequence[int], losses: LossCurve | None = None) -> Values:
    """Return the values of the charts of a timeline, and of their bins, which lead to steps."""
    bounds, shares = timeline.bounds.tolist(), timeline.shares
    in_bins = losses.of_bins(timeline.bounds) if losses else [None] * len(shares)
    bins = [
        {
            "steps": range(*bounds[place : place + 2]),
            "shares": [(name, shares[place, source]) for source, name in enumerate(timeline.names)],
            "loss": in_bins[place],
            "skipped": int(timeline.skipped[place]),
        }
        for place in range(len(shares))
    ]
    return {"timeline": timeline, "bins": bins, "panels": [*draw_timeline(timeline, losses, colours)]}


def show_step(explored: Explored, query: Query, step: int) -> Values:
    """Return the values of the page of a step: its samples and their documents."""
    order = explored.order_at(step)
    reads, rank = read_step(order, step, query)
    first, ranked = parse_number(query, "from", 0), query.get("by") == "loss"
    known = None
    if explored.losses:
        known = explored.losses.of_samples(order, step, reads)
    sample_losses = known or [(math.nan, math.nan)] * len(reads.step)
    if ranked and known:  # samples without a loss come last
        places = sorted(range(len(known)), key=lambda place: (math.isnan(known[place][1]), -known[place][1]))
        reads = reads.at(places)
        sample_losses = [known[place] for place in places]
    page = reads.at(slice(first, first + SAMPLES_SHOWN))
    contents = order.contents(page.sample)
    # Origins are shown with the text of a sample: those of all would take a part of each row group of the lineage.
    page_rows = build_rows(order, page, contents=contents, lineage=False)
    numbers = explored.numbers_of(order)
    parts = zip(page_rows, contents.source.tolist(), sample_losses[first:], strict=False)
    rows = [{**row, "number": numbers[source], "loss": loss, "excess": excess} for row, source, (loss, excess) in parts]
    sources = np.bincount(order.sources_of(reads.sample) + 1)[1:]
    losses = explored.losses.of_bins(np.array([step, step + 1]))[0] if explored.losses else None
    return {
        "order": order,
        "rank": rank,
        "rows": rows,
        "sources": [(numbers[source], count) for source, count in enumerate(sources.tolist()) if count],
        "loss": losses and losses[1],
        "ranked": ranked,
        "has_losses": known is not None,
        "pager_of": Pager(first, SAMPLES_SHOWN, len(reads.step)),
        "command": ["trace", "--steps", str(step), *([] if rank is None else ["--rank", str(rank)])],
    }


def read_step(order: RunOrder, step: int, query: Query) -> tuple[SampleReads, int | None]:
    """Return the reads of a step, of the rank that the query names or of all, and that rank."""
    rank = parse_number(query, "rank", None)
    if rank is not None and not 0 <= rank < order.num_ranks:
        raise ConfigError(f"rank: found {rank}, the run has {order.num_ranks}, counted from 0")
    check_steps(range(step, step + 1), order.num_steps(), first_step=order.first_step)
    return order.readings(range(step, step + 1), rank), rank


def show_seen(explored: Explored, query: Query, step: int) -> Values:
    """Return the values of the table of documents of a step that were read before; one pass over the indices."""
    order = explored.order_at(step)
    reads, rank = read_step(order, step, query)
    contents = order.contents(reads.sample)
    owner = np.array(explored.numbers_of(order))[contents.piece_source]
    source, document = np.unique(np.stack([owner, contents.document])[:, contents.inputs > 0], axis=1)
    asked = {each.name: document[source == number] for number, each in enumerate(explored.sources) if number in source}
    rows = list[tuple[int, ...]]()
    for name, seen in count_exposures(explored.runs, asked, step, earlier=None).items():
        own = np.stack([seen.document, seen.samples, seen.last_step], axis=1)[seen.samples > 0]
        rows += [(explored.numbers[name], *row) for row in own.tolist()]
    rows.sort(key=lambda row: (-row[2], -row[3]))
    return {"rank": rank, "rows": rows[:READS_SHOWN], "total": len(rows), "documents": len(document)}


def show_comparison(explored: Explored, query: Query) -> Values:
    """Return the values of the comparison of the documents of two parts of the run, or of a part of another run."""
    order = _run_of(explored)
    steps, other = range(order.first_step, explored.steps.stop), explored.other or order
    half = steps.start + len(steps) // 2
    first = parse_range(query.get("first"), steps if explored.other else range(steps.start, half))
    ends = range(other.first_step, other.num_steps() or steps.stop) if explored.other else range(half, steps.stop)
    second = parse_range(query.get("second"), ends)
    found = compare_documents(order, first, other, second)
    return {"first": first, "second": second, "found": found, "numbers": explored.numbers}


def show_text(explored: Explored, query: Query, step: int, rank: int, slot: int) -> Values:
    """Return the values of the text of a sample: the pieces of its documents, in order."""
    order = explored.order_at(step)
    reads, _ = read_step(order, step, {"rank": str(rank)})
    if slot >= len(reads.slot):
        raise ConfigError(f"slot: found {slot}, the step has {len(reads.slot)} on each rank, counted from 0")
    page = reads.at([slot])
    contents = order.contents(page.sample)
    (row,), source = build_rows(order, page, contents=contents), explored.numbers_of(order)[int(contents.source[0])]
    tokens, text = order.read(page.sample)[0].tolist(), explored.text(source)
    # Without an origin a block is one piece, and separators between documents are shown in any case.
    row["docs"] = row.get("docs") or [{"doc": None, "start": 0, "len": len(tokens), "dst": 0}]
    for doc in row["docs"]:
        doc["pieces"] = list(text.pieces(tokens[doc["dst"] : doc["dst"] + doc["len"]]))
    command = ["trace", "--steps", str(step), "--rank", str(rank)]
    return {"row": row, "number": source, "reason": text.reason, "command": command}


def show_source(explored: Explored, query: Query, number: int) -> Values:
    """Return the values of the page of a source: its counts, and some of its documents."""
    dataset, first = _dataset_of(explored, number), parse_number(query, "from", 0)
    index, count = dataset.index, len(dataset.index.document_indices) - 1
    documents = range(min(first, count), min(first + DOCUMENTS_SHOWN, count))
    sequences = np.diff(index.document_indices[documents.start : documents.stop + 1]).tolist()
    bounds = [*pairwise(token_bounds(dataset, documents))]
    starts = read_token_ranges(dataset, [(start, min(start + STARTING_TOKENS, stop)) for start, stop in bounds])
    origins, text = known_origins(explored.prefix(number), list(documents)), explored.text(number)
    name, is_run = explored.sources[number].name, isinstance(explored.history, RunHistory)
    counted: list[Values] = [row for row in (explored.accounts() if is_run else ()) if row["source"] == name]
    rows = [
        {
            "document": document,
            "tokens": bounds[place][1] - bounds[place][0],
            "sequences": sequences[place],
            "pieces": list(text.pieces(starts[place])),
            "origin": origins.get(document),
        }
        for place, document in enumerate(documents)
    ]
    return {
        "number": number,
        "dataset": dataset,
        "documents": count,
        "account": {column: sum(row[column] for row in counted) for column in SUMMED} if counted else None,
        "rows": rows,
        "reason": text.reason,
        "pager_of": Pager(first, DOCUMENTS_SHOWN, count),
        "counts_lengths": dataset.location.local_path is not None or len(index) <= SEQUENCES_FETCHED,
        "target": name,
        "command": ["inspect"],
    }


def show_lengths(explored: Explored, query: Query, number: int) -> Values:
    """Return the values of the histogram of the lengths of a source, one pass over them."""
    dataset = _dataset_of(explored, number)
    return {"lengths": count_lengths(dataset), "command": ["inspect"], "target": dataset.path_prefix}


def show_tokens(explored: Explored, query: Query, number: int) -> Values:
    """Return the values of the list of the most frequent tokens of a source, in some places of it."""
    dataset, text = _dataset_of(explored, number), explored.text(number)
    counted = count_frequent_tokens(dataset)
    rows = [(token, count, next(text.pieces([token]))) for token, count in counted.most]
    return {"counted": counted, "rows": rows}


def show_duplicates(explored: Explored, query: Query, number: int) -> Values:
    """Return the values of the list of equal documents among consecutive ones of a source, whose tokens are read."""
    dataset, first = _dataset_of(explored, number), parse_number(query, "from", 0)
    count = len(dataset.index.document_indices) - 1
    found = find_duplicates(dataset, min(first, count))
    shown = {"found": found, "groups": found.groups[:READS_SHOWN]}
    return {**shown, "pager_of": Pager(first, max(len(found.documents), 1), count)}


def show_repeats(explored: Explored, query: Query) -> Values:
    """Return the values of the table of repeats: documents read 0, 1, 2, ... times; reads every sample of the run."""
    _run_of(explored)
    return {"accounts": explored.accounts(repeats=True), "command": ["account", "--repeats"]}


def show_document(explored: Explored, query: Query, number: int, document: int) -> Values:
    """Return the values of the page of a document: its tokens, and the row that it came from."""
    dataset = _dataset_of(explored, number)
    count = len(dataset.index.document_indices) - 1
    if document >= count:
        raise ConfigError(f"document {document}: {dataset.path_prefix} has {count:,}, counted from 0")
    start, stop = token_bounds(dataset, range(document, document + 1))
    pager = Pager(parse_number(query, "from", 0), TOKENS_SHOWN, stop - start)
    (tokens,) = read_token_ranges(dataset, [(start + pager.first, start + pager.stop)])
    text = explored.text(number)
    origin = known_origins(explored.prefix(number), [document]).get(document)
    named = ["--source", explored.sources[number].name] if len(explored.sources) > 1 else []
    return {
        "documents": count,
        "tokens": stop - start,
        "pieces": list(text.pieces(tokens)),
        "reason": text.reason,
        "first": pager.first,
        "origin": origin,
        "pager_of": pager,
        "command": ["where", *named, "--document", str(document)] if explored.order else None,
    }


def show_reads(explored: Explored, query: Query, number: int, document: int) -> Values:
    """Return the values of the list of all reads of a document; one pass over the indices of the run."""
    name, rows = explored.sources[_known(explored, number)].name, []
    for order, reads, contents in find_reads(explored.runs, {name: [document]}, explored.steps.stop, earlier=None):
        inputs = np.bincount(contents.owner, contents.inputs * (contents.document == document), len(reads.step))
        built = build_rows(order, reads, contents=contents, lineage=False)
        for row, read in zip(built, inputs.tolist(), strict=True):
            parts = [doc for doc in row["docs"] if doc["doc"] == document and doc["len"]]
            rows.append({**row, "parts": parts, "read": read})
    first = parse_number(query, "from", 0)
    start, stop = token_bounds(_dataset_of(explored, number), range(document, document + 1))
    return {
        "num_steps": len({row["step"] for row in rows}),
        "rows": rows[first : first + READS_SHOWN],
        "pager_of": Pager(first, READS_SHOWN, len(rows)),
        "tokens": stop - start,
    }


def show_search(explored: Explored, query: Query) -> Values:
    """Return the values of the list of documents with an exact text, for which the data is read from end to end."""
    text = query.get("text", "")
    if not text.strip():
        raise ConfigError("text: found nothing, needs a text to search")
    sources = _chosen(explored, query)
    named = {explored.sources[number].name: explored.sources[number] for number in sources}
    numbers = {explored.sources[number].name: number for number in reversed(sources)}
    prefixes = [explored.prefix(number) for number in sources]
    table, history = find_token_table(prefixes, explored.tokenizer), explored.history
    result = search_sources(named, [text], table, explored.options)
    hits = [(numbers[name], *row) for name, rows in result.hits.items() for row in rows[:, [0, 2]].tolist()]
    ends = np.cumsum([0, *map(len, result.hits.values())]).tolist()
    shown = {
        name: rows[: max(READS_SHOWN - end, 0)] for end, (name, rows) in zip(ends, result.hits.items(), strict=False)
    }
    ranges = find_ranges(named, replace(result, hits=shown)) if history else {}
    groups = {
        name: np.column_stack([end + shown[name][:, 0].searchsorted(rows[:, 0]), rows[:, [0, 2, 3]]])
        for end, (name, rows) in zip(ends, ranges.items(), strict=False)
    }
    stop, typed = explored.steps.stop, ["grep", *(redacted(prefix.uri) for prefix in prefixes)]
    reads = count_groups(history, groups, len(hits), stop, None) if history else {}
    found = {"hits": hits[:READS_SHOWN], "total": len(hits), "reads": reads, "result": result}
    return {"text": text, **found, "command": typed, "target": text}


def _known(explored: Explored, source: int) -> int:
    """Return the number of a source; raise ConfigError if there is none."""
    if source >= len(explored.sources):
        raise ConfigError(f"source {source}: there are {len(explored.sources)}, counted from 0")
    return source


def _chosen(explored: Explored, query: Query) -> list[int]:
    """Return the numbers of the sources that a form names: one, or all."""
    if query.get("source", "") in ("", "all"):
        return list(range(len(explored.sources)))
    return [_known(explored, parse_number(query, "source", 0))]


def find_page(explored: Explored, query: Query) -> str | Values:
    """Return the address of the step or document that a form names, or the values of a list of several documents."""
    if step := query.get("step", "").strip():
        return f"step/{parse_number({'step': step}, 'step', 0)}"
    name, sources = query.get("document", "").strip(), _chosen(explored, query)
    if not name:
        raise ConfigError("document: found nothing, needs a number, FILE:ROW or id=ID")
    if name.isdecimal():
        if len(sources) > 1:
            raise ConfigError(f"document {name}: choose its source, the run has {len(sources)}")
        return f"source/{sources[0]}/document/{parse_number({'document': name}, 'document', 0)}"
    named, _ = find_named({str(source): explored.prefix(source) for source in sources}, name)
    found = [(int(source), number) for source, numbers in named.items() for number in numbers]
    if not found:
        raise ConfigError(f"document: {name} not found in the lineage of {len(sources)} sources")
    if len(found) == 1:
        return "source/{}/document/{}".format(*found[0])
    return {"found": found[:READS_SHOWN], "total": len(found), "name": name}


class Pager:
    """Rows of one page among all rows.

    Args:
        first: number of the first row.
        size: rows of a page.
        total: number of all rows.
    """

    def __init__(self, first: int, size: int, total: int) -> None:
        if first and first >= total:
            raise ConfigError(f"from: found {first}, there are {total:,}, counted from 0")
        self.first, self.stop, self.total, self.size = first, min(first + size, total), total, size
        self.previous = max(first - size, 0) if first else None
        self.next = self.stop if self.stop < total else None


def parse_number(query: Query, name: str, default: Any) -> Any:
    """Return a number of a query from 0 on, or the default."""
    text = query.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ConfigError(f"{name}: found {text[:40]!r}, needs a whole number from 0")
    return int(text)


def parse_range(text: str | None, whole: range) -> range:
    """Return the steps that `A:B` names; None is `whole`."""
    first, _, stop = (text or "").partition(":")
    bounds = {"first": first, "stop": stop}
    steps = range(parse_number(bounds, "first", whole.start), parse_number(bounds, "stop", whole.stop))
    if not steps:
        raise ConfigError(f"steps: found {text}, needs A:B with A below B")
    return steps


def _run_of(explored: Explored) -> RunOrder:
    """Return the order of the run, which is none over packed files."""
    if not isinstance(explored.runs, RunHistory):
        kind = "a run over packed files, which has no such page"
        raise ConfigError(f"{explored.name}: found {kind}, needs the file of a run over .bin and .idx")
    return explored.runs.last


def _dataset_of(explored: Explored, source: int) -> IndexedDataset:
    return as_pair(explored.sources[_known(explored, source)].dataset)


def _colours(counts: Sequence[int]) -> list[int]:
    """Return the number of a colour for each source; the smallest of many sources share the last."""
    ranked = sorted(range(len(counts)), key=lambda source: -counts[source])
    if len(counts) <= NUM_COLOURS:
        return list(range(len(counts)))
    return [min(ranked.index(source), NUM_COLOURS - 1) for source in range(len(counts))]
