"""Documents and passages that `binidx where` looks for, and counts of their reads."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from binidx.errors import ConfigError, FormatError
from binidx.format.sidecars.lineage import find_named
from binidx.jobs.parts import Workers
from binidx.order.order_protocols import Numbers, Source
from binidx.order.reads import TokenReads
from binidx.packed.packed_run import PackedRunOrder
from binidx.run.global_order import SampleReads
from binidx.run.history import Runs
from binidx.run.provenance.exposures import count_exposures
from binidx.search.document_search import find_token_table
from binidx.search.matches import find_ranges, search_sources
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole

from ._command import print_result, print_rows_json
from ._display import MOST_ROWS, counts, print_note, table
from ._options import chosen
from ._runs import READ_HEAD, exposure_rows, print_comparison, read_cells, steps_cell


def find_passage(history: Runs, arguments: argparse.Namespace) -> dict[str, Numbers]:
    """Return prefix -> the tokens of each match of the text of the file --text, as `count_exposures` takes ranges."""
    options, sources = arguments.storage_options, history.select_sources()
    try:
        text = bytes(read_whole(open_object(arguments.text, storage_options=options))).decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{arguments.text}: not UTF-8 ({error}); needs a text file") from error
    tokens = find_token_table([Location(source.prefix, options) for source in sources.values()], arguments.tokenizer)
    result = search_sources(sources, [text], tokens, options, **chosen(arguments, "normalize", "watch"))
    arguments.watch.end_stage()
    print_comparison(arguments.normalize)
    return {name: rows[:, [0, 2, 3]] for name, rows in find_ranges(sources, result).items()}


def reads_of_stored(
    history: Runs, samples: Collection[Numbers], stop_step: int
) -> Iterator[tuple[PackedRunOrder, SampleReads, TokenReads]]:
    """Yield the reads of stored samples, whose names were given, in each run, and their contents."""
    if samples:
        for order, steps in history.orders(range(history.first_step, stop_step)):
            if isinstance(order, PackedRunOrder):
                reads = order.reads_of(np.unique(np.concatenate([*samples])), steps.stop)
                yield order, reads, order.contents(reads.sample)


def count_stored(history: Runs, stored: Mapping[str, Numbers], stop_step: int) -> list[dict[str, Any]]:
    """Return a row for each stored sample whose name was given."""
    rows = []
    for name, samples in stored.items():
        for order, reads, _ in reads_of_stored(history, [samples], stop_step):
            source, steps = order.label(int(samples[0]))["source"], reads.step.tolist()
            counts = dict.fromkeys(("samples", "samples_trained", "times_started"), len(steps))
            counts["tokens"] = len(steps) * order.blocks.sequence_length
            ends = {"first_step": min(steps, default=None), "last_step": max(steps, default=None)}
            rows.append({"source": source, "document": name, **counts, **ends})
    return rows


def print_counts(
    history: Runs,
    documents: Mapping[str, Sequence[int] | Numbers],
    stored: Mapping[str, Numbers],
    stop_step: int,
    arguments: argparse.Namespace,
    place: Workers | None = None,
) -> None:
    """Print how often documents, or with --text matches, and stored samples were read."""
    earlier = not arguments.no_earlier
    exposures = count_exposures(history, documents, stop_step, earlier=earlier, workers=place)
    rows = chain(count_stored(history, stored, stop_step), exposure_rows(exposures))
    if arguments.watch:
        arguments.watch.end_stage()
    name, text = ("documents", document_table) if arguments.text is None else ("matches", match_table)
    if arguments.json:
        print_rows_json({"steps": stop_step, "normalized": arguments.normalize}, name, rows)
    else:
        print_result({}, text(rows, stop_step), arguments)


def document_table(rows: Iterable[dict[str, Any]], stop: int) -> str:
    """Return documents as a table, and how many of them were read in how many samples."""
    names = ("samples", "samples_trained", "times_started", "tokens")
    shown, total, read, _, most = _sum_rows(rows)
    cells = [[row["source"], _number(row["document"]), *(f"{row[name]:,}" for name in names)] for row in shown]
    cells = [[*cell, steps_cell(row)] for cell, row in zip(cells, shown, strict=True)]
    head = ["source", "document", "samples", "trained", "started", "tokens", "in steps"]
    text = f"{counts(documents=total)}, steps before {stop:,}; {read:,} seen"
    text += f", in up to {counts(samples=most)} each" if read else ""
    return f"{table(head, cells, num_rows=total)}\n{text}" if cells else text


def _sum_rows(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], int, int, int, int]:
    """Return the rows to show; the numbers of all, of those read and of those read whole; the most samples of one."""
    shown, total, read, whole, most = list[dict[str, Any]](), 0, 0, 0, 0
    for row in rows:
        if total < MOST_ROWS:
            shown.append(row)
        total, read, most = total + 1, read + (row["samples"] > 0), max(most, row["samples"])
        whole += row.get("samples_whole", 0) > 0
    return shown, total, read, whole, most


def match_table(rows: Iterable[dict[str, Any]], stop: int) -> str:
    """Return matches as a table, and how many of them were read whole, in part and not at all."""
    shown, total, read, whole, _ = _sum_rows(rows)
    cells = [
        [row["source"], f"{row['document']:,}", f"{row['first_token']:,} to {row['stop_token']:,}", *read_cells(row)]
        for row in shown
    ]
    head = ["source", "document", "tokens", *READ_HEAD]
    text = f"{total:,} match{'' if total == 1 else 'es'}, steps before {stop:,}"
    text += f"; {whole:,} read whole, {read - whole:,} only in part, {total - read:,} not read" if shown else ""
    return f"{table(head, cells, num_rows=total)}\n{text}" if cells else text


def _number(document: int | str) -> str:
    """Return the number of a document, or the name of a block of packed files."""
    return document if isinstance(document, str) else f"{document:,}"


def describe_earlier(history: Runs, past: int | None) -> str:
    """Return a clause about the samples before `consumed_samples` of the first run; "" if there are none.

    Args:
        past: how many of them were found; None if they were not searched.
    """
    consumed = history.consumed_samples
    if not consumed:
        return ""
    before = f"the {consumed:,} samples before consumed_samples"
    if past is None:
        return f"; not searched: {before}, of which the run.json of the earlier part has the order"
    return f" and {before}; {past:,} of them before, with step and rank by the run.json of the earlier part"


def find_documents(
    sources: Mapping[str, Source], names: Sequence[str], options: Mapping[str, Any] | None
) -> dict[str, list[int]]:
    """Return prefix -> numbers of the named documents.

    Args:
        sources: the sources to search, by their prefix.
        names: numbers, FILE:ROW or id=ID.
        options: fsspec's options of their stores.
    """
    documents: dict[str, list[int]] = {}
    for name in names:
        if name.isdecimal() and len(name) < 19:
            if len(sources) > 1:
                raise ConfigError(f"--source: not given, document {name} needs one of {', '.join(sources)}")
            documents.setdefault(next(iter(sources)), []).append(int(name))
            continue
        for prefix, numbers in search_lineage(sources, name, options).items():
            if len(sources) > 1:
                told = ", ".join(f"{number:,}" for number in numbers)
                print_note("binidx", f"{name}: document {told} of {prefix}")
            documents.setdefault(prefix, []).extend(numbers)
    return documents


def search_lineage(sources: Mapping[str, Source], name: str, options: Mapping[str, Any] | None) -> dict[str, list[int]]:
    """Return prefix -> numbers of the documents that `name`, FILE:ROW or id=ID, names; skip sources without lineage.

    Args:
        sources, options: as for `find_documents`.
        name: FILE:ROW or id=ID.

    Raises:
        ConfigError: no document has that name.
        ObjectNotFoundError: none of the sources has lineage, or ids in it.
    """
    numbers, missing = find_named({prefix: Location(own.prefix, options) for prefix, own in sources.items()}, name)
    if len(missing) == len(sources):
        raise missing[0]
    if not numbers:
        without = f", {len(missing)} have no lineage or no ids in it" if missing else ""
        searched = next(iter(sources)) if len(sources) == 1 else f"{len(sources)} sources{without}"
        raise ConfigError(f"--document: {name} not found in {searched}")
    return numbers
