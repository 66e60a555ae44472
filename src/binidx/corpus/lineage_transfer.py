"""Lineage carried along: `PREFIX.lineage.parquet` of what is merged, cut or shuffled, for what comes out of it.

Row i stays document i. Of several datasets some may have none: their documents get the prefix as `source`, their number
in it as `row`, and nulls in the rest, so that each can still be found. Where none has any, none is written.

Rows are read and written some ten thousand at a time. pyarrow is imported when the first of them is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.convert_journal import DatasetTarget
from binidx.corpus.whole_dataset import Options, WholeDataset
from binidx.errors import FormatError
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.format.virtual import map_concurrently
from binidx.storage.open import open_object
from binidx.storage.writing.copy import ProgressWatcher
from binidx.storage.writing.publish import delete_object

BATCH_ROWS = 1 << 16


class LineageRows:
    """The rows of several datasets, one after another.

    Args:
        opened: the datasets.
        limit: of these rows only the first so many are wanted.
    """

    def __init__(self, opened: Sequence[WholeDataset], options: Options = None, limit: int | None = None) -> None:
        self._options, self._limit = options, limit
        there = map_concurrently(lambda each: each.source.has(LINEAGE), opened)
        counts = [each.index.num_documents for each in opened]
        self._sources = [*zip([each.prefix for each in opened], counts, there, strict=True)]

    def __bool__(self) -> bool:
        """Whether any of them has some."""
        return any(there for *_, there in self._sources)

    @property
    def num_rows(self) -> int:
        count = sum(count for _, count, _ in self._sources)
        return count if self._limit is None else min(count, self._limit)

    def tables(self) -> Iterator[Any]:
        """The rows, in tables of `SCHEMA`.

        Raises:
            FormatError: a sidecar has another number of rows than its dataset has documents.
            MissingDriverError: pyarrow is.
        """
        left = self.num_rows
        for table in self._all():
            yield table[:left]
            left -= min(left, len(table))
            if not left:
                return

    def _all(self) -> Iterator[Any]:
        for prefix, count, there in self._sources:
            yield from read_lineage(prefix, count, self._options) if there else placeholder_lineage(prefix, count)


def read_lineage(prefix: str, count: int | None, options: Options) -> Iterator[Any]:
    """The rows of one sidecar; FormatError if there are not `count` of them, None: however many."""
    from binidx.format.sidecars.lineage import SCHEMA, open_lineage

    uri = prefix + LINEAGE
    with lineage_errors(uri):
        found = open_lineage(open_object(uri, storage_options=options, cache=False))
        if count is not None and found.metadata.num_rows != count:
            raise FormatError(f"{uri}: {found.metadata.num_rows} rows, needed {count}, one for each document")
        for batch in found.iter_batches(BATCH_ROWS):
            yield lineage_table_from_batch(batch).cast(SCHEMA)


def placeholder_lineage(prefix: str, count: int) -> Iterator[Any]:
    """Rows for a dataset that has none."""
    from binidx.format.sidecars.lineage import build_lineage_table

    for first in range(0, count, BATCH_ROWS):
        rows = np.arange(first, min(first + BATCH_ROWS, count))
        yield build_lineage_table([prefix], np.zeros(len(rows), np.int32), rows, None, None, None)


def lineage_table_from_batch(batch: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches([batch])


@contextlib.contextmanager
def lineage_errors(uri: str) -> Iterator[None]:
    """What pyarrow says of a file that is none, as ours."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError) as error:
        raise FormatError(f"{uri}: is no lineage ({error}); needed the columns source, row, byte, id, hash") from error


class LineageOutputs:
    """Sidecars on their way, of each target of a call one; unseen until `publish`.

    Nothing is written where the sources have none; what stands there of an older dataset goes in any case.
    """

    def __init__(self, lineage: LineageRows, places: Sequence[DatasetTarget]) -> None:
        self._places = places
        self._writers: list[LineageWriter] = []
        if lineage:
            from binidx.format.sidecars.lineage import LineageWriter

            self._writers = [LineageWriter(each.prefix + LINEAGE, each.options) for each in places]

    def write(self, number: int, table: Any) -> None:
        """Rows for one of them."""
        self._writers[number].write(table)

    def fill(
        self, lineage: LineageRows, choose: Callable[[int, int], NDArray[np.int64]], watch: ProgressWatcher
    ) -> None:
        """Each row to the target that `choose(first row, rows)` names; -1: to none."""
        if not lineage:
            return
        import pyarrow as pa

        watch.begin("lineage", lineage.num_rows, 0)
        first = 0
        for table in lineage.tables():
            chosen = choose(first, len(table))
            for number in range(len(self._writers)):
                self.write(number, table.filter(pa.array(chosen == number)))
            first += len(table)
            watch.advance(len(table))

    def make_way(self, number: int) -> None:
        """Let the older dataset go, and what tells of it; show what tells of the new one, which has no `.idx` yet."""
        place = self._places[number]
        place.make_way()
        if self._writers:
            self._writers[number].publish()

    def close(self) -> None:
        """Leave nothing of what is not published."""
        for writer in self._writers:
            writer.abandon()


def copy_lineage(opened: Sequence[WholeDataset], target: str, options: Options) -> None:
    """The rows of all datasets under another prefix; afterwards there are none where the sources have none."""
    rows, uri = LineageRows(opened, options), target + LINEAGE
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
    """All rows to the one target there is."""
    return np.zeros(count, np.int64)
