"""Check a dataset: its index, the size of its .bin, its checksums, and its token ids against a vocabulary.

Every rule of the .idx is checked, and all tokens are read, wherever they lie: against the checksums of a .bin.xxh3 or
the frames of a .bin.zst where there are any, with --vocab-size against the vocabulary, and with --lineage each document
against the hash that .lineage.parquet has of it. Where there is a .manifest.json its counts must be those of the index.
A .bin with more than 4,096 bytes after its last token belongs to another .idx, or has a leftover: both are errors.
--quick reads only the index and the sizes. The first document that is wrong is named.

exit status: 0 all is sound, 1 something is wrong, 2 the call is wrong

example:
  binidx verify data/en --vocab-size 50257
  binidx verify s3://corpus/en --quick
  binidx verify data/en_text_document --lineage
"""

from __future__ import annotations

import argparse

from binidx.corpus.verify import Verification, verify_dataset

from ._command import DATASET, add_json, chosen, command, prefix, print_result
from ._display import Bar, counts, human_bytes, human_seconds


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("prefix", type=prefix, metavar="PREFIX", help=DATASET)
    options.add_argument("--vocab-size", type=int, metavar="V", help="every token must be from 0 to V - 1")
    options.add_argument("--quick", action="store_true", help="read only the index and the sizes")
    options.add_argument("--lineage", action="store_true", help="compare each document with the hash in its lineage")
    add_json(options, "--storage-options", "fsspec's own, for this URI")
    options.add_argument("--json", action="store_true", help="print what was found as one JSON object")


def verify(arguments: argparse.Namespace) -> int:
    """Check the dataset, and print the result."""
    with Bar("verify") as bar:
        options = chosen(arguments, "vocab_size", "quick", "lineage", "storage_options")
        checked = verify_dataset(arguments.prefix, **options, watch=bar)
    print_result(checked.to_json(), describe(checked), arguments)
    return 0


def describe(found: Verification) -> str:
    """Return the result as text."""
    empty = f", {found.empty_documents:,} of them empty" if found.empty_documents else ""
    trailing = f", {found.trailing_bytes:,} bytes after the last token" if found.trailing_bytes else ""
    lines = [
        f"{found.prefix}: sound; {human_seconds(found.seconds)}",
        f"  {counts(documents=found.num_documents)}{empty}, {counts(sequences=found.num_sequences)}",
        f"  {counts(tokens=found.num_tokens)} of {found.dtype}, {human_bytes(found.bin_bytes)}{trailing}",
        f"  {tokens_read(found)}",
    ]
    if found.manifest:
        lines.append("  the manifest's counts are the same")
    if found.lineage is not None:
        lines.append(f"  {counts(documents=found.lineage)} compared with the lineage")
    return "\n".join(lines)


def tokens_read(found: Verification) -> str:
    """Return a text about the tokens: their range, and the checksums with which they were compared."""
    if found.token_range is None:
        return "tokens were not read" if found.num_tokens else "there are no tokens"
    below = f", all in a vocabulary of {found.vocab_size:,}" if found.vocab_size is not None else ""
    sums = {
        None: "read; there are no checksums to compare them with",
        "frames": "compared with the checksums of their frames",
        "in part": "compared with their checksums; some parts have no checksums to compare them with",
    }
    read = sums.get(found.checked_by, f"compared with their {found.checked_by}")
    return f"tokens from {found.token_range[0]:,} to {found.token_range[1]:,}{below}; {read}"


main = command("verify", __doc__, add_options, verify)
