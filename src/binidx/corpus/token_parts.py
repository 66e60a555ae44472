"""Tokens of a dataset in parts, for workers: ranges of bytes, of a dataset that each process opens once.

    size of the tokens        up to 64 GiB    256 GiB    1 TiB      more
    size of a part            256 MiB         256 MiB    1 GiB      1 GiB
    ... of blocks of 8 MiB     64 MiB         256 MiB    1 GiB      1 GiB

The ranges depend on the size and the blocks alone, so that each restart has the same parts. They begin where checksums
and zstd segments of this library begin.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from binidx.corpus.whole_dataset import WholeDataset
from binidx.errors import redacted
from binidx.json_models import JsonFile
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named
from binidx.storage.ranges import cut

LEAST_BYTES, MOST_BYTES, NUM_PARTS = 256 << 20, 1 << 30, 1024
"""Least and most bytes of a part, but for the last; number of parts between them."""

LEAST_BLOCKS = 8
"""Least blocks of a part that is made of blocks: a killed copy over 20 MB/s loses 3 s, at a record for each 64 MiB."""


ALIGN_BYTES = codec_named("zstd").block_bytes
MAX_BLOCKS = 10_000
"""Most blocks of an object: parts of an upload to S3."""


def plan_blocks(size: int, block_bytes: int = 8 << 20) -> int:
    """Return the bytes of a block of an object: whole segments, and no more blocks than an upload has parts."""
    return -(-max(block_bytes, 1, -(-size // MAX_BLOCKS)) // ALIGN_BYTES) * ALIGN_BYTES


def plan_ranges(size: int, block_bytes: int = 0) -> list[Range]:
    """Return the ranges of the parts of `size` bytes; an empty one if there are none, so that each job has a part.

    Args:
        block_bytes: bytes of a block; parts are whole blocks, and as few as LEAST_BLOCKS. 0: they are whole segments.
    """
    least = min(LEAST_BYTES, LEAST_BLOCKS * block_bytes or LEAST_BYTES)
    block_bytes = block_bytes or ALIGN_BYTES
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


@dataclass(frozen=True)
class DatasetPart:
    """Part of a dataset to read: its documents, or bytes of its tokens, from `start` to before `stop`.

    Args:
        size: bytes to read, about.
        unit: "documents" or "bytes".
        settings: all else that decides the result, in JSON values.
    """

    dataset: PinnedDataset
    start: int
    stop: int
    size: int
    unit: str
    settings: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Digest of all that decides the result."""
        return JsonFile.digest([self.dataset.identity, self.start, self.stop, *self.settings])

    def __str__(self) -> str:
        return f"{self.unit} {self.start} to {self.stop} of {self.dataset.prefix}"


def plan_documents(dataset: WholeDataset, count: int, settings: tuple[Any, ...]) -> list[DatasetPart]:
    """Return the documents of a dataset in about `count` parts; of few documents there are fewer, and empty ones.

    Args:
        dataset: its index must have been checked.
    """
    bounds = [dataset.index.num_documents * number // count for number in range(count + 1)]
    pinned, size = PinnedDataset.of(dataset), dataset.num_bytes // count
    return [DatasetPart(pinned, *pair, size, "documents", settings) for pair in sorted(set(itertools.pairwise(bounds)))]
