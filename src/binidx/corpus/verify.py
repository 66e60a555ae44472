"""What stands beside a dataset, against the dataset: its manifest's counts, its lineage row by row.

manifest   documents, sequences and tokens are those of the .idx
           its tokenizer is that of the others that are merged with it
lineage    a row for each document; its hash, if it has one, is that of the document's bytes in the .bin

Whether a dataset is what its index says, and nothing else: structure, sizes, checksums, token ids.

    quick      the .idx, all of it, the size of the .bin, and the counts of a manifest
    in full    also every token: blocks against their checksums (.bin.xxh3) or frames (.bin.zst), ids against a
               vocabulary, and on demand each document against the hash in its lineage

The tokens are streamed: 64 MiB of them are in memory, whatever there is to verify.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.lineage_transfer import read_lineage
from binidx.corpus.shuffle_buckets import batch_by_size
from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectNotFoundError
from binidx.format.idx import little_endian
from binidx.format.sidecars.dataset_manifest import LINEAGE, MANIFEST, read_manifest
from binidx.format.source import PairSource
from binidx.format.virtual import map_concurrently
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import ROUND_BYTES
from binidx.storage.ranges import cut
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher
from binidx.storage.writing.publish import object_exists

HASH_ROUND_BYTES = 16 << 20


"""Of documents that are read and hashed together; of a longer one, in parts."""


def check_manifest(opened: WholeDataset, options: Options) -> bool:
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


def check_tokenizers(opened: Sequence[WholeDataset]) -> None:
    """FormatError where manifests tell that datasets which are to be one are of different tokenizers."""
    pairs = [pair for each in opened for pair in each.source.pairs]
    told = map_concurrently(lambda each: _tokenizer_of(each) if each.has(MANIFEST) else None, pairs)
    known = [(each.prefix, tokenizer) for each, tokenizer in zip(pairs, told, strict=True) if tokenizer]
    for prefix, (uri, digest) in known[1:]:
        first, (needed, wanted) = known[0]
        if digest != wanted:
            raise FormatError(
                f"{prefix}{MANIFEST}: made by the tokenizer {uri} ({digest[:12]}), needed that of {first}, "
                f"{needed} ({wanted[:12]}): ids of two mean different text; where they do not, move the manifest away"
            )


def _tokenizer_of(pair: PairSource) -> tuple[str, str] | None:
    """Its URI and digest; None where the manifest does not tell."""
    manifest = read_manifest(pair.prefix + MANIFEST, pair.options) or {}
    tokenizer = manifest.get("job", {}).get("tokenizer", {})
    return (str(tokenizer["uri"]), str(tokenizer["digest"])) if {"uri", "digest"} <= tokenizer.keys() else None


def check_lineage(opened: WholeDataset, plain: RangeReader, options: Options, watch: ProgressWatcher) -> int:
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
    for table in read_lineage(opened.prefix, opened.index.num_documents, options):
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


def document_hashes(opened: WholeDataset, plain: RangeReader) -> Iterator[tuple[NDArray[np.uint64], int]]:
    """xxh3_64 of the bytes of each document, some at once, and how many bytes those are."""
    for block in opened.index.documents():
        bounds = block.token_bounds() * opened.index.item_bytes
        for low, high in batch_by_size(bounds, HASH_ROUND_BYTES):
            yield _hashes(bounds[low : high + 1], plain), int(bounds[high] - bounds[low])


def _hashes(bounds: NDArray[np.int64], plain: RangeReader) -> NDArray[np.uint64]:
    start, stop = int(bounds[0]), int(bounds[-1])
    if len(bounds) == 2:
        digest = xxhash.xxh3_64()
        for part in cut((start, stop), HASH_ROUND_BYTES):
            digest.update(plain.read([part])[0])
        return np.array([digest.intdigest()], np.uint64)
    (data,), places = plain.read([(start, stop)]), (bounds - start).tolist()
    found = (xxhash.xxh3_64_intdigest(data[at:end]) for at, end in itertools.pairwise(places))
    return np.fromiter(found, np.uint64, len(places) - 1)


PART_BYTES = 8 << 20


SMALL_BYTES = 16 << 10


"""What is read at once to find the place of a damage: a block of checksums."""


@dataclass(frozen=True)
class Verification:
    """What was found sound.

    Attributes:
        bin_bytes: plain bytes of its tokens, `trailing_bytes` of them after the last one.
        checked_by: "checksums", "frames" (zstd's own), or None: nothing says what the bytes ought to be; "in part":
            something does of some parts of a virtual merge.
        token_range: least and largest token; None: not read, or there are none.
        vocab_size: that all of them are below.
        manifest: whether there is one; its counts are right then.
        lineage: documents that were compared with the hash in their lineage; None: nobody asked.
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

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return asdict(self)


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
        vocab_size: every token must be 0 or more and below.
        quick: read only the index and sizes.
        lineage: compare each document with the hash in its lineage.

    Raises:
        ObjectNotFoundError: the dataset is not there, or no lineage where that is to be compared.
        ConfigError: a vocabulary to compare with tokens that are not read, or are no integers.
        FormatError: something is wrong; the message names the first document that is.
        ObjectChangedError: it was replaced meanwhile.
    """
    began, watch, opened = time.monotonic(), watch or SilentWatcher(), WholeDataset(prefix, storage_options)
    check_verify_arguments(opened, vocab_size, quick, lineage)
    watch.begin("index", opened.index.size, 0)
    opened.index.check()
    watch.advance(opened.index.size)
    plain = opened.source.open_plain()
    num_bytes = opened.check_size(plain.size)
    manifest, found, compared = check_manifest(opened, storage_options), None, None
    if not quick:
        watch.begin("tokens", plain.size, 0)
        found = _read_tokens(opened, plain, num_bytes, vocab_size, watch)
    if lineage:
        compared = check_lineage(opened, plain, storage_options, watch)
    opened.check_unchanged()
    return Verification(
        opened.prefix,
        opened.index.dtype.__name__,
        opened.index.num_documents,
        opened.index.num_sequences,
        opened.index.num_tokens,
        _count_empty(opened),
        plain.size,
        plain.size - num_bytes,
        None if quick else opened.source.checked_by,
        found,
        vocab_size,
        manifest,
        compared,
        time.monotonic() - began,
    )


def check_verify_arguments(opened: WholeDataset, vocab_size: int | None, quick: bool, lineage: bool) -> None:
    """ConfigError for what cannot be compared."""
    if lineage and quick:
        raise ConfigError("verify: lineage, and quick; needed to read the tokens, or no lineage")
    if vocab_size is None:
        return
    if quick:
        raise ConfigError("verify: a vocabulary, and quick; needed to read the tokens, or no vocabulary")
    if np.dtype(opened.index.dtype).kind == "f":
        raise ConfigError(f"{opened.prefix}: tokens are {opened.index.dtype.__name__}, a vocabulary needs integers")


def _read_tokens(
    opened: WholeDataset, plain: RangeReader, num_bytes: int, vocab_size: int | None, watch: ProgressWatcher
) -> tuple[float, float] | None:
    """Least and largest token; reads also what lies after the last one."""
    dtype = little_endian(opened.index.dtype)
    least, largest = None, None
    for around in cut((0, plain.size), ROUND_BYTES):
        for (start, stop), data in zip(cut(around, PART_BYTES), _read(opened, plain, around), strict=True):
            tokens = np.frombuffer(data[: max(min(stop, num_bytes) - start, 0)], dtype)
            if len(tokens):
                low, high = tokens.min().item(), tokens.max().item()
                if vocab_size is not None and (low < 0 or high >= vocab_size):
                    raise _not_in_vocabulary(opened, tokens, start // dtype.itemsize, vocab_size)
                least = low if least is None else min(low, least)
                largest = high if largest is None else max(high, largest)
            watch.advance(stop - start)
    return None if least is None or largest is None else (least, largest)


def _read(opened: WholeDataset, plain: RangeReader, around: Range) -> list[memoryview]:
    """Its parts; a damage in one of them is named by its document."""
    try:
        return plain.read(cut(around, PART_BYTES))
    except FormatError as error:
        place = _first_damage(plain, around)
        raise FormatError(f"{error}; {_document_at(opened, place // opened.index.item_bytes)}") from error


def _first_damage(plain: RangeReader, around: Range) -> int:
    """The first byte of the first small block that cannot be read."""
    for block in cut(around, SMALL_BYTES):
        try:
            plain.read([block])
        except BinidxError:
            return block[0]
    return around[0]


def _not_in_vocabulary(opened: WholeDataset, tokens: NDArray[Any], first: int, vocab_size: int) -> FormatError:
    place = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    where = _document_at(opened, first + place)
    return FormatError(f"{opened.source.bin_uri}: token {tokens[place]}, needed 0 to {vocab_size - 1}; {where}")


def _document_at(opened: WholeDataset, token: int) -> str:
    """`document 17, token 3 of it`, from the number of a token in the `.bin`."""
    for block in opened.index.documents():
        bounds = block.token_bounds()
        if token < bounds[-1]:
            place = int(np.searchsorted(bounds, token, "right")) - 1
            return f"document {block.first + place}, token {token - bounds[place]} of it{_part_at(opened, token)}"
    return "after the last document"


def _part_at(opened: WholeDataset, token: int) -> str:
    """Of a virtual merge which part holds a token."""
    source = opened.source
    return f", in the part {source.part_at(token * opened.index.item_bytes)}" if source.num_parts else ""


def _count_empty(opened: WholeDataset) -> int:
    """Documents without sequences."""
    count, before = 0, -1
    for bounds in opened.index.bounds():
        count += int((np.diff(bounds) == 0).sum()) + int(bounds[0] == before)
        before = int(bounds[-1])
    return count
