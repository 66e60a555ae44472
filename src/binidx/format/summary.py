"""Summary of a dataset from a few dozen bytes of it, without reading an array of its `.idx`.

    header                      dtype, number of sequences and documents         34 bytes
    pointer of sequence i       bytes, and so tokens, before sequence i           8 bytes for each i
    last pointer and length     number of tokens                                 12 bytes

Pointers are a running sum, so the tokens of any run of sequences, such as a split, follow from two of them. The `.idx`
of a virtual merge is that of its parts, joined while it is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from binidx.errors import FormatError
from binidx.format.pair import open_bin
from binidx.format.prefix_listing import ListedPair
from binidx.format.sequence_index import SequenceIndex, open_index
from binidx.format.source import VirtualSource
from binidx.format.virtual import pair_or_parts
from binidx.storage.location import Location
from binidx.storage.open import codec_named, open_stored
from binidx.storage.ranges import as_block_reader


@dataclass(frozen=True)
class DatasetSummary:
    """Sizes and counts of the dataset under one prefix.

    Attributes:
        index: sequence index; its arrays are read range by range, not loaded as a whole.
        idx_bytes: size of the `.idx`; for a virtual merge, of all its parts together.
        plain_bytes: size of the uncompressed tokens.
        stored_bytes: size of the object that holds the tokens; smaller than `plain_bytes` if they are compressed.
        block_bytes: smallest read in bytes: a zstd frame, or a block with a checksum; 1 without either.
        codec: name of the codec of the tokens; "mixed" if the parts of a virtual merge have several.
        checked: whether the tokens are uncompressed and have checksums.
        identities: identities (size, ETag, ...) of the two objects, under "idx" and "bin".
        num_parts: number of parts of a virtual merge, else 0.
    """

    location: Location
    index: SequenceIndex = field(repr=False, compare=False)
    idx_bytes: int
    plain_bytes: int
    stored_bytes: int
    identities: Mapping[str, Any]
    block_bytes: int = 1
    codec: str = "raw"
    checked: bool = False
    num_parts: int = 0

    @property
    def prefix(self) -> str:
        """URI of the prefix."""
        return self.location.uri

    @property
    def compressed(self) -> bool:
        """True if the tokens, or some of them, are compressed."""
        return self.codec != "raw"

    def tokens_before(self, sequences: Sequence[int]) -> list[int]:
        """Return the number of tokens before each of these sequences; the number of all sequences stands for the end.

        Raises:
            FormatError: the pointers decrease, or exceed the number of tokens.
            StorageError: the pointers cannot be read.
        """
        index = self.index
        inside = sorted({sequence for sequence in sequences if 0 < sequence < len(index)})
        pointers = index.sequence_pointers[np.array(inside, np.int64)]
        bounds = [0, *(pointers // index.dtype_size).tolist(), index.num_tokens]
        if bounds != sorted(bounds):
            raise FormatError(f"{self.prefix}.idx: pointers {bounds} fall, or leave {index.num_tokens} tokens")
        known = dict(zip([0, *inside, len(index)], bounds, strict=True))
        return [known[sequence] for sequence in sequences]


def read_summary(prefix: Location, listed: ListedPair | None = None) -> DatasetSummary:
    """Read the summary of a pair of files, or of a virtual merge.

    Args:
        listed: the pair's files in a listing of their folder, if one was made.

    Raises:
        ObjectNotFoundError: there is neither.
        ObjectChangedError: a part of the virtual merge was replaced since the list of parts was written.
        FormatError: a header breaks a rule.
    """
    pair = partial(_summarize_pair, prefix, listed)
    return pair_or_parts(prefix, pair, lambda parts: _summarize_parts(VirtualSource(prefix, parts)))


def _summarize_pair(prefix: Location, listed: ListedPair | None) -> DatasetSummary:
    idx = open_stored(prefix + ".idx", found=listed.idx if listed else None)
    tokens = open_bin(prefix, listed=listed, cache=False)
    index = open_index(idx, f"{prefix}.idx")
    if index.num_bytes > tokens.size:
        raise FormatError(f"{tokens.uri}: {tokens.size} bytes, its .idx needs {index.num_bytes}")
    opened = {"idx": dict(idx.identity), "bin": dict(tokens.identity)}
    blocks = as_block_reader(tokens)
    if blocks is None:
        return DatasetSummary(prefix, index, idx.size, tokens.size, tokens.size, opened)
    stored = blocks.stored_bytes, opened, blocks.block_bytes, blocks.codec, blocks.codec == "raw"
    return DatasetSummary(prefix, index, idx.size, tokens.size, *stored)


def _summarize_parts(source: VirtualSource) -> DatasetSummary:
    idx = source.open_idx()
    index = open_index(idx, idx.uri)
    idx_bytes, stored_bytes = (source.opened[end]["size"] for end in ("idx", "bin"))
    # Parts are not opened: their blocks are assumed to have the usual size.
    block_bytes = max(codec_named(pair.codec).block_bytes for pair in source.pairs)
    codec, parts = "mixed" if source.mixed else source.codec, source.num_parts
    stored = stored_bytes, source.opened, block_bytes, codec, False
    return DatasetSummary(source.prefix, index, idx_bytes, index.num_bytes, *stored, num_parts=parts)
