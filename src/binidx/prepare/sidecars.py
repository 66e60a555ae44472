"""What stands beside a dataset, against the dataset: its manifest's counts, its lineage row by row.

manifest   documents, sequences and tokens are those of the .idx
           its tokenizer is that of the others that are merged with it
lineage    a row for each document; its hash, if it has one, is that of the document's bytes in the .bin
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import FormatError, ObjectNotFoundError
from binidx.format.sidecars import LINEAGE, MANIFEST
from binidx.format.source import Source
from binidx.format.virtual import together
from binidx.prepare.finished import Finished, Options
from binidx.prepare.lineage import read_rows
from binidx.prepare.preprocess.manifest import read_manifest
from binidx.prepare.shuffle.buckets import batches
from binidx.storage.publish import object_exists
from binidx.storage.ranges import RangeReader, cut
from binidx.storage.resumable import Watch

ROUND_BYTES = 16 << 20
"""Of documents that are read and hashed together; of a longer one, in parts."""


def check_manifest(opened: Finished, options: Options) -> bool:
    """Whether there is one, whose counts are then those of the index, which was read.

    Raises:
        FormatError: they are not.
    """
    uri = opened.prefix + MANIFEST
    manifest = read_manifest(uri, options)
    if manifest is None:
        return False
    if "dataset" not in manifest:
        raise FormatError(
            f"{uri}: $.dataset: missing, there is nothing to compare; needed what binidx preprocess writes"
        )
    index, told = opened.index, manifest["dataset"]
    found = {"documents": index.num_documents, "sequences": index.num_sequences, "tokens": index.num_tokens}
    for name, count in found.items():
        if told[name] != count:
            raise FormatError(f"{uri}: tells of {told[name]} {name}, {opened.prefix}.idx has {count}; one is another's")
    return True


def check_tokenizers(opened: Sequence[Finished]) -> None:
    """FormatError where manifests tell that datasets which are to be one are of different tokenizers."""
    pairs = [pair for each in opened for pair in each.source.pairs]
    told = together(lambda each: _tokenizer_of(each) if each.has(MANIFEST) else None, pairs)
    known = [(each.prefix, tokenizer) for each, tokenizer in zip(pairs, told, strict=True) if tokenizer]
    for prefix, (uri, digest) in known[1:]:
        first, (needed, wanted) = known[0]
        if digest != wanted:
            raise FormatError(
                f"{prefix}{MANIFEST}: made by the tokenizer {uri} ({digest[:12]}), needed that of {first}, "
                f"{needed} ({wanted[:12]}): ids of two mean different text; where they do not, move the manifest away"
            )


def _tokenizer_of(pair: Source) -> tuple[str, str] | None:
    """Its URI and digest; None where the manifest does not tell."""
    manifest = read_manifest(pair.prefix + MANIFEST, pair.options) or {}
    tokenizer = manifest.get("job", {}).get("tokenizer", {})
    return (str(tokenizer["uri"]), str(tokenizer["digest"])) if {"uri", "digest"} <= tokenizer.keys() else None


def check_lineage(opened: Finished, plain: RangeReader, options: Options, watch: Watch) -> int:
    """How many documents were compared with the hash that their lineage has; those without one are passed over.

    Raises:
        ObjectNotFoundError: there is no lineage.
        FormatError: it has other rows, or a document is not the one that its row tells of.
    """
    uri = opened.prefix + LINEAGE
    if not object_exists(uri, options):
        raise ObjectNotFoundError(f"{uri}: not there, so there is nothing to compare; binidx preprocess writes it")
    watch.begin("lineage", opened.index.num_tokens * opened.index.item_bytes, 0)
    first = compared = 0
    hashes = document_hashes(opened, plain)
    held = np.empty(0, np.uint64)
    for table in read_rows(opened.prefix, opened.index.num_documents, options):
        while len(held) < len(table):
            found, num_bytes = next(hashes)
            held = np.concatenate([held, found])
            watch.advance(num_bytes)
        told, there = told_hashes(table)
        wrong = np.flatnonzero(there & (told != held[: len(table)]))
        if len(wrong):
            raise FormatError(f"{uri}: row {first + wrong[0]} is of another document than {opened.prefix} has there")
        compared += int(there.sum())
        first, held = first + len(table), held[len(table) :]
    return compared


def told_hashes(table: Any) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Hashes of rows, and which of them have one."""
    column = table.column("hash")
    return column.fill_null(0).to_numpy(), column.is_valid().to_numpy()


def document_hashes(opened: Finished, plain: RangeReader) -> Iterator[tuple[NDArray[np.uint64], int]]:
    """xxh3_64 of the bytes of each document, some at once, and how many bytes those are."""
    for block in opened.index.documents():
        bounds = block.token_bounds() * opened.index.item_bytes
        for low, high in batches(bounds, ROUND_BYTES):
            yield _hashes(bounds[low : high + 1], plain), int(bounds[high] - bounds[low])


def _hashes(bounds: NDArray[np.int64], plain: RangeReader) -> NDArray[np.uint64]:
    start, stop = int(bounds[0]), int(bounds[-1])
    if len(bounds) == 2:
        digest = xxhash.xxh3_64()
        for part in cut((start, stop), ROUND_BYTES):
            digest.update(plain.read([part])[0])
        return np.array([digest.intdigest()], np.uint64)
    (data,), places = plain.read([(start, stop)]), (bounds - start).tolist()
    found = (xxhash.xxh3_64_intdigest(data[at:end]) for at, end in itertools.pairwise(places))
    return np.fromiter(found, np.uint64, len(places) - 1)
