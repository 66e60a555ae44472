"""Lineage of the documents that are merged, cut or shuffled, written beside the new dataset.

Row i still describes document i. If only some of several datasets have lineage, the documents of the others get their
prefix as `source`, their number in it as `row`, and nulls, so that each can be found. If none has any, none is written.

Rows are read and written `BATCH_ROWS` at a time. pyarrow is imported with the first of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.dataset_target import DatasetTarget
from binidx.corpus.whole_dataset import Options, WholeDataset
from binidx.errors import FormatError
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.storage.open import open_object
from binidx.storage.threads import OPENS
from binidx.storage.writing.copy import ProgressWatcher
from binidx.storage.writing.publish import delete_object

BATCH_ROWS = 1 << 16


class LineageRows:
    """Lineage rows of several datasets, one dataset after another. False if no dataset has any.

    Args:
        limit: number of rows after which to stop; None for all.
    """

    def __init__(self, datasets: Sequence[WholeDataset], options: Options = None, limit: int | None = None) -> None:
        self._options, self._limit = options, limit
        present = OPENS.map(lambda each: each.source.has(LINEAGE), datasets)
        self._sources = [
            (each.prefix, each.index.num_documents, here) for each, here in zip(datasets, present, strict=True)
        ]

    def __bool__(self) -> bool:
        return any(present for *_, present in self._sources)

    @property
    def num_rows(self) -> int:
        count = sum(count for _, count, _ in self._sources)
        return count if self._limit is None else min(count, self._limit)

    def tables(self) -> Iterator[Any]:
        """Yield the rows in tables of `SCHEMA`.

        Raises:
            FormatError: a file has another number of rows than its dataset has documents.
            MissingDriverError: pyarrow is not installed.
        """
        left = self.num_rows
        for prefix, count, present in self._sources:
            for table in read_lineage(prefix, count, self._options) if present else _placeholders(prefix, count):
                yield table[:left]
                left -= min(left, len(table))
                if not left:
                    return


def read_lineage(prefix: str, count: int, options: Options) -> Iterator[Any]:
    """Yield the lineage of a dataset in tables of `SCHEMA`; FormatError if it has not `count` rows."""
    import pyarrow as pa

    from binidx.format.sidecars.lineage import SCHEMA, open_lineage

    uri = prefix + LINEAGE
    with lineage_errors(uri):
        opened = open_lineage(open_object(uri, storage_options=options, cache=False))
        if opened.metadata.num_rows != count:
            raise FormatError(f"{uri}: {opened.metadata.num_rows} rows, needed {count}, one for each document")
        for batch in opened.iter_batches(BATCH_ROWS):
            yield pa.Table.from_batches([batch]).cast(SCHEMA)


def _placeholders(prefix: str, count: int) -> Iterator[Any]:
    """Yield rows for a dataset without lineage."""
    from binidx.format.sidecars.lineage import build_lineage_table

    for first in range(0, count, BATCH_ROWS):
        rows = np.arange(first, min(first + BATCH_ROWS, count))
        yield build_lineage_table([prefix], np.zeros(len(rows), np.int32), rows, None, None, None)


@contextlib.contextmanager
def lineage_errors(uri: str) -> Iterator[None]:
    """Raise pyarrow's errors about an invalid file as FormatError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError) as error:
        raise FormatError(f"{uri}: is no lineage ({error}); needed the columns source, row, byte, id, hash") from error


class LineageOutputs:
    """Lineage files of several targets, invisible until `replace`; none if `rows` is False."""

    def __init__(self, rows: LineageRows, targets: Sequence[DatasetTarget]) -> None:
        self._targets = targets
        self._writers: list[LineageWriter] = []
        if rows:
            from binidx.format.sidecars.lineage import LineageWriter

            self._writers = [LineageWriter(each.prefix + LINEAGE, each.options) for each in targets]

    def write(self, number: int, table: Any) -> None:
        """Append rows to the file of one target."""
        self._writers[number].write(table)

    def fill(self, rows: LineageRows, assign: Callable[[int, int], NDArray[np.int64]], watch: ProgressWatcher) -> None:
        """Append all rows; `assign(first, count)` gives the target of each of `count` rows, -1 for none."""
        if not rows:
            return
        import pyarrow as pa

        watch.begin("lineage", rows.num_rows, 0)
        first = 0
        for table in rows.tables():
            targets = assign(first, len(table))
            for number in range(len(self._writers)):
                self.write(number, table.filter(pa.array(targets == number)))
            first += len(table)
            watch.advance(len(table))

    def replace(self, number: int) -> None:
        """Remove the existing dataset of a target and its sidecars, and publish the new lineage."""
        self._targets[number].remove_existing()
        if self._writers:
            self._writers[number].publish()

    def close(self) -> None:
        """Remove the files that were not published."""
        for writer in self._writers:
            writer.abandon()


def copy_lineage(datasets: Sequence[WholeDataset], target: str, options: Options) -> None:
    """Write the lineage of all datasets under another prefix; remove the file there if they have none."""
    rows, uri = LineageRows(datasets, options), target + LINEAGE
    if not rows:
        delete_object(uri, options)
        return
    from binidx.format.sidecars.lineage import LineageWriter

    writer = LineageWriter(uri, options)
    try:
        for table in rows.tables():
            writer.write(table)
        writer.publish()
    finally:
        writer.abandon()


def assign_to_first(first: int, count: int) -> NDArray[np.int64]:
    """Assign all rows to the first target."""
    return np.zeros(count, np.int64)
