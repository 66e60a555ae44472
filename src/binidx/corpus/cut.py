"""Cut a dataset into one or several others without tokenizing again.

    head      the first documents: one range of the .bin, copied inside the store where it can
    sample    some of the documents, by a hash of (seed, document number)
    split     each document to one of several datasets, by the same hash

The hash is SplitMix64, read as a number u in [0, 1): a sample takes u < fraction, a split the share that u falls in.
The same seed therefore gives the same documents on every machine, a smaller sample is part of a larger one, and the
sample of 0.1 is the first share of a split that starts with 0.1. The number of documents is close to the share, not
equal.

Documents keep their order, and their lineage is carried over. A target that an earlier run of the same cut has written
is compared and left alone: `whole_dataset`. Memory: some MB for the index, and 64 MiB of tokens.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.exchange import ROUND_BYTES
from binidx.corpus.lineage.lineage_transfer import Assign, LineageTransfer
from binidx.corpus.random_numbers import uniform_hash
from binidx.corpus.whole_dataset import DatasetOutput, DatasetTarget, Options, Prefix, WholeDataset
from binidx.errors import ConfigError
from binidx.format.document_blocks import DocumentBlock, batch_by_size
from binidx.format.index_columns import IndexColumns
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.ranges import cut

PART_BYTES = 8 << 20
"""Bytes of tokens read at once; a longer document is read in parts of this size."""


@dataclass(frozen=True)
class CutOutput:
    """Counts of one written dataset."""

    target: str
    num_documents: int
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True)
class CutResult:
    """Result of a cut: the number of documents of the source, and the written datasets."""

    source: str
    num_documents: int
    shares: list[CutOutput]
    seconds: float


def cut_dataset(
    source: Prefix,
    targets: Sequence[Prefix],
    fractions: Sequence[float] | None = None,
    *,
    seed: int = 0,
    num_documents: int | None = None,
    lineage: bool = True,
    overwrite: bool = False,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> CutResult:
    """Write each document to one of the targets, chosen by a hash; to none if the fractions add up to less than 1.

    A sample is a split with one target. The source is read once; from a remote source only the needed ranges are
    fetched. Without fractions the store itself copies an uncompressed `.bin` if it can; a compressed one is
    decompressed and compressed again.

    Args:
        fractions: share of each target, together at most 1; None: all documents, to the one target.
        seed: seed of the hash, any 64-bit number.
        num_documents: write only the first of `source`, 0 or more; all if it has fewer.
        lineage: whether to carry the lineage over, if the source has one.
        overwrite: replace a dataset at a target. It stays until the new one is ready.
        source_options, target_options: fsspec options; the store itself can copy tokens only if the two are equal.

    Raises:
        ConfigError: the number is negative; the fractions are not such shares or not one for each target; or targets
            are equal to each other or to the source.
        FormatError, ObjectExistsError, ObjectChangedError: as `merge_datasets`.
    """
    if num_documents is not None and num_documents < 0:
        raise ConfigError(f"num_documents: found {num_documents}, need 0 or more")
    _check_shares(targets, [1.0] if fractions is None else fractions)
    assign = None if fractions is None else partial(assign_by_hash, seed, np.cumsum(fractions))
    began, watch = time.monotonic(), watch or SilentWatcher()
    dataset = WholeDataset(Location.of(source, source_options))
    index, stored, check = dataset.index, dataset.source, dataset.source.check_unchanged
    locations = [Location.of(target, target_options) for target in targets]
    opened = [DatasetTarget.open(target, stored.codec, [dataset], overwrite=overwrite) for target in locations]
    # The first documents of a plain dataset are one range; other documents pass through this process.
    is_range = assign is None and stored.codec == "raw" and not stored.mixed
    dataset.check_index(watch)
    with contextlib.ExitStack() as stack:
        outputs = [DatasetOutput(target, index.dtype, index.sequence_modes is not None) for target in opened]
        for output in outputs:
            stack.callback(output.close)
        _scatter(dataset, assign, num_documents, outputs, None if is_range else stored.open_plain(), watch)
        lineages = LineageTransfer([dataset] if lineage else [], opened, num_documents)
        stack.callback(lineages.close)
        lineages.fill(watch, assign=assign)
        # Existing targets first: one of another job is refused before any is published.
        for number, output in sorted(enumerate(outputs), key=lambda numbered: not numbered[1].target.existing):
            replace = partial(lineages.replace, number)
            if is_range:
                pieces = stored.pieces(output.columns.counts()["tokens"] * index.dtype_size)
                output.target.publish_pieces(output.columns, pieces, stored.prefix.options, watch, check, replace)
            else:
                output.publish(check, replace)
            output.target.say_complete(watch)
        shares = [CutOutput(output.target.prefix.uri, *output.columns.counts().values()) for output in outputs]
    return CutResult(dataset.prefix, index.num_documents, shares, time.monotonic() - began)


def _check_shares(targets: Sequence[Prefix], fractions: Sequence[float]) -> None:
    if len(targets) != len(fractions) or not targets:
        raise ConfigError(f"targets, fractions: found {len(targets)} and {len(fractions)}, need as many of both")
    if not all(0 <= fraction <= 1 for fraction in fractions) or math.fsum(fractions) > 1 + 1e-9:
        found = ", ".join(map(str, fractions))
        raise ConfigError(f"fractions: found {found}, need shares of 0 to 1, together at most 1")
    if len(set(map(str, targets))) < len(targets):
        raise ConfigError("targets: two are equal, need another one for each fraction")


def assign_by_hash(seed: int, ends: NDArray[np.float64], first: int, count: int) -> NDArray[np.int64]:
    """Return the target number of each of the documents first, first + 1, ...; -1 for none. Shape (count,).

    Args:
        ends: upper end of each target's share in [0, 1], ascending.
    """
    numbers = np.searchsorted(ends, uniform_hash(seed, first, count), "right")
    # Shares that add up to 1 except for rounding leave no document out.
    last = len(ends) - 1 if ends[-1] > 1 - 1e-9 else -1
    return np.where(numbers < len(ends), numbers, last)


def _scatter(
    dataset: WholeDataset,
    assign: Assign | None,
    limit: int | None,
    outputs: Sequence[DatasetOutput],
    plain: RangeReader | None,
    watch: ProgressWatcher,
) -> None:
    """Append each document to its output, with tokens unless `plain` is None."""
    index = dataset.index
    if plain is not None:
        watch.begin("tokens", dataset.num_bytes, 0)
    for block in index.documents(limit):
        chosen = assign(block.first, len(block)) if assign else np.zeros(len(block), np.int64)
        for number, output in enumerate(outputs):
            append_documents(block, chosen == number, output.columns)
        if plain is not None:
            _write_tokens(block, chosen, outputs, plain, index.dtype_size)
            watch.advance(int(block.lengths.sum(dtype=np.int64)) * index.dtype_size)


def append_documents(block: DocumentBlock, wanted: NDArray[np.bool_], columns: IndexColumns) -> None:
    """Append the wanted documents of a block to the columns of an `.idx`.

    Args:
        block: neighbouring documents.
        wanted: whether to append each of them, shape (num_documents,).
        columns: the columns to append to.
    """
    counts = np.diff(block.bounds)
    sequences = np.repeat(wanted, counts)
    columns.add(
        block.lengths[sequences], np.cumsum(counts[wanted]), None if block.modes is None else block.modes[sequences]
    )


def _write_tokens(
    block: DocumentBlock, chosen: NDArray[np.int64], outputs: Sequence[DatasetOutput], plain: RangeReader, size: int
) -> None:
    """Copy the tokens of a block, `size` bytes each, to the outputs that `chosen` names; about `ROUND_BYTES` a read."""
    runs = list(_runs(block, chosen, size))
    ends = np.cumsum([0, *(stop - start for _, (start, stop) in runs)])
    for first, stop in batch_by_size(ends, ROUND_BYTES):
        views = plain.read([where for _, where in runs[first:stop]])
        for (target, _), view in zip(runs[first:stop], views, strict=True):
            outputs[target].bin.write(view)


def _runs(block: DocumentBlock, chosen: NDArray[np.int64], item_bytes: int) -> Iterator[tuple[int, Range]]:
    """Yield (target number, byte range) for runs of documents with the same target; at most `PART_BYTES` each."""
    bounds = block.token_bounds() * item_bytes
    breaks = np.flatnonzero(np.diff(chosen)) + 1
    firsts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(chosen)]])
    runs = zip(chosen[firsts].tolist(), bounds[firsts].tolist(), bounds[stops].tolist(), strict=True)
    for target, start, stop in runs:
        if target >= 0:
            yield from ((target, part) for part in cut((start, stop), PART_BYTES))
