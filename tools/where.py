"""Find every step, rank and slot that read a document, for takedowns and contamination.

Searches all indices of the run, by one pass over each; no token is read. A document is named
as `binidx trace` prints it: its number in its source, and the source where the run has several; and as there, the file
and row it came from are shown where its source has lineage. Such a document may also be named by these, or by its
id, and is searched in all sources if none is given. --documents takes the output of `binidx grep`.

A run that names the one before it, or has phases, is searched over its whole history; --count prints how often each
document was read and trained, first and last. Of a resumed run that names none, the samples before its consumed_samples
are searched, too; their step, rank and slot (null in JSON) are in the run.json of the earlier part. A cyclic run that
names none must be searched part by part, with --no-earlier.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx where run.json --document 123456 --source s3://corpus/en --before-step 41200
  binidx where run.json --document crawl-07.jsonl.zst:4711 --document id=6ba7b810
  binidx where run.json --documents drop.txt
  binidx where run.json --document id=6ba7b810 --count --before-step 41200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields

from binidx.corpus.origins import documents_at, documents_with_id
from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.run.provenance.history import DocumentReads, RunHistory, count_reads
from binidx.run.provenance.run_order import RunOrder
from binidx.run.provenance.sample_rows import build_rows
from binidx.storage.location import Location

from ._command import command, print_result
from ._display import counts
from ._display import table as columns
from ._packed import find_packed
from ._runs import (
    MANY_DOCUMENTS,
    add_run,
    add_topology,
    listed_documents,
    open_history,
    open_packed,
    print_rows,
    read_list,
    stop_step,
)

SEARCHES = 8
"""Lineage files read at the same time; each needs 6 MB, for a row group."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    which = options.add_mutually_exclusive_group(required=True)
    which.add_argument("--document", action="append", metavar="N", help="a number, FILE:ROW or id=ID; may be repeated")
    which.add_argument("--documents", metavar="LIST", help="a list, as binidx grep prints it; - reads stdin")
    options.add_argument(
        "--source", metavar="PREFIX", help="prefix of the source; of a number needed where there are several"
    )
    options.add_argument("--before-step", type=int, metavar="N", help="only steps before N; by default all of the run")
    options.add_argument("--count", action="store_true", help="a row for each document: how often, first and last step")
    options.add_argument(
        "--no-earlier", action="store_true", help="of a resumed run, leave out the samples before its consumed_samples"
    )
    add_topology(options)


def find(arguments: argparse.Namespace) -> None:
    """Print the samples with parts of the documents, or the counts of each document; and the number of the samples."""
    if (packed := open_packed(arguments)) is not None:
        find_packed(packed, arguments)
        return
    listed = read_list(arguments.documents, arguments.storage_options) if arguments.documents else None
    history = open_history(arguments, whole=listed is not None and len(listed) >= MANY_DOCUMENTS)
    stop = stop_step(history, arguments.before_step)
    rows, steps, past, missing = 0, set[int](), 0, list[ConfigError]()
    table: dict[tuple[str, int], DocumentReads] = {}
    parts = [*history.orders(range(history.first_step, stop))]
    for number, (order, part) in enumerate(parts):
        try:
            documents = (
                find_documents(order, select_sources(order, arguments.source), arguments.document)
                if listed is None
                else listed_documents(order, listed)
            )
        except ConfigError as error:  # another run of the history may have the source
            missing.append(error)
            continue
        earlier = number == 0 and not arguments.no_earlier
        for source in sorted(documents):
            try:
                readings, contents = order.where(source, documents[source], part.stop, earlier=earlier)
            except IndexError as error:
                raise ConfigError(str(error)) from error
            if arguments.count:
                for found in count_reads(order, source, documents[source], readings, contents):
                    key = found.source, found.document
                    table[key] = table[key] + found if key in table else found
                rows += len(readings.step)
            else:
                rows += print_rows(build_rows(order, readings, contents), arguments.json)
            past += int((readings.step < 0).sum())
            steps |= set(readings.step[readings.step >= 0].tolist())
    if len(missing) == len(parts):
        raise missing[0]
    if arguments.count:
        print_counts([*table.values()], arguments)
    print(
        f"{counts(samples=rows)} in {len(steps):,} of {counts(steps=stop - history.first_step)}"
        f"{_earlier(history, arguments, past)}",
        file=sys.stderr,
    )


