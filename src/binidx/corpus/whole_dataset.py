"""Datasets read from end to end, and datasets about to be written.

Sources are opened here, so that all commands check the same things in the same way. All objects of a target are written
invisibly first. Then the old `.idx` is removed, `.bin` and sidecars appear, and the `.idx` comes last. A reader
therefore never combines an index with other tokens.

A killed job may have published a target's `.bin`, or its `.idx`, too. The same job then compares these, byte for byte,
with what it would write (`storage.writing.compare`): it adds what is missing, or leaves a complete dataset untouched.
At the first difference the target belongs to another job, and is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

import binidx
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectExistsError, redacted, warn_once
from binidx.forks import cached_property
from binidx.format.bin_file import BinWriter
from binidx.format.document_blocks import batch_by_size
from binidx.format.idx import SequenceIndex
from binidx.format.index_columns import IndexColumns
from binidx.format.prefix_listing import ListedPair
from binidx.format.sidecars.dataset_manifest import MANIFEST, MANIFEST_FILE, SIDECARS, read_manifest
from binidx.format.source import open_source
from binidx.format.virtual import PARTS, is_multimodal
from binidx.jobs.progress import ProgressWatcher
from binidx.storage.codecs.checksums import SUMS
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_named, suffix_of
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists, object_identity
from binidx.storage.threads import OPENS
from binidx.storage.writing.concatenate import SourcePiece, open_join
from binidx.storage.writing.publish import ComparingWriter, delete_object, write_object
from binidx.tokenizers.spec import TokenizerSpec

Options = Mapping[str, Any] | None
Prefix = str | os.PathLike[str]

HASH_BYTES = 16 << 20
"""Bytes of documents that are read and hashed together; a longer document is read in pieces of this size."""


@dataclass(frozen=True)
class CombinedCounts:
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

    def __init__(self, prefix: Location, listed: ListedPair | None = None, *, distrust_sums: bool = False) -> None:
        self.prefix = prefix.uri
        self.source = open_source(prefix, distrust_sums=distrust_sums, listed=listed)
        self.index = self.source.index

    @property
    def dtype(self) -> np.dtype[Any]:
        """Stored type of a token, little-endian."""
        return np.dtype(self.index.dtype).newbyteorder("<")

    @property
    def num_bytes(self) -> int:
        """Bytes of all tokens; known only after the lengths in the index have been read to their end."""
        return self.index.num_bytes

    def check_size(self, report: Callable[[str, str], None] = warn_once) -> int:
        """Return `num_bytes` after `check_bin_size`, in which each part of a virtual merge is checked, too."""
        self.source.check_size(self.index.counts, report)
        return self.num_bytes

    def check_index(self, watch: ProgressWatcher, report: Callable[[str, str], None] = warn_once) -> None:
        """Read and check the whole index, and compare it with the size of the `.bin`.

        Args:
            report: called with URI and problem of a `.bin` that is much longer than its index needs.

        Raises:
            FormatError: a rule of the format is broken, or the `.bin` is too small, or too large by its manifest.
        """
        watch.begin("index", self.index.reader.size, 0)
        self.index.check()
        self.check_size(report)
        watch.advance(self.index.reader.size)

    def hash_documents(
        self,
        plain: RangeReader,
        digest: Callable[..., Any],
        widen: Callable[[memoryview], memoryview] = memoryview,
        documents: Range | None = None,
    ) -> Iterator[tuple[list[bytes], int]]:
        """Yield (digests of neighbouring documents, number of bytes read for them), in their order.

        Args:
            plain: reader of the tokens.
            digest: constructor of a hash object, such as `xxhash.xxh3_64`.
            widen: converts stored tokens to the bytes to hash; each token to the same number of bytes.
            documents: numbers (start, stop) of the documents; None: all.
        """
        start, stop = documents or (0, self.index.num_documents)
        for block in self.index.documents(stop - start, start):
            bounds = block.token_bounds() * self.index.dtype_size
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

    Args:
        prefixes: all with the same options.

    Raises:
        ConfigError: `prefixes` is empty.
        ObjectNotFoundError, FormatError, ObjectChangedError: as `WholeDataset`.
    """

    def __init__(self, prefixes: Sequence[Location]) -> None:
        if not prefixes:
            raise ConfigError("merge: 0 datasets, needed at least one")
        listed = ListedPair.list_all(prefixes)
        self.options = prefixes[0].options
        self.datasets = OPENS.map(lambda prefix: WholeDataset(prefix, listed.get(prefix.uri)), prefixes)

    def counts(self) -> tuple[int, int, int, int]:
        """Return the number of datasets, and their total numbers of documents, sequences and tokens."""
        indices = [dataset.index for dataset in self.datasets]
        counts = [(index.num_documents, index.num_sequences, index.num_tokens) for index in indices]
        documents, sequences, tokens = map(sum, zip(*counts, strict=True))
        return len(indices), documents, sequences, tokens

    def check_unchanged(self) -> None:
        """Raise ObjectChangedError if a file of one of the datasets was replaced since it was opened."""
        listed = ListedPair.list_all([dataset.source.prefix for dataset in self.datasets])
        OPENS.map(lambda dataset: dataset.source.check_unchanged(listed.get(dataset.prefix)), self.datasets)

    def check_compatible(self, *, mixed: bool = False) -> tuple[str, bool]:
        """Return the codec of all datasets and whether they have modes; datasets without sequences fit either way.

        Args:
            mixed: whether some datasets may be compressed and others not.

        Raises:
            ConfigError: the codecs differ.
            FormatError: dtypes differ, or some have modes and others not.
        """
        first = self.datasets[0]
        for dataset in self.datasets:
            if dataset.index.dtype is not first.index.dtype:
                found, needed = dataset.index.dtype.__name__, first.index.dtype.__name__
                raise FormatError(f"{dataset.prefix}: dtype {found}, needed {needed} as in {first.prefix}")
            if dataset.source.codec != first.source.codec and not mixed:
                need = f"stored otherwise than {first.source.bin}, needed all compressed or none"
                way = "binidx convert --plain or --compress brings them together"
                raise ConfigError(f"{dataset.source.bin}: {need}; {way}")
        return first.source.codec, is_multimodal([dataset.index for dataset in self.datasets])

    def check_tokenizers(self) -> None:
        """Raise FormatError if the manifests of the datasets name different tokenizers."""
        pairs = [pair for dataset in self.datasets for pair in dataset.source.pairs]
        prefixes = [pair.prefix.uri for pair in pairs]
        tokenizers = zip(prefixes, OPENS.map(lambda pair: pair.tokenizer, pairs), strict=True)
        for prefix, problem in other_tokenizers(tokenizers):
            raise FormatError(f"{prefix}{MANIFEST}: {problem}; where they do not, move the manifest away")


