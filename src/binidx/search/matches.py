"""Matches of patterns in documents by their tokens, which say what samples hold of each.

    text       the white rabbit ran        the pattern "hite rabbit"
    tokens     |the| wh|ite| rab|bit| ran|   tokens 1 to 5: all that hold a byte of it

The search (`document_search.py`) finds the documents; only these are read here, once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ObjectChangedError
from binidx.format.document_blocks import batch_by_size
from binidx.format.indexed_dataset import IndexedDataset, as_pair
from binidx.native.token_search import TokenTable
from binidx.order.order_protocols import Numbers, Source
from binidx.order.source_order import join_ranges
from binidx.search.document_search import Hits, SearchResult, search_documents
from binidx.search.normalize import normalize_bytes, normalize_query
from binidx.storage.location import Location

CONTINUATIONS = np.repeat([0, 1, 2, 3], [0xC0, 0x20, 0x10, 0x10])
"""Number of bytes of a UTF-8 character after its first one, by that."""


def locate_matches(
    dataset: IndexedDataset,
    hits: Hits,
    patterns: Sequence[str] | Sequence[Sequence[int]],
    table: TokenTable | None,
    *,
    normalize: bool = False,
    tokens_at_once: int = 1 << 20,
) -> Numbers:
    """Return all matches of patterns in the documents that a search has found, with the tokens that hold them.

    Args:
        dataset: the dataset that was searched.
        hits: what was found in it, of `SearchResult`.
        patterns, table, normalize: those of the search.
        tokens_at_once: tokens whose text is in memory together, unless a document has more: 20 MiB, and 50 MiB while
            they are decoded.

    Returns:
        Rows (document, pattern, first token, token after the last), shape (n, 4), those of a document together. Tokens
        count from the first of the document. Matches may overlap, and each is one that `hits` counts.

    Raises:
        ObjectChangedError: the tokens are not those that were searched.
    """
    dtype = dataset.dtype
    texts = [normalize_query(each) if normalize and isinstance(each, str) else each for each in patterns]
    encoded = [each.encode() if isinstance(each, str) else np.array(each, dtype).tobytes() for each in texts]
    sizes_of, unit = np.array([*map(len, encoded)]), 1 if table else dtype.itemsize
    documents, bounds, rows = np.unique(hits[:, 0]), dataset.document_indices, [np.empty((0, 4), np.int64)]
    first, stop = (np.asarray(bounds[documents + after], np.int64) for after in (0, 1))
    sequences, sizes = join_ranges(first, stop), np.concatenate([[0], np.cumsum(stop - first)])
    lengths = np.asarray(dataset.sequence_lengths[sequences], np.int64)
    spans, starts = np.column_stack([sequences, 0 * lengths, lengths]), np.concatenate([[0], lengths.cumsum()])[sizes]
    for part in (slice(*pair) for pair in batch_by_size(starts, tokens_at_once)):
        pieces = dataset.read(spans[sizes[part.start] : sizes[part.stop]])
        text, ends = decode_tokens(np.concatenate([np.empty(0, dtype), *pieces]), table, tokens_at_once)
        before = starts[part.start : part.stop + 1] - starts[part.start]  # tokens before each document
        edges, stored = np.concatenate([[0], ends])[before].tolist(), text
        if normalize:
            text, edges, origin = _normalize_parts(stored, edges)
        found = hits[slice(*hits[:, 0].searchsorted(documents[part][[0, -1]] + [0, 1]))]
        place = np.searchsorted(documents[part], found[:, 0])
        row, at = np.array([
            (row, at)
            for row, (number, (_, pattern, _, byte)) in enumerate(zip(place.tolist(), found.tolist(), strict=True))
            for at in _find_all(text, encoded[pattern], edges[number] + byte, edges[number + 1], unit)
        ], np.int64).reshape(-1, 2).T  # fmt: skip
        if (np.bincount(row, minlength=len(found)) != found[:, 2]).any():
            raise ObjectChangedError(f"{dataset.path_prefix}: has other tokens than when it was searched; search again")
        last = at + sizes_of[found[row, 1]] - 1
        if normalize:
            at, last = origin[at], origin[last]
            last += CONTINUATIONS[np.frombuffer(stored, np.uint8)[last]]
        tokens = [ends.searchsorted(at, "right"), ends.searchsorted(last, "right") + 1]
        rows.append(np.column_stack([found[row, :2], *(tokens - before[place[row]])]))
    return np.concatenate(rows)


def search_sources(
    sources: Mapping[str, Source],
    patterns: Sequence[str] | Sequence[Sequence[int]],
    table: TokenTable | None,
    options: Mapping[str, Any] | None,
    **how: Any,
) -> SearchResult:
    """Return the result of `search_documents` in the datasets of a run, by their names there.

    Args:
        sources: name -> the dataset.
        patterns, table, how: as for `search_documents`.
        options: options of the stores of the datasets.
    """
    names = {Location(source.prefix).uri: name for name, source in reversed([*sources.items()])}
    result = search_documents([Location(prefix, options) for prefix in names], patterns, table, **how)
    return replace(result, hits={names[prefix]: hits for prefix, hits in result.hits.items()})


def find_ranges(sources: Mapping[str, Source], result: SearchResult) -> dict[str, Numbers]:
    """Return the matches of a search in each source as `locate_matches` does: (document, pattern, first token, stop).

    Args:
        sources: those of `search_sources`.
        result: its result.
    """
    patterns, table, normalize = result.patterns, result.table, result.normalized
    return {
        name: locate_matches(as_pair(sources[name].dataset), hits, patterns, table, normalize=normalize)
        for name, hits in result.hits.items()
    }


def _normalize_parts(text: bytes, edges: Sequence[int]) -> tuple[bytes, list[int], Numbers]:
    """Return the normal forms of the parts of a text, their bounds, and where the character of each byte began."""
    parts = [normalize_bytes(text[first:stop]) for first, stop in pairwise(edges)]
    origins = [origin + first for (_, origin), first in zip(parts, edges, strict=False)]
    bounds = [*accumulate((len(normal) for normal, _ in parts), initial=0)]
    return b"".join(normal for normal, _ in parts), bounds, np.concatenate([np.empty(0, np.int64), *origins])


def decode_tokens(tokens: NDArray[Any], table: TokenTable | None, at_once: int = 1 << 20) -> tuple[bytes, Numbers]:
    """Return the bytes of tokens, and where each of them ends; without a table, their own bytes.

    Args:
        tokens: as they are stored, shape (n,).
        table: text of the tokens.
        at_once: number of tokens whose text is joined at once.
    """
    if table is None:
        return tokens.tobytes(), np.arange(1, len(tokens) + 1) * tokens.itemsize
    offsets = table.offsets.astype(np.int64)
    parts = (tokens[first : first + at_once] for first in range(0, len(tokens), at_once))
    text = (table.data[join_ranges(offsets[part], offsets[part + 1])].tobytes() for part in parts)
    return b"".join(text), np.diff(offsets)[tokens].cumsum()


def _find_all(text: bytes, pattern: bytes, first: int, stop: int, unit: int) -> Iterator[int]:
    """Yield all places of a pattern in a part of a text, overlapping ones too, that are a multiple of `unit`."""
    at = text.find(pattern, first, stop)
    while at >= 0:
        if at % unit == 0:
            yield at
        at = text.find(pattern, at + 1, stop)
