"""Datasets read from end to end, and datasets about to be written.

Sources are opened here, so that all commands check the same things in the same way. All objects of a target are written
invisibly first. Then the old `.idx` is removed, `.bin` and sidecars appear, and the `.idx` comes last. A reader
therefore never combines an index with other tokens.

A killed job may have published a target's `.bin`, or its `.idx`, too. The same job then compares these, byte for byte,
with what it would write (`storage.writing.compare`): it adds what is missing, or leaves a complete dataset untouched.
At the first difference the target belongs to another job, and is refused.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from numpy.typing import DTypeLike

from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.format.bin_file import BinWriter, delete_objects, superseded_objects
from binidx.format.idx import get_idx_path, idx_size
from binidx.format.idx_blocks import IndexColumns, batch_by_size
from binidx.format.prefix_listing import ListedPair, list_pairs
from binidx.format.sidecars.dataset_manifest import MANIFEST, SIDECARS, read_manifest
from binidx.format.source import PairSource, absolute_uri, is_multimodal, open_source
from binidx.format.virtual import SUFFIX as PARTS
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import CODECS
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists, object_identity
from binidx.storage.threads import OPENS
from binidx.storage.writing.compare import ComparedJoin, ComparingWriter
from binidx.storage.writing.concatenate import Join, SourcePiece, open_join
from binidx.storage.writing.copy import ProgressWatcher
from binidx.storage.writing.publish import create_object

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


@dataclass(frozen=True)
class CombinedCounts(JsonResult):
    """Counts of a dataset that was made of several."""

    target: str
    num_sources: int
    num_documents: int
    num_sequences: int
    num_tokens: int


class WholeDataset:
    """Dataset under a prefix, read from end to end: a pair of files, or a virtual merge (a list of pairs).

    Args:
        listed: the pair's files, if its folder was listed; this saves requests.
        distrust_sums: do not check tokens against the existing checksums, as these are about to be replaced.

    Attributes:
        source: the objects of the dataset.
        index: stream over the `.idx`.

    Raises:
        ObjectNotFoundError: a file is missing.
        FormatError: the header of the `.idx` breaks a rule, or a part of a virtual merge has other counts than listed.
        ObjectChangedError: a part of a virtual merge was replaced since it was listed.
    """

    def __init__(
        self, prefix: Prefix, options: Options = None, listed: ListedPair | None = None, *, distrust_sums: bool = False
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.source = open_source(self.prefix, options, distrust_sums=distrust_sums, listed=listed)
        self.index = self.source.open_index()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tokens; known only after the lengths in the index have been read to their end."""
        return self.index.num_tokens * self.index.item_bytes

    def check_size(self) -> int:
        """Return `num_bytes`; raise FormatError if the `.bin` is smaller."""
        plain_bytes = self.source.plain_bytes()
        if plain_bytes < self.num_bytes:
            raise FormatError(
                f"{self.source.bin_uri}: {plain_bytes} bytes, its .idx needs {self.num_bytes} "
                f"({self.index.num_tokens} tokens of {self.index.dtype.__name__})"
            )
        return self.num_bytes

    def check_index(self, watch: ProgressWatcher) -> None:
        """Read and check the whole index, and compare it with the size of the `.bin`.

        Raises:
            FormatError: a rule of the format is broken, or the `.bin` is too small.
        """
        watch.begin("index", self.index.size, 0)
        self.index.check()
        self.check_size()
        watch.advance(self.index.size)

    def hash_documents(
        self, plain: RangeReader, digest: Callable[..., Any], widen: Callable[[memoryview], memoryview] = memoryview
    ) -> Iterator[tuple[list[bytes], int]]:
        """Yield (digests of neighbouring documents, number of bytes read for them), from the first document on.

        Args:
            plain: reader of the tokens.
            digest: constructor of a hash object, such as `xxhash.xxh3_64`.
            widen: converts stored tokens to the bytes to hash; each token to the same number of bytes.
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


class SourceDatasets:
    """Datasets to combine into one, opened in parallel; their folders are listed if that saves requests.

    Raises:
        ConfigError: `prefixes` is empty.
        ObjectNotFoundError, FormatError, ObjectChangedError: as `WholeDataset`.
    """

    def __init__(self, prefixes: Sequence[Prefix], options: Options) -> None:
        if not prefixes:
            raise ConfigError("merge: 0 datasets, needed at least one")
        names = [os.fspath(each) for each in prefixes]
        listed = list_pairs(names, options)
        self.options = options
        self.datasets = OPENS.map(lambda each: WholeDataset(each, options, listed.get(each)), names)

    def counts(self) -> tuple[int, int, int, int]:
        """Return the number of datasets, and their total numbers of documents, sequences and tokens."""
        indices = [each.index for each in self.datasets]
        documents, sequences = sum(each.num_documents for each in indices), sum(each.num_sequences for each in indices)
        return len(indices), documents, sequences, sum(each.num_tokens for each in indices)

    def check_unchanged(self) -> None:
        """Raise ObjectChangedError if a file of one of the datasets was replaced since it was opened."""
        listed = list_pairs([each.prefix for each in self.datasets], self.options)
        OPENS.map(lambda each: each.source.check_unchanged(listed.get(each.prefix)), self.datasets)

    def check_compatible(self, *, mixed: bool = False) -> tuple[str, bool]:
        """Return the codec of all datasets and whether they have modes; datasets without sequences fit either way.

        Args:
            mixed: whether some datasets may be compressed and others not.

        Raises:
            ConfigError: the codecs differ.
            FormatError: dtypes differ, or some have modes and others not.
        """
        first = self.datasets[0]
        for each in self.datasets:
            if each.index.dtype is not first.index.dtype:
                found, needed = each.index.dtype.__name__, first.index.dtype.__name__
                raise FormatError(f"{each.prefix}: dtype {found}, needed {needed} as in {first.prefix}")
            if each.source.codec != first.source.codec and not mixed:
                raise ConfigError(
                    f"{each.source.bin_uri}: stored otherwise than {first.source.bin_uri}, needed all compressed or "
                    "none; binidx convert --plain or --compress brings them together"
                )
        return first.source.codec, is_multimodal([each.index for each in self.datasets])

    def check_tokenizers(self) -> None:
        """Raise FormatError if the manifests of the datasets name different tokenizers."""
        pairs = [pair for each in self.datasets for pair in each.source.pairs]
        tokenizers = OPENS.map(lambda each: _read_tokenizer(each) if each.has(MANIFEST) else None, pairs)
        known = [(each.prefix, tokenizer) for each, tokenizer in zip(pairs, tokenizers, strict=True) if tokenizer]
        for prefix, (uri, digest) in known[1:]:
            first, (first_uri, first_digest) = known[0]
            if digest != first_digest:
                raise FormatError(
                    f"{prefix}{MANIFEST}: made by the tokenizer {uri} ({digest[:12]}), needed that of {first}, "
                    f"{first_uri} ({first_digest[:12]}): ids of two mean different text; where they do not, move the "
                    "manifest away"
                )


def _read_tokenizer(pair: PairSource) -> tuple[str, str] | None:
    """Return URI and digest of the tokenizer in a manifest; None unless it has both."""
    manifest = read_manifest(pair.prefix + MANIFEST, pair.options) or {}
    tokenizer = manifest.get("job", {}).get("tokenizer", {})
    return (str(tokenizer["uri"]), str(tokenizer["digest"])) if {"uri", "digest"} <= tokenizer.keys() else None


BIN_SUFFIXES = tuple(f"bin{codec.suffix}" for codec in CODECS.values())
OBJECT_SUFFIXES = (*BIN_SUFFIXES, f"bin{SUFFIX}", "idx")
"""Objects of a dataset in the order in which they are written: tokens first, index last."""


class DatasetTarget:
    """Prefix of a dataset to write, with its tokens stored by `codec`.

    Attributes:
        existing: suffixes of objects that an earlier run of this job may have published; they are only compared.
    """

    def __init__(self, prefix: str, codec: str, options: Options) -> None:
        self.prefix, self.codec, self.options, self.existing = prefix, codec, options, list[str]()
        self.bin_suffix = f"bin{CODECS[codec].suffix}"
        self.bin_uri, self.idx_uri = self.uri(self.bin_suffix), get_idx_path(prefix)

    @classmethod
    def open(
        cls, prefix: Prefix, codec: str, sources: Sequence[WholeDataset], options: Options, *, overwrite: bool
    ) -> DatasetTarget:
        """Return the target under a prefix that is free, may be overwritten, or may hold an earlier run's output.

        Raises:
            ConfigError: the prefix is a folder, or one of the sources.
            ObjectExistsError: other objects exist than an earlier run of this job leaves, and `overwrite` is False.
        """
        name = os.fspath(prefix)
        if name.endswith("/"):
            raise ConfigError(f"{name}: a folder, needed a prefix such as {name}en")
        if any(absolute_uri(name) in each.source.uris for each in sources):
            raise ConfigError(f"{name}: is read and written, needed another prefix to write to")
        target = cls(name, codec, options)
        target.existing = [] if overwrite else target._find_objects()
        if target.existing not in ([], [target.bin_suffix], [target.bin_suffix, "idx"]):
            raise ObjectExistsError(target.refusal)
        return target

    def uri(self, suffix: str) -> str:
        """Return the URI of an object by its suffix, such as "bin.zst"."""
        return f"{self.prefix}.{suffix}"

    @property
    def refusal(self) -> str:
        """Message of the ObjectExistsError for a prefix that holds another dataset."""
        names = ", ".join(f".{suffix}" for suffix in self.existing or self._find_objects())
        return f"{self.prefix}: holds {names}, needed a free name; --overwrite replaces it"

    def _find_objects(self) -> list[str]:
        suffixes = (*BIN_SUFFIXES, "idx", PARTS[1:])
        return [suffix for suffix in suffixes if object_exists(self.uri(suffix), self.options)]

    def size(self) -> int:
        """Return the bytes of `.bin` and `.idx` together."""
        return sum(int(object_identity(uri, self.options)["size"]) for uri in (self.bin_uri, self.idx_uri))

    def check_free(self, published: dict[str, Any] | None = None, *, resumed: bool = False) -> None:
        """Check that nothing exists under the prefix but a lone `.bin` that an earlier run published.

        Args:
            published: identity of the `.bin` that an earlier run, of any source, has verified; None if there is none.
            resumed: whether an earlier run of the same source exists.

        Raises:
            ObjectExistsError: something else exists.
        """
        found = self._find_objects()
        is_bin = len(found) == 1 and found[0] in BIN_SUFFIXES
        if not found or (is_bin and (resumed or object_identity(self.uri(found[0]), self.options) == published)):
            return
        raise ObjectExistsError(self.refusal)

    @property
    def is_complete(self) -> bool:
        """True if `.bin` and `.idx` exist already, so that the job compares both and writes neither."""
        return "idx" in self.existing

    def say_complete(self, watch: ProgressWatcher) -> None:
        """Report to `watch` that the dataset was complete already, if it was."""
        if self.is_complete:
            watch.say(f"{self.prefix}: holds this dataset already, compared byte for byte")

    def check_counts(self, num_sequences: int, num_documents: int, multimodal: bool) -> None:
        """Raise ObjectExistsError if the dataset exists with other counts, which saves a long comparison."""
        size = idx_size(num_sequences, num_documents + 1) + num_sequences * multimodal
        if self.is_complete and object_identity(self.idx_uri, self.options)["size"] != size:
            raise ObjectExistsError(self.refusal)

    def compare_index(self, columns: IndexColumns) -> None:
        """Raise ObjectExistsError if the existing `.idx` differs from one with these columns."""
        writer = ComparingWriter(self.idx_uri, self.refusal, self.options)
        for piece in columns.format():
            writer.write(piece)
        writer.finish()

    def remove_existing(self) -> None:
        """Remove the old index first, then other forms of the tokens, checksums, a virtual merge's list, and sidecars.

        The `.bin` in the form to write stays: publishing the new one replaces it.
        """
        others = [self.prefix + suffix for suffix in (PARTS, *SIDECARS)]
        delete_objects([self.idx_uri, *superseded_objects(self.bin_uri), *others], self.options)

    def publish(self, columns: IndexColumns, *steps: Callable[[], object]) -> None:
        """Write the `.idx` invisibly; then call all `steps`, and make the `.idx` visible last.

        In a complete dataset the existing `.idx` is compared instead, and then all `steps` are called.
        """
        if self.is_complete:
            self.compare_index(columns)
            for step in steps:
                step()
            return

        def before_publish() -> None:
            for step in steps:
                step()

        with create_object(self.idx_uri, self.options, before_publish=before_publish) as writer:
            for piece in columns.format():
                writer.write(piece)

    def publish_pieces(
        self,
        columns: IndexColumns,
        pieces: Sequence[SourcePiece],
        source_options: Options,
        watch: ProgressWatcher,
        check: Callable[[], object],
        remove_existing: Callable[[], object],
    ) -> Join:
        """Assemble the tokens from pieces, inside the store if it can, or compare them; then publish the dataset.

        Args:
            check, remove_existing: called right before the tokens become visible.
        """
        join: Join
        if self.existing:
            join = ComparedJoin(pieces, ComparingWriter(self.bin_uri, self.refusal, self.options, codec="raw"))
        else:
            join = open_join(self.bin_uri, pieces, source_options=source_options, target_options=self.options)
        try:
            watch.begin("tokens", sum(piece.num_bytes for piece in pieces), 0)
            join.fill(watch.advance)
            self.publish(columns, check, lambda: join.publish(remove_existing))
        finally:
            join.abandon()
        return join


class DatasetOutput:
    """Unpublished dataset whose tokens pass through this process.

    Attributes:
        columns: columns of its `.idx`, to which the caller appends.
    """

    def __init__(self, target: DatasetTarget, dtype: DTypeLike, multimodal: bool) -> None:
        self.target, self.columns = target, IndexColumns(dtype, multimodal)

    @functools.cached_property
    def bin(self) -> BinWriter | ComparingWriter:
        """Writer of the tokens; it only compares them if the target has an existing `.bin`."""
        if self.target.existing:
            return ComparingWriter(self.target.bin_uri, self.target.refusal, self.target.options)
        return BinWriter(self.target.bin_uri, self.target.options)

    def publish(self, *steps: Callable[[], object]) -> None:
        """Call all `steps`, then make the dataset visible, the `.idx` last."""
        if isinstance(self.bin, ComparingWriter):
            self.bin.finish()
            self.target.publish(self.columns, *steps)
        else:
            self.target.publish(self.columns, *steps, self.bin.publish)

    def close(self) -> None:
        """Remove all temporary files that were not published."""
        self.columns.close()
        if "bin" in vars(self) and isinstance(self.bin, BinWriter):
            self.bin.abandon()
