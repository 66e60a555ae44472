"""Datasets of one dtype -> one dataset: the index is rewritten, the tokens are moved by the store where it can.

    1  every .idx is read in blocks and checked; lengths and bounds go to spools
    2  the .bin of the target is put together, unseen: `storage.join`
    3  the .idx is written, unseen
    4  the sources are looked at again; then the old .idx goes, the .bin appears, the .idx last

Price: 20 bytes read, 12 spooled and 20 written a document, some 40 ns; memory 20 to 45 MB, whatever there is to merge.
A run that fails leaves nothing, one that is killed no dataset; the same call begins again.

A virtual merge written: the parts are opened and checked, and listed; no token and no index is copied.

Lineage is, where there is some: it is found under the prefix of the list, row i of document i.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.carry_lineage import Lineage, LineageTargets, bring_lineage, to_first
from binidx.corpus.convert_journal import Target
from binidx.corpus.verify import check_tokenizers
from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset, free_target, publish
from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.format.bin_file import find_bin
from binidx.format.idx import get_idx_path
from binidx.format.index_writer import IndexColumns
from binidx.format.prefix_listing import list_pairs
from binidx.format.virtual import VirtualPart, format_parts, get_parts_path, prefix_of_part
from binidx.format.virtual_source import is_multimodal, join_tables
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.concatenate import IN_FLIGHT, SourcePiece, open_join, piece_bytes
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher, map_in_flight
from binidx.storage.writing.publish import create_object, object_exists

Item = TypeVar("Item")


Result = TypeVar("Result")


@dataclass(frozen=True)
class Merged:
    """What a merge did. `how` the tokens moved, "server", "copy_file_range" or "stream"; `moved_bytes` of them passed
    through this process. `dropped_sums`: a source has checksums, the target has none. `lineage`: that came along."""

    target: str
    num_sources: int
    num_documents: int
    num_sequences: int
    num_tokens: int
    bin_bytes: int
    moved_bytes: int
    how: str
    dropped_sums: bool
    seconds: float
    lineage: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


def merge_datasets(
    sources: Sequence[Prefix],
    target: Prefix,
    *,
    lineage: bool = True,
    overwrite: bool = False,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> Merged:
    """Write the documents of all sources, in order, as one dataset. A source may be named twice.

    Bytes of a `.bin` past its last sequence stay behind. Compressed sources give a compressed dataset: their frames are
    moved as they are, under a new table. Checksums are not carried along, as their blocks would begin elsewhere.

    Args:
        lineage: whether it is carried along, where there is some: `prepare.lineage`.
        overwrite: replace a dataset that stands at the target. It stands until the new one is ready.
        source_options, target_options: fsspec's own; the store moves the tokens itself where the two are equal.

    Raises:
        ConfigError: nothing to merge, the target is a source, or some are compressed and others not.
        FormatError: a source is no sound dataset, has another dtype or tokenizer, or modes where others have none.
        ObjectExistsError: something stands at the target.
        ObjectChangedError: a source changed meanwhile.

    Source: Megatron Core, IndexedDatasetBuilder.add_index and finalize: the same bytes, except that bytes past the last
    sequence, which shift all that Megatron adds later, stay behind.
    """
    began, watch = time.monotonic(), watch or SilentWatcher()
    opened = open_all(sources, source_options)
    for each in opened:
        each.source.check_movable()
    place = free_target(target, check_alike(opened)[0], opened, target_options, overwrite=overwrite)
    check_tokenizers(opened)
    with merged_index(opened, watch) as columns:
        rows = Lineage(opened if lineage else [], source_options)
        with closing(LineageTargets(rows, [place])) as sidecar:
            sidecar.fill(rows, to_first, watch)
            done = merge_tokens(opened, place, columns, lambda: sidecar.make_way(0), source_options, watch)
    return replace(done, lineage=bool(rows), seconds=time.monotonic() - began)


def open_all(sources: Sequence[Prefix], options: Options) -> list[WholeDataset]:
    """Many at once, as each asks the store several times."""
    found = list_pairs([os.fspath(each) for each in sources], options)
    return _together(lambda each: WholeDataset(each, options, found.get(os.fspath(each))), sources)


@contextmanager
def merged_index(opened: Sequence[WholeDataset], watch: ProgressWatcher) -> Iterator[IndexColumns]:
    """What the `.idx` of all of them says, checked."""
    _, multimodal = check_alike(opened)
    with closing(IndexColumns(opened[0].index.dtype, multimodal)) as columns:
        watch.begin("index", sum(each.index.size for each in opened), 0)
        with closing(map_in_flight(read_index, opened, IN_FLIGHT)) as read:
            for each, blocks in zip(opened, read, strict=True):
                add_index(blocks, columns)
                watch.advance(each.index.size)
        yield columns


def merge_tokens(
    opened: Sequence[WholeDataset],
    place: Target,
    columns: IndexColumns,
    make_way: Callable[[], object],
    source_options: Options,
    watch: ProgressWatcher,
) -> Merged:
    """Bring the tokens together, and publish them and the index after `make_way`."""
    began = time.monotonic()
    pieces = [piece for each in _together(pieces_of, opened) for piece in each]
    if place.codec != "raw":
        pieces.append(SourcePiece(None, data=join_tables([table for each in opened for table in each.source.tables])))
    bin_bytes = sum(map(piece_bytes, pieces))
    join = open_join(place.bin_uri, pieces, source_options=source_options, target_options=place.options)
    try:
        watch.begin("tokens", bin_bytes, 0)
        join.fill(watch.advance)
        publish(place, columns, lambda: join.publish(make_way), lambda: check_unchanged(opened))
    finally:
        join.abandon()
    return _report(place, opened, columns, bin_bytes, join.moved_bytes, join.how, time.monotonic() - began)


def check_alike(opened: Sequence[WholeDataset], *, mixed: bool = False) -> tuple[str, bool]:
    """The codec of all of them, and whether they have modes; one without sequences has whatever the others have.

    Args:
        mixed: whether some may be compressed, and others not.

    Raises:
        ConfigError, FormatError: they differ, or there is none.
    """
    if not opened:
        raise ConfigError("merge: 0 datasets, needed at least one")
    first = opened[0]
    for each in opened:
        if each.index.dtype is not first.index.dtype:
            found, needed = each.index.dtype.__name__, first.index.dtype.__name__
            raise FormatError(f"{each.prefix}: dtype {found}, needed {needed} as in {first.prefix}")
        if each.source.codec != first.source.codec and not mixed:
            raise ConfigError(
                f"{each.source.bin_uri}: stored otherwise than {first.source.bin_uri}, needed all compressed or none; "
                "binidx convert --plain or --compress brings them together"
            )
    return first.source.codec, is_multimodal([each.index for each in opened])


class IndexBlocks(NamedTuple):
    """The columns of one index, in blocks."""

    lengths: Iterable[NDArray[np.int32]]
    bounds: Iterable[NDArray[np.int64]]
    modes: Iterable[NDArray[np.int8]]


AHEAD = 1 << 17


"""Sequences and documents of an index that is read before its turn: 1.5 MB of memory, for each of `IN_FLIGHT`."""


def read_index(dataset: WholeDataset) -> IndexBlocks:
    """A small index, at once: a thousand of them would else be a thousand round trips. Of a large one nothing yet."""
    index = dataset.index
    if max(index.num_sequences, index.num_documents) > AHEAD:
        return IndexBlocks(index.lengths(), index.bounds(), index.modes())
    return IndexBlocks(list(index.lengths()), list(index.bounds()), list(index.modes()))


def add_index(blocks: IndexBlocks, columns: IndexColumns) -> None:
    """Check a whole index, and append it."""
    before = len(columns.lengths)
    for lengths in blocks.lengths:
        columns.lengths.extend(lengths)
    for number, bounds in enumerate(blocks.bounds):
        columns.add_bounds(bounds[1:] if number == 0 else bounds, plus=before)
    for modes in blocks.modes:
        columns.modes.extend(modes)


def pieces_of(dataset: WholeDataset) -> list[SourcePiece]:
    """Where its tokens lie.

    Raises:
        FormatError: there are fewer than its index needs; or more, and compressed, where they cannot be left out.
    """
    return dataset.source.pieces(dataset.check_size(dataset.source.plain_bytes()))


def check_unchanged(opened: Sequence[WholeDataset]) -> None:
    """None of them has changed."""
    options = opened[0].source.options
    found = list_pairs([each.prefix for each in opened], options)
    _together(lambda each: each.check_unchanged(found.get(each.prefix)), opened)


def _together(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`map`, so many at once that a distant store answers a thousand in seconds; a virtual merge calls `together`."""
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        pending = [threads.submit(work, each) for each in items]
        return [each.result() for each in pending]


