"""Check that a dataset is what its index says: structure, sizes, checksums, token ids, manifest and lineage.

    quick      the whole .idx, the size of the .bin, the counts of the manifest; of a virtual merge also each part's
    in full    every token, too: blocks against their checksums (.bin.xxh3) or frames (.bin.zst), ids against a
               vocabulary, and on demand each document against the hash in its lineage

Tokens are streamed, with 64 MiB of them in memory. Workers read them in parts (`token_parts`); the driver reads the
index, combines the findings of all parts in their order, and names the document of the first damage. A part's finding
is its record; damage has none, so that it is looked for again after a repair.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.exchange import ROUND_BYTES
from binidx.corpus.token_parts import DatasetPart, PinnedDataset, plan_documents, plan_ranges
from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectNotFoundError
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.format.source import VirtualSource
from binidx.jobs.parts import Values, Workers
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.jobs.runner import check_stop
from binidx.jobs.stages import make_recorded_parts
from binidx.json_models import JsonFile
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import stream
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists

DAMAGE_BYTES = 16 << 10
"""Bytes of one read in the search for a damaged block: one checksum covers so many bytes."""


@dataclass(frozen=True)
class Verification:
    """Result of a verification that found no error.

    Attributes:
        bin_bytes, trailing_bytes: uncompressed bytes of the `.bin`; the number of them after its last token, which is
            at most `bin_file.PADDING_BYTES`.
        checked_by: checksums with which the tokens were compared: "checksums" (.bin.xxh3), "frames" (zstd's own), "in
            part" if only some parts of a virtual merge have any; None if there are none, or with `quick`.
        token_range: smallest and largest token; None if no token was read.
        vocab_size: as given.
        manifest: whether there is a manifest, or one of a part; its counts are equal to those of the index.
        lineage: number of documents whose hash was compared; None without `lineage=True`.
        parts_missing: parts that are left to other shards; while there are any, only the index is known to be right.
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
    parts_missing: int = 0


def verify_dataset(
    prefix: Prefix,
    *,
    vocab_size: int | None = None,
    quick: bool = False,
    lineage: bool = False,
    storage_options: Options = None,
    watch: ProgressWatcher | None = None,
    workers: Workers | None = None,
    records: Prefix | None = None,
) -> Verification:
    """Read a dataset and check it.

    Args:
        vocab_size: every token must be in [0, vocab_size); None for no check.
        quick: read only the index and sizes.
        lineage: compare each document with its hash in the lineage file.
        workers: they read the tokens in parts; None: this process does.
        records: folder of the parts' findings, with the same storage options, for a restart and for shards. A call
            without a shard removes them at its end.

    Raises:
        ObjectNotFoundError: the dataset does not exist, or with `lineage` its lineage file.
        ConfigError: `vocab_size` or `lineage` with `quick`, `vocab_size` for tokens that are not integers, or a shard
            without `records`.
        FormatError: an error was found; for a damaged or invalid token the message names the document.
        ObjectChangedError: the dataset was replaced meanwhile.
        ObjectExistsError: `records` are of another verification.
        WorkerError, UnreachableError: a worker failed repeatedly, or the cluster is lost.
    """
    if records is not None and workers is None:
        raise ConfigError("records: found no workers, which write them; give workers, too")
    began, watch = time.monotonic(), watch or SilentWatcher()
    dataset = WholeDataset(Location.of(prefix, storage_options))
    index = dataset.index
    if quick and (lineage or vocab_size is not None):
        other = "lineage" if lineage else "vocab_size"
        raise ConfigError(f"{other}, quick: found both, need one; quick reads no tokens")
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"vocab_size: found {vocab_size}, needs at least 1")
    if vocab_size is not None and dataset.dtype.kind == "f":
        raise ConfigError(f"{dataset.prefix}: tokens are {dataset.dtype.name}, a vocabulary needs integers")
    plain = dataset.source.open_plain()
    dataset.check_index(watch, _refuse)
    manifest = dataset.source.check_manifests(index.counts)
    parts = [] if quick else plan_verification(dataset, plain.size, vocab_size, lineage=lineage, whole=workers is None)
    if workers is None or quick:
        findings = [_find_here(dataset, plain, part, watch) for part in parts]
    else:
        folder = None if records is None else Location.of(records, storage_options)
        findings = _find_by_workers(dataset, parts, workers, folder, watch)
    dataset.source.check_unchanged()
    number = float if dataset.dtype.kind == "f" else int
    bounds = [number(bound) for finding in findings for bound in finding.bounds]
    compared = sum(finding.compared for finding in findings) if lineage else None
    num_empty = sum(int((np.diff(block.bounds) == 0).sum()) for block in index.documents())
    counts = index.num_documents, index.num_sequences, index.num_tokens, num_empty
    names, sizes = (dataset.prefix, dataset.dtype.name), (plain.size, plain.size - dataset.num_bytes)
    token_range = (min(bounds), max(bounds)) if bounds else None
    checked, seconds = None if quick else dataset.source.checked_by, time.monotonic() - began
    found = Verification(*names, *counts, *sizes, checked, token_range, vocab_size, manifest, compared, seconds)
    return replace(found, parts_missing=len(parts) - len(findings))


