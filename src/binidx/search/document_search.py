"""Find the documents of datasets in which exact texts, or sequences of token ids, stand.

    text           table of tokens ─► bytes of each document ─► C searches for all patterns at once
                   or folded bytes of each document
    tokens         bytes of the stored tokens                 ─► the same, in whole tokens

A match crosses the bounds of tokens and of sequences, never those of documents. Datasets are read from end to end, in
parts of about 256 MiB of whole documents, with 64 MiB of tokens of each part in memory.
"""

from __future__ import annotations

import base64
import functools
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.token_parts import DatasetPart, plan_documents, plan_ranges
from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset, read_tokenizers, warn_of_tokenizers
from binidx.errors import ConfigError, FormatError
from binidx.format.sidecars.dataset_manifest import MANIFEST
from binidx.format.virtual import check_named
from binidx.jobs.parts import Values, Workers
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.jobs.runner import check_stop
from binidx.jobs.stages import make_recorded_parts
from binidx.json_models import JsonFile
from binidx.native.token_search import FoldedTokens, TokenSearch, TokenTable
from binidx.search.normalize import fold_table, normalize_query
from binidx.storage.location import Location
from binidx.storage.open import stream
from binidx.storage.threads import OPENS
from binidx.tokenizers.describe import describe_tokenizer
from binidx.tokenizers.spec import TokenizerSpec
from binidx.tokenizers.token_bytes import token_table

Hits = NDArray[np.int64]
"""Rows (document, pattern, matches, first byte of the first match in the document's text, or in the normal form of that
text), shape (n, 4), ascending."""


@dataclass(frozen=True)
class SearchResult:
    """Documents in which patterns were found.

    Attributes:
        hits: prefix -> its documents and patterns.
        num_documents, num_tokens, num_bytes: what was searched: bytes of stored tokens.
        seconds: duration.
        patterns, table: those of the search.
        parts_missing: parts that are left to other shards.
        normalized: whether normal forms were compared.
    """

    hits: dict[str, Hits]
    num_documents: int
    num_tokens: int
    num_bytes: int
    seconds: float
    patterns: Sequence[str] | Sequence[Sequence[int]]
    table: TokenTable | None
    parts_missing: int = 0
    normalized: bool = False

    def documents(self) -> dict[str, NDArray[np.int64]]:
        """Return the numbers of the documents that were found, ascending, of each prefix that has some."""
        return {prefix: np.unique(hits[:, 0]) for prefix, hits in self.hits.items() if len(hits)}

    def format_list(self) -> str:
        """Return a list of documents, as `View` takes it: prefix, tab and number on each line."""
        numbers = self.documents().items()
        return "".join(f"{prefix}\t{number}\n" for prefix, found in numbers for number in found.tolist())


