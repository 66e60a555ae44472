"""Shuffle the documents of one dataset or several into one dataset.

    1  every .idx is read and checked
    2  documents, with the lengths and modes of their sequences, are distributed to buckets on a scratch disk
    3  bucket by bucket they are written in the new order: to the .bin, invisible, and the columns of the .idx
    4  the same for the rows of their lineage, if there are any: about 55 bytes of numbers each, and an id
    5  the sources are checked for changes; the old .idx is removed, lineage and .bin appear, the .idx last

Disk: the bytes of the tokens and about 30 bytes for each document, in a file without a name; and the target. Memory: as
the caller sets, for the whole process. A run that fails leaves nothing; after a kill there is neither a dataset nor
scratch data.

With workers the buckets are exchange objects in the store, and each becomes a part of the target: `shuffle_parts`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.origins import LineageTransfer, shuffle_lineage
from binidx.corpus.shuffle_buckets import MIB, Buckets, Pieces, plan_shuffle, shuffle_keys
from binidx.corpus.shuffle_parts import SEQUENCE, ShuffleParts, sequence_records
from binidx.corpus.token_parts import PinnedDataset
from binidx.corpus.whole_dataset import (
    CombinedCounts,
    DatasetOutput,
    DatasetTarget,
    Options,
    Prefix,
    SourceDatasets,
    WholeDataset,
)
from binidx.errors import BinidxError, ConfigError
from binidx.format.idx_blocks import batch_by_size
from binidx.jobs.parts import Workers
from binidx.storage.location import Location
from binidx.storage.ranges import cut
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

MEMORY_BYTES = 2 << 30
PART_BYTES = 8 * MIB


@dataclass(frozen=True)
class ShuffleResult(CombinedCounts):
    """Result of a shuffle.

    Attributes:
        num_buckets: depends on `memory_bytes`, with workers on the size of the data.
        lineage: whether a lineage was written.
        parts_missing: tasks that other shards must make before the same call can go on; 0 if the target is complete.
    """

    num_buckets: int
    lineage: bool
    seconds: float
    parts_missing: int = 0


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
    workers: Workers | None = None,
) -> ShuffleResult:
    """Write the documents of all sources as one dataset, in a random order.

    Args:
        seed: any integer; its low 64 bits and the number of documents determine the order.
        memory_bytes: memory of this process; it does not change the output.
        scratch: directory of the temporary file; None for the system's temporary directory.
        lineage: whether to carry the lineage over, if a source has one.
        overwrite: replace a dataset at the target. It stays until the new one is ready.
        workers: they make the parts of the target, in TARGET-parts; None: this process writes it at once. The tokens
            are the same; in a compressed `.bin` also the segments, unless they end with a part.

    Raises:
        ConfigError: too little memory; or as `merge_datasets`.
        FormatError, ObjectExistsError, ObjectChangedError: as `merge_datasets`.
        ObjectExistsError: also if TARGET-parts holds parts of another job.
        StorageError: the scratch disk is full.
    """
    began, watch = time.monotonic(), watch or SilentWatcher()
    if overwrite and workers is not None and workers.shard is not None:
        raise ConfigError("shard, overwrite: shards do not know of each other; remove the old dataset first")
    opened = SourceDatasets([Location.of(source, source_options) for source in sources])
    codec, multimodal = opened.check_compatible()
    opened.check_tokenizers()
    datasets = opened.datasets
    to_write = DatasetTarget.open(Location.of(target, target_options), codec, datasets, overwrite=overwrite)
    _, documents, sequences, _ = opened.counts()
    to_write.check_counts(sequences, documents, multimodal)
    for dataset in datasets:
        dataset.check_index(watch)
    token_bytes = sum(dataset.num_bytes for dataset in datasets)
    if workers is not None:
        carried = opened.datasets if lineage else []
        num_buckets, has_rows, missing = _shuffle_by_workers(
            opened, to_write, seed, workers, carried, memory_bytes, scratch, watch
        )
        made = num_buckets, has_rows, time.monotonic() - began
        return ShuffleResult(to_write.prefix.uri, *opened.counts(), *made, missing)
    plan = plan_shuffle(memory_bytes, token_bytes + sequences * SEQUENCE.itemsize, documents, 2)
    with contextlib.ExitStack() as stack:
        output = DatasetOutput(to_write, datasets[0].index.dtype, multimodal)
        stack.callback(output.close)
        with contextlib.closing(Buckets(plan, 2, scratch)) as buckets:
            watch.begin("into buckets", token_bytes, 0)
            first = 0
            for dataset in datasets:
                _distribute(dataset, seed, first, buckets, watch)
                first += dataset.index.num_documents
            watch.begin("in order", token_bytes, 0)
            for lengths, pieces in buckets.sorted():
                _append(output, lengths, *pieces)
                watch.advance(int(lengths[:, 0].sum()))
        rows = LineageTransfer(datasets if lineage else [], [to_write])
        stack.callback(rows.close)
        rows.fill(watch, tables=shuffle_lineage(rows.tables(), rows.num_rows, seed, memory_bytes, scratch))
        output.publish(opened.check_unchanged, lambda: rows.replace(0))
    to_write.say_complete(watch)
    done = plan.num_buckets, bool(rows), time.monotonic() - began
    return ShuffleResult(to_write.prefix.uri, *opened.counts(), *done)


def _shuffle_by_workers(
    opened: SourceDatasets,
    target: DatasetTarget,
    seed: int,
    workers: Workers,
    carried: Sequence[WholeDataset],
    memory_bytes: int,
    scratch: str | None,
    watch: ProgressWatcher,
) -> tuple[int, bool, int]:
    """Make the parts, and the target once all exist; return the last fields of a ShuffleResult, without the time.

    Args:
        carried: datasets whose lineage is carried over.
    """
    datasets, (_, multimodal) = opened.datasets, opened.check_compatible()
    counts = [(dataset.index.num_documents, dataset.num_bytes) for dataset in datasets]
    dtype, pinned = datasets[0].index.dtype.__name__, [PinnedDataset.of(dataset) for dataset in datasets]
    job = ShuffleParts(target, pinned, counts, dtype, multimodal, seed, scratch)
    if workers.shard is not None and target.is_complete and not job.folder.is_claimed():
        watch.say(f"{target.prefix}: finished by another shard; the same command without --shard compares it")
        return job.num_buckets, False, 0
    missing = job.make(workers, watch)
    if missing:
        return job.num_buckets, False, missing
    with contextlib.closing(LineageTransfer(carried, [target])) as rows:
        rows.fill(watch, tables=shuffle_lineage(rows.tables(), rows.num_rows, seed, memory_bytes, scratch))
        try:
            job.finish(opened.check_unchanged, lambda: rows.replace(0), watch)
        except BinidxError:
            if workers.shard is None or job.folder.is_claimed():
                raise  # else another shard, which found all parts at the same time, has finished the job
        return job.num_buckets, bool(rows), 0


def _distribute(dataset: WholeDataset, seed: int, first: int, buckets: Buckets, watch: ProgressWatcher) -> None:
    """Distribute the documents of a dataset, numbered from `first` on, to the buckets (pass 1)."""
    item_bytes = dataset.index.item_bytes
    plain = dataset.source.open_plain(mmap=False)  # mapped pages would count as memory of this process
    for block in dataset.index.documents():
        keys = shuffle_keys(seed, first + block.first, len(block))
        bounds = block.token_bounds() * item_bytes
        for low, high in batch_by_size(bounds, buckets.plan.round_bytes):
            start, stop = bounds[[low, high]].tolist()
            sequences = sequence_records(block, low, high)
            if stop - start > buckets.plan.round_bytes:
                pieces = (plain.read([part])[0] for part in cut((start, stop), PART_BYTES))
                buckets.add_one(keys[low:high], [pieces, [sequences[0].data]])
            else:
                data = np.frombuffer(plain.read([(start, stop)])[0], np.uint8)
                buckets.add(keys[low:high], [(data, bounds[low : high + 1] - start), sequences])
            watch.advance(stop - start)


def _append(output: DatasetOutput, lengths: NDArray[np.int64], tokens: Pieces, sequences: Pieces) -> None:
    """Append sorted documents to the output (pass 2); `lengths` are the bytes of their tokens and sequence records."""
    for piece in tokens:
        output.bin.write(piece)
    # Joined, as a piece of a column on disk may end within a record.
    records = np.frombuffer(b"".join(map(bytes, sequences)), SEQUENCE)
    modes = records["mode"] if output.columns.multimodal else None
    output.columns.add(records["length"], np.cumsum(lengths[:, 1] // SEQUENCE.itemsize), modes)
