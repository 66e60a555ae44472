"""Contents of the pages of a run over packed files (LITPKDS): its sets over the steps, blocks of a step, reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from binidx.errors import redacted
from binidx.explore.explored import Explored
from binidx.explore.views import (
    COLOURS,
    SAMPLES_SHOWN,
    NotFoundError,
    Pager,
    Query,
    Values,
    list_reads,
    parse_number,
    parse_range,
    show_charts,
)
from binidx.packed.packed_origins import PackedDocuments, origins_of
from binidx.packed.packed_rows import account_blocks, block_rows
from binidx.packed.packed_run import PackedRunOrder
from binidx.run.display.timeline import Timeline
from binidx.run.display.token_text import TokenText
from binidx.run.schedule import check_steps
from binidx.storage.location import Location

BINS = 24
"""Bins of the timeline; draws are followed to the bounds of each."""


def show_packed_run(explored: Explored, query: Query) -> Values:
    """Return the values of the page of a run: its sets over some steps, and the account of them."""
    order, whole = _order_of(explored), explored.steps
    steps = parse_range(query.get("steps"), whole)
    check_steps(steps, order.num_steps())
    timeline = build_packed_timeline(order, steps)
    colours = [min(number, COLOURS - 1) for number in range(len(order.names))]
    rows = [
        {**row, "colour": colours[number], "planned": order.weights and order.weights[number]}
        for number, row in enumerate(account_blocks(order, whole.stop))
    ]
    command = ["account", *([] if order.num_steps() else ["--before-step", str(whole.stop)])]
    shown = {"order": order, "steps": steps, "whole": whole, "rows": rows, "command": command}
    return {**shown, **show_charts(timeline, colours)}


def build_packed_timeline(order: PackedRunOrder, steps: range) -> Timeline:
    """Return the course of a run over some steps; a sample is a block."""
    count = min(BINS, len(steps))
    bounds = steps.start + np.arange(count + 1) * len(steps) // count
    read = np.array([order.count_blocks(step) for step in bounds.tolist()])
    total = np.array([each.num_files * each.num_blocks for each in order.sets])
    weights = np.array(order.weights or [1 / len(order.sets)] * len(order.sets))
    planned = None if order.schedules else np.repeat([weights], count, axis=0)
    sizes = np.full(count, order.num_rows(range(1)))
    lengths = np.full(count, order.files[0].block_size - 1 if order.files else 0)
    shared = planned, read / total, sizes, lengths, np.zeros(count, np.int64)
    return Timeline(order.names, bounds, np.diff(read, axis=0), *shared, [], [])


def show_packed_step(explored: Explored, query: Query, step: int) -> Values:
    """Return the values of the page of a step: its blocks and their documents."""
    order, first = _order_of(explored), parse_number(query, "from", 0)
    rank = parse_number(query, "rank", None)
    if rank is not None and rank >= order.num_ranks:
        raise NotFoundError(f"rank: found {rank}, the run has {order.num_ranks}, counted from 0")
    check_steps(range(step, step + 1), order.num_steps())
    reads, blocks = order.rows(range(step, step + 1), rank)
    page = slice(first, first + SAMPLES_SHOWN)
    rows = [_numbered(explored, row) for row in block_rows(order, reads.at(page), blocks[page])]
    command = ["trace", "--step", str(step), *([] if rank is None else ["--rank", str(rank)])]
    shown = {"step": step, "order": order, "rank": rank, "rows": rows, "total": len(blocks), "command": command}
    return {**shown, "pager_of": Pager(first, SAMPLES_SHOWN, len(blocks))}


def show_block_text(explored: Explored, query: Query, step: int, rank: int, slot: int) -> Values:
    """Return the values of the text of a block: of the pieces of its documents, or of all its tokens."""
    order = _order_of(explored)
    check_steps(range(step, step + 1), order.num_steps())
    if rank >= order.num_ranks or slot >= order.blocks_per_step:
        raise NotFoundError(
            f"rank, slot: found {rank}, {slot}, needs one of {order.num_ranks}, {order.blocks_per_step}"
        )
    reads, blocks = order.rows(range(step, step + 1), rank)
    one = slice(slot, slot + 1)
    (row,) = (_numbered(explored, each) for each in block_rows(order, reads.at(one), blocks[one]))
    number, tokens = row["number"], order.read(blocks[one])[0].tolist()
    if number is not None:
        text = explored.text(number)
    elif explored.tokenizer:
        text = TokenText.open(Location(explored.name, explored.options), explored.tokenizer)
    else:
        text = TokenText(reason="the dataset of the file, which names its tokenizer, is not known; give --tokenizer")
    # Without an origin the block is one piece, and separators between documents are shown in any case.
    row["docs"] = row.get("docs") or [{"doc": None, "start": 0, "len": len(tokens), "dst": 0}]
    for doc in row["docs"]:
        doc["pieces"] = list(text.pieces(tokens[doc["dst"] : doc["dst"] + doc["len"]]))
    command = ["trace", "--step", str(step), "--rank", str(rank)]
    return {"row": row, "number": number, "reason": text.reason, "step": step, "command": command}


def show_block_reads(explored: Explored, query: Query, source: int, document: int) -> Values:
    """Return the values of the list of all reads of a document; the ranks that read it are followed from step 0 on."""
    order = _order_of(explored)
    if source >= len(explored.sources):
        raise NotFoundError(f"source {source}: there are {len(explored.sources)}, counted from 0")
    prefix = explored.sources[source].name
    sets = {number: files for number, files in enumerate(order.files or ()) if prefix in origins_of(files)}
    wanted = {number: PackedDocuments(files).blocks_of([document], prefix) for number, files in sets.items()}
    reads, blocks = order.where(wanted, explored.steps.stop)
    rows = [_numbered(explored, row) for row in block_rows(order, reads, blocks)]
    for row in rows:
        row["parts"] = [doc for doc in row["docs"] if doc["doc"] == document]
        row["read"] = sum(doc["len"] for doc in row["parts"])
    return list_reads(explored, query, source, document, rows)


def _order_of(explored: Explored) -> PackedRunOrder:
    assert explored.packed is not None
    return explored.packed


def _numbered(explored: Explored, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the number of its dataset among the sources; None if it is not known."""
    prefixes = [source.name for source in explored.sources]
    number = prefixes.index(row["dataset"]) if row.get("dataset") in prefixes else None
    return {**row, "file": redacted(row["file"]), "number": number}
