"""Rows about the blocks of a packed run, as JSON values: their reads with documents, and the use of each set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from binidx.packed.packed_origins import PackedDocuments
from binidx.packed.packed_run import Numbers, PackedRunOrder
from binidx.run.global_order import SampleReads


def block_rows(
    order: PackedRunOrder, readings: SampleReads, blocks: Numbers, decode: Callable[[list[int]], str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each read of a block: where it is, and its documents if `binidx pack` wrote their origin.

    Args:
        order: order of the run.
        readings, blocks: as `PackedRunOrder.rows` returns them.
        decode: returns the text of ids, which is then added.
    """
    tokens = order.read(blocks) if decode else None
    known = [PackedDocuments(files) for files in order.files or ()]
    for place, (number, file, block, epoch) in enumerate(blocks.tolist()):
        row: dict[str, Any] = {
            name: int(column[place]) for name, column in zip(readings._fields, readings, strict=True)
        }
        row |= {"source": order.names[number], "epoch": epoch, "file": known[number].files.uris[file], "block": block}
        if known[number].has_origin(file):
            row["dataset"], row["docs"] = known[number].documents(file, block)
        if decode and tokens is not None:
            row["text"] = decode(tokens[place].tolist())
        yield row


def account_blocks(order: PackedRunOrder, stop_step: int) -> list[dict[str, Any]]:
    """Return for each set its size and its use in the steps before `stop_step`.

    Args:
        order: order of the run.
        stop_step: first step that is not counted.
    """
    rows, counts = list[dict[str, Any]](), order.count_blocks(stop_step)
    for name, of, files, read in zip(order.names, order.sets, order.files or (), counts, strict=True):
        total = of.num_files * of.num_blocks
        sizes = {"source": name, "files": of.num_files, "blocks": total, "tokens": total * files.block_size}
        used = {"blocks_read": int(read), "tokens_read": int(read) * files.block_size, "epochs": int(read) / total}
        rows.append({**sizes, **used})
    return rows
