"""Shuffle the documents of one dataset or several into one dataset.

    1  every .idx is read and checked
    2  documents, with the lengths and modes of their sequences, are distributed to buckets on a scratch disk
    3  bucket by bucket they are written in the new order: to the .bin, invisible, and the columns of the .idx
    4  the same for the rows of their lineage, if there are any: 29 bytes of numbers each, and an id
    5  the sources are checked for changes; the old .idx is removed, lineage and .bin appear, the .idx last

Disk: the bytes of the tokens and about 28 bytes for each document, in a file without a name; and the target. Memory: as
the caller sets, for the whole process. A run that fails leaves nothing; after a kill there is neither a dataset nor
scratch data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from binidx.corpus.dataset_target import DatasetOutput, open_target
from binidx.corpus.lineage_transfer import LineageOutputs, LineageRows
from binidx.corpus.shuffle_buckets import MIB, Buckets, Column, RecordRun, plan_shuffle, shuffle_keys
from binidx.corpus.verify import check_tokenizers
from binidx.corpus.whole_dataset import (
    JsonResult,
    Options,
    Prefix,
    WholeDataset,
    check_all_unchanged,
    check_compatible,
    open_datasets,
    sum_counts,
)
from binidx.format.idx_blocks import DocumentBlock, batch_by_size
from binidx.format.sidecars.lineage import build_lineage_table, to_bitmap
from binidx.storage.ranges import cut
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

MEMORY_BYTES = 2 << 30
PART_BYTES = 8 * MIB


@dataclass(frozen=True)
class ShuffleResult(JsonResult):
    """Result of a shuffle; `num_buckets` follows from the memory."""

    target: str
    num_sources: int
    num_documents: int
    num_sequences: int
    num_tokens: int
    num_buckets: int
    lineage: bool
    seconds: float


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
) -> ShuffleResult:
    """Write the documents of all sources as one dataset, in the order that `seed` and their number determine.

    Args:
        seed: seed of the keys: `shuffle_buckets`.
        memory_bytes: memory of this process; it does not change the output.
        scratch: directory for the data between the passes; None for the system's temporary directory.
        lineage: whether to carry the lineage over, if a source has one.
        overwrite: replace a dataset at the target. It stays until the new one is ready.

    Raises:
        ConfigError: too little memory; or as `merge_datasets`.
        FormatError, ObjectExistsError, ObjectChangedError: as `merge_datasets`.
        StorageError: the scratch disk is full.
    """
    began, watch = time.monotonic(), watch or SilentWatcher()
    datasets = open_datasets(sources, source_options)
    codec, multimodal = check_compatible(datasets)
    check_tokenizers(datasets)
    opened = open_target(target, codec, datasets, target_options, overwrite=overwrite)
    for each in datasets:
        each.check_index(each.source.plain_bytes(), watch)
    documents, sequences, tokens = sum_counts(datasets)
    token_bytes, num_columns = sum(each.num_bytes for each in datasets), 3 if multimodal else 2
    plan = plan_shuffle(memory_bytes, token_bytes + sequences * (num_columns + 2), documents, num_columns)
    with contextlib.ExitStack() as stack:
        output = DatasetOutput(opened, datasets[0].index.dtype, multimodal)
        stack.callback(output.close)
        with contextlib.closing(Buckets(plan, num_columns, scratch)) as buckets:
            watch.begin("into buckets", token_bytes, 0)
            first = 0
            for each in datasets:
                _distribute(each, seed, first, buckets, watch)
                first += each.index.num_documents
            watch.begin("in order", token_bytes, 0)
            for run in buckets.sorted():
                _append(output, run)
                watch.advance(int(run.lengths[:, 0].sum()))
        rows = LineageRows(datasets if lineage else [], source_options)
        outputs = stack.enter_context(contextlib.closing(LineageOutputs(rows, [opened])))
        if rows:
            watch.begin("lineage", rows.num_rows, 0)
            for table in shuffle_lineage(rows.tables(), rows.num_rows, seed, memory_bytes, scratch):
                outputs.write(0, table)
                watch.advance(len(table))
        output.publish(lambda: outputs.replace(0), lambda: check_all_unchanged(datasets))
    counts = len(datasets), documents, sequences, tokens
    return ShuffleResult(opened.prefix, *counts, plan.num_buckets, bool(rows), time.monotonic() - began)


class TokenStream:
    """Reader of the plain tokens of a dataset from front to back.

    Mapped pages count as memory of this process until other processes need them. A mapped file is therefore opened
    again every 64 MiB; `check_unchanged` shows in the end that it is still the same file.
    """

    def __init__(self, dataset: WholeDataset) -> None:
        self._dataset, self._bytes_read = dataset, 0
        self._reader = dataset.source.open_plain()
        self._mapped = local_path(self._reader.uri) is not None

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes of the tokens; the view is valid until the next call."""
        if self._mapped and self._bytes_read > 64 * MIB:
            self._reader, self._bytes_read = self._dataset.source.open_plain(), 0
        self._bytes_read += stop - start
        return self._reader.read([(start, stop)])[0]


def _distribute(dataset: WholeDataset, seed: int, first: int, buckets: Buckets, watch: ProgressWatcher) -> None:
    """Pass 1 for one dataset; its first document has the number `first`."""
    tokens, item_bytes = TokenStream(dataset), dataset.index.item_bytes
    for block in dataset.index.documents():
        keys = shuffle_keys(seed, first + block.first, len(block))
        bounds = block.token_bounds() * item_bytes
        for low, high in batch_by_size(bounds, buckets.plan.round_bytes):
            start, stop = bounds[[low, high]].tolist()
            sequences = _sequence_columns(block, low, high, buckets.num_columns)
            if stop - start > buckets.plan.round_bytes:
                pieces = (tokens.read(*part) for part in cut((start, stop), PART_BYTES))
                buckets.add_one(keys[low:high], [pieces, *([data.data] for data, _ in sequences)])
            else:
                data = np.frombuffer(tokens.read(start, stop), np.uint8)
                buckets.add(keys[low:high], [(data, bounds[low : high + 1] - start), *sequences])
            watch.advance(stop - start)