def _refuse(uri: str, problem: str) -> None:
    raise FormatError(f"{uri}: {problem}")


@dataclass(frozen=True)
class Finding:
    """Result of a part, in JSON values.

    Attributes:
        bounds: smallest and largest token, as texts, since JSON has no NaN; empty without tokens.
        compared: number of documents whose hash was compared.
        problem: first damage, in words; "" if there is none.
        token: number of the damaged token; None if the problem names the document.
    """

    bounds: Sequence[str] = ()
    compared: int = 0
    problem: str = ""
    token: int | None = None

    def check(self, dataset: WholeDataset) -> None:
        """Raise FormatError for damage, with the damaged document."""
        if self.problem:
            where = "" if self.token is None else f"; {_locate(dataset, self.token)}"
            raise FormatError(f"{self.problem}{where}")


def plan_verification(
    dataset: WholeDataset, size: int, vocab_size: int | None, *, lineage: bool, whole: bool
) -> list[DatasetPart]:
    """Return the parts of a verification, those of the tokens first; parts of documents compare hashes.

    Args:
        dataset: its index must have been checked.
        size: plain bytes of its `.bin`.
        lineage: whether to compare documents with their hashes.
        whole: make one part of all tokens, and one of all documents.

    Raises:
        ObjectNotFoundError: there is no lineage to compare with.
    """
    pinned, ranges = PinnedDataset.of(dataset), [(0, size)] if whole else plan_ranges(size)
    parts = [DatasetPart(pinned, start, stop, stop - start, "bytes", (vocab_size, False)) for start, stop in ranges]
    if lineage:
        if not object_exists(file := dataset.source.prefix + LINEAGE):
            raise ObjectNotFoundError(f"{file}: not found; binidx preprocess writes it")
        parts += plan_documents(dataset, len(ranges), (None, True))
    return parts


def _find_here(dataset: WholeDataset, plain: RangeReader, part: DatasetPart, watch: ProgressWatcher) -> Finding:
    """Return the finding of a part; raise FormatError for damage."""
    watch.begin("lineage" if part.unit == "documents" else "tokens", part.size, 0)
    finding = _find(dataset, plain, dataset.num_bytes, part, watch.advance)
    finding.check(dataset)
    return finding


def _find_by_workers(
    dataset: WholeDataset, parts: list[DatasetPart], workers: Workers, records: Location | None, watch: ProgressWatcher
) -> list[Finding]:
    """Return the findings of the parts, as far as there are any; raise FormatError for the first damage."""
    first, digest = parts[0], JsonFile.digest([part.name for part in parts])
    identity = {"job": "verify", "source": first.dataset.identity, "vocab_size": first.settings[0], "parts": digest}
    remote = dataset.source.prefix.local_path is None
    values = make_recorded_parts(
        functools.partial(_verify_part, dataset.num_bytes), parts, workers, records, identity, watch,
        remote_data=remote, is_final=lambda result: not result["problem"],
    )  # fmt: skip
    findings = {part: Finding(**values[part.name]) for part in parts if part.name in values}
    for finding in findings.values():
        finding.check(dataset)
    return list(findings.values())


