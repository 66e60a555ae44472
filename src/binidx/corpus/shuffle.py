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
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from binidx.corpus.origins import BATCH_ROWS, LineageOutputs, LineageRows
from binidx.corpus.shuffle_buckets import (
    MIB,
    Buckets,
    Column,
    RecordRun,
    ScratchFile,
    assign_buckets,
    plan_shuffle,
    shuffle_keys,
    shuffle_order,
)
from binidx.corpus.verify import check_tokenizers
from binidx.corpus.whole_dataset import (
    DatasetOutput,
    JsonResult,
    Options,
    Prefix,
    WholeDataset,
    check_all_unchanged,
    check_compatible,
    open_datasets,
    open_target,
    sum_counts,
)
from binidx.format.index_stream import DocumentBlock, batch_by_size
from binidx.format.sidecars.lineage import build_lineage_table
from binidx.storage.ranges import cut
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

MEMORY_BYTES = 2 << 30
PART_BYTES = 8 * MIB

REOPEN_BYTES = 64 * MIB
"""A local source is opened again after so many bytes: mapped pages count as memory of this process until other
processes need them. `check_unchanged` shows in the end that it is still the same file."""


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
        tables = shuffle_lineage(rows.tables(), rows.num_rows, seed, memory_bytes, scratch)
        outputs.fill(tables, rows.num_rows, watch)
        output.publish(lambda: outputs.replace(0), lambda: check_all_unchanged(datasets))
    counts = len(datasets), documents, sequences, tokens
    return ShuffleResult(opened.prefix, *counts, plan.num_buckets, bool(rows), time.monotonic() - began)


def _distribute(dataset: WholeDataset, seed: int, first: int, buckets: Buckets, watch: ProgressWatcher) -> None:
    """Pass 1 for one dataset; its first document has the number `first`."""
    plain, opened_at, item_bytes = dataset.source.open_plain(), 0, dataset.index.item_bytes
    for block in dataset.index.documents():
        keys = shuffle_keys(seed, first + block.first, len(block))
        bounds = block.token_bounds() * item_bytes
        for low, high in batch_by_size(bounds, buckets.plan.round_bytes):
            start, stop = bounds[[low, high]].tolist()
            if start - opened_at > REOPEN_BYTES and local_path(plain.uri) is not None:
                plain, opened_at = dataset.source.open_plain(), start
            sequences = _sequence_columns(block, low, high, buckets.num_columns)
            if stop - start > buckets.plan.round_bytes:
                pieces = (plain.read([part])[0] for part in cut((start, stop), PART_BYTES))
                buckets.add_one(keys[low:high], [pieces, *([data.data] for data, _ in sequences)])
            else:
                data = np.frombuffer(plain.read([(start, stop)])[0], np.uint8)
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


LINEAGE_ROW_BYTES = 112
"""Assumed memory of a row and its id, while they are sorted."""


def shuffle_lineage(
    tables: Iterable[Any], num_rows: int, seed: int, memory_bytes: int, scratch: str | None
) -> Iterator[Any]:
    """Yield the rows of tables of `SCHEMA` in the order of their keys.

    Each bucket is an Arrow stream on the scratch disk, with the numbers of the sources instead of their names.

    Args:
        num_rows: rows of all tables.
        memory_bytes, scratch: as in `shuffle_datasets`.
    """
    sources: dict[str, int] = {}
    plan, first = plan_shuffle(memory_bytes, num_rows * LINEAGE_ROW_BYTES, num_rows, 0), 0
    with contextlib.closing(ScratchFile(scratch, plan.num_buckets)) as file:
        for table in tables:
            keys = shuffle_keys(seed, first, len(table))
            first += len(table)
            buckets = assign_buckets(keys, plan.num_buckets)
            order = np.argsort(buckets, kind="stable")
            rows = _numbered_batch(table, keys, sources).take(pa.array(order))
            bounds = np.searchsorted(buckets[order], np.arange(plan.num_buckets + 1)).tolist()
            for bucket, (start, stop) in enumerate(itertools.pairwise(bounds)):
                if start < stop:
                    messages = [] if file.sizes[bucket] else [rows.schema.serialize()]
                    for message in (*messages, rows.slice(start, stop - start).serialize()):
                        file.append(bucket, np.frombuffer(message, np.uint8))
        for bucket in np.flatnonzero(file.sizes).tolist():
            stored = np.empty(file.sizes[bucket], np.uint8)
            file.read(bucket, 0, stored)
            rows = pa.ipc.open_stream(pa.py_buffer(stored)).read_all().combine_chunks()
            order = shuffle_order(rows.column("key").to_numpy())
            for start in range(0, len(order), BATCH_ROWS):
                found = rows.take(pa.array(order[start : start + BATCH_ROWS]))
                row, byte, ids, hashes = (found.column(name) for name in ("row", "byte", "id", "hash"))
                numbers = found.column("source").to_numpy()
                yield build_lineage_table(list(sources), numbers, row, byte, ids.cast(pa.string()), hashes)


def _numbered_batch(table: Any, keys: NDArray[np.uint64], sources: dict[str, int]) -> Any:
    """Return rows with their keys as one record batch; new sources get the next numbers."""
    table = table.unify_dictionaries().combine_chunks()
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    named = columns["source"]
    numbers = [sources.setdefault(name, len(sources)) for name in named.dictionary.to_pylist()]
    columns["source"] = pa.array(np.array(numbers, np.int32)[named.indices.to_numpy()])
    # A bucket may have more bytes of ids than 32-bit offsets reach.
    return pa.RecordBatch.from_pydict({**columns, "id": columns["id"].cast(pa.large_string()), "key": pa.array(keys)})
