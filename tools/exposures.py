"""Count how often a model has read documents or a passage, when first and last, and how many of their tokens.

The documents are those of a list: a number, or prefix, tab and number on each line, as `binidx grep` prints them. Of
each, `samples` counts the samples with a token of it as an input, `trained` those that no iteration to skip has read,
`started` reads of its first token, `tokens` its tokens that were inputs.

--text counts each match of the text of a file, byte for byte, or with --normalize in normal form (binidx grep --help).
A match is all tokens that hold a byte of it: `whole` counts the samples of which all of them are inputs, `part` those
of which only some are. The last label of a sample is no input. "tokens A to B" ends before token B.

A sample that is read again counts again. A run that names the one before it is counted over its whole history. Only
indices are read, and with --text the tokens, once: a million documents take seconds for each hundred million samples.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx exposures run.json --documents list.txt --before-step 41200
  binidx exposures run.json --text passage.txt --json
"""

from __future__ import annotations

import argparse
from typing import Any

from binidx.errors import ConfigError, FormatError
from binidx.order.order_protocols import Numbers
from binidx.run.provenance.exposures import count_exposures
from binidx.run.provenance.history import Runs
from binidx.search.document_search import find_token_table
from binidx.search.matches import find_ranges, search_sources
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole

from ._command import command, print_result
from ._display import counts
from ._display import table as columns
from ._runs import (
    MANY_DOCUMENTS,
    READ_HEAD,
    add_normalize,
    add_run,
    exposure_rows,
    listed_documents,
    open_order,
    print_comparison,
    read_cells,
    read_list,
    steps_cell,
    stop_step,
)


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    which = options.add_mutually_exclusive_group(required=True)
    which.add_argument("--documents", metavar="LIST", help="a list of documents; - reads stdin")
    which.add_argument("--text", metavar="FILE", help="a passage: the text of this file, without newlines at its end")
    options.add_argument("--before-step", type=int, metavar="N", help="only steps before N (default: all)")
    options.add_argument("--no-earlier", action="store_true", help="leave out samples before consumed_samples")
    options.add_argument("--tokenizer", metavar="URI", help="with --text; by default that of the manifests")
    add_normalize(options)


def print_exposures(arguments: argparse.Namespace) -> None:
    """Count the exposures, and print a row for each document."""
    if arguments.normalize and arguments.text is None:
        raise ConfigError("normalize: needs --text, whose text it compares")
    options = arguments.storage_options
    listed = read_list(arguments.documents, options) if arguments.documents else None
    history = open_order(arguments, whole=listed is not None and len(listed) >= MANY_DOCUMENTS)
    stop = stop_step(history, arguments.before_step)
    documents = find_passage(history, arguments) if listed is None else listed_documents(history, listed)
    arguments.watch.begin("count", 0, 0, unit="")
    try:
        rows = exposure_rows(count_exposures(history, documents, stop, earlier=not arguments.no_earlier))
    except IndexError as error:
        raise ConfigError(f"documents: {error}") from error
    name, text = ("matches", match_table(rows, stop)) if listed is None else ("documents", table(rows, stop))
    print_result({"steps": stop, "normalized": arguments.normalize, name: rows}, text, arguments)


def find_passage(history: Runs, arguments: argparse.Namespace) -> dict[str, Numbers]:
    """Return prefix -> the tokens of each match of the text of the file --text, as `count_exposures` takes ranges."""
    options, sources = arguments.storage_options, history.select_sources()
    try:
        text = bytes(read_whole(open_object(arguments.text, storage_options=options))).decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{arguments.text}: not UTF-8 ({error}); needs a text file") from error
    tokens = find_token_table([Location(source.prefix, options) for source in sources.values()], arguments.tokenizer)
    how = {"normalize": arguments.normalize, "watch": arguments.watch}
    result = search_sources(sources, [text], tokens, options, **how)
    arguments.watch.end_stage()
    print_comparison(arguments.normalize)
    return {name: rows[:, [0, 2, 3]] for name, rows in find_ranges(sources, result).items()}


def table(rows: list[dict[str, Any]], stop: int) -> str:
    """Return documents as a table, and how many of them were read in how many samples."""
    names = ("document", "samples", "samples_trained", "times_started", "tokens")
    cells = [[row["source"], *(f"{row[name]:,}" for name in names), steps_cell(row)] for row in rows]
    head = ["source", "document", "samples", "trained", "started", "tokens", "in steps"]
    read = [row["samples"] for row in rows if row["samples"]]
    text = f"{counts(documents=len(rows))}, steps before {stop:,}; {len(read):,} seen"
    text += f", in up to {counts(samples=max(read))} each" if read else ""
    return f"{columns(head, cells)}\n{text}" if cells else text


def match_table(rows: list[dict[str, Any]], stop: int) -> str:
    """Return matches as a table, and how many of them were read whole, in part and not at all."""
    cells = [
        [row["source"], f"{row['document']:,}", f"{row['first_token']:,} to {row['stop_token']:,}", *read_cells(row)]
        for row in rows
    ]
    head = ["source", "document", "tokens", *READ_HEAD]
    whole, read = (sum(row[name] > 0 for row in rows) for name in ("samples_whole", "samples"))
    text = f"{len(rows):,} match{'' if len(rows) == 1 else 'es'}, steps before {stop:,}"
    text += f"; {whole:,} read whole, {read - whole:,} only in part, {len(rows) - read:,} not read" if rows else ""
    return f"{columns(head, cells)}\n{text}" if cells else text


main = command("exposures", __doc__, add_options, print_exposures, progress=True)