def _report(
    place: Target,
    opened: Sequence[WholeDataset],
    columns: IndexColumns,
    bin_bytes: int,
    moved_bytes: int,
    how: str,
    seconds: float,
) -> Merged:
    return Merged(
        place.prefix,
        len(opened),
        columns.num_documents,
        len(columns.lengths),
        sum(each.index.num_tokens for each in opened),
        bin_bytes,
        moved_bytes,
        how,
        any(each.source.has_sums for each in opened),
        seconds,
    )


@dataclass(frozen=True)
class VirtualMerged:
    """What was written."""

    target: str
    num_sources: int
    num_documents: int
    num_sequences: int
    num_tokens: int

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


def merge_virtually(
    sources: Sequence[Prefix],
    target: Prefix,
    *,
    overwrite: bool = False,
    storage_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> VirtualMerged:
    """List datasets as the parts of one, which then opens under the prefix `target`.

    Args:
        overwrite: replace a list that stands there; a dataset that does is never replaced.

    Raises:
        ConfigError: nothing to merge, or a part is itself virtual.
        FormatError: a source is no sound dataset, or has another dtype.
        ObjectExistsError: something stands at the target.
    """
    uri, prefixes = get_parts_path(os.fspath(target)), [_whole(os.fspath(each)) for each in sources]
    _check_free(os.fspath(target), uri, storage_options, overwrite)
    opened, watch = open_all(prefixes, storage_options), watch or SilentWatcher()
    check_alike(opened, mixed=True)
    check_tokenizers(opened)
    for each in opened:
        if each.source.num_parts:
            raise ConfigError(f"{each.prefix}: is itself a virtual merge, needed its parts")
    check_indices(opened, watch)
    bring_lineage(opened, os.fspath(target), storage_options)
    with create_object(uri, storage_options) as out:
        out.write(format_parts(opened[0].index.dtype.__name__, [_part(_whole(uri), each) for each in opened]))
    indices = [each.index for each in opened]
    documents, sequences = sum(each.num_documents for each in indices), sum(each.num_sequences for each in indices)
    return VirtualMerged(os.fspath(target), len(opened), documents, sequences, sum(each.num_tokens for each in indices))


def check_indices(opened: Sequence[WholeDataset], watch: ProgressWatcher) -> None:
    """Read every index, and check it; some at once."""
    watch.begin("index", sum(each.index.size for each in opened), 0)
    with closing(map_in_flight(lambda each: each.index.check(), opened, IN_FLIGHT)) as read:
        for each, _ in zip(opened, read, strict=True):
            each.check_size(each.source.plain_bytes())
            watch.advance(each.index.size)


def _part(uri: str, dataset: WholeDataset) -> VirtualPart:
    prefix, marks = prefix_of_part(uri, dataset.prefix), dataset.source.opened
    return VirtualPart(prefix, dataset.index.num_sequences, dataset.index.num_tokens, marks["idx"], marks["bin"])


def _whole(prefix: str) -> str:
    """Of a local one the whole path: a list is read from anywhere."""
    path = local_path(prefix)
    return prefix if path is None else os.path.abspath(path)


def _check_free(target: str, uri: str, options: Options, overwrite: bool) -> None:
    if object_exists(get_idx_path(target), options) or find_bin(target, options):
        raise ObjectExistsError(f"{target}: holds a dataset, needed a free name; a list beside it would not be seen")
    if not overwrite and object_exists(uri, options):
        raise ObjectExistsError(f"{uri}: stands there, needed a free name; --overwrite replaces it")
