"""Documents of a dataset -> one or several others, without tokenising again.

    head      the first documents: a range of the .bin, moved by the store where it can
    sample    a part of the documents, by a hash of (seed, number of the document)
    split     each document to one of several datasets, by the same hash

The hash is SplitMix64, read as a number u in [0, 1): a sample takes u < fraction, a split the share in which u falls.
So the same seed gives the same documents on every machine, a smaller sample lies within a larger one, and the sample of
0.1 is the first share of a split that begins with 0.1. How many documents that is, is near the share, not exactly it.

Order is kept, and lineage carried along: `prepare.lineage`. Memory: some MB for the index, and 64 MiB of tokens on
their way.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.convert_journal import DatasetTarget
from binidx.corpus.lineage_transfer import LineageOutputs, LineageRows
from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset, open_target, publish_dataset
from binidx.errors import ConfigError
from binidx.format.bin_file import BinWriter
from binidx.format.index_stream import DocumentBlock
from binidx.format.index_writer import IndexColumns
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import ROUND_BYTES
from binidx.storage.ranges import cut
from binidx.storage.writing.concatenate import open_join
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

PART_BYTES = 8 << 20


"""A document longer than this is read in parts."""


@dataclass(frozen=True)
class CutOutput:
    """One dataset that was written."""

    target: str
    num_documents: int
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True)
class CutResult:
    """What a cut did: of how many documents, which datasets."""

    source: str
    num_documents: int
    shares: list[CutOutput]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


def head_dataset(
    source: Prefix,
    target: Prefix,
    num_documents: int,
    *,
    lineage: bool = True,
    overwrite: bool = False,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> CutResult:
    """Write the first documents as a dataset; all where there are fewer.

    A plain `.bin` is moved by the store itself where it can; a compressed one is packed anew.

    Raises:
        ConfigError: a negative count, or the target is the source.
        FormatError, ObjectExistsError, ObjectChangedError: as `merge_datasets`.
    """
    if num_documents < 0:
        raise ConfigError(f"head: {num_documents} documents, needed 0 or more")
    began, watch, opened = time.monotonic(), watch or SilentWatcher(), WholeDataset(source, source_options)
    choice = Assignment(limit=num_documents)
    if opened.source.codec != "raw" or opened.source.mixed:
        return _scatter(opened, [target], choice, lineage, overwrite, source_options, target_options, watch)
    place = open_target(target, "raw", [opened], target_options, overwrite=overwrite)
    check_whole_index(opened, opened.source.plain_bytes(), watch)
    with contextlib.closing(IndexColumns(opened.index.dtype, opened.index.multimodal)) as columns:
        num_tokens = 0
        for block in opened.index.documents(num_documents):
            append_documents(block, np.ones(len(block), bool), columns)
            num_tokens += int(block.lengths.sum(dtype=np.int64))
        num_bytes = num_tokens * opened.index.item_bytes
        pieces = opened.source.pieces(num_bytes)
        with write_lineage(opened, [place], choice, lineage, source_options, watch) as sidecar:
            join = open_join(place.bin_uri, pieces, source_options=source_options, target_options=target_options)
            try:
                watch.begin("tokens", num_bytes, 0)
                join.fill(watch.advance)
                publish_dataset(
                    place, columns, lambda: join.publish(lambda: sidecar.make_way(0)), opened.check_unchanged
                )
            finally:
                join.abandon()
        share = CutOutput(place.prefix, columns.num_documents, len(columns.lengths), num_tokens)
    return CutResult(opened.prefix, opened.index.num_documents, [share], time.monotonic() - began)


def split_dataset(
    source: Prefix,
    targets: Sequence[Prefix],
    fractions: Sequence[float],
    *,
    seed: int,
    lineage: bool = True,
    overwrite: bool = False,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> CutResult:
    """Write each document to the dataset whose share it falls in; to none, where the fractions leave something.

    A sample is a split with one target. The source is read once, of a remote one only what is wanted, with small gaps.

    Args:
        fractions: share of each target, together at most 1.
        seed: of the hash, any 64-bit number.

    Raises:
        ConfigError: fractions that are no shares, or targets that are equal or the source.
        FormatError, ObjectExistsError, ObjectChangedError: as `merge_datasets`.
    """
    if len(targets) != len(fractions) or not targets:
        raise ConfigError(f"split: {len(targets)} targets, needed one for each of {len(fractions)} fractions")
    if not all(0 <= each <= 1 for each in fractions) or math.fsum(fractions) > 1 + 1e-9:
        raise ConfigError(f"fractions {', '.join(map(str, fractions))}: needed shares of 0 to 1, together at most 1")
    if len(set(map(str, targets))) < len(targets):
        raise ConfigError("split: two targets are equal, needed one for each fraction")
    choice = Assignment(seed=seed, ends=tuple(np.cumsum(fractions)))
    opened = WholeDataset(source, source_options)
    return _scatter(
        opened, targets, choice, lineage, overwrite, source_options, target_options, watch or SilentWatcher()
    )


@dataclass(frozen=True)
class Assignment:
    """Which target a document goes to: by its number up to a limit, or by the hash."""

    limit: int | None = None
    seed: int = 0
    ends: tuple[float, ...] = ()

    def of(self, first: int, count: int) -> NDArray[np.int64]:
        """Number of the target of documents first, first + 1, ...; -1: none. Shape (count,)."""
        if self.limit is not None:
            return np.where(np.arange(first, first + count) < self.limit, 0, -1)
        found = np.searchsorted(self.ends, uniform_hash(self.seed, first, count), "right")
        # Shares that add up to 1 but for rounding leave nobody out.
        last = len(self.ends) - 1 if self.ends[-1] > 1 - 1e-9 else -1
        return np.where(found < len(self.ends), found, last)


def uniform_hash(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each of the documents first, first + 1, ...; shape (count,).

    Source: SplitMix64 (Steele, Lea, Flood 2014): output `number + 1` of the generator of this seed.
    """
    steps = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    mixed = np.uint64(seed % 2**64) + steps * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    found: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