def search_documents(
    prefixes: Sequence[Prefix | Location],
    patterns: Sequence[str] | Sequence[Sequence[int]],
    table: TokenTable | None = None,
    *,
    normalize: bool = False,
    storage_options: Options = None,
    watch: ProgressWatcher | None = None,
    workers: Workers | None = None,
    records: Prefix | None = None,
) -> SearchResult:
    """Search datasets for patterns, all at once.

    Args:
        prefixes: of the datasets, or of virtual merges.
        patterns: texts, compared byte for byte in UTF-8; without a table, sequences of token ids.
        table: bytes of each token, from `token_table`.
        normalize: compare the normal forms of texts (`search/normalize.py`).
        storage_options: fsspec's options of the datasets.
        workers: they read parts; by default threads of this process.
        records: folder of the findings of the parts, for a restart and for shards.

    Returns:
        The documents with matches, by prefix.

    Raises:
        ConfigError: an empty pattern, `normalize` without a table, or a shard without `records`.
        FormatError: an index breaks a rule, or a token is not in the table.
        ObjectNotFoundError, ObjectChangedError: as `WholeDataset`.

    Example:
        >>> table = token_table(describe_tokenizer("tokenizer.json"))  # doctest: +SKIP
        >>> search_documents(["s3://corpus/en"], ["white rabbit"], table).documents()  # doctest: +SKIP

    Source: ours.
    """
    began, watch, workers = time.monotonic(), watch or SilentWatcher(), workers or Workers()
    workers.check_records(records)
    locations = {(location := Location.of(prefix, storage_options)).uri: location for prefix in prefixes}
    if normalize and table is None:
        raise ConfigError("normalize, tokens: found both, need one; token ids are compared as they are stored")
    texts = [normalize_query(pattern) if normalize and isinstance(pattern, str) else pattern for pattern in patterns]
    folded = FoldedTokens.of(fold_table(), table) if normalize and table is not None else None
    encoded = tuple(text.encode() if isinstance(text, str) else tuple(text) for text in texts)
    if not encoded or not all(encoded):
        raise ConfigError("patterns: found an empty one, or none; give a text, or token ids")
    datasets = OPENS.map(WholeDataset, locations.values())
    hashed = [pattern.hex() if isinstance(pattern, bytes) else pattern for pattern in encoded]
    hashed_table = table is not None and [table.data.tobytes().hex(), table.offsets.tolist()]
    query = JsonFile.digest([hashed, hashed_table, *([unicodedata.unidata_version] if normalize else [])])
    parts: dict[str, list[DatasetPart]] = {}
    for prefix, dataset in zip(locations, datasets, strict=True):
        dataset.check_index(watch)
        parts[prefix] = plan_search(dataset, query)
    every = [part for own in parts.values() for part in own]
    is_remote = any(location.local_path is None for location in locations.values())
    folder = None if records is None else Location.of(records, storage_options)
    identity = {"job": "grep", "query": query, "parts": JsonFile.digest([part.name for part in every])}
    search = functools.partial(_search_part, encoded, table, folded)
    results = make_recorded_parts(search, every, workers, folder, identity, watch, remote_data=is_remote)
    for dataset in datasets:
        dataset.source.check_unchanged()
    found = {name: base64.b64decode(result["hits"]) for name, result in results.items()}
    hits = {prefix: _merge([np.frombuffer(found[part.name], np.int64).reshape(-1, 4) for part in own
            if part.name in found]) for prefix, own in parts.items()}  # fmt: skip
    counts = [(each.index.num_documents, each.index.num_tokens, each.num_bytes) for each in datasets]
    num_documents, num_tokens, num_bytes = map(sum, zip(*counts, strict=True))
    missing = sum(part.name not in results for part in every)
    seconds = time.monotonic() - began
    return SearchResult(hits, num_documents, num_tokens, num_bytes, seconds, patterns, table, missing, normalize)


def find_token_table(prefixes: Sequence[Location], uri: str | None) -> TokenTable:
    """Return the bytes of each token of a tokenizer: that of a URI, or that which the manifests name.

    Args:
        prefixes: the datasets.
        uri: of a tokenizer, read with the options of the first dataset; None for the manifests'.

    Raises:
        ConfigError: as `find_tokenizer`, or tokens have no bytes of their own.
    """
    return token_table(find_tokenizer(prefixes, uri), prefixes[0].options)


def find_tokenizer(prefixes: Sequence[Location], uri: str | None = None) -> TokenizerSpec:
    """Return the tokenizer of a URI, with a warning where a manifest names another; without one that of the manifests.

    Raises:
        ConfigError: without a URI: a dataset has no manifest with a tokenizer, or they have different ones.
    """
    if uri is not None:
        spec = describe_tokenizer(uri, storage_options=prefixes[0].options if prefixes else None)
        warn_of_tokenizers(lambda: read_tokenizers(prefixes), "the text", spec)
        return spec
    pairs = [pair for dataset in OPENS.map(WholeDataset, prefixes) for pair in dataset.source.pairs]
    found: dict[str, TokenizerSpec] = {}
    for pair in pairs:
        recorded = (pair.manifest or {}).get("job", {}).get("tokenizer")
        if not recorded or not {"uri", "digest"} <= recorded.keys():
            raise ConfigError(
                f"tokenizer: {pair.prefix} has no manifest that names one; give the tokenizer of its tokens"
            )
        uri, merges = str(recorded["uri"]), recorded.get("merges") or None
        check_named(filter(None, [uri, merges]), pair.prefix + MANIFEST)
        if recorded["digest"] not in found:
            spec = describe_tokenizer(uri, merges=merges, storage_options=pair.prefix.options)
            if spec.digest != recorded["digest"]:
                raise ConfigError(
                    f"tokenizer: {uri} is another one than that of {pair.prefix}; give the tokenizer's URI"
                )
            found[spec.digest] = spec
    if len(found) > 1:
        names = ", ".join(spec.uri for spec in found.values())
        raise ConfigError(f"tokenizer: the datasets have several ({names}), needs one; search them one by one")
    return next(iter(found.values()))


