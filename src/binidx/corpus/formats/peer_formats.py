"""Import and export: the registry of other libraries' formats, and the proof that a copy has the same tokens.

    import    files ── read ──► documents ── builder ──► PREFIX.bin, .idx    read back, and compared by digest
    export    PREFIX ─────────► documents ── write ────► files               read back by `read`, and compared

A format is a reader and a writer of documents, arrays of shape (length,). Memory: a shard, and a document.
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.formats import flat_tokens, folders
from binidx.corpus.formats.peer_files import Files, PeerOptions, Tokens, split_stream
from binidx.corpus.whole_dataset import DatasetTarget, Options
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectExistsError, ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.listing import list_matches


@dataclass(frozen=True)
class PeerFormat:
    """Format of another library.

    Attributes:
        peer: library and version whose files were compared.
        read: yields the documents of the files that a user names, in their order.
        write: writes documents below a location, and returns the files that `read` takes.
        suffix: that of its files, if it is neither a folder nor a prefix.
        needs_eod: whether its files lack the bounds of documents, which then end, or begin, with an EOD; those of
            OLMo-core may have them in a file beside.
        mark: end of the name of a file, nothing for its first file; a blank; and text near the beginning of that file.
    """

    peer: str
    read: Callable[[Sequence[Location], PeerOptions], Iterator[Tokens]]
    write: Callable[[Location, Iterable[Tokens], np.dtype[Any], PeerOptions], Files]
    suffix: str = ""
    needs_eod: bool = False
    mark: str = ""

    def list_files(self, source: Location) -> Files:
        """Return the files of a folder or a pattern, sorted; anything else as it is."""
        path, named = source.local_path, source.uri.endswith(self.suffix) and source.is_folder()
        if not self.suffix or (named if path is None else os.path.isfile(path)):
            return [source]
        if not (names := [name for name in list_matches(source) if name.endswith(self.suffix)]):
            raise ObjectNotFoundError(f"{source}: no {self.suffix} file in it; correct the name")
        return [Location(name, source.options) for name in names]

    def matches(self, source: Location) -> bool:
        """Return whether a source looks like one of this format."""
        end, _, mark = self.mark.partition(" ")
        with contextlib.suppress(BinidxError):
            file = source.beside(source.uri.rstrip("/") + end) if end else self.list_files(source)[0]
            reader = open_object(file, cache=False, codec="raw")
            head = bytes(reader.read([(0, min(4096, reader.size))])[0])
            return mark.encode() in head and file.uri.endswith(end or self.suffix)
        return False


FORMATS = {
    "mds": PeerFormat("MosaicML Streaming 0.13", folders.read_mds, folders.write_mds, mark='/index.json "shards"'),
    "litdata": PeerFormat("LitData 0.2", folders.read_litdata, folders.write_litdata, mark='/index.json "chunks"'),
    "olmo": PeerFormat("OLMo-core 3", flat_tokens.read_olmo, flat_tokens.write_olmo, ".npy", needs_eod=True),
    "arrow": PeerFormat("datasets.save_to_disk", folders.read_arrow, folders.write_arrow, mark='/state.json "_data_'),
    "nanotron": PeerFormat("datatrove, nanotron", flat_tokens.read_nanotron, flat_tokens.write_nanotron, ".ds"),
    "llmc": PeerFormat("llm.c", flat_tokens.read_llmc, flat_tokens.write_llmc, ".bin", True, f" {chr(0) * 1000}"),
    "neox": PeerFormat("GPT-NeoX, fairseq", flat_tokens.read_neox, flat_tokens.write_neox, mark=".idx TNTIDX"),
}
"""Name of a format -> its functions. A new one is a row, a reader and a writer."""


@dataclass(frozen=True)
class ImportResult:
    """Counts of an import or an export.

    Attributes:
        files: files that were read, or written.
        digest: XXH3 of the lengths and tokens of all documents, in 32 hex digits; equal for both sides.
    """

    format: str
    prefix: str
    files: list[str]
    documents: int
    tokens: int
    dtype: str
    digest: str


class DocumentDigest:
    """Digest and counts of documents, whatever the dtype of their tokens."""

    def __init__(self) -> None:
        self.hash, self.documents, self.tokens, self.low, self.high = xxhash.xxh3_128(), 0, 0, 0, 0

    def over(self, documents: Iterable[Tokens], watch: ProgressWatcher) -> Iterator[Tokens]:
        """Yield the documents, and add each."""
        for document in documents:
            self.documents, self.tokens = self.documents + 1, self.tokens + len(document)
            self.low, self.high = min(self.low, document.min(initial=0)), max(self.high, document.max(initial=0))
            self.hash.update(np.int64(len(document)).tobytes() + np.ascontiguousarray(document, "<i8").tobytes())
            watch.advance(len(document))
            yield document


def import_dataset(
    format: str,
    sources: Sequence[str],
    target: str,
    *,
    eod: int | None = None,
    column: str | None = None,
    stored_dtype: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> ImportResult:
    """Write the documents of another library's files as a dataset, read it back and compare all tokens.

    Args:
        format: key of FORMATS.
        sources: folder of `mds`, `litdata` and `arrow`; files of the others, in order, or folders or patterns of them,
            whose files are sorted; prefix of `neox`.
        target: prefix to write.
        eod: id at the bounds of documents: required by `olmo`, of which it splits files without a .csv.gz, and by
            `llmc`; of the others it splits packed samples.
        column: of `mds` and `arrow`; by default tokens or input_ids.
        stored_dtype: NumPy's name of the tokens' type in files that do not record it: `olmo`, `bytes` columns of `mds`.
        dtype: of the dataset; by default that of the files, int32 for one that a dataset cannot have.
        overwrite: replace a dataset.
        watch: receiver of the progress, in tokens.

    Raises:
        ConfigError: an unknown format, or an option that the format needs is missing; or files of another format.
        FormatError: the files are not of the format, or a token does not fit `dtype`.
        ObjectExistsError: there is a dataset, and `overwrite` is False.

    Source: ours.
    """
    peer, watch = find_format(format, eod), watch or SilentWatcher()
    options = PeerOptions(eod, column, None if stored_dtype is None else np.dtype(stored_dtype), watch=watch)
    place = Location.of(target, target_options)
    if not overwrite and IndexedDataset.exists(target, storage_options=target_options):
        raise ObjectExistsError(f"{place}: holds a dataset; give another prefix, or --overwrite")
    DatasetTarget.open(place, "raw", [], overwrite=overwrite)
    opened, given = [Location.of(source, source_options) for source in sources], DocumentDigest()
    try:
        locations = [file for source in opened for file in peer.list_files(source)]
        stored = peer.read(locations, options)
        documents = stored if eod is None or peer.needs_eod else split_stream(stored, eod)
        first = [*islice(documents, 1)]
    except BinidxError as error:
        names = [name for name, each in FORMATS.items() if each.matches(opened[0])]
        if names and format not in names:
            raise ConfigError(f"{opened[0]}: is of {FORMATS[names[0]].peer}; use binidx import {names[0]}") from None
        if isinstance(error, ObjectNotFoundError) and peer.mark.startswith("/"):
            raise ObjectNotFoundError(f"{error}; {format} needs the folder with {peer.mark[1:].split()[0]}") from error
        raise
    own = [document.dtype.newbyteorder("=") for document in first]
    kind = np.dtype(dtype) if dtype else next((each for each in own if each in OWN_DTYPES), np.dtype(np.int32))
    watch.begin("documents", 0, 0, "tokens")
    with IndexedDatasetBuilder(f"{place}.bin", kind, storage_options=target_options) as builder:
        for document in given.over(chain(first, documents), watch):
            builder.add_document(document, [len(document)])
        builder.finalize(f"{place}.idx")
    check_equal(format, place.uri, given, read_documents(IndexedDataset(target, storage_options=target_options)))
    if dtype is None and kind.itemsize > 2 and 0 <= given.low <= given.high <= np.iinfo(np.uint16).max:
        watch.say(f"{place}: of {kind}; its ids, up to {given.high:,}, fit --dtype uint16")
    files = [location.uri for location in locations]
    return ImportResult(format, target, files, given.documents, given.tokens, kind.name, given.hash.hexdigest())


def export_dataset(
    format: str,
    source: str,
    target: str,
    *,
    eod: int | None = None,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> ImportResult:
    """Write a dataset as files of another library, read them back and compare all tokens.

    Args:
        format: key of FORMATS.
        source: prefix of the dataset; the sequences of a document are written as one.
        target: folder to write; prefix of `neox`.
        eod: as in `import_dataset`.
        watch: receiver of the progress, in tokens.

    Raises:
        ConfigError: an unknown format, or `eod` is missing.
        FormatError: the format cannot hold a document, such as one without tokens in `mds`; or the files, read back,
            have other documents.
        ObjectExistsError: a file exists.

    Source: ours.
    """
    peer, watch = find_format(format, eod), watch or SilentWatcher()
    dataset, place = IndexedDataset(source, storage_options=source_options), Location.of(target, target_options)
    dtype, given = np.dtype(dataset.index.dtype), DocumentDigest()
    watch.begin("documents", dataset.index.num_tokens, 0, "tokens")
    options = PeerOptions(eod, None, dtype, dataset.index.num_tokens)
    files = peer.write(place, given.over(read_documents(dataset), watch), dtype, options)
    check_equal(format, place.uri, given, peer.read(files, options))
    names = [file.uri for file in files]
    return ImportResult(format, source, names, given.documents, given.tokens, dtype.name, given.hash.hexdigest())


def find_format(name: str, eod: int | None) -> PeerFormat:
    """Return a format by its name; raise ConfigError if it is not known, or needs an EOD and none is given."""
    if name not in FORMATS:
        raise ConfigError(f"format: unknown (found {name!r}, need one of {', '.join(FORMATS)})")
    if FORMATS[name].needs_eod and eod is None:
        raise ConfigError(f"eod: {name} files have no bounds of documents; give the id at them")
    return FORMATS[name]


def check_equal(format: str, uri: str, given: DocumentDigest, documents: Iterable[Tokens]) -> None:
    """Raise FormatError if documents that were read back are not the given ones."""
    found = DocumentDigest()
    collections.deque(found.over(documents, SilentWatcher()), 0)
    if found.hash.digest() != given.hash.digest():
        counts = [f"{each.documents:,} documents, {each.tokens:,} tokens" for each in (found, given)]
        hint = "; an EOD inside a document, or one that lacks it, has no place in this format"
        raise FormatError(
            f"{uri}: other documents than were written (found {counts[0]}; need {counts[1]})"
            f"{hint if FORMATS[format].needs_eod else ''}; remove it"
        )


SEQUENCES_AT_ONCE = 1024

OWN_DTYPES = (np.uint8, np.uint16, np.int8, np.int16, np.int32)
"""Types of tokens that a dataset keeps; it has others as int32, by default."""


def read_documents(dataset: IndexedDataset) -> Iterator[Tokens]:
    """Yield the tokens of each document."""
    bounds: list[int] = dataset.document_indices.tolist()
    sequences = (
        sequence
        for start in range(0, len(dataset), SEQUENCES_AT_ONCE)
        for sequence in dataset[start : start + SEQUENCES_AT_ONCE]
    )
    for first, stop in pairwise(bounds):
        parts: list[NDArray[Any]] = [next(sequences) for _ in range(stop - first)]
        yield parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dataset.index.dtype), *parts])