def other_tokenizers(tokenizers: Iterable[tuple[str, tuple[str, str] | None]]) -> Iterator[tuple[str, str]]:
    """Yield each dataset that another tokenizer made than the first of them, and that problem.

    Args:
        tokenizers: prefix of a dataset, and URI and digest of the tokenizer in its manifest; None: it has none.
    """
    known = [(redacted(prefix), redacted(found[0]), found[1]) for prefix, found in tokenizers if found]
    for prefix, uri, digest in known[1:]:
        first, first_uri, first_digest = known[0]
        if digest != first_digest:
            names = f"{uri} ({digest[:12]}), {first} by {first_uri} ({first_digest[:12]})"
            yield prefix, f"made by the tokenizer {names}: ids of two mean different text"


def read_tokenizers(prefixes: Iterable[Location]) -> dict[str, dict[str, Any]]:
    """Return the tokenizers in the manifests of datasets, by prefix: {} where there is none."""
    manifests = OPENS.map(lambda prefix: (prefix.uri, read_manifest(prefix + MANIFEST) or {}), prefixes)
    return {uri: (manifest.get("job") or {}).get("tokenizer", {}) for uri, manifest in manifests}


def warn_of_tokenizers(
    read: Callable[[], Mapping[str, Mapping[str, Any]]], reader: str, spec: TokenizerSpec | None, eod: int | None = None
) -> None:
    """Log a warning for each dataset whose manifest names another tokenizer or EOD than its reader, or than the first.

    Args:
        read: returns the tokenizers in the manifests of the datasets, as `read_tokenizers`.
        reader: name of what `spec` reads, as "the text".
        spec, eod: None: not known.
    """
    with contextlib.suppress(BinidxError):  # a manifest that cannot be read
        tokenizers = read()
        known = [] if spec is None else [(reader, (spec.uri, spec.digest))]
        known += [(uri, (own.get("uri", ""), own["digest"])) for uri, own in tokenizers.items() if "digest" in own]
        for prefix, problem in other_tokenizers(known):
            warn_once(prefix, problem)
        for prefix, each in tokenizers.items():
            if None not in (eod, stored := each.get("eod")) and eod != stored:
                warn_once(redacted(prefix), f"made with the EOD {stored}, the given tokenizer has {eod}")


