"""Counts of the reads of documents and of passages, which `binidx where --count` prints."""

from __future__ import annotations

import argparse
from typing import Any

from binidx.errors import FormatError
from binidx.order.order_protocols import Numbers
from binidx.run.provenance.history import Runs
from binidx.search.document_search import find_token_table
from binidx.search.matches import find_ranges, search_sources
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole

from ._display import counts, table
from ._runs import READ_HEAD, print_comparison, read_cells, steps_cell


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


def document_table(rows: list[dict[str, Any]], stop: int) -> str:
    """Return documents as a table, and how many of them were read in how many samples."""
    names = ("samples", "samples_trained", "times_started", "tokens")
    cells = [[row["source"], _number(row["document"]), *(f"{row[name]:,}" for name in names)] for row in rows]
    cells = [[*cell, steps_cell(row)] for cell, row in zip(cells, rows, strict=True)]
    head = ["source", "document", "samples", "trained", "started", "tokens", "in steps"]
    read = [row["samples"] for row in rows if row["samples"]]
    text = f"{counts(documents=len(rows))}, steps before {stop:,}; {len(read):,} seen"
    text += f", in up to {counts(samples=max(read))} each" if read else ""
    return f"{table(head, cells)}\n{text}" if cells else text


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
    return f"{table(head, cells)}\n{text}" if cells else text


def _number(document: int | str) -> str:
    """Return the number of a document, or the name of a block of packed files."""
    return document if isinstance(document, str) else f"{document:,}"
