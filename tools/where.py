"""Find every step, rank and slot that read a document, for takedowns and contamination.

Searches all indices of the run, by one pass over each; no token is read. A document is named
as `binidx trace` prints it: its number in its source, and the source where the run has several; and as there, the file
and row it came from are shown where its source has lineage. Such a document may also be named by these, or by its
id, and is searched in all sources if none is given. --documents takes the output of `binidx grep`.

Of a resumed run the samples before its consumed_samples are searched, too; their step, rank and slot (null in JSON) are
in the run.json of the earlier part. A cyclic run must be searched part by part, with --no-earlier.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx where run.json --document 123456 --source s3://corpus/en --before-step 41200
  binidx where run.json --document crawl-07.jsonl.zst:4711 --document id=6ba7b810
  binidx where run.json --documents drop.txt
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from binidx.corpus.origins import documents_at, documents_with_id
from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.order.order_protocols import Numbers
from binidx.run.provenance.run_order import RunOrder
from binidx.run.provenance.sample_rows import build_rows
from binidx.storage.location import Location

from ._command import command
from ._display import counts
from ._runs import MANY_DOCUMENTS, add_run, listed_documents, open_run, print_rows, read_list, stop_step

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
    options.add_argument(
        "--no-earlier", action="store_true", help="of a resumed run, leave out the samples before its consumed_samples"
    )


def find(arguments: argparse.Namespace) -> None:
    """Print the samples with parts of the documents, and the number of these samples."""
    listed = read_list(arguments.documents, arguments.storage_options) if arguments.documents else None
    order = open_run(arguments, in_ranges=listed is None or len(listed) < MANY_DOCUMENTS)
    stop = stop_step(order, arguments.before_step)
    documents: Mapping[int, Sequence[int] | Numbers]
    if listed is not None:
        documents = listed_documents(order, listed)
    else:
        documents = find_documents(order, select_sources(order, arguments.source), arguments.document)
    rows, steps, past = 0, set[int](), 0
    for source in sorted(documents):
        try:
            readings, contents = order.where(source, documents[source], stop, earlier=not arguments.no_earlier)
        except IndexError as error:
            raise ConfigError(str(error)) from error
        rows += print_rows(build_rows(order, readings, contents), arguments.json)
        past += int((readings.step < 0).sum())
        steps |= set(readings.step[readings.step >= 0].tolist())
    print(
        f"{counts(samples=rows)} in {len(steps):,} of {counts(steps=stop)}{_earlier(order, arguments, past)}",
        file=sys.stderr,
    )


def _earlier(order: RunOrder, arguments: argparse.Namespace, past: int) -> str:
    """Return a clause about the samples before `consumed_samples`; "" if there are none."""
    consumed = order.reading.schedule.consumed_samples
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
