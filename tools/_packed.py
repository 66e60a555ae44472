"""The questions of trace, where and account about a run over packed files (LITPKDS)."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import numpy as np

from binidx.errors import ConfigError
from binidx.order.view import DocumentList
from binidx.packed.packed_origins import PackedDocuments
from binidx.packed.packed_rows import account_blocks, block_rows
from binidx.packed.packed_run import Numbers, PackedRunOrder
from binidx.run.global_order import SampleReads

from ._command import print_result
from ._display import counts, row_table
from ._runs import decoder, parse_steps, print_rows, stop_step


def trace_packed(order: PackedRunOrder, arguments: argparse.Namespace) -> None:
    """Print the blocks of some steps, and their documents where `binidx pack` wrote their origin."""
    steps = parse_steps(order, arguments.step, "step")
    if arguments.rank is not None and not 0 <= arguments.rank < order.num_ranks:
        raise ConfigError(f"rank: found {arguments.rank}, the run has {order.num_ranks}, counted from 0")
    decode = decoder(arguments.tokenizer, arguments.storage_options)
    for step in steps:
        print_rows(block_rows(order, *order.rows(range(step, step + 1), arguments.rank), decode), arguments.json)


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
        print_result(rows, row_table(rows), arguments)
    else:
        print_rows(block_rows(order, readings, blocks), arguments.json)
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
    print_result(rows, row_table(rows, "{:,}"), arguments)
