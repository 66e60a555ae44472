"""An order as parquet files: one for each rank, or one for each stretch of steps; to any URI, and resumed.

    worker_{rank}-of-{ranks}_ordered_dataset.parquet     rows of one rank, step by step
    steps-{first:09d}-{stop:09d}.parquet                 rows of all ranks, step by step, then rank, then slot

Row groups are whole steps, so that one step is found by the groups' statistics. A file appears whole, under a
fingerprint of the order; one that is there with the same fingerprint is kept, so an export that broke off goes on.

Memory: one row group for each thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from binidx.errors import ConfigError, ObjectExistsError, ObjectNotFoundError
from binidx.order.arrow import pa, parquet
from binidx.order.run_order import Docs
from binidx.storage.as_file import Sink, Source
from binidx.storage.backends import open_object
from binidx.storage.publish import Writer, create_object, join_uri

GROUP_ROWS = 1 << 16
GROUP_BYTES = 32 << 20
"""Of a row group, about, without and with tokens; at least one step."""

METADATA = b"binidx"

SPAN_PARTS = ("doc", "start", "len", "dst")
LAYOUT: Mapping[str, Any] = {
    "use_dictionary": ["source"],
    "write_statistics": ["step"],
    "column_encoding": {"sample": "DELTA_BINARY_PACKED"},
    "compression": {
        **dict.fromkeys(["step", "rank", "slot", "sample", "epoch"], "lz4"),
        **{f"spans.list.element.{part}": "lz4" for part in SPAN_PARTS},
        "input_ids.list.element": "zstd",
    },
}
"""Numbers of documents and places in them hardly repeat, so a dictionary or a codec costs more than it saves; those of
samples mostly rise evenly. What is not named here is not compressed. Row groups are found by their steps."""


class Order(Protocol):
    """What can be exported: `RunOrder`, `PackedRunOrder`."""

    num_ranks: int
    fingerprint: str

    def num_steps(self) -> int | None: ...

    def table(self, steps: range, rank: int | None = None, *, docs: Any = "ends", tokens: bool = False) -> pa.Table: ...


@dataclass(frozen=True)
class Part:
    """One file: these steps of one rank, or of all."""

    name: str
    steps: range
    rank: int | None


def plan_by_rank(num_ranks: int, steps: range) -> list[Part]:
    """A file for each rank, named as those of the Gemstones are."""
    return [Part(f"worker_{rank}-of-{num_ranks}_ordered_dataset.parquet", steps, rank) for rank in range(num_ranks)]


def plan_by_steps(steps: range, steps_per_file: int) -> list[Part]:
    """A file for each `steps_per_file` steps, counted from step 0."""
    if steps_per_file < 1:
        raise ConfigError(f"steps_per_file: found {steps_per_file}, needs at least 1")
    bounds = sorted(
        {steps.start, *range(-(-steps.start // steps_per_file) * steps_per_file, steps.stop, steps_per_file)}
    )
    stretches = zip(bounds, [*bounds[1:], steps.stop], strict=True)
    return [Part(f"steps-{a:09d}-{b:09d}.parquet", range(a, b), None) for a, b in stretches if a < b]


def export(
    order: Order,
    directory: str,
    parts: list[Part],
    *,
    docs: Docs = "ends",
    tokens: bool = False,
    threads: int = 1,
    storage_options: Mapping[str, Any] | None = None,
    watch: Callable[[int], object] = lambda num_rows: None,
) -> int:
    """Write the parts that are not there; the number written.

    Args:
        docs: as of `RunOrder.table`. Of packed files there are none.
        tokens: with the tokens of each sample, which are read.
        watch: told the rows of each group that was written, or of a part that was there.

    Raises:
        ObjectExistsError: a file is there that is of another order.
        StorageError: the store refuses.
    """

    columns = {"docs": docs, "tokens": tokens}

    def write(part: Part) -> bool:
        uri = join_uri(directory, part.name)
        mark = {"fingerprint": order.fingerprint, "steps": [part.steps.start, part.steps.stop], **columns}
        if (rows := _rows_there(uri, mark, storage_options)) is not None:
            watch(rows)
            return False
        with create_object(uri, storage_options) as out:
            _write_part(order, part, columns, mark, out, watch)
        return True

    with ThreadPoolExecutor(threads, "binidx-export") as pool:
        return sum(pool.map(write, parts))


def _write_part(
    order: Order,
    part: Part,
    columns: Mapping[str, Any],
    mark: Mapping[str, Any],
    out: Writer,
    watch: Callable[[int], object],
) -> None:
    writer: Any = None
    for table in _groups(order, part, columns):
        if writer is None:
            marked = table.schema.with_metadata({METADATA: json.dumps(mark)})
            writer = parquet.ParquetWriter(Sink(out), marked, **LAYOUT)
        writer.write_table(table.cast(writer.schema), row_group_size=max(len(table), 1))
        watch(len(table))
    writer.close()


def _groups(order: Order, part: Part, columns: Mapping[str, Any]) -> Iterator[pa.Table]:
    """Tables of whole steps, each about as large as a row group should be; at least one."""
    first, count = part.steps.start, 1
    while True:
        stop = min(first + count, part.steps.stop)
        table = order.table(range(first, stop), part.rank, **columns)
        yield table
        rows = max(len(table) // max(stop - first, 1), 1)
        room = GROUP_BYTES // max(table.nbytes // max(len(table), 1), 1) if columns["tokens"] else GROUP_ROWS
        first, count = stop, max(room // rows, 1)
        if first >= part.steps.stop:
            return


def _rows_there(uri: str, mark: Mapping[str, Any], storage_options: Mapping[str, Any] | None) -> int | None:
    """The rows of a file of this order; None where there is no file."""
    try:
        reader = open_object(uri, storage_options=storage_options, cache=False)
    except ObjectNotFoundError:
        return None
    found = parquet.ParquetFile(Source(reader))
    if json.loads((found.schema_arrow.metadata or {}).get(METADATA, b"null")) != mark:
        raise ObjectExistsError(f"{uri}: is of another order, or has other columns; remove it or export elsewhere")
    return int(found.metadata.num_rows)