def print_counts(reads: Sequence[DocumentReads], arguments: argparse.Namespace) -> None:
    """Print a row for each document."""
    rows = [["" if value is None else str(value) for value in asdict(each).values()] for each in reads]
    names = [option.name.replace("_", " ") for option in fields(DocumentReads)]
    print_result([asdict(each) for each in reads], columns(names, rows, most_rows=len(rows)), arguments)


def _earlier(history: RunHistory, arguments: argparse.Namespace, past: int) -> str:
    """Return a clause about the samples before `consumed_samples` of the first run; "" if there are none."""
    consumed = history.runs[0].consumed_samples
    if not consumed:
        return ""
    before = f"the {consumed:,} samples before consumed_samples"
    if arguments.no_earlier:
        return f"; not searched: {before}, of which the run.json of the earlier part has the order"
    return f" and {before}; {past:,} of them before, with step and rank by the run.json of the earlier part"


def find_documents(order: RunOrder, sources: Sequence[int], names: Sequence[str]) -> dict[int, list[int]]:
    """Return source -> numbers of the named documents.

    Args:
        order: order of the run.
        sources: numbers of the sources to search.
        names: numbers, FILE:ROW or id=ID.
    """
    documents: dict[int, list[int]] = {}
    for name in names:
        if name.isdecimal():
            if len(sources) > 1:
                raise ConfigError(f"--source: not given, document {name} needs one of {', '.join(order.prefixes)}")
            documents.setdefault(sources[0], []).append(int(name))
            continue
        for source, numbers in search_lineage(order, sources, name).items():
            if len(sources) > 1:
                told = ", ".join(f"{number:,}" for number in numbers)
                print(f"binidx: {name}: document {told} of {order.prefixes[source]}", file=sys.stderr)
            documents.setdefault(source, []).extend(numbers)
    return documents


def search_lineage(order: RunOrder, sources: Sequence[int], name: str) -> dict[int, list[int]]:
    """Return source -> numbers of the documents that `name`, FILE:ROW or id=ID, names; skip sources without lineage.

    Args:
        order: order of the run.
        sources: numbers of the sources to search.
        name: FILE:ROW or id=ID.

    Raises:
        ConfigError: no document has that name.
        ObjectNotFoundError: none of the sources has lineage, or ids in it.
    """
    file, colon, row = name.rpartition(":")
    if not (name.startswith("id=") or (colon and row.isdecimal())):
        raise ConfigError(f"--document: found {name}, needs a number, FILE:ROW or id=ID")

    def search(source: int) -> list[int] | ObjectNotFoundError:
        prefix = Location(order.sources[source].prefix, order.config.storage_options)
        try:
            if name.startswith("id="):
                return documents_with_id(prefix, name.removeprefix("id="))
            return documents_at(prefix, file, int(row))
        except ObjectNotFoundError as error:
            return error

    with ThreadPoolExecutor(SEARCHES, "binidx-where") as pool:
        answers = dict(zip(sources, pool.map(search, sources), strict=True))
    missing = [answer for answer in answers.values() if isinstance(answer, ObjectNotFoundError)]
    if len(missing) == len(answers):
        raise missing[0]
    numbers = {source: answer for source, answer in answers.items() if isinstance(answer, list) and answer}
    if not numbers:
        without = f", {len(missing)} have no lineage or no ids in it" if missing else ""
        searched = order.prefixes[sources[0]] if len(sources) == 1 else f"{len(sources)} sources{without}"
        raise ConfigError(f"--document: {name} not found in {searched}")
    return numbers


def select_sources(order: RunOrder, prefix: str | None) -> list[int]:
    """Return the numbers of the sources: the one with a prefix, or all."""
    names = order.prefixes
    if prefix is None:
        return list(range(len(names)))
    if prefix not in names:
        raise ConfigError(f"--source: found {prefix}, needs one of {', '.join(names)}")
    return [names.index(prefix)]


main = command("where", __doc__, add_options, find)