def common_manifest(target: Location, datasets: Sequence[WholeDataset]) -> dict[str, Any]:
    """Return the manifest, without counts, of a dataset that is made of others; {} if theirs agree in nothing.

    Args:
        target: prefix of that dataset, whose log has the names of the fields in which they differ.
    """
    pairs = [pair for dataset in datasets for pair in dataset.source.pairs]
    job, others = common_fields(OPENS.map(lambda pair: (pair.manifest or {}).get("job", {}), pairs))
    if others:
        warn_once(f"{target}{MANIFEST}", f"lacks {', '.join(others)}, as the manifests of the sources differ in them")
    return {"job": job} if job else {}


def object_suffixes() -> list[str]:
    """Return the suffixes of a dataset's objects in the order in which they are written: tokens first, index last."""
    return [*BinWriter.suffixes(), f"bin{SUMS}", "idx"]


class DatasetTarget:
    """Prefix of a dataset to write, with its tokens stored by `codec`.

    Attributes:
        bin, idx: objects of its tokens and its index.
        manifest: manifest to write, without counts; {}: none.
        existing: suffixes of objects that an earlier run of this job may have published; they are only compared.
    """

    def __init__(self, prefix: Location, codec: str) -> None:
        self.prefix, self.codec, self.existing, self.manifest = prefix, codec, list[str](), dict[str, Any]()
        self.bin_suffix = f"bin{suffix_of(codec)}"
        self.bin, self.idx = self.file(self.bin_suffix), self.file("idx")

    @classmethod
    def open(cls, prefix: Location, codec: str, sources: Sequence[WholeDataset], *, overwrite: bool) -> DatasetTarget:
        """Return the target under a prefix that is free, may be overwritten, or may hold an earlier run's output.

        Args:
            prefix: of the dataset to write.
            codec: name of the codec of its tokens.
            sources: datasets that are read meanwhile.
            overwrite: replace what is there.

        Raises:
            ConfigError: the prefix is a folder, or one of the sources.
            ObjectExistsError: other objects exist than an earlier run of this job leaves, and `overwrite` is False.
        """
        if prefix.uri.endswith("/"):
            raise ConfigError(f"{prefix}: a folder, needed a prefix such as {prefix}en")
        if any(prefix.absolute in dataset.source.uris for dataset in sources):
            raise ConfigError(f"{prefix}: is read and written, needed another prefix to write to")
        target = cls(prefix, codec)
        target.existing = [] if overwrite else target.find_objects()
        if target.existing not in ([], [target.bin_suffix], [target.bin_suffix, "idx"]):
            raise ObjectExistsError(target.refusal)
        target.manifest = common_manifest(prefix, sources)
        return target

    def file(self, suffix: str) -> Location:
        """Return the location of an object by its suffix, such as "bin.zst"."""
        return self.prefix + f".{suffix}"

    @property
    def refusal(self) -> str:
        """Message of the ObjectExistsError for a prefix that holds another dataset."""
        names = ", ".join(f".{suffix}" for suffix in self.existing or self.find_objects())
        return f"{self.prefix}: holds {names}, needed a free name; --overwrite replaces it"

    def find_objects(self) -> list[str]:
        """Return the suffixes of the objects under the prefix, in the order in which readers look for them."""
        suffixes = (*BinWriter.suffixes(), "idx", PARTS[1:])
        return [suffix for suffix in suffixes if object_exists(self.file(suffix))]

    def size(self) -> int:
        """Return the bytes of `.bin` and `.idx` together."""
        return sum(int(object_identity(file)["size"]) for file in (self.bin, self.idx))

    def check_free(self, resumed: bool = False) -> None:
        """Check that nothing exists under the prefix but a lone `.bin` that an earlier run published.

        Args:
            resumed: whether an earlier run was broken off.

        Raises:
            ObjectExistsError: something else exists.
        """
        suffixes = self.find_objects()
        if suffixes and not (resumed and suffixes[1:] == [] and suffixes[0] in BinWriter.suffixes()):
            raise ObjectExistsError(self.refusal)

    @property
    def is_complete(self) -> bool:
        """True if `.bin` and `.idx` exist already, so that the job compares both and writes neither."""
        return "idx" in self.existing

    def say_complete(self, watch: ProgressWatcher) -> None:
        """Report to `watch` that the dataset was complete already, if it was."""
        if self.is_complete:
            watch.say(f"{self.prefix}: holds this dataset already, compared byte for byte")

    def write_manifest(self, counts: Mapping[str, Any]) -> None:
        """Write the manifest, if there is one, with these counts; the one of a complete dataset stays."""
        if self.manifest and not (self.is_complete and object_exists(self.prefix + MANIFEST)):
            content = {"version": binidx.__version__, **self.manifest, "dataset": counts}
            write_object(self.prefix + MANIFEST, [MANIFEST_FILE.encode(content, indent=1)])

    def check_counts(self, num_sequences: int, num_documents: int, multimodal: bool) -> None:
        """Raise ObjectExistsError if the dataset exists with other counts, which saves a long comparison.

        Args:
            num_sequences, num_documents: counts of the dataset to write.
            multimodal: whether it has modes.
        """
        size = SequenceIndex.file_bytes(num_sequences, num_documents + 1) + num_sequences * multimodal
        if self.is_complete and object_identity(self.idx)["size"] != size:
            raise ObjectExistsError(self.refusal)

    def compare_index(self, columns: IndexColumns) -> None:
        """Raise ObjectExistsError if the existing `.idx` differs from one with these columns."""
        writer = ComparingWriter(self.idx, self.refusal)
        for piece in columns.format():
            writer.write(piece)
        writer.finish()

    def remove_existing(self, *, index: bool = True) -> None:
        """Remove the old index first, then other forms of the tokens, checksums, a virtual merge's list, and sidecars.

        The `.bin` in the form to write stays: publishing the new one replaces it.

        Args:
            index: whether to remove the index, too.
        """
        if index:
            delete_object(self.idx)
        BinWriter.remove_superseded(self.bin)
        for suffix in (PARTS, *SIDECARS):
            delete_object(self.prefix + suffix)

    def publish(self, columns: IndexColumns, *steps: Callable[[], object]) -> None:
        """Write the `.idx` invisibly; then call all `steps`, and make the `.idx` visible last.

        In a complete dataset the existing `.idx` is compared instead, and then all `steps` are called.
        """

        def call_steps() -> None:
            for step in steps:
                step()
            self.write_manifest(columns.counts())

        if self.is_complete:
            self.compare_index(columns)
            call_steps()
        else:
            write_object(self.idx, columns.format(), before_publish=call_steps)

    def publish_pieces(
        self,
        columns: IndexColumns,
        pieces: Sequence[SourcePiece],
        source_options: Options,
        watch: ProgressWatcher,
        check: Callable[[], object],
        remove_existing: Callable[[], object],
    ) -> tuple[int, str]:
        """Assemble the tokens from pieces, inside the store if it can, or compare them; then publish the dataset.

        Args:
            check, remove_existing: called right before the tokens become visible.

        Returns:
            The number of bytes that passed through this process, and how the tokens were copied: see `MergeResult`.
        """
        # The codec that is left to do for the pieces: none if they are moved as they are stored.
        codec = "raw" if codec_named(self.codec).joining else self.codec
        join = open_join(self.bin, pieces, source_options, codec, refusal=self.refusal if self.existing else "")
        try:
            watch.begin("tokens", sum(piece.num_bytes for piece in pieces), 0)
            join.fill(watch.advance)
            self.publish(columns, check, lambda: join.publish(remove_existing))
        finally:
            join.abandon()
        return join.moved_bytes, join.how


