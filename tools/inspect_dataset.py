"""Print a dataset's header, counts, lengths, empty items, first tokens, and text.

The .idx is checked in full, so a dataset that inspect prints is sound; of the .bin only the first tokens are read, and
of a .bin.zst its seek table. With --text and --tokenizer the start of so many documents is shown as text, and
its origin, if there is lineage (.lineage.parquet).
Memory: the .idx, which is mapped when it is local, and 4 bytes a sequence to find the percentiles.

exit status: 0 a sound dataset, 1 a damaged one, 2 there is none

example:
  binidx inspect s3://corpus/en --text 3 --tokenizer tokenizer.json
  binidx inspect data/en
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

if __name__ == "__main__":  # python tools/inspect_dataset.py: see convert.py
    __package__ = "binidx.tools"

from binidx.errors import ConfigError
from binidx.format.idx import VERSION, DType
from binidx.format.idx_blocks import IndexStream
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.source import PairSource, VirtualSource, open_source
from binidx.storage.codecs.segments import SegmentedObject

from ._command import DATASET, human_bytes, json_object, parser, prefix, run
from ._document_texts import describe_texts, first_texts
from ._histogram import bins, draw, percentiles
from ._order_rows import decoder

BLOCK = 1 << 20
"""Values looked at together, so that no pass makes a second index in memory."""

KINDS = ("documents", "sequences")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = build_parser().parse_args(argv)
    return run("inspect", lambda: inspect(arguments))


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    options = parser("inspect", __doc__)
    options.add_argument("prefix", type=prefix, help=DATASET)
    options.add_argument("--documents", type=int, default=3, metavar="N", help="show the start of N documents (3)")
    options.add_argument("--tokens", type=int, default=16, metavar="N", help="show N tokens of each (16)")
    options.add_argument("--text", type=int, default=0, metavar="N", help="show the text of N documents; needs:")
    options.add_argument("--tokenizer", metavar="URI", help="any that preprocess takes")
    options.add_argument("--storage-options", metavar="JSON", type=json_object, help="fsspec's own, for this URI")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return options


def inspect(arguments: argparse.Namespace) -> int:
    """Print the report."""
    dataset = IndexedDataset(arguments.prefix, storage_options=arguments.storage_options)
    if bool(arguments.text) != bool(arguments.tokenizer):
        raise ConfigError("--text and --tokenizer go together, found one of them")
    report = build_report(dataset, arguments.documents, arguments.tokens)
    if decode := decoder(arguments.tokenizer, arguments.storage_options):
        report["texts"] = first_texts(dataset, arguments.text, decode)
    print(json.dumps(report) if arguments.json else describe(report))
    return 0


def build_report(dataset: IndexedDataset, num_documents: int = 3, num_tokens: int = 16) -> dict[str, Any]:
    """All that is known of a dataset, in JSON values.

    Args:
        num_documents: how many documents to show the start of; empty ones are passed over.
        num_tokens: how many tokens to show of each.
    """
    index = dataset.index
    source = open_source(dataset.path_prefix, dataset.storage_options)
    stream = source.open_index()
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
        "idx_bytes": stream.size,
        "stored": how_stored(dataset, source),
        "trailing_bytes": dataset.bin_reader.size - index.num_bytes,
        "sequence_lengths": {
            "mean": index.num_tokens / len(index) if len(index) else None,
            "percentiles": percentiles(index.sequence_lengths),
            "histogram": bins(index.sequence_lengths),
        },
        "modes": count_modes(stream) if stream.multimodal else None,
        "first_tokens": first_tokens(dataset, num_documents, num_tokens),
    }


def how_stored(dataset: IndexedDataset, source: PairSource | VirtualSource) -> dict[str, Any]:
    """The object that holds the tokens: its codec and bytes, its segments if it is compressed, its checksums if not.

    Of a virtual merge: the bytes of all, and what each part is stored as.
    """
    if isinstance(source, VirtualSource):
        parts = [
            {"prefix": each.prefix, "codec": each.codec, "checksums": bool(each.sums_uri)} for each in source.pairs
        ]
        return {"codec": "parts", "bytes": source.opened["bin"]["size"], "parts": parts}
    segmented = next((each for each in layers(dataset.bin_reader) if isinstance(each, SegmentedObject)), None)
    if segmented is not None:
        sizes = {"segments": len(segmented.table), "segment_bytes": segmented.block_bytes}
        return {"codec": source.codec, "bytes": segmented.stored_bytes, **sizes}
    return {"codec": source.codec, "bytes": dataset.bin_reader.size, "checksums": bool(source.sums_uri)}


def layers(reader: Any) -> Iterator[Any]:
    """Yield a reader and the readers below it."""
    while reader is not None:
        yield reader
        reader = getattr(reader, "reader", None)


def first_tokens(dataset: IndexedDataset, num_documents: int, num_tokens: int) -> list[dict[str, Any]]:
    """The start of the first documents that have sequences, each with its number. One vectored read."""
    bounds, lengths = dataset.document_indices[: BLOCK + 1], dataset.sequence_lengths
    documents = np.diff(bounds).nonzero()[0][: max(num_documents, 0)].tolist()
    spans = [(int(bounds[d]), 0, min(int(lengths[bounds[d]]), max(num_tokens, 0))) for d in documents]
    return [
        {"document": document, "sequence": span[0], "tokens": tokens.tolist()}
        for document, span, tokens in zip(documents, spans, dataset.read(spans), strict=True)
    ]


def count_empty_documents(bounds: NDArray[np.int64]) -> int:
    """Count the document bounds that repeat the one before; block by block, as there may be 10^9 of them."""
    pieces = (bounds[start : start + BLOCK + 1] for start in range(0, len(bounds) - 1, BLOCK))
    return sum(int((np.diff(piece) == 0).sum()) for piece in pieces)


def count_modes(stream: IndexStream) -> dict[str, int]:
    """Return mode -> number of its sequences, for a multimodal dataset."""
    counts = np.zeros(256, np.int64)
    for modes in stream.modes():
        counts += np.bincount(modes.view(np.uint8), minlength=256)
    return {str(np.uint8(byte).view(np.int8)): int(counts[byte]) for byte in counts.nonzero()[0]}


def describe(report: dict[str, Any]) -> str:
    """Return the report as text."""
    lengths = report["sequence_lengths"]
    lines = [report["prefix"], *rows(report), ""]
    if lengths["percentiles"]:
        lines += ["tokens in a sequence", *table(lengths["percentiles"], lengths["mean"]), ""]
        lines += [*draw(lengths["histogram"], shutil.get_terminal_size().columns, smooth=can_print("▏█")), ""]
    if report["first_tokens"]:
        lines += ["first tokens", *map(start_of, report["first_tokens"]), ""]
    lines += describe_texts(report.get("texts", []), shutil.get_terminal_size().columns)
    return "\n".join(lines).rstrip()


def rows(report: dict[str, Any]) -> list[str]:
    """Return name and value, one per line."""
    empty = {name: f", {report[f'empty_{name}']:,} empty" if report[f"empty_{name}"] else "" for name in KINDS}
    values = {
        "format": f"MMIDIDX version {report['version']}, {report['dtype']} (code {report['dtype_code']})",
        "documents": f"{report['num_documents']:,}{empty['documents']}",
        "sequences": f"{report['num_sequences']:,}{empty['sequences']}",
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
    """Return the rows about the stored object, if it is not a plain one without checksums."""
    if "parts" in stored:
        checked = sum(each["checksums"] for each in stored["parts"])
        compressed = sum(each["codec"] != "raw" for each in stored["parts"])
        kinds = [
            f"{count:,} {kind}" for count, kind in ((compressed, "compressed"), (checked, "with checksums")) if count
        ]
        whole = f"{len(stored['parts']):,} datasets, listed in a virtual merge"
        return {"parts": ", ".join([whole, *kinds])}
    if "segments" not in stored:
        return {".bin.xxh3": "checksums"} if stored["checksums"] else {}
    ratio = f"1 / {bin_bytes / stored['bytes']:.2f} of it"
    segments = f"{stored['segments']:,} segments of {human_bytes(stored['segment_bytes'])}"
    return {".bin.zst": f"{exact_bytes(stored['bytes'])}, {ratio}, {segments}"}


def can_print(text: str) -> bool:
    """Return whether the encoding of stdout has these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def exact_bytes(count: int) -> str:
    """`1,234,567 bytes (1.2 MiB)`."""
    return f"{count:,} bytes ({human_bytes(count)})" if count >= 1024 else f"{count:,} bytes"


def table(found: dict[str, int], mean: float) -> list[str]:
    """Percentiles in two lines."""
    cells = {name if name == "max" else f"{name} %": f"{value:,}" for name, value in found.items()}
    cells["mean"] = f"{mean:,.1f}"
    widths = [max(len(name), len(value)) + 2 for name, value in cells.items()]
    return [
        "".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
        for texts in (cells.keys(), cells.values())
    ]


def start_of(first: dict[str, Any]) -> str:
    """Return the start of one document."""
    shown = " ".join(map(str, first["tokens"])) or "(an empty sequence)"
    return f"  document {first['document']:,}: {shown}"


if __name__ == "__main__":
    sys.exit(main())
