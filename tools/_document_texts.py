"""The start of documents as text, and their origins."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from binidx.corpus.origins import origin_text, read_origins
from binidx.errors import MissingDriverError
from binidx.format.indexed_dataset import IndexedDataset

MOST_TOKENS = 512
"""Tokens of a document that are decoded."""

BLOCK = 1 << 20
"""Documents that are searched for non-empty ones."""


def first_texts(dataset: IndexedDataset, count: int, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Return the first documents with sequences: number, start of the text, whether it is complete, and origin.

    One vectored read of tokens.
    """
    bounds, lengths = dataset.document_indices[: BLOCK + 1], dataset.sequence_lengths
    documents = np.diff(bounds).nonzero()[0][: max(count, 0)].tolist()
    spans = [span for each in documents for span in spans_of(bounds[each : each + 2].tolist(), lengths)]
    tokens = iter(dataset.read(spans))
    origins = origins_of(dataset, documents)
    found = []
    for each in documents:
        first, stop = bounds[each : each + 2].tolist()
        read = [next(tokens) for _ in spans_of([first, stop], lengths)]
        ids = np.concatenate(read).tolist()
        whole = len(ids) == int(lengths[first:stop].sum())
        found.append({"document": each, "text": decode(ids), "whole": whole, "origin": origins.get(each)})
    return found


def spans_of(bounds: Sequence[int], lengths: Any) -> list[tuple[int, int, int]]:
    """Return the spans of the first `MOST_TOKENS` tokens of a document."""
    spans, left = [], MOST_TOKENS
    for sequence in range(*bounds):
        spans.append((sequence, 0, min(int(lengths[sequence]), left)))
        left -= spans[-1][2]
        if not left:
            break
    return spans


def origins_of(dataset: IndexedDataset, documents: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the origins of documents; empty if pyarrow, which reads the lineage, is missing."""
    try:
        return read_origins(dataset.path_prefix, documents, dataset.storage_options)
    except MissingDriverError as error:
        print(f"binidx: {error}", file=sys.stderr)
        return {}


def describe_texts(texts: Sequence[dict[str, Any]], columns: int) -> list[str]:
    """Return the texts as lines for the terminal."""
    lines = ["text"] if texts else []
    for each in texts:
        origin = f", from {origin_text(each['origin'])}" if each["origin"] else ""
        lines.append(f"  document {each['document']:,}{origin}")
        text = " ".join(each["text"].split()) + ("" if each["whole"] else " …")
        lines += textwrap.wrap(text, min(columns, 120), initial_indent="    ", subsequent_indent="    ")
    return lines