@contextlib.contextmanager
def write_lineage(
    opened: WholeDataset,
    places: Sequence[DatasetTarget],
    choice: Assignment,
    wanted: bool,
    options: Options,
    watch: ProgressWatcher,
) -> Iterator[LineageOutputs]:
    """The rows of the documents of each target, written but not shown."""
    rows = LineageRows([opened] if wanted else [], options, choice.limit)
    with contextlib.closing(LineageOutputs(rows, places)) as sidecars:
        sidecars.fill(rows, choice.of, watch)
        yield sidecars


def check_whole_index(opened: WholeDataset, plain_bytes: int, watch: ProgressWatcher) -> None:
    """Read and check a whole index, and the size of the `.bin`."""
    watch.begin("check the index", opened.index.size, 0)
    opened.index.check()
    opened.check_size(plain_bytes)
    watch.advance(opened.index.size)


def append_documents(block: DocumentBlock, wanted: NDArray[np.bool_], columns: IndexColumns) -> None:
    """Append the wanted documents of a block."""
    counts = np.diff(block.bounds)
    sequences = np.repeat(wanted, counts)
    before = len(columns.lengths)
    columns.lengths.extend(block.lengths[sequences])
    if block.modes is not None:
        columns.modes.extend(block.modes[sequences])
    columns.add_bounds(np.cumsum(counts[wanted]), plus=before)


class _Output:
    """One dataset on its way."""

    def __init__(self, place: DatasetTarget, dtype: Any, multimodal: bool, stack: contextlib.ExitStack) -> None:
        self.place, self.num_tokens = place, 0
        self.columns = stack.enter_context(contextlib.closing(IndexColumns(dtype, multimodal)))
        self.bin = BinWriter(place.bin_uri, place.options)
        stack.callback(self.bin.abandon)
        self.bin.goes.append(place.idx_uri)

    def way(self, sidecars: LineageOutputs, number: int) -> Callable[[], None]:
        """What shows all but the `.idx`."""

        def show() -> None:
            sidecars.make_way(number)
            self.bin.publish()

        return show

    def share(self) -> CutOutput:
        return CutOutput(self.place.prefix, self.columns.num_documents, len(self.columns.lengths), self.num_tokens)


def _scatter(
    opened: WholeDataset,
    targets: Sequence[Prefix],
    choice: Assignment,
    lineage: bool,
    overwrite: bool,
    source_options: Options,
    target_options: Options,
    watch: ProgressWatcher,
) -> CutResult:
    began = time.monotonic()
    codec, index = opened.source.codec, opened.index
    places = [open_target(each, codec, [opened], target_options, overwrite=overwrite) for each in targets]
    plain = opened.source.open_plain()
    check_whole_index(opened, plain.size, watch)
    with contextlib.ExitStack() as stack:
        outputs = [_Output(place, index.dtype, index.multimodal, stack) for place in places]
        watch.begin("tokens", index.num_tokens * index.item_bytes, 0)
        for block in index.documents():
            chosen = choice.of(block.first, len(block))
            for number, output in enumerate(outputs):
                append_documents(block, chosen == number, output.columns)
            _write_tokens(block, chosen, outputs, plain, index.item_bytes)
            watch.advance(int(block.lengths.sum(dtype=np.int64)) * index.item_bytes)
        sidecars = stack.enter_context(write_lineage(opened, places, choice, lineage, source_options, watch))
        for number, output in enumerate(outputs):
            publish_dataset(output.place, output.columns, output.way(sidecars, number), opened.check_unchanged)
        return CutResult(
            opened.prefix, index.num_documents, [each.share() for each in outputs], time.monotonic() - began
        )


def _write_tokens(
    block: DocumentBlock, chosen: NDArray[np.int64], outputs: Sequence[_Output], plain: RangeReader, item_bytes: int
) -> None:
    runs = list(_runs(block, chosen, item_bytes))
    for first, stop in _rounds(runs):
        views = plain.read([where for _, where in runs[first:stop]])
        for (target, _), view in zip(runs[first:stop], views, strict=True):
            outputs[target].bin.write(view)
            outputs[target].num_tokens += len(view) // item_bytes


def _runs(block: DocumentBlock, chosen: NDArray[np.int64], item_bytes: int) -> Iterator[tuple[int, Range]]:
    """Neighbouring documents that go to one target, as its number and their bytes, at most `PART_BYTES` of them."""
    bounds = block.token_bounds() * item_bytes
    breaks = np.flatnonzero(np.diff(chosen)) + 1
    firsts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(chosen)]])
    found = zip(chosen[firsts].tolist(), bounds[firsts].tolist(), bounds[stops].tolist(), strict=True)
    for target, start, stop in found:
        if target >= 0:
            yield from ((target, part) for part in cut((start, stop), PART_BYTES))


def _rounds(runs: Sequence[tuple[int, Range]]) -> Iterator[Range]:
    """Which runs to read together: `ROUND_BYTES` of them."""
    first, size = 0, 0
    for number, (_, (start, stop)) in enumerate(runs):
        if size and size + stop - start > ROUND_BYTES:
            yield first, number
            first, size = number, 0
        size += stop - start
    if first < len(runs):
        yield first, len(runs)
