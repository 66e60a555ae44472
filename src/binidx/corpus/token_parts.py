"""Tokens of a dataset in parts, for workers: ranges of bytes, of a dataset that each process opens once.

    size of the tokens        up to 64 GiB    256 GiB    1 TiB      more
    size of a part            256 MiB         256 MiB    1 GiB      1 GiB
    ... of blocks of 8 MiB     64 MiB         256 MiB    1 GiB      1 GiB

The ranges depend on the size and the blocks alone, so that each restart has the same parts. They begin where checksums
and zstd segments of this library begin.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from binidx.corpus.whole_dataset import WholeDataset
from binidx.errors import redacted
from binidx.storage.codecs.segments import SEGMENT_BYTES
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.ranges import cut


def json_digest(value: Any) -> str:
    """Return the 128-bit digest of a JSON value, hex: the name of a part, of all that decides its result."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


LEAST_BYTES, MOST_BYTES, NUM_PARTS = 256 << 20, 1 << 30, 1024
"""Least and most bytes of a part, but for the last; number of parts between them."""

LEAST_BLOCKS = 8
"""Least blocks of a part that is made of blocks: a killed copy over 20 MB/s loses 3 s, at a record for each 64 MiB."""


MAX_BLOCKS = 10_000
"""Most blocks of an object: parts of an upload to S3."""


def plan_blocks(size: int, block_bytes: int = 8 << 20) -> int:
    """Return the bytes of a block of an object: whole segments, and no more blocks than an upload has parts."""
    return -(-max(block_bytes, 1, -(-size // MAX_BLOCKS)) // SEGMENT_BYTES) * SEGMENT_BYTES


def plan_ranges(size: int, block_bytes: int = 0) -> list[Range]:
    """Return the ranges of the parts of `size` bytes; an empty one if there are none, so that each job has a part.

    Args:
        block_bytes: bytes of a block; parts are whole blocks, and as few as LEAST_BLOCKS. 0: they are whole segments.
    """
    least = min(LEAST_BYTES, LEAST_BLOCKS * block_bytes or LEAST_BYTES)
    block_bytes = block_bytes or SEGMENT_BYTES
    part_bytes = min(max(size // NUM_PARTS, least), MOST_BYTES)
    return cut((0, size), max(part_bytes // block_bytes, 1) * block_bytes) or [(0, 0)]


@dataclass(frozen=True)
class PinnedDataset:
    """One version of a dataset, opened once in each process that reads parts of it. It can be pickled.

    Args:
        prefix: an absolute one, as workers may have another working directory.
        opened: identities of its files.
        distrust_sums: as in `WholeDataset`.
    """

    prefix: Location
    opened: Mapping[str, Any] = field(hash=False)
    distrust_sums: bool = False

    @classmethod
    def of(cls, dataset: WholeDataset, *, distrust_sums: bool = False) -> PinnedDataset:
        """Return the version of a dataset that is open."""
        prefix = dataset.source.prefix
        return cls(Location(prefix.absolute, prefix.options), dataset.source.opened, distrust_sums)

    @property
    def identity(self) -> dict[str, Any]:
        """Return the identities of the files in JSON values, without secrets."""
        return {**self.opened, "uri": redacted(self.opened["uri"])}

    @functools.lru_cache(2)  # noqa: B019 - a value: equal ones share the open dataset
    def open(self) -> WholeDataset:
        """Return the dataset.

        Raises:
            ObjectChangedError: another version is stored.
        """
        dataset = WholeDataset(self.prefix, distrust_sums=self.distrust_sums)
        dataset.source.check_opened(self.opened)
        return dataset

    @functools.lru_cache(2)  # noqa: B019 - as above
    def reader(self, *, stored: bool = False) -> RangeReader:
        """Return the reader of the plain bytes of the tokens, or of the `stored` ones."""
        source = self.open().source
        return source.open_stored() if stored else source.open_plain()
