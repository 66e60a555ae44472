"""Whether a dataset is what its index says, and nothing else: structure, sizes, checksums, token ids.

    quick      the .idx, all of it, the size of the .bin, and the counts of a manifest
    in full    also every token: blocks against their checksums (.bin.xxh3) or frames (.bin.zst), ids against a
               vocabulary, and on demand each document against the hash in its lineage

The tokens are streamed: 64 MiB of them are in memory, whatever there is to verify.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import BinidxError, ConfigError, FormatError
from binidx.format.idx import stored
from binidx.prepare.finished import Finished, Options, Prefix
from binidx.prepare.sidecars import check_lineage, check_manifest
from binidx.storage.ranges import Range, RangeReader, cut
from binidx.storage.resumable import Silent, Watch
from binidx.storage.transfer import ROUND_BYTES

PART_BYTES = 8 << 20
SMALL_BYTES = 16 << 10
"""What is read at once to find the place of a damage: a block of checksums."""


@dataclass(frozen=True)
class Verified:
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
    watch: Watch | None = None,
) -> Verified:
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
    began, watch, opened = time.monotonic(), watch or Silent(), Finished(prefix, storage_options)
    check_call(opened, vocab_size, quick, lineage)
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
    return Verified(
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


def check_call(opened: Finished, vocab_size: int | None, quick: bool, lineage: bool) -> None:
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
    opened: Finished, plain: RangeReader, num_bytes: int, vocab_size: int | None, watch: Watch
) -> tuple[float, float] | None:
    """Least and largest token; reads also what lies after the last one."""
    dtype = stored(opened.index.dtype)
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


def _read(opened: Finished, plain: RangeReader, around: Range) -> list[memoryview]:
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


def _not_in_vocabulary(opened: Finished, tokens: NDArray[Any], first: int, vocab_size: int) -> FormatError:
    place = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    where = _document_at(opened, first + place)
    return FormatError(f"{opened.source.bin_uri}: token {tokens[place]}, needed 0 to {vocab_size - 1}; {where}")


def _document_at(opened: Finished, token: int) -> str:
    """`document 17, token 3 of it`, from the number of a token in the `.bin`."""
    for block in opened.index.documents():
        bounds = block.token_bounds()
        if token < bounds[-1]:
            place = int(np.searchsorted(bounds, token, "right")) - 1
            return f"document {block.first + place}, token {token - bounds[place]} of it{_part_at(opened, token)}"
    return "after the last document"


def _part_at(opened: Finished, token: int) -> str:
    """Of a virtual merge which part holds a token."""
    source = opened.source
    return f", in the part {source.part_at(token * opened.index.item_bytes)}" if source.num_parts else ""


def _count_empty(opened: Finished) -> int:
    """Documents without sequences."""
    count, before = 0, -1
    for bounds in opened.index.bounds():
        count += int((np.diff(bounds) == 0).sum()) + int(bounds[0] == before)
        before = int(bounds[-1])
    return count
