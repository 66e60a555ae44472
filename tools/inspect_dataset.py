"""Print a dataset's header, counts, lengths, empty items, first tokens, and text.

The .idx is checked in full, so a dataset that inspect prints is sound; of the .bin only the first tokens are read, and
of a .bin.zst its seek table. With --text and --tokenizer the start of so many documents is shown as text, and
its origin, if there is lineage (.lineage.parquet).
Memory: the .idx, which is mapped when it is local.

exit status: 0 a sound dataset, 1 a damaged one, 2 there is none

example:
  binidx inspect s3://corpus/en --text 3 --tokenizer tokenizer.json
  binidx inspect data/en
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.origins import origin_text
from binidx.errors import ConfigError
from binidx.explore.token_counts import count_lengths
from binidx.format.bin_file import as_prefix
from binidx.format.idx import VERSION, DType, SequenceIndex
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.source import PairSource, VirtualSource, open_source
from binidx.run.provenance.sample_rows import known_origins
from binidx.storage.interfaces import LayeredReader
from binidx.storage.open import suffix_of
from binidx.storage.ranges import as_block_reader

from ._command import DATASET, add_json, command, print_result
from ._display import human_bytes, table
from ._runs import decoder

BLOCK = 1 << 20
"""Number of values processed together, so that no pass makes a second index in memory."""

MOST_TOKENS = 512
"""Most tokens of a document that are decoded."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("prefix", type=as_prefix, metavar="PREFIX", help=DATASET)
    options.add_argument("--documents", type=int, default=3, metavar="N", help="show the start of N documents (3)")
    options.add_argument("--tokens", type=int, default=16, metavar="N", help="show N tokens of each (16)")
    options.add_argument("--text", type=int, default=0, metavar="N", help="show the text of N documents, with:")
    options.add_argument("--tokenizer", metavar="URI", help="any that preprocess takes")
    add_json(options, "--storage-options", "fsspec's own, for this URI")


def inspect(arguments: argparse.Namespace) -> None:
    """Print the report on a dataset."""
    dataset = IndexedDataset(arguments.prefix, storage_options=arguments.storage_options)
    if bool(arguments.text) != bool(arguments.tokenizer):
        raise ConfigError("--text and --tokenizer go together, found one of them")
    report = build_report(dataset, arguments.documents, arguments.tokens)
    if decode := decoder(arguments.tokenizer, arguments.storage_options):
        report["texts"] = first_texts(dataset, arguments.text, decode)
    print_result(report, describe(report), arguments)


def build_report(dataset: IndexedDataset, num_documents: int = 3, num_tokens: int = 16) -> dict[str, Any]:
    """Return the report on a dataset, as JSON values.

    Args:
        num_documents: number of documents whose first tokens to show; empty documents are skipped.
        num_tokens: number of tokens to show of each.
    """
    index = dataset.index
    source = open_source(dataset.location)
    stream = source.index
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
        "idx_bytes": stream.reader.size,
        "stored": how_stored(dataset, source),
        "trailing_bytes": dataset.bin_reader.size - index.num_bytes,
        "sequence_lengths": {
            "mean": index.num_tokens / len(index) if len(index) else None,
            "percentiles": count_lengths(dataset).percentiles,
        },
        "modes": count_modes(stream) if stream.sequence_modes is not None else None,
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
    reader = dataset.bin_reader
    while as_block_reader(reader) is None and isinstance(reader, LayeredReader):
        reader = reader.reader
    blocks = as_block_reader(reader)
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
    spans = [starting_spans(dataset, document) for document in documents]
    tokens = iter(dataset.read([span for starts in spans for span in starts]))
    origins = known_origins(dataset.location, documents)
    texts = []
    for document, starts in zip(documents, spans, strict=True):
        ids = np.concatenate([next(tokens) for _ in starts]).tolist()
        first, stop = dataset.document_indices[document : document + 2].tolist()
        whole = len(ids) == int(dataset.sequence_lengths[first:stop].sum())
        texts.append({"document": document, "text": decode(ids), "whole": whole, "origin": origins.get(document)})
    return texts


def starting_spans(dataset: IndexedDataset, document: int) -> list[tuple[int, int, int]]:
    """Return the spans of the first `MOST_TOKENS` tokens of a document."""
    spans, left = [], MOST_TOKENS
    for sequence in range(*dataset.document_indices[document : document + 2].tolist()):
        spans.append((sequence, 0, min(int(dataset.sequence_lengths[sequence]), left)))
        left -= spans[-1][2]
        if not left:
            break
    return spans


