"""Conversion between packed files and `.bin`/`.idx`, in bounded memory.

    packed     |a b c 0 d e 0 f|g 0 h i 0 0 0 0|      0 separates documents and fills the last file
    sequences   a b c 0 · d e 0 · f g 0 · h i 0        one per document, each with its separator

Packed files do not store where documents end; the separator marks it, so a text that contains the separator is split
there. The fill at the end of the last file is left out.

The tokens of a packed file are a range of the stream of all documents, known from the index: any worker makes any file.
The other direction runs in one process, since only a read of all tokens finds the ends of the documents.

Files that exist are compared with the new ones, unless they are to be replaced: equal ones, of an earlier run that was
killed, stay; others are an error.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.whole_dataset import DatasetOutput, DatasetTarget
from binidx.errors import ConfigError, ObjectExistsError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import as_tokens
from binidx.jobs.parts import Values, Workers, make_parts
from binidx.jobs.runner import check_stop
from binidx.packed.packed_blocks import PackedOrigin
from binidx.packed.packed_files import (
    PACKED_HEADER,
    PackedDatasetBuilder,
    PackedFiles,
    PackedHeader,
    format_packed_header,
    packed_file_name,
)
from binidx.run.run_parts import PerProcess, RangePart
from binidx.storage.location import Location
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.publish import create_or_compare, delete_object

CONVERTED_BYTES = 32 << 20
"""Bytes of tokens in memory at a time, of each worker."""

Watch = Callable[[int], object]
"""Function that is called with the number of tokens of each finished part."""


def packed_to_indexed(
    files: PackedFiles,
    path_prefix: str,
    sep_token: int,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    watch: Watch = lambda num_tokens: None,
) -> int:
    """Write the documents of packed files, in the order of the files, as a dataset; return the number of documents.

    Args:
        sep_token: token that ends each document, and is kept as the document's last token.
        overwrite: replace another dataset at `path_prefix`.

    Tokens after the last separator are the last document.

    Raises:
        ObjectExistsError: the target holds another dataset.
    """
    target = DatasetTarget.open(Location.of(path_prefix, storage_options), "raw", [], overwrite=overwrite)
    with closing(DatasetOutput(target, files.header.dtype, False)) as output:
        columns = output.columns
        for documents, lengths in _documents(_strip_filler(_read_all(files), sep_token), sep_token):
            output.bin.write(as_tokens(documents, columns.dtype, path_prefix).view(np.uint8).data)
            columns.add(lengths, np.arange(1, len(lengths) + 1))
            watch(len(documents))
        output.publish(*([] if target.is_complete else [target.remove_existing]))
        return columns.num_documents


def _refusal(file: Location) -> str:
    return f"{file}: exists, needed a free name; --overwrite replaces it"


def indexed_to_packed(
    dataset: IndexedDataset,
    outdir: str,
    prefix: str,
    chunk_size: int,
    sep_token: int,
    *,
    add_separator: bool = False,
    overwrite: bool = False,
    workers: Workers | None = None,
    storage_options: Mapping[str, Any] | None = None,
    watch: Watch = lambda num_tokens: None,
) -> list[str]:
    """Write the documents of a dataset as packed files; return the URIs of all files.

    Args:
        chunk_size: number of tokens of a file.
        sep_token: token that fills the rest of the last file.
        add_separator: add `sep_token` after each document as well; data tokenized with --append-eod already has it.
        overwrite: replace existing files, and remove those of this prefix that follow the last one.
        workers: workers that write the files, each a file at a time, and this call's share of the files; by default one
            after the other, in this process.
        watch: called with the number of tokens of each finished file.

    Raises:
        ConfigError: files of less than one token, or a separator or dtype that the format lacks.
        ObjectExistsError: a file exists and has other tokens, or one exists after the last one.
    """
    files = plan_packed_files(dataset, prefix, chunk_size, add_separator=add_separator)
    header = PackedDatasetBuilder(outdir, prefix, chunk_size, sep_token, dataset.index.dtype).header  # checks the token
    target = Location(Location.of(outdir).absolute, storage_options)
    source = PerProcess(dataset, functools.partial(_move, dataset, dataset.location.absolute))
    write = _FileWriter(source, target, header, sep_token, add_separator, overwrite)
    make_parts(write, files, workers or Workers(count=1), advance=watch, remote_data=target.local_path is None)
    for number in itertools.count(len(files)):
        if not object_exists(extra := target / packed_file_name(prefix, number)):
            break
        if not overwrite:
            raise ObjectExistsError(_refusal(extra))
        delete_object(extra)
    PackedOrigin(dataset.location.absolute, chunk_size, add_separator).write(target, prefix)
    return [(Location.of(outdir) / file.name).uri for file in files]


def _move(dataset: IndexedDataset, prefix: str) -> IndexedDataset:
    """Return a dataset that was unpickled and is not open yet, to be opened at another prefix."""
    dataset.path_prefix = prefix
    return dataset


def plan_packed_files(
    dataset: IndexedDataset, prefix: str, chunk_size: int, *, add_separator: bool = False
) -> list[RangePart]:
    """Return the files that `indexed_to_packed` writes, as ranges of the stream of all documents and their separators.

    An empty dataset has one file, too.
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size: found {chunk_size}, needs at least 1")
    num_tokens = dataset.index.num_tokens + add_separator * (len(dataset.document_indices) - 1)
    starts = range(0, max(num_tokens, 1), chunk_size)
    stretches = [range(start, min(start + chunk_size, num_tokens)) for start in starts]
    return [RangePart(packed_file_name(prefix, number), tokens) for number, tokens in enumerate(stretches)]


