"""Find every step, rank and slot that read a document, for takedowns and contamination.

Searches all indices of the run, by one pass over each; a million documents take seconds for each hundred million
samples. A row is a sample with a token of the
document. Where no token of it was an input, since the model had only to predict one, it says "only the last label".
A document is named as `binidx trace` prints it: its number in its source, and the source where the run has several; and
as there, the file and row it came from are shown where its source has lineage. Such a document may also be named by
these, or by its id, and is searched in all sources if none is given. --documents takes the output of `binidx grep`.

--count prints how often the model saw each document, first and last: `samples` counts the samples with a token of it as
an input, `trained` those that no iteration to skip has read, `started` reads of its first token, `tokens` its tokens
that were inputs. Samples in which it was only the last label do not count.

--text counts each match of the text of a file, byte for byte, or with --normalize in normal form (binidx grep --help).
A match is all tokens that hold a byte of it: `whole` counts the samples of which all of them are inputs, `part` those
of which only some are. "tokens A to B" ends before token B. The tokens are read, once.

A sample that is read again counts again. A run that names the one before it, or has phases, is searched over its whole
history. Of a resumed run that names none, the samples before its consumed_samples are searched, too; their step, rank
and slot (null in JSON) are in the run.json of the earlier part. A cyclic run that names none must be searched part by
part, with --no-earlier. --json prints JSON Lines: an object for each sample; with --count and --text it prints one.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx where run.json --document 123456 --source s3://corpus/en --before-step 41200
  binidx where run.json --document crawl-07.jsonl.zst:4711 --document id=6ba7b810
  binidx where run.json --documents drop.txt
  binidx where run.json --document id=6ba7b810 --count --before-step 41200
  binidx where run.json --text passage.txt --json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from binidx.corpus.origins import find_named
from binidx.errors import ConfigError
from binidx.order.order_protocols import Numbers, Source
from binidx.order.reads import TokenReads
from binidx.run.global_order import SampleReads
from binidx.run.provenance.exposures import count_exposures
from binidx.run.provenance.history import Runs, find_reads
from binidx.run.provenance.reading import StoredBlocks
from binidx.run.provenance.run_order import RunOrder
from binidx.run.provenance.sample_rows import build_rows
from binidx.storage.location import Location

from ._command import command, print_result
from ._display import counts, print_note
from ._exposures import document_table, find_passage, match_table
from ._runs import (
    MANY_DOCUMENTS,
    add_normalize,
    add_run,
    add_topology,
    exposure_rows,
    listed_documents,
    open_order,
    print_rows,
    read_list,
    stop_step,
)


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    which = options.add_mutually_exclusive_group(required=True)
    which.add_argument("--document", action="append", metavar="N", help="a number, FILE:ROW or id=ID; may be repeated")
    which.add_argument("--documents", metavar="LIST", help="a list, as binidx grep prints it; - reads stdin")
    which.add_argument("--text", metavar="FILE", help="a passage: the text of this file, without newlines at its end")
    options.add_argument(
        "--source", metavar="PREFIX", help="prefix of the source; of a number needed where there are several"
    )
    options.add_argument("--before-step", type=int, metavar="N", help="only steps before N; by default all of the run")
    options.add_argument("--count", action="store_true", help="a row for each document: how often, first and last step")
    options.add_argument("--tokenizer", metavar="URI", help="with --text; by default that of the manifests")
    add_normalize(options)
    options.add_argument(
        "--no-earlier", action="store_true", help="of a resumed run, leave out the samples before its consumed_samples"
    )
    add_topology(options)


def find(arguments: argparse.Namespace) -> None:
    """Print the samples with parts of the documents, or the counts of each document; and the number of the samples."""
    if arguments.normalize and arguments.text is None:
        raise ConfigError("normalize: needs --text, whose text it compares")
    arguments.watch.begin("search", 0, 0, unit="")
    listed = read_list(arguments.documents, arguments.storage_options) if arguments.documents else None
    history = open_order(arguments, whole=listed is not None and len(listed) >= MANY_DOCUMENTS)
    stop, given = stop_step(history, arguments.before_step), not arguments.no_earlier
    documents: Mapping[str, Sequence[int] | Numbers]
    stored = {name: found for name in arguments.document or () if len(found := history.samples_named(name))}
    if listed is not None:
        documents = listed_documents(history, listed)
    elif arguments.text is not None:
        documents = find_passage(history, arguments)
        arguments.watch.begin("count", 0, 0, unit="")
    elif names := [name for name in arguments.document if name not in stored]:
        sources = history.select_sources(arguments.source)
        documents = find_documents(sources, names, arguments.storage_options)
    else:
        documents = {}
    try:
        if arguments.count or arguments.text is not None:
            print_counts(history, documents, stop, arguments, count_stored(history, stored, stop))
            return
        num_rows, steps, past = 0, set[int](), 0
        read = find_reads(history, documents, stop, earlier=given)
        for order, reads, contents in chain(reads_of_stored(history, stored.values(), stop), read):
            num_rows += print_rows(build_rows(order, reads, contents=contents), arguments.json)
            past += int((reads.step < 0).sum())
            steps |= set(reads.step[reads.step >= 0].tolist())
    except IndexError as error:
        raise ConfigError(str(error)) from error
    arguments.watch.end_stage()
    print(
        f"{counts(samples=num_rows)} in {len(steps):,} of {counts(steps=stop - history.first_step)}"
        f"{_earlier(history, arguments, past)}",
        file=sys.stderr,
    )


def reads_of_stored(
    history: Runs, samples: Collection[Numbers], stop_step: int
) -> Iterator[tuple[RunOrder, SampleReads, TokenReads]]:
    """Yield the reads of stored samples, whose names were given, in each run, and their contents."""
    if samples:
        for order, steps in history.orders(range(history.first_step, stop_step)):
            if isinstance(order.order, StoredBlocks):
                reads = order.reads_of(np.unique(np.concatenate([*samples])), steps.stop)
                yield order, reads, order.contents(reads.sample)


def count_stored(history: Runs, stored: Mapping[str, Numbers], stop_step: int) -> list[dict[str, Any]]:
    """Return a row for each stored sample whose name was given."""
    rows = []
    for name, samples in stored.items():
        for order, reads, _ in reads_of_stored(history, [samples], stop_step):
            assert isinstance(order.order, StoredBlocks)
            source, steps = order.order.label(int(samples[0]))["source"], reads.step.tolist()
            counts = dict.fromkeys(("samples", "samples_trained", "times_started"), len(steps))
            counts["tokens"] = len(steps) * order.order.sequence_length
            ends = {"first_step": min(steps, default=None), "last_step": max(steps, default=None)}
            rows.append({"source": source, "document": name, **counts, **ends})
    return rows


def print_counts(
    history: Runs,
    documents: Mapping[str, Sequence[int] | Numbers],
    stop_step: int,
    arguments: argparse.Namespace,
    stored: Sequence[dict[str, Any]] = (),
) -> None:
    """Print how often documents, or with --text matches, were read; `stored` are rows of stored samples."""
    exposures = count_exposures(history, documents, stop_step, earlier=not arguments.no_earlier)
    rows, is_text = [*stored, *exposure_rows(exposures)], arguments.text is not None
    name, text = ("matches", match_table) if is_text else ("documents", document_table)
    print_result({"steps": stop_step, "normalized": arguments.normalize, name: rows}, text(rows, stop_step), arguments)


def _earlier(history: Runs, arguments: argparse.Namespace, past: int) -> str:
    """Return a clause about the samples before `consumed_samples` of the first run; "" if there are none."""
    consumed = history.consumed_samples
    if not consumed:
        return ""
    before = f"the {consumed:,} samples before consumed_samples"
    if arguments.no_earlier:
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


main = command("where", __doc__, add_options, find, progress=True)
