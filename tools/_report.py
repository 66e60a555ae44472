"""Report on a dataset, which `binidx inspect` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.explore.token_counts import count_lengths, read_token_ranges, token_bounds
from binidx.format.idx import VERSION, DType
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.source import DatasetFiles, PairSource, VirtualSource, open_source
from binidx.run.display.sample_rows import known_origins
from binidx.storage.ranges import as_block_reader

BLOCK = 1 << 20
"""Number of values processed together, so that no pass makes a second index in memory."""

MOST_TOKENS = 512
"""Most tokens of a document that are decoded."""


def build_report(dataset: IndexedDataset, num_documents: int, num_tokens: int) -> dict[str, Any]:
    """Return the report on a dataset, as JSON values.

    Args:
        num_documents: number of documents whose first tokens to show; empty documents are skipped.
        num_tokens: number of tokens to show of each.
    """
    index = dataset.index
    source = open_source(dataset.location)
    return {
        "prefix": dataset.path_prefix,
        "version": VERSION,
        "dtype": index.dtype.__name__,
        "dtype_code": DType.code_from_dtype(index.dtype),
        "num_documents": len(index.document_indices) - 1,
        "num_sequences": len(index),
        "num_tokens": index.num_tokens,
        "empty_documents": count_empty_documents(index.document_indices),
        "empty_sequences": len(index) - int(np.count_nonzero(index.sequence_lengths)),
        "bin_bytes": dataset.bin_reader.size,
        "idx_bytes": source.index.reader.size,
        "stored": how_stored(dataset, source),
        "trailing_bytes": dataset.bin_reader.size - index.num_bytes,
        "sequence_lengths": {
            "mean": index.num_tokens / len(index) if len(index) else None,
            "percentiles": count_lengths(dataset).percentiles,
        },
        "modes": count_modes(source) if source.index.sequence_modes is not None else None,
        "first_tokens": first_tokens(dataset, num_documents, num_tokens),
    }


def how_stored(dataset: IndexedDataset, source: PairSource | VirtualSource) -> dict[str, Any]:
    """Return how the tokens are stored, as JSON values: codec and bytes, with segments or the presence of checksums.

    Of a virtual merge: the bytes of all parts, and codec and checksums of each.
    """
    if isinstance(source, VirtualSource):
        parts = [
            {"prefix": pair.prefix.uri, "codec": pair.codec, "checksums": bool(pair.sums)} for pair in source.pairs
        ]
        return {"codec": "parts", "bytes": source.opened["bin"]["size"], "parts": parts}
    blocks = as_block_reader(source.plain)
    if source.codec == "raw" or blocks is None:
        return {"codec": source.codec, "bytes": dataset.bin_reader.size, "checksums": bool(source.sums)}
    sizes = {"segments": blocks.num_blocks, "segment_bytes": blocks.block_bytes}
    return {"codec": source.codec, "bytes": blocks.stored_bytes, **sizes}


def first_documents(dataset: IndexedDataset, count: int) -> list[int]:
    """Return the numbers of the first `count` documents with sequences, among the first `BLOCK` documents."""
    documents: list[int] = np.diff(dataset.document_indices[: BLOCK + 1]).nonzero()[0][: max(count, 0)].tolist()
    return documents


def first_tokens(dataset: IndexedDataset, num_documents: int, num_tokens: int) -> list[dict[str, Any]]:
    """Return the first tokens of the first documents with sequences, each with its number; one vectored read."""
    documents, lengths = first_documents(dataset, num_documents), dataset.sequence_lengths
    first = dataset.document_indices[documents].tolist()
    spans = [(sequence, 0, min(int(lengths[sequence]), max(num_tokens, 0))) for sequence in first]
    return [
        {"document": document, "sequence": sequence, "tokens": tokens.tolist()}
        for document, sequence, tokens in zip(documents, first, dataset.read(spans), strict=True)
    ]


def first_texts(dataset: IndexedDataset, count: int, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Return for the first documents with sequences: number, start of the text, whether that is all of it, and origin.

    The tokens are read by one vectored read.

    Args:
        count: most documents.
        decode: returns the text of ids.
    """
    documents = first_documents(dataset, count)
    bounds = [token_bounds(dataset, range(document, document + 1)) for document in documents]
    tokens = read_token_ranges(dataset, [(start, min(start + MOST_TOKENS, stop)) for start, stop in bounds])
    origins, texts = known_origins(dataset.location, documents), list[dict[str, Any]]()
    for document, (start, stop), ids in zip(documents, bounds, tokens, strict=True):
        whole = len(ids) == stop - start
        texts.append({"document": document, "text": decode(ids), "whole": whole, "origin": origins.get(document)})
    return texts


def count_empty_documents(bounds: NDArray[np.int64]) -> int:
    """Return the number of empty documents, counted block by block, as there may be 10^9 documents."""
    pieces = (bounds[start : start + BLOCK + 1] for start in range(0, len(bounds) - 1, BLOCK))
    return sum(int((np.diff(piece) == 0).sum()) for piece in pieces)


def count_modes(source: DatasetFiles) -> dict[str, int]:
    """Return mode -> number of sequences with this mode, of a multimodal dataset."""
    counts = np.zeros(256, np.int64)
    for modes in source.index.modes():
        counts += np.bincount(modes.view(np.uint8), minlength=256)
    return {str(np.uint8(byte).view(np.int8)): int(counts[byte]) for byte in counts.nonzero()[0]}