@dataclass(frozen=True)
class _FileWriter:
    """Picklable call that writes a packed file, or compares it with an existing one."""

    dataset: PerProcess[IndexedDataset]
    target: Location
    header: PackedHeader
    sep_token: int
    add_separator: bool
    overwrite: bool

    def __call__(self, file: RangePart) -> Values:
        dataset, dtype, target = self.dataset.get(), self.header.dtype, self.target / file.name
        with create_or_compare(target, _refusal(target), overwrite=self.overwrite) as out:
            out.write(format_packed_header(self.header))
            for first, stop in cut((file.items.start, file.items.stop), CONVERTED_BYTES // dtype.itemsize):
                check_stop()
                out.write(self._read(dataset, first, stop).view(np.uint8).data)
            out.write(np.full(self.header.chunk_size - file.size, self.sep_token, dtype).view(np.uint8).data)
        return {}

    def _read(self, dataset: IndexedDataset, first: int, stop: int) -> NDArray[Any]:
        """Return the tokens at some places of the stream."""
        documents = range(0)
        if self.add_separator:
            documents = range(count_ended(dataset, first), count_ended(dataset, stop))
        start, end = first - documents.start, stop - documents.stop
        size = dataset.index.dtype_size
        tokens = np.frombuffer(dataset.bin_reader.read([(start * size, end * size)])[0], self.header.dtype)
        if not documents:
            return tokens
        ends = dataset.index.tokens_before(dataset.document_indices[documents.start + 1 : documents.stop + 1])
        return np.insert(tokens, ends - start, self.sep_token)


def count_ended(dataset: IndexedDataset, place: int) -> int:
    """Return the number of documents whose separator is before a place of the stream, by bisection.

    The separator of document d is at E + d, where E is the number of tokens of the documents 0 to d.
    """
    index, sequences = dataset.index, dataset.document_indices
    return bisect.bisect_left(
        range(len(sequences) - 1), place, key=lambda d: int(index.tokens_before(sequences[d + 1])) + d
    )


def _read_all(files: PackedFiles) -> Iterator[NDArray[Any]]:
    """Yield all tokens of all files, also the tokens after the last whole block of a file."""
    for reader in files.readers:
        for piece in cut((PACKED_HEADER.size, files.header.file_bytes), CONVERTED_BYTES):
            yield np.frombuffer(reader.read([piece])[0], files.header.dtype)


def _strip_filler(pieces: Iterator[NDArray[Any]], sep_token: int) -> Iterator[NDArray[Any]]:
    """Yield the same tokens without the separators at the very end, except that of a last document."""
    num_separators, is_empty = 0, True
    for piece in pieces:
        others = np.flatnonzero(piece != sep_token)
        stop = int(others[-1]) + 1 if len(others) else 0
        if stop:
            yield np.full(num_separators, sep_token, piece.dtype)
            yield piece[:stop]
            num_separators, is_empty = 0, False
        num_separators += len(piece) - stop
    yield np.full(0 if is_empty else min(num_separators, 1), sep_token, np.int64)


def _documents(pieces: Iterator[NDArray[Any]], sep_token: int) -> Iterator[tuple[NDArray[Any], list[int]]]:
    """Yield groups of whole documents: their concatenated tokens, and the length of each document."""
    left: list[NDArray[Any]] = []
    for piece in pieces:
        if not len(ends := np.flatnonzero(piece == sep_token) + 1):
            left.append(piece)
            continue
        before, used = sum(map(len, left)), int(ends[-1])
        yield np.concatenate([*left, piece[:used]]), np.diff(ends + before, prepend=0).tolist()
        left = [piece[used:]]
    if remaining := sum(map(len, left)):
        yield np.concatenate(left), [remaining]
