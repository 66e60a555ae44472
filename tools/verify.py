"""Check a dataset: its index, the size of its .bin, its checksums, and its token ids against a vocabulary.

Every rule of the .idx is checked, and all tokens are read, wherever they lie: against the checksums of a .bin.xxh3 or
the frames of a .bin.zst where there are any, with --vocab-size against the vocabulary, and with --lineage each document
against the hash that .lineage.parquet has of it. Where there is a .manifest.json its counts must be those of the index.
A .bin with more than 4,096 bytes after its last token belongs to another .idx, or has a leftover: both are errors.
--quick reads only the index and the sizes. The first document that is wrong is named.

With --engine, --workers or --shard the tokens are read in parts of 256 MiB to 1 GiB, by processes of this machine, Ray,
Dask, or any scheduler that starts this command n times with --shard 0/n to n-1/n. The result is the same. --records
keeps the finding of each part: a restart reads the other parts only. Shards need it. The shard that finds all records
reports the result; the same command without --shard does so, too, and removes the records.

exit status: 0 all is sound, or the shard is done; 1 something is wrong; 2 the call is wrong

example:
  binidx verify data/en --vocab-size 50257
  binidx verify data/en --engine local --workers 2 --records data/en-verify
  binidx verify s3://corpus/en --quick
  binidx verify data/en_text_document --lineage
"""

from __future__ import annotations

import argparse

from ._command import Command, print_result
from ._display import counts, human_bytes, human_seconds
from ._options import add_dataset, add_json, add_workers, chosen, chosen_workers, workers

COMPARED_WITH = {
    None: "read; there are no checksums to compare them with",
    "frames": "compared with the checksums of their frames",
    "in part": "compared with their checksums; some parts have no checksums to compare them with",
}
"""Checksums with which tokens were compared -> text."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_dataset(options, "prefix")
    options.add_argument("--vocab-size", type=int, metavar="V", help="every token must be from 0 to V - 1")
    options.add_argument("--quick", action="store_true", help="read only the index and the sizes")
    options.add_argument("--lineage", action="store_true", help="compare each document with the hash in its lineage")
    add_workers(options, "parts")
    options.add_argument("--records", metavar="DIR", help="folder of the parts' findings, for restarts and shards")
    add_json(options, "--storage-options", "fsspec's own, for this URI and the records")


def verify(arguments: argparse.Namespace) -> None:
    """Check the dataset, and print the result."""
    from binidx.corpus.verify import verify_dataset

    options = chosen(arguments, "vocab_size", "quick", "lineage", "storage_options", "records", "watch")
    place = workers(arguments) if arguments.records else chosen_workers(arguments)
    checked = verify_dataset(arguments.prefix, **options, workers=place)
    if checked.parts_missing:
        left = f"no damage found; {counts(parts=checked.parts_missing)} left to other shards"
        print_result(checked, f"{checked.prefix}: {left}", arguments)
        return
    empty = f", {checked.empty_documents:,} of them empty" if checked.empty_documents else ""
    trailing = f", {checked.trailing_bytes:,} bytes after the last token" if checked.trailing_bytes else ""
    read = "tokens were not read" if checked.num_tokens else "there are no tokens"
    if checked.token_range is not None:
        below = f", all in a vocabulary of {checked.vocab_size:,}" if checked.vocab_size is not None else ""
        sums = COMPARED_WITH.get(checked.checked_by, f"compared with their {checked.checked_by}")
        read = f"tokens from {checked.token_range[0]:,} to {checked.token_range[1]:,}{below}; {sums}"
    lines = [
        f"{checked.prefix}: sound; {human_seconds(checked.seconds)}",
        f"  {counts(documents=checked.num_documents)}{empty}, {counts(sequences=checked.num_sequences)}",
        f"  {counts(tokens=checked.num_tokens)} of {checked.dtype}, {human_bytes(checked.bin_bytes)}{trailing}",
        f"  {read}",
    ]
    if checked.manifest:
        lines.append("  the manifest's counts are the same")
    if checked.lineage is not None:
        lines.append(f"  {counts(documents=checked.lineage)} compared with the lineage")
    print_result(checked, "\n".join(lines), arguments)


main = Command("verify", __doc__, add_options, verify, progress=True)
