"""Shuffle the documents of a dataset, or the lines of text, in bounded memory.

The order is a function of --seed and of how many documents (or lines) there are: the same on every machine, whatever
--memory says. Several sources come together as one. Two passes read and write in long runs: into buckets on the scratch
disk, then bucket by bucket in order. The scratch disk needs room for all the tokens (or text) once; it is free again
when the command ends, however that is.

Compressed datasets (.bin.zst) give a compressed one. Lineage (.lineage.parquet) comes along. Checksums (.bin.xxh3) are
not carried along: binidx convert TARGET --to TARGET --checksums takes them anew. Nothing stands under the target's name
before it is whole: the .idx comes last. After a break, the same command begins again; what the first run had published
is compared, byte for byte, and left alone, while a target of other content needs --overwrite.

With --engine, --workers or --shard the two passes are tasks for processes of this machine, Ray, Dask or a scheduler,
and the buckets are objects in TARGET-parts. A task needs 1.6 GiB of memory, and beyond 128 GiB of tokens 8 MiB of
scratch for each GiB of them. The last call joins the parts, inside the store where it can. An interrupted job
continues. --shard I/N ends where the other shards have to end a pass: give all commands again, two times in all.

With --lines, SOURCE is jsonl or other text, also .gz and .zst, and the target one object, compressed if its name says
so.

exit status: 0 shuffled, 1 the data is bad, 2 the call is wrong

example:
  binidx shuffle data/en --to data/en-shuffled --seed 1 --memory 2GB
  binidx shuffle s3://corpus/en s3://corpus/code --to s3://corpus/all --seed 1 --scratch /local/nvme
  binidx shuffle s3://corpus/en --to s3://corpus/new --seed 1 --engine ray
  binidx shuffle --lines 'text/*.jsonl.gz' --to text/shuffled.jsonl.zst --seed 1
"""

from __future__ import annotations

import argparse
from typing import Any

from binidx.errors import ConfigError

from . import _options
from ._command import Command, print_result
from ._display import counts, counts_of_dataset, human_bytes, human_seconds
from ._options import DATASET, add_target, add_workers, add_writing, chosen, chosen_workers, num_bytes, seed, writing


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("sources", nargs="+", metavar="SOURCE", help=f"{DATASET}; with --lines, text")
    add_target(options, "prefix to write; with --lines, the object", type=str, metavar="TARGET")
    options.add_argument("--seed", type=seed, required=True, help="a number; another one gives another order")
    options.add_argument("--memory", type=num_bytes, default="2GiB", metavar="SIZE", help="memory bound (2GiB)")
    options.add_argument("--scratch", metavar="FOLDER", help="for what lies between the passes; by default $TMPDIR")
    options.add_argument("--lines", action="store_true", help="shuffle lines of text")
    add_workers(options, "tasks")
    add_writing(options)


def shuffle(arguments: argparse.Namespace) -> None:
    """Shuffle documents or lines, and print a summary."""
    from binidx.corpus.shuffle import shuffle_datasets

    options = {**writing(arguments), **chosen(arguments, "seed", "scratch"), "memory_bytes": arguments.memory}
    if arguments.lines:
        print_shuffled_lines(arguments, options)
        return
    sources, to = map(_options.prefix, arguments.sources), _options.target(arguments.target)
    done = shuffle_datasets([*sources], to, **options, workers=chosen_workers(arguments))
    if done.parts_missing:
        text = f"{done.target}: {counts(tasks=done.parts_missing)} left to other shards; give the same command again"
        print_result(done, text, arguments)
        return
    held = counts_of_dataset(done)
    lineage = "with" if done.lineage else "no"
    how = f"{counts(buckets=done.num_buckets)}; {lineage} lineage; {human_seconds(done.seconds)}"
    text = f"{done.target}: {counts(datasets=done.num_sources)}\n  {held}\n  {how}"
    print_result(done, text, arguments)


def print_shuffled_lines(arguments: argparse.Namespace, options: dict[str, Any]) -> None:
    """Shuffle lines, and print a summary."""
    from binidx.prepare.text.line_shuffle import shuffle_lines

    if chosen_workers(arguments) is not None:
        raise ConfigError("lines: are shuffled by one process; leave out --engine, --workers and --shard")
    del options["lineage"]
    done = shuffle_lines(arguments.sources, arguments.target, **options)
    text = f"{counts(lines=done.num_lines)}, {human_bytes(done.num_bytes)}; {counts(buckets=done.num_buckets)}"
    print_result(done, f"{done.target}: {text}; {human_seconds(done.seconds)}", arguments)


main = Command("shuffle", __doc__, add_options, shuffle, "interrupted; nothing was written", progress=True)
