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
from collections.abc import Sequence
from typing import Any

import binidx
from binidx.errors import ConfigError

from ._command import Command, print_result
from ._display import human_bytes, table
from ._options import add_dataset, add_json
from ._run_options import add_text_tokenizer


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_dataset(options, "prefix")
    options.add_argument("--documents", type=int, default=3, metavar="N", help="show the start of N documents (3)")
    options.add_argument("--tokens", type=int, default=16, metavar="N", help="show N tokens of each (16)")
    options.add_argument("--text", type=int, default=0, metavar="N", help="show the text of N documents, with:")
    add_text_tokenizer(options, "of the text")
    add_json(options, "--storage-options", "fsspec's own, for this URI")


def inspect(arguments: argparse.Namespace) -> None:
    """Print the report on a dataset."""
    from ._report import build_report, first_texts
    from ._runs import decoder

    dataset = binidx.IndexedDataset(arguments.prefix, storage_options=arguments.storage_options)
    if bool(arguments.text) != bool(arguments.tokenizer):
        raise ConfigError("--text and --tokenizer go together, found one of them")
    if low := [f"--{name}" for name in ("documents", "tokens", "text") if getattr(arguments, name) < 0]:
        raise ConfigError(f"{', '.join(low)}: found a negative number, needs 0 or more")
    report = build_report(dataset, arguments.documents, arguments.tokens)
    if decode := decoder(arguments.tokenizer, arguments.storage_options, [arguments.prefix]):
        report["texts"] = first_texts(dataset, arguments.text, decode)
    print_result(report, describe(report), arguments)


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
    from binidx.storage.open import suffix_of

    if "parts" in stored:
        checked = sum(part["checksums"] for part in stored["parts"])
        compressed = sum(part["codec"] != "raw" for part in stored["parts"])
        named = ((compressed, "compressed"), (checked, "with checksums"))
        kinds = [f"{count:,} {kind}" for count, kind in named if count]
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
    from binidx.format.sidecars.lineage import origin_text

    lines = ["text"] if texts else []
    for start in texts:
        origin = f", from {origin_text(start['origin'])}" if start["origin"] else ""
        lines.append(f"  document {start['document']:,}{origin}")
        text = " ".join(start["text"].split()) + ("" if start["whole"] else " …")
        lines += textwrap.wrap(text, min(columns, 120), initial_indent="    ", subsequent_indent="    ")
    return lines


main = Command("inspect", __doc__, add_options, inspect)
