"""Count how often a model has read documents, when first and last, and how many of their tokens.

The documents are those of a list (a number, or prefix, tab and number on each line, as `binidx grep` prints them), or
those in which the text of a file stands, byte for byte, or with --normalize in normal form (binidx grep --help).
`times` counts reads of a document's first token, `samples` the samples with a token of it as an input, `trained` those
that no iteration to skip has read, `tokens` its tokens that were inputs. A run that names the one before it is counted
over its whole history. Only indices are read: a million documents take seconds for each hundred million samples.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx exposures run.json --documents list.txt --before-step 41200
  binidx exposures run.json --text passage.txt --json
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from binidx.errors import ConfigError
from binidx.run.provenance.exposures import count_exposures
from binidx.search.document_search import find_token_table, search_documents
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole

from ._command import command, print_result
from ._display import counts
from ._display import table as columns
from ._runs import (
    MANY_DOCUMENTS,
    add_normalize,
    add_run,
    exposure_rows,
    listed_documents,
    open_order,
    print_comparison,
    read_list,
    stop_step,
)


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    which = options.add_mutually_exclusive_group(required=True)
    which.add_argument("--documents", metavar="LIST", help="a list of documents; - reads stdin")
    which.add_argument("--text", metavar="FILE", help="documents in which the text of this file stands")
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
    if listed is not None:
        documents = listed_documents(history, listed)
    else:
        text = bytes(read_whole(open_object(arguments.text, storage_options=options))).decode().rstrip("\n")
        names = {Location(source.prefix).uri: name for name, source in history.select_sources().items()}
        prefixes = [Location(prefix, options) for prefix in names]
        table = find_token_table(prefixes, arguments.tokenizer)
        result = search_documents(prefixes, [text], table, normalize=arguments.normalize, watch=arguments.watch)
        documents = {names[prefix]: numbers for prefix, numbers in result.documents().items()}
        print_comparison(arguments.normalize)
    arguments.watch.begin("count", 0, 0, unit="")
    try:
        rows = exposure_rows(count_exposures(history, documents, stop, earlier=not arguments.no_earlier))
    except IndexError as error:
        raise ConfigError(f"documents: {error}") from error
    print_result({"steps": stop, "normalized": arguments.normalize, "documents": rows}, _table(rows, stop), arguments)


def _table(rows: list[dict[str, Any]], stop: int) -> str:
    """Return the rows as a table, and the numbers of documents by how often they were read."""
    cells = [
        [row["source"], *("-" if value is None else f"{value:,}" for value in [*row.values()][1:])] for row in rows
    ]
    head = ["source", "document", "times", "samples", "trained", "tokens", "first step", "last step"]
    times = np.bincount([row["times"] for row in rows]) if rows else np.zeros(0, np.int64)
    seen = ", ".join(f"{number}x: {count:,}" for number, count in enumerate(times.tolist()) if count)
    text = f"{counts(documents=len(rows))}, steps before {stop:,}; seen {seen or 'none'}"
    return f"{columns(head, cells)}\n{text}" if cells else text


main = command("exposures", __doc__, add_options, print_exposures, progress=True)
