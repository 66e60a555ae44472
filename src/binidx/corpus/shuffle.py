"""Rows of lineage in the order of the documents that they are of: the same keys, the same two passes.

A row is 29 bytes of numbers, and its id.

Documents of one dataset or several -> one dataset of all of them, in random order.

    1  every .idx is read and checked
    2  documents, with the lengths and modes of their sequences, are thrown into buckets on a scratch disk
    3  bucket by bucket they come out in order: into the .bin, unseen, and the spools of the .idx
    4  the same with the rows of their lineage, where there is some
    5  the sources are looked at again; the old .idx goes, lineage and .bin appear, the .idx last

Disk: as many bytes as the tokens have, and 28 or so a document, in a file without a name; and the target. Memory: as
the caller says, for the whole process. A run that fails leaves nothing, one that is killed no dataset and no scratch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from binidx.corpus.carry_lineage import Lineage, LineageTargets
from binidx.corpus.convert_journal import Target
from binidx.corpus.cut import check_whole_index
from binidx.corpus.merge import check_alike, open_all
from binidx.corpus.shuffle_buckets import MIB, Buckets, Column, RecordRun, batch_records, plan_shuffle, shuffle_keys
from binidx.corpus.verify import check_tokenizers
from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset, free_target, publish
from binidx.format.bin_file import BinWriter
from binidx.format.index_stream import DocumentBlock
from binidx.format.index_writer import IndexColumns
from binidx.format.sidecars.arrow_arrays import bitmap
from binidx.format.sidecars.lineage import table_of
from binidx.storage.interfaces import Range
from binidx.storage.ranges import cut
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

ROW = np.dtype([("source", "<i4"), ("nulls", "u1"), ("row", "<i8"), ("byte", "<i8"), ("hash", "<u8")])


NULLABLE = ("row", "byte", "hash", "id")


"""Bit i of `nulls`: the i-th of them is null."""


ID_BYTES = 64


"""Of an id, where nobody has looked: more only makes buckets that are left on the disk."""


def shuffle_lineage_rows(
    tables: Iterable[Any], num_rows: int, seed: int, memory_bytes: int, scratch: str | None
) -> Iterator[Any]:
    """Tables of `SCHEMA` -> the same rows by their keys, in tables of some ten thousand.

    Args:
        num_rows: of all tables.
        memory_bytes, scratch: as in `shuffle_datasets`.
    """
    sources: dict[str, int] = {}
    plan, first = plan_shuffle(memory_bytes, num_rows * (ROW.itemsize + ID_BYTES), num_rows, 2), 0
    with contextlib.closing(Buckets(plan, 2, scratch)) as buckets:
        for table in tables:
            keys = shuffle_keys(seed, first, len(table))
            first += len(table)
            numbers, ids = as_columns(table, sources)
            for low, high in batch_records(ids[1], plan.round_bytes):
                part = ids[0][ids[1][low] : ids[1][high]], ids[1][low : high + 1] - ids[1][low]
                of_numbers = numbers[low:high].view(np.uint8).reshape(-1), np.arange(high - low + 1) * ROW.itemsize
                buckets.add(keys[low:high], [of_numbers, part])
        for run in buckets.sorted():
            yield run_table(run, list(sources))


def as_columns(table: Any, sources: dict[str, int]) -> tuple[NDArray[Any], Column]:
    """The numbers of rows, and their ids as bytes; new sources are added."""
    rows, batch = np.zeros(len(table), ROW), table.combine_chunks()
    named = batch.column("source").unify_dictionaries().combine_chunks()
    named = named.chunk(0) if isinstance(named, pa.ChunkedArray) else named
    numbers = [sources.setdefault(name, len(sources)) for name in named.dictionary.to_pylist()]
    rows["source"] = np.array(numbers, np.int32)[named.indices.to_numpy()]
    for bit, name in enumerate(NULLABLE):
        column = batch.column(name)
        rows["nulls"] |= column.is_null().to_numpy().astype(np.uint8) << bit
        if name != "id":
            rows[name] = column.fill_null(0).to_numpy()
    ids = batch.column("id").fill_null("").cast(pa.large_string()).combine_chunks()
    ids = ids.chunk(0) if isinstance(ids, pa.ChunkedArray) else ids
    return rows, id_bytes(ids)


def id_bytes(ids: Any) -> Column:
    """Of a large_string array without nulls."""
    _, offsets, data = ids.buffers()
    bounds = np.frombuffer(offsets, np.int64)[ids.offset : ids.offset + len(ids) + 1].copy()
    held = np.frombuffer(data, np.uint8) if data is not None and len(data) else np.empty(0, np.uint8)
    return held[bounds[0] : bounds[-1]], bounds - bounds[0]


def run_table(run: RecordRun, sources: list[str]) -> Any:
    """The rows of a run."""
    rows = np.frombuffer(run.joined(0), ROW)
    null = {name: (rows["nulls"] >> bit & 1).astype(bool) for bit, name in enumerate(NULLABLE)}
    row, byte, hashes = (
        pa.array(np.ascontiguousarray(rows[name]), mask=null[name]) for name in ("row", "byte", "hash")
    )
    return table_of(sources, np.ascontiguousarray(rows["source"]), row, byte, id_array(run, null["id"]), hashes)


def id_array(run: RecordRun, null: NDArray[np.bool_]) -> Any:
    offsets = np.zeros(len(run) + 1, np.int64)
    np.cumsum(run.lengths[:, 1], out=offsets[1:])
    validity = bitmap(~null)
    data = pa.py_buffer(run.joined(1))
    found = pa.Array.from_buffers(pa.large_string(), len(run), [validity, pa.py_buffer(offsets), data])
    return found.cast(pa.string())


MEMORY_BYTES = 2 << 30


PART_BYTES = 8 * MIB


@dataclass(frozen=True)
class Shuffled:
    """What a shuffle did; `num_buckets` it took within the memory that it had."""

    target: str
    num_sources: int
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_buckets: int
    lineage: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


def shuffle_datasets(
    sources: Sequence[Prefix],
    target: Prefix,
    *,
    seed: int,
    memory_bytes: int = MEMORY_BYTES,
    scratch: str | None = None,
    lineage: bool = True,
    overwrite: bool = False,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> Shuffled:
    """Write the documents of all sources as one dataset, in the order that `seed` and their number give: `keys`.

    Args:
        memory_bytes: that this process may use in all; it decides nothing of what is written.
        scratch: directory for what lies between the passes; None: that for temporary files.
        lineage: whether it is carried along, where there is some.
        overwrite: replace a dataset that stands at the target. It stands until the new one is ready.

    Raises:
        ConfigError: too little memory; or as `merge_datasets`.
        FormatError, ObjectExistsError, ObjectChangedError: as `merge_datasets`.
        StorageError: the scratch directory is full.
    """
    began, watch = time.monotonic(), watch or SilentWatcher()
    opened = open_all(sources, source_options)
    codec, multimodal = check_alike(opened)
    check_tokenizers(opened)
    place = free_target(target, codec, opened, target_options, overwrite=overwrite)
    for each in opened:
        check_whole_index(each, each.source.plain_bytes(), watch)
    documents = sum(each.index.num_documents for each in opened)
    sequences = sum(each.index.num_sequences for each in opened)
    tokens = sum(each.index.num_tokens for each in opened)
    num_bytes = tokens * opened[0].index.item_bytes + sequences * (5 if multimodal else 4)
    plan = plan_shuffle(memory_bytes, num_bytes, documents, 3 if multimodal else 2)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(contextlib.closing(_Output(place, opened[0].index.dtype, multimodal)))
        with contextlib.closing(Buckets(plan, 3 if multimodal else 2, scratch)) as buckets:
            watch.begin("into buckets", tokens * opened[0].index.item_bytes, 0)
            first = 0
            for each in opened:
                _scatter(each, seed, first, buckets, watch)
                first += each.index.num_documents
            watch.begin("in order", tokens * opened[0].index.item_bytes, 0)
            for run in buckets.sorted():
                output.add(run)
                watch.advance(int(run.lengths[:, 0].sum()))
        rows = Lineage(opened if lineage else [], source_options)
        sidecar = stack.enter_context(contextlib.closing(LineageTargets(rows, [place])))
        if rows:
            # MOVED

            watch.begin("lineage", rows.num_rows, 0)
            for table in shuffle_lineage_rows(rows.tables(), rows.num_rows, seed, memory_bytes, scratch):
                sidecar.write(0, table)
                watch.advance(len(table))
        publish(place, output.columns, lambda: output.publish(sidecar), lambda: _check_unchanged(opened))
    seconds = time.monotonic() - began
    return Shuffled(place.prefix, len(opened), documents, sequences, tokens, plan.num_buckets, bool(rows), seconds)


class TokenStream:
    """The plain tokens of a dataset, read from front to back.

    Pages of a map count as memory of this process until others need them, so a file that is mapped is opened anew now
    and then, and the map goes. That it is the same file is known in the end: `Finished.check_unchanged`.
    """

    def __init__(self, dataset: WholeDataset) -> None:
        self._dataset, self._read = dataset, 0
        self._reader = dataset.source.open_plain()
        self._maps = local_path(self._reader.uri) is not None
        self.uri, self.size = self._reader.uri, self._reader.size

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """As a RangeReader; the views are for now."""
        if self._maps and self._read > 64 * MIB:
            self._reader, self._read = self._dataset.source.open_plain(), 0
        self._read += sum(stop - start for start, stop in ranges)
        return self._reader.read(ranges)


def _scatter(dataset: WholeDataset, seed: int, first: int, buckets: Buckets, watch: ProgressWatcher) -> None:
    """Pass 1 for the documents of one dataset, of which the first has the number `first`."""
    tokens, item_bytes = TokenStream(dataset), dataset.index.item_bytes
    for block in dataset.index.documents():
        keys = shuffle_keys(seed, first + block.first, len(block))
        bounds = block.token_bounds() * item_bytes
        for low, high in batch_records(bounds, buckets.plan.round_bytes):
            start, stop = bounds[low], bounds[high]
            rest = _of_sequences(block, low, high, buckets.num_columns)
            if stop - start > buckets.plan.round_bytes:
                pieces = (tokens.read([part])[0] for part in cut((int(start), int(stop)), PART_BYTES))
                buckets.add_one(keys[low:high], [pieces, *([data.data] for data, _ in rest)])
            else:
                data = np.frombuffer(tokens.read([(int(start), int(stop))])[0], np.uint8)
                buckets.add(keys[low:high], [(data, bounds[low : high + 1] - start), *rest])
            watch.advance(int(stop - start))


def _of_sequences(block: DocumentBlock, low: int, high: int, num_columns: int) -> list[Column]:
    """Lengths, and modes if they are wanted, of the sequences of some documents."""
    bounds = block.bounds[low : high + 1] - block.bounds[0]
    first, stop = bounds[0], bounds[-1]
    lengths = _bytes(block.lengths[first:stop]), (bounds - first) * 4
    # A dataset without sequences has no modes, whatever the others have.
    modes = np.empty(0, np.int8) if block.modes is None else block.modes[first:stop]
    return [lengths, (_bytes(modes), bounds - first)][: num_columns - 1]


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(values.tobytes(), np.uint8)


class _Output:
    """The new dataset on its way."""

    def __init__(self, place: Target, dtype: Any, multimodal: bool) -> None:
        self.columns = IndexColumns(dtype, multimodal)
        self._bin = BinWriter(place.bin_uri, place.options)
        self._bin.goes.append(place.idx_uri)

    def add(self, run: RecordRun) -> None:
        """Pass 2: some documents more."""
        for piece in run.pieces(0):
            self._bin.write(piece)
        before = len(self.columns.lengths)
        for piece in run.pieces(1):
            self.columns.lengths.extend(np.frombuffer(piece, "<i4"))
        if self.columns.multimodal:
            for piece in run.pieces(2):
                self.columns.modes.extend(np.frombuffer(piece, np.int8))
        self.columns.add_bounds(np.cumsum(run.lengths[:, 1] // 4), plus=before)

    def publish(self, sidecar: LineageTargets) -> None:
        """All but the `.idx`."""
        sidecar.make_way(0)
        self._bin.publish()

    def close(self) -> None:
        """Leave nothing of what is not published."""
        self.columns.close()
        self._bin.abandon()


def _check_unchanged(opened: Sequence[WholeDataset]) -> None:
    for each in opened:
        each.check_unchanged()
