"""Export of an order: Arrow tables of reads and their contents, and parquet files of them, resumable, at any URI.

    worker_{rank}-of-{ranks}_ordered_dataset.parquet     rows of one rank, step by step
    steps-{first:09d}-{stop:09d}.parquet                 rows of all ranks, step by step, then rank, then slot

Columns of a table:

    step int32, rank int16, slot int16      position in the global order; here and below int32 if a value needs it
    sample int64                            number of the sample in the run
    source dictionary<int16, string>        prefix of its source
    epoch int16                             complete passes over the source before it
    docs list<int32>                        its documents, in the order of their tokens; numbers in the source
    start int32, stop int32                 first token in the first of them, one after the last in the last of them;
                                            the documents between are whole (whole sequences, if they have several)
    spans list<struct<doc int64, start int32, len int32, dst int32>>
                                            on request, instead of these: each piece, and its position in the sample
    input_ids list<uint16 or uint32>        on request: S + 1 tokens, no pads; list<int64> if one is below 0
    trained bool                            false where iterations to skip only read; in files only of such runs

Row groups are whole steps, so the statistics of the groups locate a step. A file is published atomically, with a
fingerprint of the order in its metadata; an existing file with the same fingerprint is kept, so an interrupted export
resumes.

Memory: one row group per worker.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

from binidx.errors import ConfigError, ObjectExistsError, ObjectNotFoundError
from binidx.format.arrow import pa, parquet
from binidx.jobs.parts import Values, Workers, make_parts
from binidx.jobs.runner import check_stop
from binidx.run.read_table import LARGEST_INT16, SPAN
from binidx.run.run_order import Docs, RunOrder
from binidx.run.run_parts import PerProcess
from binidx.run.schedule import check_steps
from binidx.storage.adapters import ReadableFile, WritableFile
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.writing.publish import create_object

EXPORTED_GROUP_ROWS = 1 << 16
GROUP_BYTES = 32 << 20
"""Approximate size of a row group: in rows without tokens, in bytes with tokens; at least one step."""

METADATA = b"binidx"

LAYOUT: Mapping[str, Any] = {
    "use_dictionary": ["source"],
    "write_statistics": ["step"],
    "column_encoding": {"sample": "DELTA_BINARY_PACKED"},
    "compression": {
        **dict.fromkeys(["step", "rank", "slot", "sample", "epoch"], "lz4"),
        **{f"spans.list.element.{part}": "lz4" for part in SPAN},
        "input_ids.list.element": "zstd",
    },
}
"""Numbers of documents and places in them hardly repeat, so a dictionary or a codec costs more than it saves; those of
samples mostly rise evenly. Columns that are not named here are not compressed. Row groups are found by their steps."""


@dataclass(frozen=True)
class ExportPart:
    """One file of an export.

    Attributes:
        name: name of the file.
        steps: its steps.
        rank: its rank; None for all ranks.
        size: number of its rows, as `count_rows` returns it.
    """

    name: str
    steps: range
    rank: int | None
    size: int = 0

    def __str__(self) -> str:
        return self.name


def plan_by_rank(num_ranks: int, steps: range) -> list[ExportPart]:
    """Return the plan of one file per rank, named as in the Gemstones release.

    Args:
        num_ranks: number of data parallel ranks.
        steps: steps of the export.
    """
    return [
        ExportPart(f"worker_{rank}-of-{num_ranks}_ordered_dataset.parquet", steps, rank) for rank in range(num_ranks)
    ]


def plan_by_steps(steps: range, steps_per_file: int) -> list[ExportPart]:
    """Return the plan of one file for each `steps_per_file` steps, counted from step 0.

    Args:
        steps: steps of the export.
        steps_per_file: number of steps of a file; the first and the last may have fewer.
    """
    if steps_per_file < 1:
        raise ConfigError(f"steps_per_file: found {steps_per_file}, needs at least 1")
    starts = [*range(steps.start // steps_per_file * steps_per_file, steps.stop, steps_per_file), steps.stop]
    stretches = [(max(first, steps.start), stop) for first, stop in pairwise(starts)]
    return [ExportPart(f"steps-{a:09d}-{b:09d}.parquet", range(a, b), None) for a, b in stretches if a < b]


def count_rows(order: RunOrder, part: ExportPart) -> int:
    """Return the number of rows of a file; all ranks have the same number."""
    first, stop = (order.reading.schedule.samples_before(step) for step in (part.steps.start, part.steps.stop))
    return (stop - first) // (1 if part.rank is None else order.num_ranks)


def export(
    order: RunOrder,
    directory: str,
    parts: Sequence[ExportPart],
    *,
    docs: Docs = "ends",
    tokens: bool = False,
    trained: bool = False,
    workers: Workers | None = None,
    storage_options: Mapping[str, Any] | None = None,
    watch: Callable[[int], object] = lambda num_rows: None,
) -> int:
    """Write the missing files of an export.

    Args:
        order: the order of the run.
        directory: path or URI of the target.
        parts: the files, as `plan_by_rank` or `plan_by_steps` return them.
        docs: as in `RunOrder.table`; for packed files, whether to include file and block.
        tokens: read the tokens of each sample, and include them.
        trained: include this column also of a run without iterations to skip, as files of a history need one schema.
        workers: workers that write the files, each a file at a time, and this call's share of the files; by default one
            after the other, in this process.
        storage_options: options of the target's store.
        watch: called with the number of rows of each file that is written or exists.

    Returns:
        The number of files written.

    Raises:
        IndexError: a step is beyond the end of the run.
        ObjectExistsError: an existing file belongs to another order.
        ObjectChangedError: a worker in another process found other data.
        StorageError: the store refuses a request.
    """
    num_steps, target = order.num_steps(), Location(Location.of(directory).absolute, storage_options)
    for part in parts:
        check_steps(part.steps, num_steps, first_step=order.first_step)
    write = _FileWriter(order.per_process(), target, order.fingerprint, docs, tokens, trained)
    sized = [replace(part, size=count_rows(order, part)) for part in parts]
    results = make_parts(
        write, sized, workers or Workers(count=1), advance=watch, remote_data=target.local_path is None
    )
    return sum(result["written"] for result in results.values())


@dataclass(frozen=True)
class _FileWriter:
    """Picklable call that writes a file of an export, unless it exists."""

    order: PerProcess[Any]
    target: Location
    fingerprint: str
    docs: Docs
    tokens: bool
    trained: bool

    def __call__(self, part: ExportPart) -> Values:
        columns = {"docs": self.docs, "tokens": self.tokens}
        mark = {"fingerprint": self.fingerprint, "steps": [part.steps.start, part.steps.stop], **columns}
        if _is_written(file := self.target / part.name, mark):
            return {"written": False}
        with create_object(file) as out:
            tables = _groups(self.order.get(), part, {**columns, "trained": self.trained})
            first = next(tables)
            schema = _widened(first.schema, self.order.get(), part.steps)
            marked = schema.with_metadata({METADATA: json.dumps(mark)})
            writer = parquet.ParquetWriter(WritableFile(out), marked, **LAYOUT)
            for table in chain([first], tables):
                check_stop()
                writer.write_table(table.cast(marked), row_group_size=max(len(table), 1))
            writer.close()
        return {"written": True}


def _widened(schema: pa.Schema, order: RunOrder, steps: range) -> pa.Schema:
    """Return a schema with int32 for the columns whose largest value in the file of some steps may need it."""
    size = max(stage.batch_size for stage in order.reading.schedule.stages)
    epoch = order.reading.count_passes(order.order.num_epochs, steps.stop) - 1
    largest = {"rank": order.num_ranks - 1, "slot": size // order.num_ranks - 1, "epoch": epoch}
    for name, value in largest.items():
        kind = pa.int16() if value <= LARGEST_INT16 else pa.int32()
        schema = schema.set(schema.get_field_index(name), pa.field(name, kind, nullable=False))
    return schema


def _groups(order: RunOrder, part: ExportPart, columns: Mapping[str, Any]) -> Iterator[pa.Table]:
    """Yield tables of whole steps, each about as large as a row group should be; at least one table."""
    first, count = part.steps.start, 1
    while True:
        stop = min(first + count, part.steps.stop)
        table = order.table(range(first, stop), part.rank, **columns)
        yield table
        rows = max(len(table) // max(stop - first, 1), 1)
        room = GROUP_BYTES // max(table.nbytes // max(len(table), 1), 1) if columns["tokens"] else EXPORTED_GROUP_ROWS
        first, count = stop, max(room // rows, 1)
        if first >= part.steps.stop:
            return


def _is_written(file: Location, mark: Mapping[str, Any]) -> bool:
    """Return whether a file exists; raise ObjectExistsError unless its metadata is `mark`."""
    try:
        reader = open_object(file, cache=False)
    except ObjectNotFoundError:
        return False
    with contextlib.suppress(ValueError):  # pyarrow's, of a file that is no parquet, among them
        metadata = parquet.ParquetFile(ReadableFile(reader)).schema_arrow.metadata or {}
        if json.loads(metadata.get(METADATA, b"null")) == mark:
            return True
    raise ObjectExistsError(f"{file}: is of another order, or has other columns; remove it or export elsewhere")
