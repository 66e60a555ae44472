"""Merge datasets of one dtype into one: their documents, in the order in which they are named.

Only the index is rewritten, in a few MB of memory however many documents there are. The tokens are moved by the store
itself from S3 to S3 and within a bucket of GCS, and by the kernel from disk to disk (copy_file_range, which shares the
blocks where the file system can); anything else passes through this machine. Nothing stands under the target's name
before it is whole: the .idx comes last. After a break, the same command begins again; what the first run had published
is compared, byte for byte, and left alone, while a target of other content needs --overwrite.

There is no --engine: the store copies the tokens where it can, and between disks one disk writes all of them; more
processes would wait for it. To copy through many machines, merge --virtual and convert the list with --engine.

With --virtual nothing is moved: TARGET.parts.json lists the datasets, and opens as what the merge would have made. They
may be compressed or not, and must stay as they are. Those on another host or in another bucket than the list are opened
only if BINIDX_PARTS_FROM names it (s3://more,gs://other). Every command takes the list as a dataset: this one, given it
as a source, makes it real.

Lineage (.lineage.parquet) comes along: a document of a dataset without lineage is identified by the prefix and its
number in it. Compressed datasets (.bin.zst) give a compressed one, without being decompressed; all must be compressed
or none. What is moved is not read, so a damaged source gives a damaged target: run binidx verify before. Checksums
(.bin.xxh3) are not carried along: binidx convert TARGET --to TARGET --checksums takes them anew.

exit status: 0 merged, 1 the data is bad, 2 the call is wrong

example:
  binidx merge data/part-0 data/part-1 data/part-2 --to data/en
  binidx merge s3://corpus/en s3://corpus/code --to s3://corpus/all
  binidx merge s3://corpus/en s3://corpus/code --to s3://corpus/all --virtual
"""

from __future__ import annotations

import argparse

from binidx.errors import ConfigError

from ._command import Command, print_result
from ._display import counts, counts_of_dataset, human_bytes, human_seconds
from ._options import add_dataset, add_target, add_writing, chosen, writing

HOW = {
    "server": "moved by the store",
    "copy_file_range": "copied by the kernel",
    "stream": "streamed through this machine",
    "compared": "there already, and equal",
}


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_dataset(options, "sources", nargs="+")
    add_target(options, "of the merged dataset")
    options.add_argument("--virtual", action="store_true", help="only list the datasets; nothing is copied")
    add_writing(options)


def merge(arguments: argparse.Namespace) -> None:
    """Merge datasets, and print a summary."""
    from binidx.corpus.merge import merge_datasets

    if arguments.virtual:
        list_datasets(arguments)
        return
    done = merge_datasets(arguments.sources, arguments.target, **writing(arguments))
    lines = [
        f"{done.target}: {counts(datasets=done.num_sources)}",
        f"  {counts_of_dataset(done)}",
        f"  {human_bytes(done.bin_bytes)} {HOW[done.how]}, {human_bytes(done.moved_bytes)} through this process",
        f"  {human_seconds(done.seconds)}",
    ]
    if done.dropped_sums:
        lines.append("  checksums were neither compared nor carried along: binidx verify each source,")
        lines.append(f"  then binidx convert {done.target} --to {done.target} --checksums")
    print_result(done, "\n".join(lines), arguments)


def list_datasets(arguments: argparse.Namespace) -> None:
    """Write a virtual merge, and print a summary."""
    from binidx.corpus.merge import merge_virtually

    if arguments.target_options not in (None, arguments.source_options):
        raise ConfigError("--target-options: a virtual merge is read with one set of options, needed --source-options")
    options = {"storage_options": arguments.source_options, "lineage": not arguments.no_lineage}
    done = merge_virtually(arguments.sources, arguments.target, **options, **chosen(arguments, "overwrite", "watch"))
    held = counts_of_dataset(done)
    print_result(done, f"{done.target}: a list of {counts(datasets=done.num_sources)}\n  {held}", arguments)


main = Command("merge", __doc__, add_options, merge, "interrupted; nothing was written", progress=True)