def count_empty_documents(bounds: NDArray[np.int64]) -> int:
    """Return the number of empty documents, counted block by block, as there may be 10^9 documents."""
    pieces = (bounds[start : start + BLOCK + 1] for start in range(0, len(bounds) - 1, BLOCK))
    return sum(int((np.diff(piece) == 0).sum()) for piece in pieces)


def count_modes(index: SequenceIndex) -> dict[str, int]:
    """Return mode -> number of sequences with this mode, of a multimodal dataset."""
    counts = np.zeros(256, np.int64)
    for modes in index.modes():
        counts += np.bincount(modes.view(np.uint8), minlength=256)
    return {str(np.uint8(byte).view(np.int8)): int(counts[byte]) for byte in counts.nonzero()[0]}


def describe(report: dict[str, Any]) -> str:
    """Return the report as text."""
    lengths, columns = report["sequence_lengths"], shutil.get_terminal_size().columns
    lines = [report["prefix"], *rows(report), ""]
    if lengths["percentiles"]:
        names = [name if name == "max" else f"{name} %" for name in lengths["percentiles"]]
        values = [f"{value:,}" for value in lengths["percentiles"].values()]
        mean = f"{lengths['mean']:,.1f}"
        lines += ["tokens in a sequence", table(["", *names, "mean"], [["", *values, mean]]), ""]
    if report["first_tokens"]:
        lines.append("first tokens")
        for first in report["first_tokens"]:
            shown = " ".join(map(str, first["tokens"])) or "(an empty sequence)"
            lines.append(f"  document {first['document']:,}: {shown}")
        lines.append("")
    lines += describe_texts(report.get("texts", []), columns)
    return "\n".join(lines).rstrip()


def rows(report: dict[str, Any]) -> list[str]:
    """Return lines of the report, each with a name and a value."""
    values = {"format": f"MMIDIDX version {report['version']}, {report['dtype']} (code {report['dtype_code']})"}
    for name in ("documents", "sequences"):
        empty = f", {report[f'empty_{name}']:,} empty" if report[f"empty_{name}"] else ""
        values[name] = f"{report[f'num_{name}']:,}{empty}"
    values |= {
        "tokens": f"{report['num_tokens']:,}",
        ".bin": exact_bytes(report["bin_bytes"]),
        **stored_rows(report["stored"], report["bin_bytes"]),
        ".idx": exact_bytes(report["idx_bytes"]),
    }
    if report["trailing_bytes"]:
        values["trailing"] = f"{exact_bytes(report['trailing_bytes'])} of the .bin after its last token"
    if report["modes"]:
        values["modes"] = ", ".join(f"{mode}: {count:,} sequences" for mode, count in report["modes"].items())
    return [f"  {name:<11}{value}" for name, value in values.items()]


def stored_rows(stored: dict[str, Any], bin_bytes: int) -> dict[str, str]:
    """Return name -> value for lines about the stored object; none for a plain one without checksums.

    Args:
        stored: as `how_stored` returns it.
        bin_bytes: plain bytes of the tokens.
    """
    if "parts" in stored:
        checked = sum(part["checksums"] for part in stored["parts"])
        compressed = sum(part["codec"] != "raw" for part in stored["parts"])
        kinds = [
            f"{count:,} {kind}" for count, kind in ((compressed, "compressed"), (checked, "with checksums")) if count
        ]
        whole = f"{len(stored['parts']):,} datasets, listed in a virtual merge"
        return {"parts": ", ".join([whole, *kinds])}
    if "segments" not in stored:
        return {".bin.xxh3": "checksums"} if stored["checksums"] else {}
    ratio = f"1 / {bin_bytes / stored['bytes']:.2f} of it"
    segments = f"{stored['segments']:,} segments of {human_bytes(stored['segment_bytes'])}"
    return {f".bin{suffix_of(stored['codec'])}": f"{exact_bytes(stored['bytes'])}, {ratio}, {segments}"}


def exact_bytes(count: int) -> str:
    """Format bytes: 1_234_567 -> `1,234,567 bytes (1.2 MiB)`."""
    return f"{count:,} bytes ({human_bytes(count)})" if count >= 1024 else f"{count:,} bytes"


def describe_texts(texts: Sequence[dict[str, Any]], columns: int) -> list[str]:
    """Return the texts of documents as lines for a terminal of `columns` columns."""
    lines = ["text"] if texts else []
    for start in texts:
        origin = f", from {origin_text(start['origin'])}" if start["origin"] else ""
        lines.append(f"  document {start['document']:,}{origin}")
        text = " ".join(start["text"].split()) + ("" if start["whole"] else " …")
        lines += textwrap.wrap(text, min(columns, 120), initial_indent="    ", subsequent_indent="    ")
    return lines


main = command("inspect", __doc__, add_options, inspect)
