"""Compare two datasets by their documents: which were added or removed, which repeat, whether the order is another.

Documents are compared by a 128-bit hash of their tokens (xxh3_128, tokens as int64), so the dtypes may differ, and so
may compression and place; how a document is cut into sequences is not looked at. All tokens of both are read. Memory:
some hundred MB for any number of documents; disk: 40 bytes a document, in --scratch.

Of each kind the first few are named, by their numbers in the dataset that has them. An order break is a document of A
whose match stands in B before that of the document ahead of it.

With --engine, --workers or --shard processes of this machine, Ray, Dask or a scheduler share the work: --records names
a folder that all of them reach, for what lies between its three stages. It also lets the same command go on after a
break. --shard I/N ends where the other shards have to end a stage: give all commands again, three times in all.

exit status: 0 the same documents in the same order, or this shard is done; 1 they differ or the data is bad;
2 the call is wrong

example:
  binidx diff data/en s3://corpus/en
  binidx diff data/old data/new --json
  binidx diff s3://old/en s3://new/en --engine ray --records s3://new/en-diff
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ._command import Command, print_result
from ._display import counts, human_seconds
from ._options import add_dataset, add_json, add_workers, chosen, workers


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_dataset(options, "left", metavar="A")
    add_dataset(options, "right", metavar="B", help="prefix to compare it with")
    options.add_argument("--few", type=int, default=5, metavar="N", help="how many documents of each kind to name (5)")
    add_workers(options, "tasks")
    options.add_argument("--records", metavar="DIR", help="folder of what lies between the stages, for restarts")
    options.add_argument("--scratch", metavar="FOLDER", help="for temporary files; by default $TMPDIR")
    add_json(options, "--left-options", "fsspec's options for A")
    add_json(options, "--right-options", "the same for B")


def diff(arguments: argparse.Namespace) -> int:
    """Compare two datasets and print the differences; return 1 if there are any."""
    from binidx.corpus.diff import diff_datasets

    options = chosen(arguments, "few", "left_options", "right_options", "records", "scratch", "watch")
    pair = diff_datasets(arguments.left, arguments.right, workers=workers(arguments), **options)
    if pair.parts_missing:
        text = f"{counts(tasks=pair.parts_missing)} are left to other shards; give the same command again"
        print_result(pair.to_json(), text, arguments)
        return 0
    columns = pair.prefixes, pair.num_documents, pair.num_tokens, pair.num_duplicates
    lines = [
        f"{name} {prefix}: {counts(documents=documents, tokens=tokens)}, "
        f"{copies:,} {'copy' if copies == 1 else 'copies'} of earlier documents"
        for name, prefix, documents, tokens, copies in zip("AB", *columns, strict=True)
    ]
    lines += [
        f"  in both       {pair.num_common:,}",
        f"  removed       {counted(pair.num_removed, pair.removed, 'A')}",
        f"  added         {counted(pair.num_added, pair.added, 'B')}",
        f"  order breaks  {counted(pair.num_order_breaks, pair.order_breaks, 'A')}",
        f"  {'the same documents in the same order' if pair.same else 'they differ'}; {human_seconds(pair.seconds)}",
    ]
    print_result(pair.to_json(), "\n".join(lines), arguments)
    return 0 if pair.same else 1


def counted(count: int, first: Sequence[int], where: str) -> str:
    """Return a text such as `12: documents 3, 7, 9 ... of A`.

    Args:
        count: number of documents.
        first: numbers of the first of them.
        where: name of their dataset.
    """
    if not first:
        return f"{count:,}"
    return f"{count:,}: documents {', '.join(map(str, first))}{' ...' if count > len(first) else ''} of {where}"


main = Command("diff", __doc__, add_options, diff, progress=True)
