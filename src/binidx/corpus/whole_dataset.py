"""Dataset opened to be read from end to end: its index in blocks, its tokens as stored or plain.

The commands of this package open their sources here, so that all check the same things in the same way.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import ConfigError, FormatError
from binidx.format.idx_blocks import batch_by_size
from binidx.format.prefix_listing import ListedPair, list_pairs
from binidx.format.source import is_multimodal, open_source
from binidx.storage.interfaces import RangeReader
from binidx.storage.ranges import cut
from binidx.storage.threads import OPENS
from binidx.storage.writing.copy import ProgressWatcher

Options = Mapping[str, Any] | None
Prefix = str | os.PathLike[str]

HASH_BYTES = 16 << 20
"""Bytes of documents that are read and hashed together; a longer document is read in pieces of this size."""


@dataclass(frozen=True)
class JsonResult:
    """Base of the results that the commands of this package return."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields as one JSON object."""
        return asdict(self)


class WholeDataset:
    """Dataset under a prefix: a pair of files or a virtual merge.

    Args:
        listed: the pair as a list of its folder shows it, if such a list was made.

    Attributes:
        source: the objects of the dataset.
        index: stream over its `.idx`.

    Raises:
        ObjectNotFoundError: a file is missing.
        FormatError: the header of the `.idx` breaks a rule, or a part of a virtual merge has other counts than listed.
        ObjectChangedError: a part of a virtual merge was replaced since it was listed.
    """

    def __init__(self, prefix: Prefix, options: Options = None, listed: ListedPair | None = None) -> None:
        self.prefix = os.fspath(prefix)
        self.source = open_source(self.prefix, options, listed=listed)
        self.index = self.source.open_index()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tokens; known once the index was read."""
        return self.index.num_tokens * self.index.item_bytes

    def check_size(self, plain_bytes: int) -> int:
        """Return `num_bytes`; FormatError if the `.bin` is smaller."""
        if plain_bytes < self.num_bytes:
            raise FormatError(
                f"{self.source.bin_uri}: {plain_bytes} bytes, its .idx needs {self.num_bytes} "
                f"({self.index.num_tokens} tokens of {self.index.dtype.__name__})"
            )
        return self.num_bytes

    def check_index(self, plain_bytes: int, watch: ProgressWatcher) -> None:
        """Read and check the whole index, and compare it with the size of the `.bin`.

        Raises:
            FormatError: a rule of the format is broken.
        """
        watch.begin("index", self.index.size, 0)
        self.index.check()
        self.check_size(plain_bytes)
        watch.advance(self.index.size)

    def check_unchanged(self, listed: ListedPair | None = None) -> None:
        """ObjectChangedError if a file was replaced since the dataset was opened.

        Args:
            listed: the pair in a list made now; by default the store is asked.
        """
        self.source.check_unchanged(listed)

    def hash_documents(
        self, plain: RangeReader, digest: Callable[..., Any], widen: Callable[[memoryview], memoryview] = memoryview
    ) -> Iterator[tuple[list[bytes], int]]:
        """Yield the digests of neighbouring documents, from the first document on, and the bytes read for them.

        Args:
            plain: reader of the tokens.
            digest: constructor of a hash object, such as `xxhash.xxh3_64`.
            widen: converts stored tokens to the bytes that are hashed; each token to the same number of bytes.
        """
        for block in self.index.documents():
            bounds = block.token_bounds() * self.index.item_bytes
            for low, high in batch_by_size(bounds, HASH_BYTES):
                start, stop = int(bounds[low]), int(bounds[high])
                if high - low == 1:
                    whole = digest()
                    for part in cut((start, stop), HASH_BYTES):
                        whole.update(widen(plain.read([part])[0]))
                    yield [whole.digest()], stop - start
                    continue
                data = widen(plain.read([(start, stop)])[0])
                places = (bounds[low : high + 1] - start) * len(data) // max(stop - start, 1)
                yield [digest(data[at:end]).digest() for at, end in itertools.pairwise(places.tolist())], stop - start


def open_datasets(sources: Sequence[Prefix], options: Options) -> list[WholeDataset]:
    """Open many datasets at the same time, with lists of their folders where that saves requests."""
    listed = list_pairs([os.fspath(each) for each in sources], options)
    return OPENS.map(lambda each: WholeDataset(each, options, listed.get(os.fspath(each))), sources)


def check_all_unchanged(datasets: Sequence[WholeDataset]) -> None:
    """ObjectChangedError if a file of one of the datasets was replaced since it was opened."""
    listed = list_pairs([each.prefix for each in datasets], datasets[0].source.options)
    OPENS.map(lambda each: each.check_unchanged(listed.get(each.prefix)), datasets)


def check_compatible(datasets: Sequence[WholeDataset], *, mixed: bool = False) -> tuple[str, bool]:
    """Return the codec of all datasets and whether they have modes; those without sequences fit either way.

    Args:
        mixed: whether some may be compressed and others not.

    Raises:
        ConfigError: there is no dataset, or the codecs differ.
        FormatError: dtypes differ, or some have modes and others not.
    """
    if not datasets:
        raise ConfigError("merge: 0 datasets, needed at least one")
    first = datasets[0]
    for each in datasets:
        if each.index.dtype is not first.index.dtype:
            found, needed = each.index.dtype.__name__, first.index.dtype.__name__
            raise FormatError(f"{each.prefix}: dtype {found}, needed {needed} as in {first.prefix}")
        if each.source.codec != first.source.codec and not mixed:
            raise ConfigError(
                f"{each.source.bin_uri}: stored otherwise than {first.source.bin_uri}, needed all compressed or none; "
                "binidx convert --plain or --compress brings them together"
            )
    return first.source.codec, is_multimodal([each.index for each in datasets])


def sum_counts(datasets: Sequence[WholeDataset]) -> tuple[int, int, int]:
    """Return the number of documents, sequences and tokens of all datasets."""
    indices = [each.index for each in datasets]
    documents, sequences = sum(each.num_documents for each in indices), sum(each.num_sequences for each in indices)
    return documents, sequences, sum(each.num_tokens for each in indices)
