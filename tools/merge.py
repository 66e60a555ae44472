"""Merge datasets of one dtype into one: their documents, in the order in which they are named.

Only the index is rewritten, in a few MB of memory however many documents there are. The tokens are moved by the store
itself from S3 to S3 and within a bucket of GCS, and by the kernel from disk to disk (copy_file_range, which shares the
blocks where the file system can); anything else passes through this machine. Nothing stands under the target's name
before it is whole: the .idx comes last. After a break, the same command begins again.

With --virtual nothing is moved: TARGET.parts.json lists the datasets, and opens as what the merge would have made. They
may lie in several stores, compressed or not, and must stay as they are. Every command takes it as a dataset: this one,
given it as a source, makes it real.

Lineage (.lineage.parquet) comes along: a document of a dataset without lineage is identified by the prefix and its
number in it. Compressed datasets (.bin.zst) give a compressed one, without being decompressed; all must be compressed
or none. What is moved is not read, so a damaged source gives a damaged target: run binidx verify before. Checksums
(.bin.xxh3) are not carried along: binidx convert TARGET TARGET --checksums takes them anew.

exit status: 0 merged, 1 the data is bad, 2 the call is

example:
  binidx merge data/part-0 data/part-1 data/part-2 --to data/en
  binidx merge s3://corpus/en s3://corpus/code --to s3://corpus/all
  binidx merge s3://corpus/en gs://corpus/code --to s3://corpus/all --virtual
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

if __name__ == "__main__":  # python tools/merge.py: see convert.py
    __package__ = "binidx.tools"

from binidx.corpus.merge import MergeResult, merge_datasets, merge_virtually
from binidx.errors import ConfigError

from ._command import DATASET, add_writing, counts, human_bytes, human_seconds, parser, prefix, run
from ._progress import Bar


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = build_parser().parse_args(argv)
    return run("merge", lambda: merge(arguments), after_interrupt="interrupted; nothing was written")


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    options = parser("merge", __doc__)
    options.add_argument("sources", nargs="+", type=prefix, metavar="PREFIX", help=DATASET)
    options.add_argument("--to", required=True, type=prefix, metavar="PREFIX", help="of the merged dataset")
    options.add_argument("--virtual", action="store_true", help="only list the datasets; nothing is copied")
    add_writing(options)
    return options


def merge(arguments: argparse.Namespace) -> int:
    """Merge, and print a summary."""
    if arguments.virtual:
        return list_parts(arguments)
    with Bar("merge") as bar:
        done = merge_datasets(
            arguments.sources,
            arguments.to,
            lineage=not arguments.no_lineage,
            overwrite=arguments.overwrite,
            source_options=arguments.source_options,
            target_options=arguments.target_options,
            watch=bar,
        )
    print(json.dumps(done.to_json()) if arguments.json else describe(done))
    return 0


def list_parts(arguments: argparse.Namespace) -> int:
    """Write the list of a virtual merge, and print the counts of the dataset."""
    if arguments.target_options is not None and arguments.target_options != arguments.source_options:
        raise ConfigError("--target-options: a virtual merge is read with one set of options, needed --source-options")
    with Bar("merge") as bar:
        done = merge_virtually(
            arguments.sources,
            arguments.to,
            overwrite=arguments.overwrite,
            storage_options=arguments.source_options,
            watch=bar,
        )
    held = counts(documents=done.num_documents, sequences=done.num_sequences, tokens=done.num_tokens)
    said = f"{done.target}: a list of {counts(datasets=done.num_sources)}\n  {held}"
    print(json.dumps(done.to_json()) if arguments.json else said)
    return 0


HOW = {
    "server": "moved by the store",
    "copy_file_range": "copied by the kernel",
    "stream": "streamed through this machine",
}


def describe(done: MergeResult) -> str:
    """Return the summary."""
    lines = [
        f"{done.target}: {counts(datasets=done.num_sources)}",
        f"  {counts(documents=done.num_documents, sequences=done.num_sequences, tokens=done.num_tokens)}",
        f"  {human_bytes(done.bin_bytes)} {HOW[done.how]}, {human_bytes(done.moved_bytes)} through this process",
        f"  {human_seconds(done.seconds)}",
    ]
    if done.dropped_sums:
        lines += [
            "  checksums were neither compared nor carried along: binidx verify each source,",
            f"  then binidx convert {done.target} {done.target} --checksums",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
