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

from ._command import Command, add_subcommands, print_result
from ._display import counts, counts_of_dataset, human_seconds
from ._options import add_dataset, add_target, add_writing, chosen, seed, writing


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the three subcommands and their options."""
    first, sample, split = add_subcommands(
        options,
        ("head", cut, "the first documents"),
        ("sample", cut, "a part of the documents"),
        ("split", cut, "each document into one of several datasets"),
    )
    for each in (first, sample, split):
        add_dataset(each, "source")
        add_target(each, "to write to", dest="targets", nargs="+" if each is split else 1)
        add_writing(each)
    count = "how many; all if there are fewer"
    first.add_argument("-n", dest="num_documents", type=int, required=True, metavar="N", help=count)
    sample.add_argument("--fraction", dest="fractions", nargs=1, type=float, required=True, metavar="F", help="0 to 1")
    split.add_argument("--fractions", nargs="+", type=float, required=True, metavar="F", help="0 to 1")
    first.set_defaults(fractions=None, seed=0)
    for hashed in (sample, split):
        hashed.set_defaults(num_documents=None)
        hashed.add_argument("--seed", type=seed, required=True, help="of the hash")


def cut(arguments: argparse.Namespace) -> None:
    """Write the head, a sample or a split of a dataset, and print a summary: a line for it, and one for each target."""
    from binidx.corpus.cut import cut_dataset

    what = chosen(arguments, "source", "targets", "num_documents", "fractions", "seed")
    done = cut_dataset(**what, **writing(arguments))
    lines = [f"{done.source}: {counts(documents=done.num_documents)}; {human_seconds(done.seconds)}"]
    lines += [f"  {share.target}: {counts_of_dataset(share)}" for share in done.shares]
    print_result(done, "\n".join(lines), arguments)


main = Command("cut", __doc__, add_options, None, "interrupted; nothing partial was written", progress=True)
