"""Check that a dataset is what its index says: structure, sizes, checksums, token ids, manifest and lineage.

    quick      the whole .idx, the size of the .bin, the counts of the manifest; of a virtual merge also each part's
    in full    every token, too: blocks against their checksums (.bin.xxh3) or frames (.bin.zst), ids against a
               vocabulary, and on demand each document against the hash in its lineage

Tokens are streamed, with 64 MiB of them in memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.origins import read_lineage
from binidx.corpus.whole_dataset import JsonResult, Options, Prefix, WholeDataset
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectNotFoundError
from binidx.format.idx import little_endian
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.format.source import VirtualSource
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import ROUND_BYTES, stream
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

DAMAGE_BYTES = 16 << 10
"""Bytes of one read in the search for a damaged block: one checksum covers so many bytes."""


@dataclass(frozen=True)
class Verification(JsonResult):
    """Result of a verification that found no error.

    Attributes:
        bin_bytes, trailing_bytes: uncompressed bytes of the `.bin`; the number of them after its last token, which is
            at most `bin_file.PADDING_BYTES`.
        checked_by: checksums with which the tokens were compared: "checksums" (.bin.xxh3), "frames" (zstd's own), "in
            part" if only some parts of a virtual merge have any; None if there are none, or with `quick`.
        token_range: smallest and largest token; None if no token was read.
        vocab_size: as given.
        manifest: whether there is a manifest, or one of a part; its counts are equal to those of the index.
        lineage: number of documents whose hash was compared; None without `lineage=True`.
    """

    prefix: str
    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    empty_documents: int
    bin_bytes: int
    trailing_bytes: int
    checked_by: str | None
    token_range: tuple[float, float] | None
    vocab_size: int | None
    manifest: bool
    lineage: int | None
    seconds: float


def verify_dataset(
    prefix: Prefix,
    *,
    vocab_size: int | None = None,
    quick: bool = False,
    lineage: bool = False,
    storage_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> Verification:
    """Read a dataset and check it.

    Args:
        vocab_size: every token must be in [0, vocab_size); None for no check.
        quick: read only the index and sizes.
        lineage: compare each document with its hash in the lineage file.

    Raises:
        ObjectNotFoundError: the dataset does not exist, or with `lineage` its lineage file.
        ConfigError: `vocab_size` or `lineage` with `quick`, or `vocab_size` for tokens that are not integers.
        FormatError: an error was found; for a damaged or invalid token the message names the document.
        ObjectChangedError: the dataset was replaced meanwhile.
    """
    began, watch = time.monotonic(), watch or SilentWatcher()
    dataset = WholeDataset(Location.of(prefix, storage_options))
    index = dataset.index
    if quick and (lineage or vocab_size is not None):
        other = "lineage" if lineage else "vocab_size"
        raise ConfigError(f"{other}, quick: found both, need one; quick reads no tokens")
    if vocab_size is not None and np.dtype(index.dtype).kind == "f":
        raise ConfigError(f"{dataset.prefix}: tokens are {index.dtype.__name__}, a vocabulary needs integers")
    plain = dataset.source.open_plain()
    dataset.check_index(watch, _refuse)
    manifest, token_range, compared = dataset.source.check_manifests(index.counts), None, None
    if not quick:
        watch.begin("tokens", plain.size, 0)
        token_range = _read_tokens(dataset, plain, vocab_size, watch)
    if lineage:
        compared = check_lineage(dataset, plain, watch)
    dataset.source.check_unchanged()
    num_empty = sum(int((np.diff(block.bounds) == 0).sum()) for block in index.documents())
    counts = index.num_documents, index.num_sequences, index.num_tokens, num_empty
    names, sizes = (dataset.prefix, index.dtype.__name__), (plain.size, plain.size - dataset.num_bytes)
    checked, seconds = None if quick else dataset.source.checked_by, time.monotonic() - began
    return Verification(*names, *counts, *sizes, checked, token_range, vocab_size, manifest, compared, seconds)


def _refuse(uri: str, problem: str) -> None:
    raise FormatError(f"{uri}: {problem}")


def check_lineage(dataset: WholeDataset, plain: RangeReader, watch: ProgressWatcher) -> int:
    """Compare each document with its hash in the lineage file; return the number of documents that have a hash.

    Args:
        dataset: its index must have been checked.
        plain: reader of its tokens.
        watch: is advanced by the bytes of the tokens.

    Raises:
        ObjectNotFoundError: there is no lineage.
        FormatError: the number of rows is wrong, or a row belongs to another document.
    """
    file = dataset.source.prefix + LINEAGE
    if not object_exists(file):
        raise ObjectNotFoundError(f"{file}: not found; binidx preprocess writes it")
    watch.begin("lineage", dataset.num_bytes, 0)
    first = compared = 0
    batches, hashes = dataset.hash_documents(plain, xxhash.xxh3_64), np.empty(0, np.uint64)
    for table in read_lineage(dataset):
        while len(hashes) < len(table):
            digests, num_bytes = next(batches)
            hashes = np.concatenate([hashes, np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)])
            watch.advance(num_bytes)
        column = table.column("hash")
        needed, present = column.fill_null(0).to_numpy(), column.is_valid().to_numpy()
        wrong = np.flatnonzero(present & (needed != hashes[: len(table)]))
        if len(wrong):
            raise FormatError(f"{file}: row {first + wrong[0]} is of another document than {dataset.prefix} has there")
        compared += int(present.sum())
        first, hashes = first + len(table), hashes[len(table) :]
    return compared


def _read_tokens(
    dataset: WholeDataset, plain: RangeReader, vocab_size: int | None, watch: ProgressWatcher
) -> tuple[float, float] | None:
    """Read all bytes, also those after the last token; return the smallest and the largest token, or None."""
    dtype, num_bytes, bounds = little_endian(dataset.index.dtype), dataset.num_bytes, list[Any]()
    for start, data in _stream(dataset, plain):
        tokens = np.frombuffer(data[: max(num_bytes - start, 0)], dtype)
        if len(tokens):
            low, high = tokens.min().item(), tokens.max().item()
            if vocab_size is not None and (low < 0 or high >= vocab_size):
                raise _vocabulary_error(dataset, tokens, start // dtype.itemsize, vocab_size)
            bounds = [min([low, *bounds]), max([high, *bounds])]
        watch.advance(len(data))
    return (bounds[0], bounds[1]) if bounds else None


def _stream(dataset: WholeDataset, plain: RangeReader) -> Iterator[tuple[int, memoryview]]:
    """Yield the plain bytes of the `.bin` as (offset, block); a FormatError names the damaged document."""
    start = 0
    try:
        for data in stream(plain):
            yield start, data
            start += len(data)
    except FormatError as error:
        place = _first_damage(plain, (start, min(start + ROUND_BYTES, plain.size)))
        raise FormatError(f"{error}; {_locate(dataset, place // dataset.index.item_bytes)}") from error


def _first_damage(plain: RangeReader, around: Range) -> int:
    """Return the start of the first block of `DAMAGE_BYTES` in a range that cannot be read; else of the range."""
    for block in cut(around, DAMAGE_BYTES):
        try:
            plain.read([block])
        except BinidxError:
            return block[0]
    return around[0]


def _vocabulary_error(dataset: WholeDataset, tokens: NDArray[Any], first: int, vocab_size: int) -> FormatError:
    place = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    where = _locate(dataset, first + place)
    return FormatError(f"{dataset.source.bin}: token {tokens[place]}, needed 0 to {vocab_size - 1}; {where}")


def _locate(dataset: WholeDataset, token: int) -> str:
    """Return a text such as "document 17, token 3 of it" for a token number, with the part of a virtual merge."""
    for block in dataset.index.documents():
        bounds = block.token_bounds()
        if token < bounds[-1]:
            place, source = int(np.searchsorted(bounds, token, "right")) - 1, dataset.source
            text = f"document {block.first + place}, token {token - bounds[place]} of it"
            if isinstance(source, VirtualSource):
                text += f", in the part {source.part_at(token * dataset.index.item_bytes)}"
            return text
    return "after the last document"
