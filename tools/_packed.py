"""The questions of trace, where and account about a run over packed files (LITPKDS)."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from binidx.errors import ConfigError
from binidx.order.view import DocumentList
from binidx.packed.packed_origins import PackedDocuments
from binidx.packed.packed_rows import account_blocks, block_rows
from binidx.packed.packed_run import Numbers, PackedRunOrder
from binidx.run.global_order import SampleReads

from ._command import print_result
from ._display import counts
from ._display import table as columns
from ._runs import TEXT_WIDTH, decoder, parse_steps, stop_step


def trace_packed(order: PackedRunOrder, arguments: argparse.Namespace) -> None:
    """Print the blocks of some steps, and their documents where `binidx pack` wrote their origin."""
    steps = parse_steps(order, arguments.step, "step")
    if arguments.rank is not None and not 0 <= arguments.rank < order.num_ranks:
        raise ConfigError(f"rank: found {arguments.rank}, the run has {order.num_ranks}, counted from 0")
    decode = decoder(arguments.tokenizer, arguments.storage_options)
    for step in steps:
        print_blocks(order, *order.rows(range(step, step + 1), arguments.rank), arguments.json, decode)


def find_packed(order: PackedRunOrder, arguments: argparse.Namespace) -> None:
    """Print the reads of the blocks with parts of some documents, N, and of blocks FILE:BLOCK; or how often each."""
    if arguments.document is None:
        raise ConfigError(
            "documents: found a list, a packed run needs --document; or binidx exposures RUN --documents LIST"
        )
    stop, targets = stop_step(order, arguments.before_step), list[tuple[str, int, Numbers]]()
    for number, files in enumerate(order.files or ()):
        prefix = None if arguments.source == order.names[number] else arguments.source
        documents = PackedDocuments(files)
        for name in arguments.document:
            uri, _, block = name.rpartition(":")
            if uri in files.uris and block.isdecimal():
                targets.append((name, number, np.array([[files.uris.index(uri), int(block)]])))
            elif name.isdecimal() and (prefix is None or documents.has(prefix)):
                targets.append((name, number, documents.blocks_of([int(name)], prefix)))
    if not targets:
        raise ConfigError(
            f"--document: found {', '.join(arguments.document)}, needs numbers of documents or FILE:BLOCK"
        )
    wanted = {
        number: np.concatenate([blocks for _, each, blocks in targets if each == number]) for _, number, _ in targets
    }
    readings, blocks = order.where(wanted, stop)
    if arguments.count:
        rows = [count_target(order, *target, readings, blocks) for target in targets]
        text = columns([*rows[0]], [["" if value is None else str(value) for value in row.values()] for row in rows])
        print_result(rows, text, arguments)
    else:
        print_blocks(order, readings, blocks, arguments.json)
    steps = len(np.unique(readings.step))
    print(f"{counts(blocks=len(readings.step))} in {steps:,} of {counts(steps=stop)}", file=sys.stderr)


def packed_exposures(order: PackedRunOrder, listed: DocumentList, stop: int) -> list[dict[str, Any]]:
    """Return a row for each listed document, as of `Exposures`; blocks are its samples, and all of them are trained."""
    known = [PackedDocuments(files) for files in order.files or ()]
    names = {origin.dataset for each in known for name in each.numbers for origin, _ in [each.origin(name)]}
    listed.check_sources(names)
    wanted = {prefix or next(iter(names)): sorted({*numbers}) for prefix, numbers in listed.by_source.items()}
    rows: dict[tuple[str, int], dict[str, Any]] = {
        (prefix, number): {"source": prefix, "document": number, "times": 0, "samples": 0, "samples_trained": 0,
                           "tokens": 0, "first_step": None, "last_step": None}
        for prefix in sorted(wanted) for number in wanted[prefix]
    }  # fmt: skip
    blocks_of = {
        number: np.concatenate([each.blocks_of(wanted[prefix], prefix) for prefix in wanted if each.has(prefix)])
        for number, each in enumerate(known)
        if any(each.has(prefix) for prefix in wanted)
    }
    readings, blocks = order.where(blocks_of, stop)
    documents = functools.cache(lambda number, file, block: known[number].documents(file, block))
    for step, (number, file, block, _) in zip(readings.step.tolist(), blocks.tolist(), strict=True):
        prefix, pieces = documents(number, file, block)
        for piece in pieces:
            row, label = rows.get((prefix, piece["doc"])), known[number].files.block_size - 1
            tokens = min(piece["dst"] + piece["len"], label) - piece["dst"]
            if row is not None and tokens > 0:
                counts = {"times": piece["start"] == 0, "samples": 1, "samples_trained": 1, "tokens": tokens}
                row |= {name: row[name] + more for name, more in counts.items()}
                row |= {"first_step": step if row["first_step"] is None else row["first_step"], "last_step": step}
    return [*rows.values()]


def count_target(
    order: PackedRunOrder, name: str, number: int, wanted: Numbers, readings: SampleReads, blocks: Numbers
) -> dict[str, Any]:
    """Return how often blocks with a document, or one block, were read, and the first and last step."""
    codes = wanted[:, 0] * order.sets[number].num_blocks + wanted[:, 1]
    steps = readings.step[(blocks[:, 0] == number) & np.isin(readings.sample, codes)]
    ends = (int(steps.min()), int(steps.max())) if len(steps) else (None, None)
    return {
        "source": order.names[number],
        "document": name,
        "blocks": len(wanted),
        "blocks_read": len(steps),
        "first_step": ends[0],
        "last_step": ends[1],
    }


def account_packed(order: PackedRunOrder, arguments: argparse.Namespace) -> None:
    """Print for each set its size and its use up to a step."""
    if arguments.repeats or arguments.consumed_samples is not None:
        raise ConfigError("--repeats, --consumed-samples: packed files have no counts of documents; give --before-step")
    rows = account_blocks(order, stop_step(order, arguments.before_step))
    cells = [
        [f"{value:,}" if isinstance(value, int) else f"{value:.3f}" for value in list(row.values())[1:]] for row in rows
    ]
    text = columns(
        [*rows[0]], [[row["source"], *own] for row, own in zip(rows, cells, strict=True)], most_rows=len(rows)
    )
    print_result(rows, text, arguments)


def print_blocks(
    order: PackedRunOrder,
    readings: SampleReads,
    blocks: Numbers,
    as_json: bool,
    decode: Callable[[list[int]], str] | None = None,
) -> None:
    """Print a row for each read of a block: where it is, and its documents if they are known."""
    for row in block_rows(order, readings, blocks, decode):
        print(json.dumps(row) if as_json else _block(row))


def _block(row: dict[str, Any]) -> str:
    lines = [
        f"step {row['step']:,}  rank {row['rank']}  slot {row['slot']}  {row['source']}, epoch {row['epoch']}  "
        f"{row['file']}, block {row['block']:,}"
    ]
    lines += [
        f"  document {doc['doc']:>12,}  tokens {doc['start']:,} to {doc['start'] + doc['len']:,}"
        for doc in row.get("docs", ())
    ]
    if "text" in row:
        lines.append("    " + " ".join(row["text"].split())[:TEXT_WIDTH])
    return "\n".join(lines)