class DatasetOutput:
    """Unpublished dataset whose tokens pass through this process.

    Attributes:
        columns: columns of its `.idx`, to which the caller appends.
    """

    def __init__(self, target: DatasetTarget, dtype: DTypeLike, multimodal: bool) -> None:
        self.target, self.columns = target, IndexColumns(dtype, multimodal)

    @cached_property
    def bin(self) -> BinWriter | ComparingWriter:
        """Writer of the tokens; it only compares them if the target has an existing `.bin`."""
        if self.target.existing:
            return ComparingWriter(self.target.bin, self.target.refusal)
        return BinWriter(self.target.bin)

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


OWN_FIELDS = ("inputs", "output", "format", "part_bytes", "codec", "lineage")
"""Fields of a job that describe its own text and files, so not those of a dataset made of its dataset."""


def common_fields(jobs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields on which the jobs of manifests agree, and the names of the others, such as `tokenizer.eod`.

    Tokenizers of one digest get the place of the first.
    """
    common, others = dict[str, Any](), list[str]()
    for name in sorted(set[str]().union(*jobs) - {*OWN_FIELDS}):
        values: list[Any] = [job.get(name, ...) for job in jobs]
        digests = {value["digest"] if isinstance(value, dict) and "digest" in value else ... for value in values}
        if (name in ("uri", "merges") and values[0] is not ...) or all(value == values[0] for value in values):
            common[name] = values[0]
        elif ... not in digests and len(digests) == 1:
            common[name], inside = common_fields(values)
            others += [f"{name}.{other}" for other in inside]
        else:
            others.append(name)
    return common, others