def _sequence_columns(block: DocumentBlock, low: int, high: int, num_columns: int) -> list[Column]:
    """Return lengths, and modes if there are three columns, of the sequences of some documents."""
    bounds = block.bounds[low : high + 1] - block.bounds[0]
    first, stop = bounds[0], bounds[-1]
    lengths = _copy_bytes(block.lengths[first:stop]), (bounds - first) * 4
    # A dataset without sequences has no modes, whether the others have some or not.
    modes = np.empty(0, np.int8) if block.modes is None else block.modes[first:stop]
    return [lengths, (_copy_bytes(modes), bounds - first)][: num_columns - 1]


def _copy_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.frombuffer(values.tobytes(), np.uint8)


def _append(output: DatasetOutput, run: RecordRun) -> None:
    """Pass 2: append some documents."""
    for piece in run.pieces(0):
        output.bin.write(piece)
    columns = output.columns
    before = len(columns.lengths)
    for piece in run.pieces(1):
        columns.lengths.extend(np.frombuffer(piece, "<i4"))
    if columns.multimodal:
        for piece in run.pieces(2):
            columns.modes.extend(np.frombuffer(piece, np.int8))
    columns.add_bounds(np.cumsum(run.lengths[:, 1] // 4), plus=before)


LINEAGE_ROW = np.dtype([("source", "<i4"), ("nulls", "u1"), ("row", "<i8"), ("byte", "<i8"), ("hash", "<u8")])

NULLABLE = ("row", "byte", "hash", "id")
"""Columns with a bit in `nulls`."""

ID_BYTES = 64
"""Assumed bytes of an id; longer ones only make buckets that stay on disk."""


def shuffle_lineage(
    tables: Iterable[Any], num_rows: int, seed: int, memory_bytes: int, scratch: str | None
) -> Iterator[Any]:
    """Yield the rows of tables of `SCHEMA` in the order of their keys.

    Args:
        num_rows: rows of all tables.
        memory_bytes, scratch: as in `shuffle_datasets`.
    """
    sources: dict[str, int] = {}
    plan, first = plan_shuffle(memory_bytes, num_rows * (LINEAGE_ROW.itemsize + ID_BYTES), num_rows, 2), 0
    with contextlib.closing(Buckets(plan, 2, scratch)) as buckets:
        for table in tables:
            keys = shuffle_keys(seed, first, len(table))
            first += len(table)
            numbers, (ids, bounds) = _to_columns(table, sources)
            for low, high in batch_by_size(bounds, plan.round_bytes):
                of_ids = ids[bounds[low] : bounds[high]], bounds[low : high + 1] - bounds[low]
                rows = numbers[low:high].view(np.uint8).reshape(-1), np.arange(high - low + 1) * LINEAGE_ROW.itemsize
                buckets.add(keys[low:high], [rows, of_ids])
        for run in buckets.sorted():
            yield _to_table(run, list(sources))


def _to_columns(table: Any, sources: dict[str, int]) -> tuple[NDArray[Any], Column]:
    """Return the numbers of rows as LINEAGE_ROW, and their ids as bytes; add new sources to `sources`."""
    rows, batch = np.zeros(len(table), LINEAGE_ROW), table.unify_dictionaries().combine_chunks()
    named = batch.column("source").combine_chunks()
    numbers = [sources.setdefault(name, len(sources)) for name in named.dictionary.to_pylist()]
    rows["source"] = np.array(numbers, np.int32)[named.indices.to_numpy()]
    for bit, name in enumerate(NULLABLE):
        column = batch.column(name)
        rows["nulls"] |= column.is_null().to_numpy().astype(np.uint8) << bit
        if name != "id":
            rows[name] = column.fill_null(0).to_numpy()
    ids = batch.column("id").fill_null("").cast(pa.large_string()).combine_chunks()
    _, offsets, data = ids.buffers()
    bounds = np.frombuffer(offsets, np.int64)[ids.offset : ids.offset + len(ids) + 1].copy()
    text = np.frombuffer(data, np.uint8) if data is not None and len(data) else np.empty(0, np.uint8)
    return rows, (text[bounds[0] : bounds[-1]], bounds - bounds[0])


def _to_table(run: RecordRun, sources: list[str]) -> Any:
    """Return a run of records as a table of `SCHEMA`."""
    rows = np.frombuffer(run.joined(0), LINEAGE_ROW)
    null = {name: (rows["nulls"] >> bit & 1).astype(bool) for bit, name in enumerate(NULLABLE)}
    row, byte, hashes = (
        pa.array(np.ascontiguousarray(rows[name]), mask=null[name]) for name in ("row", "byte", "hash")
    )
    offsets = np.concatenate([[0], np.cumsum(run.lengths[:, 1])]).astype(np.int64)
    buffers = [to_bitmap(~null["id"]), pa.py_buffer(offsets), pa.py_buffer(run.joined(1))]
    ids = pa.Array.from_buffers(pa.large_string(), len(run), buffers).cast(pa.string())
    return build_lineage_table(sources, np.ascontiguousarray(rows["source"]), row, byte, ids, hashes)
