"""Lineage of datasets, carried along to new ones.

In a new dataset row i still describes document i. If only some of several sources have lineage, the documents of the
others get their prefix as `source`, their number in it as `row`, and nulls, so that each can be found. If none has any,
none is written. Rows are read and written in batches. pyarrow is imported with the first of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.random_numbers import shuffle_keys
from binidx.corpus.shuffle_buckets import Buckets, Column, keyed_row, plan_shuffle
from binidx.corpus.whole_dataset import DatasetTarget, WholeDataset
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.jobs.progress import ProgressWatcher
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import delete_object


def _placeholders(dataset: WholeDataset) -> Iterator[Any]:
    """Yield tables for a dataset without lineage: its prefix is the source, the document number the row."""
    from binidx.corpus.lineage.lineage_writer import GROUP_ROWS, build_lineage_table

    for start, stop in cut((0, dataset.index.num_documents), GROUP_ROWS):
        rows = np.arange(start, stop)
        yield build_lineage_table([dataset.prefix], np.zeros(len(rows), np.int32), rows, None, None, None)


Assign = Callable[[int, int], NDArray[np.int64]]
"""Function (first, count) -> target number of each document from `first` on, -1 for none; shape (count,)."""


class LineageTransfer:
    """Copy of the lineage of datasets to the targets that get their documents; invisible until `replace` or `publish`.

    Its truth value is False if no dataset has lineage; then none is written.

    Args:
        datasets: sources, in the order of their documents in the targets.
        limit: number of rows after which to stop; None for all.

    Attributes:
        num_rows: number of rows of all datasets, up to the limit.
    """

    def __init__(
        self, datasets: Sequence[WholeDataset], targets: Sequence[DatasetTarget], limit: int | None = None
    ) -> None:
        self._targets = targets
        present = OPENS.map(lambda dataset: dataset.source.has(LINEAGE), datasets)
        self._sources = [*zip(datasets, present, strict=True)]
        count = sum(dataset.index.num_documents for dataset in datasets)
        self.num_rows = count if limit is None else min(count, limit)
        self._writers: list[LineageWriter] = []
        if any(present):
            from binidx.corpus.lineage.lineage_writer import LineageWriter

            self._writers = [LineageWriter(target.prefix + LINEAGE) for target in targets]

    def __bool__(self) -> bool:
        return bool(self._writers)

    def tables(self) -> Iterator[Any]:
        """Yield the rows in tables of `SCHEMA`.

        Raises:
            FormatError: a file has another number of rows than its dataset has documents.
            MissingDriverError: pyarrow is not installed.
        """
        left = self.num_rows
        for dataset, present in self._sources:
            for table in dataset.source.lineage() if present else _placeholders(dataset):
                yield table[:left]
                left -= min(left, len(table))
                if not left:
                    return

    def fill(self, watch: ProgressWatcher, tables: Iterable[Any] | None = None, assign: Assign | None = None) -> None:
        """Append rows to the files of the targets.

        Args:
            tables: tables of `SCHEMA`; by default the sources' rows, in order. Read only if a source has lineage.
            assign: target of each row; by default all rows go to the first target.
        """
        if not self._writers:
            return
        from binidx.format.arrow import pa

        watch.begin("lineage", self.num_rows, 0, "rows")
        first = 0
        for table in self.tables() if tables is None else tables:
            if assign is None:
                self._writers[0].write(table)
            else:
                targets = assign(first, len(table))
                for number, writer in enumerate(self._writers):
                    writer.write(table.filter(pa.array(targets == number)))
            first += len(table)
            watch.advance(len(table))

    def replace(self, number: int) -> None:
        """Remove the existing dataset of target `number` and its sidecars, and publish the new lineage.

        A complete dataset that this job wrote stays as it is; only its lineage is added if it is missing.
        """
        target = self._targets[number]
        if not target.is_complete:
            target.remove_existing()
            self.publish(number)
        elif self._writers and not object_exists(target.prefix + LINEAGE):
            self.publish(number)

    def publish(self, number: int) -> None:
        """Publish the new lineage of target `number`; if no source has lineage, remove the existing one."""
        if self._writers:
            self._writers[number].publish()
        else:
            delete_object(self._targets[number].prefix + LINEAGE)

    def close(self) -> None:
        """Remove the files that were not published."""
        for writer in self._writers:
            writer.abandon()


LINEAGE_ROW_BYTES = 64
"""Assumed bytes of a row with its id. A bucket with much longer ids stays on the scratch disk, and its ids are read one
by one."""

ROW = np.dtype([("source", "<i4"), ("row", "<i8"), ("byte", "<i8"), ("hash", "<u8"), ("present", "?", 3)])
"""Record of a row without its id: the number of its source, and whether byte, id and hash are present."""


def shuffle_lineage(
    tables: Iterable[Any], num_rows: int, seed: int, memory_bytes: int, scratch: str | None
) -> Iterator[Any]:
    """Yield the rows of lineage tables, one a document, in the order in which `shuffle_datasets` puts the documents.

    Args:
        tables: tables of `SCHEMA`.
        num_rows: number of rows of all tables.
        seed: seed of that shuffle.
        memory_bytes, scratch: as in `shuffle_datasets`.
    """
    from binidx.corpus.lineage.lineage_writer import build_lineage_table, join_strings
    from binidx.format.arrow import pa

    sources: dict[str, int] = {}
    plan, first = plan_shuffle(memory_bytes, num_rows * LINEAGE_ROW_BYTES, num_rows, 2), 0
    with contextlib.closing(Buckets(plan, keyed_row(2), scratch)) as buckets:
        for table in tables:
            buckets.add(shuffle_keys(seed, first, len(table)), _row_columns(table, sources))
            first += len(table)
        for lengths, (records, ids) in buckets.sorted():
            rows = np.frombuffer(b"".join(map(bytes, records)), ROW)
            text, ends = np.frombuffer(b"".join(map(bytes, ids)), np.uint8), np.append(0, np.cumsum(lengths[:, 1]))
            has_byte, has_id, has_hash = rows["present"].T
            byte, hashes = pa.array(rows["byte"], mask=~has_byte), pa.array(rows["hash"], mask=~has_hash)
            names = join_strings(text, ends, has_id)
            yield build_lineage_table([*sources], rows["source"], rows["row"], byte, names, hashes)


def _row_columns(table: Any, sources: dict[str, int]) -> list[Column]:
    """Return the rows of a table as a column of `ROW` records and one of ids; new source names go into `sources`."""
    table = table.unify_dictionaries()
    named, ids = table.column("source").combine_chunks(), table.column("id").fill_null("").combine_chunks()
    numbers = [sources.setdefault(name, len(sources)) for name in named.dictionary.to_pylist()]
    rows = np.zeros(len(table), ROW)
    rows["source"] = np.array(numbers, np.int32)[named.indices.to_numpy()]
    rows["present"] = np.column_stack([table.column(name).is_valid().to_numpy() for name in ("byte", "id", "hash")])
    for name in ("row", "byte", "hash"):
        rows[name] = table.column(name).fill_null(0).to_numpy()
    _, offsets, text = ids.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(ids) + 1, ids.offset * 4).astype(np.int64)
    records = rows.view(np.uint8), np.arange(len(rows) + 1) * ROW.itemsize
    return [records, (np.frombuffer(text or b"", np.uint8), bounds)]
