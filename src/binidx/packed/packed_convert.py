"""Conversion between packed files and `.bin`/`.idx`, in bounded memory.

    packed     |a b c 0 d e 0 f|g 0 h i 0 0 0 0|      0 separates documents and fills the last file
    sequences   a b c 0 · d e 0 · f g 0 · h i 0        one per document, each with its separator

Packed files do not store where documents end; the separator marks it, so a text that contains the separator is split
there. The fill at the end of the last file is left out.

Files that exist are compared with the new ones, unless they are to be replaced: equal ones, of an earlier run that was
killed, stay; others are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.whole_dataset import DatasetOutput, DatasetTarget
from binidx.errors import ObjectExistsError
from binidx.format.idx_blocks import batch_by_size
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import as_tokens
from binidx.packed.packed_files import HEADER, PackedDatasetBuilder, PackedFiles
from binidx.storage.location import Location
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.compare import create_or_compare
from binidx.storage.writing.publish import delete_object

READ_BYTES = 32 << 20
"""Bytes of tokens in memory at a time."""

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
    storage_options: Mapping[str, Any] | None = None,
    watch: Watch = lambda num_tokens: None,
) -> list[str]:
    """Write the documents of a dataset as packed files; return their URIs.

    Args:
        chunk_size: number of tokens of a file.
        sep_token: token that fills the rest of the last file.
        add_separator: add `sep_token` after each document as well; data tokenised with --append-eod already has it.
        overwrite: replace existing files, and remove those of this prefix that follow the last written one.

    Raises:
        ObjectExistsError: a file exists and has other tokens, or one exists after the last written one.
    """
    dtype = dataset.index.dtype
    builder = PackedDatasetBuilder(outdir, prefix, chunk_size, sep_token, dtype, storage_options=storage_options)
    builder.create = lambda file: create_or_compare(file, _refusal(file), overwrite=overwrite)
    bounds, pointers = dataset.document_indices, dataset.index.sequence_pointers
    starts = np.append(pointers, dataset.index.num_bytes)[bounds]
    for first, stop in batch_by_size(starts, READ_BYTES):
        documents = [dataset[bounds[d] : bounds[d + 1]] for d in range(first, stop)]
        tokens = [np.concatenate([np.empty(0, dtype), *sequences]) for sequences in documents]
        for document in tokens:
            builder.add_array(document)
            if add_separator:
                builder.add_array(np.array([sep_token]))
        watch(sum(map(len, tokens)))
    builder.write_reminder()
    written = [*builder.filenames]
    while object_exists(file := builder.next_file):
        if not overwrite:
            raise ObjectExistsError(_refusal(file))
        delete_object(file)
        builder.filenames.append(file.uri)
    return written


def _read_all(files: PackedFiles) -> Iterator[NDArray[Any]]:
    """Yield all tokens of all files, also the tokens after the last whole block of a file."""
    for reader in files.readers:
        for piece in cut((HEADER.size, files.header.file_bytes), READ_BYTES):
            yield np.frombuffer(reader.read([piece])[0], files.header.dtype)


def _strip_filler(pieces: Iterator[NDArray[Any]], sep_token: int) -> Iterator[NDArray[Any]]:
    """Yield the same tokens without the separators at the very end, except that of the last document."""
    num_separators = 0
    for piece in pieces:
        others = np.flatnonzero(piece != sep_token)
        stop = int(others[-1]) + 1 if len(others) else 0
        if stop:
            yield np.full(num_separators, sep_token, piece.dtype)
            yield piece[:stop]
            num_separators = 0
        num_separators += len(piece) - stop
    yield np.full(min(num_separators, 1), sep_token, np.int64)


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