def _verify_part(num_bytes: int, part: DatasetPart) -> Values:
    """Return the finding of a part of a dataset with `num_bytes` of tokens, in a worker."""
    return asdict(_find(part.dataset.open(), part.dataset.reader(), num_bytes, part, lambda count: check_stop()))


def _find(
    dataset: WholeDataset, plain: RangeReader, num_bytes: int, part: DatasetPart, advance: Callable[[int], object]
) -> Finding:
    if part.unit == "documents":
        return _compare_hashes(dataset, plain, part, advance)
    return _read_tokens(dataset, plain, num_bytes, part, advance)


def _compare_hashes(
    dataset: WholeDataset, plain: RangeReader, part: DatasetPart, advance: Callable[[int], object]
) -> Finding:
    """Compare each document of a part with its hash in the lineage file.

    Raises:
        FormatError: the lineage has another number of rows than the dataset has documents.
    """
    documents = first, _ = part.start, part.stop
    compared, hashes = 0, np.empty(0, np.uint64)
    batches = dataset.hash_documents(plain, xxhash.xxh3_64, documents=documents)
    for table in dataset.source.lineage(documents):
        while len(hashes) < len(table):
            digests, num_bytes = next(batches)
            hashes = np.concatenate([hashes, np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)])
            advance(num_bytes)
        column = table.column("hash")
        needed, present = column.fill_null(0).to_numpy(), column.is_valid().to_numpy()
        wrong = np.flatnonzero(present & (needed != hashes[: len(table)]))
        if len(wrong):
            file = dataset.source.prefix + LINEAGE
            problem = f"{file}: row {first + wrong[0]} is of another document than {dataset.prefix} has there"
            return Finding(problem=problem)
        compared += int(present.sum())
        first, hashes = first + len(table), hashes[len(table) :]
    return Finding(compared=compared)


def _read_tokens(
    dataset: WholeDataset, plain: RangeReader, num_bytes: int, part: DatasetPart, advance: Callable[[int], object]
) -> Finding:
    """Read all bytes of a part; those behind the first `num_bytes` of the `.bin` are no tokens."""
    dtype, start, bounds, vocab_size = dataset.dtype, part.start, list[Any](), part.settings[0]
    try:
        for data in stream(plain, part.stop, start=start):
            tokens = np.frombuffer(data[: max(num_bytes - start, 0)], dtype)
            if len(tokens):
                low, high = tokens.min().item(), tokens.max().item()
                if vocab_size is not None and (low < 0 or high >= vocab_size):
                    return _refuse_token(dataset, tokens, start // dtype.itemsize, vocab_size)
                bounds = [min([low, *bounds]), max([high, *bounds])]
            advance(len(data))
            start += len(data)
    except FormatError as error:
        place = _first_damage(plain, (start, min(start + ROUND_BYTES, part.stop)))
        return Finding(problem=str(error), token=place // dtype.itemsize)
    return Finding(list(map(repr, bounds)))


def _first_damage(plain: RangeReader, around: Range) -> int:
    """Return the start of the first block of `DAMAGE_BYTES` in a range that cannot be read; else of the range."""
    for block in cut(around, DAMAGE_BYTES):
        try:
            plain.read([block])
        except BinidxError:
            return block[0]
    return around[0]


def _refuse_token(dataset: WholeDataset, tokens: NDArray[Any], first: int, vocab_size: int) -> Finding:
    place = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    problem = f"{dataset.source.bin}: token {tokens[place]}, needed 0 to {vocab_size - 1}"
    return Finding(problem=problem, token=first + place)


def _locate(dataset: WholeDataset, token: int) -> str:
    """Return a text such as "document 17, token 3 of it" for a token number, with the part of a virtual merge."""
    for block in dataset.index.documents():
        bounds = block.token_bounds()
        if token < bounds[-1]:
            place, source = int(np.searchsorted(bounds, token, "right")) - 1, dataset.source
            text = f"document {block.first + place}, token {token - bounds[place]} of it"
            if isinstance(source, VirtualSource):
                text += f", in the part {source.part_at(token * dataset.index.dtype_size)}"
            return text
    return "after the last document"
