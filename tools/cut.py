"""Cut a dataset by its documents, without tokenizing again: its head, a sample, or a split into several.

  head    the first N documents. From S3 to S3 and from disk to disk the tokens are moved without passing through here
  sample  a part of the documents
  split   each document into one of several datasets; into none, if the fractions leave something over

Samples and splits go by a hash of the seed and the number of the document: the same on every machine, a smaller sample
within each larger one, and near the fraction that was asked for, not exactly it. The order of the documents stays.

Lineage (.lineage.parquet) comes along. A compressed dataset gives compressed ones. Checksums (.bin.xxh3) are not
carried along, and a plain head is moved without being read: binidx verify tells whether the source is sound, and binidx
convert takes checksums anew. Nothing stands under a target's name before it is whole. After a break, the same command
begins again; what the first run had published is compared, byte for byte, and left alone, while a target of other
content needs --overwrite.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx cut head data/en --to data/en-10k -n 10000
  binidx cut sample s3://corpus/en --to data/small --fraction 0.001 --seed 1
  binidx cut split data/en --to data/train data/valid --fractions 0.99 0.01 --seed 1
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ._command import (
    DATASET,
    Command,
    add_subcommands,
    add_writing,
    chosen,
    prefix,
    print_result,
    run_subcommand,
    target,
    writing,
)
from ._display import counts, human_seconds

if TYPE_CHECKING:
    from binidx.corpus.cut import CutResult


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the three subcommands and their options."""
    first, sample, split = add_subcommands(
        options,
        ("head", cut_head, "the first documents"),
        ("sample", cut_split, "a part of the documents"),
        ("split", cut_split, "each document into one of several datasets"),
    )
    for each in (first, sample, split):
        each.add_argument("source", type=prefix, metavar="PREFIX", help=DATASET)
        to: dict[str, Any] = {"dest": "targets", "nargs": "+" if each is split else 1, "type": target}
        each.add_argument("--to", required=True, metavar="PREFIX", help="to write to", **to)
        add_writing(each)
    count = "how many; all if there are fewer"
    first.add_argument("-n", dest="num_documents", type=int, required=True, metavar="N", help=count)
    sample.add_argument("--fraction", dest="fractions", nargs=1, type=float, required=True, metavar="F", help="0 to 1")
    split.add_argument("--fractions", nargs="+", type=float, required=True, metavar="F", help="0 to 1")
    for hashed in (sample, split):
        hashed.add_argument("--seed", type=int, required=True, help="of the hash")


def cut_head(arguments: argparse.Namespace) -> None:
    """Write the first documents of a dataset, and print a summary."""
    from binidx.corpus.cut import head_dataset

    count, target = arguments.num_documents, arguments.targets[0]
    print_cut(head_dataset(arguments.source, target, count, **writing(arguments)), arguments)


def cut_split(arguments: argparse.Namespace) -> None:
    """Write a sample or a split of a dataset, and print a summary."""
    from binidx.corpus.cut import split_dataset

    options = chosen(arguments, "source", "targets", "fractions", "seed")
    print_cut(split_dataset(**options, **writing(arguments)), arguments)


def print_cut(done: CutResult, arguments: argparse.Namespace) -> None:
    """Print the summary of a finished cut: a line for the source, then one for each target."""
    lines = [f"{done.source}: {counts(documents=done.num_documents)}; {human_seconds(done.seconds)}"]
    lines += [
        f"  {share.target}: "
        + counts(documents=share.num_documents, sequences=share.num_sequences, tokens=share.num_tokens)
        for share in done.shares
    ]
    print_result(done.to_json(), "\n".join(lines), arguments)


main = Command(
    "cut", __doc__, add_options, run_subcommand, "interrupted; what is not whole was not written", progress=True
)