def plan_search(dataset: WholeDataset, query: str) -> list[DatasetPart]:
    """Return the parts of a search for `query`, a digest, in a dataset whose index was checked."""
    parts = plan_documents(dataset, len(plan_ranges(dataset.num_bytes)), (query,))
    return [part for part in parts if part.start < part.stop]


Patterns = tuple[bytes | tuple[int, ...], ...]
"""Texts in UTF-8, or token ids."""


def _search_part(
    patterns: Patterns, table: TokenTable | None, folded: FoldedTokens | None, part: DatasetPart
) -> Values:
    """Search a part, in a worker."""
    dataset, plain = part.dataset.open(), part.dataset.reader()
    item_bytes, found = dataset.index.dtype_size, list[Hits]()
    search = TokenSearch(_stored_patterns(dataset, patterns), dataset.index.dtype, table, folded)
    for block in dataset.index.documents(part.stop - part.start, part.start):
        bounds = block.token_bounds()
        at = int(bounds[0])
        for data in stream(plain, int(bounds[-1]) * item_bytes, start=at * item_bytes):
            check_stop()
            stop = at + len(data) // item_bytes
            first, last = int(bounds.searchsorted(at, "right")) - 1, int(bounds.searchsorted(stop))
            inside = np.clip(bounds[first : last + 1], at, stop) - at
            try:
                hits = search.scan(data, inside, is_open=bool(bounds[last] > stop))
            except IndexError as error:
                number = np.frombuffer(data, dataset.dtype)[error.args[0]]
                document = block.first + int(bounds.searchsorted(at + error.args[0], "right")) - 1
                raise FormatError(
                    f"{dataset.source.bin}: document {document}: id outside the tokenizer's vocabulary "
                    f"(found {number}); give the tokenizer that made the ids"
                ) from error
            hits[:, 0] += block.first + first
            found.append(hits)
            at = stop
    return {"hits": base64.b64encode(_merge(found).tobytes()).decode()}


def _stored_patterns(dataset: WholeDataset, patterns: Patterns) -> list[bytes]:
    """Return patterns as bytes of text, or of tokens as a dataset stores them."""
    dtype = dataset.dtype
    if dtype.kind == "f":
        raise FormatError(f"{dataset.prefix}: tokens are {dtype.name}, a search needs integers")
    stored = list[bytes]()
    for pattern in patterns:
        fits = isinstance(pattern, bytes) or all(np.iinfo(dtype).min <= id <= np.iinfo(dtype).max for id in pattern)
        if not fits:
            raise FormatError(f"{dataset.prefix}: {dtype.name} does not hold the tokens {[*pattern][:8]}")
        stored.append(pattern if isinstance(pattern, bytes) else np.array(pattern, dtype).tobytes())
    return stored


def _merge(found: Sequence[Hits]) -> Hits:
    """Return rows in the order of documents and patterns, those of one document and pattern as one."""
    rows = np.concatenate([np.empty((0, 4), np.int64), *found])
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    if not len(rows):
        return rows
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(rows[:, :2], axis=0) != 0).any(axis=1)]))
    merged = rows[starts].copy()
    merged[:, 2] = np.add.reduceat(rows[:, 2], starts)
    merged[:, 3] = np.minimum.reduceat(rows[:, 3], starts)
    return merged
