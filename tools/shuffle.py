"""Shuffle the documents of a dataset, or the lines of text, in bounded memory.

The order is a function of --seed and of how many documents (or lines) there are: the same on every machine, whatever
--memory says. Several sources come together as one. Two passes read and write in long runs: into buckets on the scratch
disk, then bucket by bucket in order. The scratch disk needs room for all the tokens (or text) once; it is free again
when the command ends, however that is.

Compressed datasets (.bin.zst) give a compressed one. Lineage (.lineage.parquet) comes along. Checksums (.bin.xxh3) are
not carried along: binidx convert TARGET TARGET --checksums takes them anew. Nothing stands under the target's name
before it is whole: the .idx comes last. After a break, the same command begins again; what the first run had published
is compared, byte for byte, and left alone, while a target of other content needs --overwrite.

With --lines SOURCE is jsonl or other text, also .gz and .zst, and the target one object, compressed if its name says
so.

exit status: 0 shuffled, 1 the data is bad, 2 the call is wrong

example:
  binidx shuffle data/en --to data/en-shuffled --seed 1 --memory 2GB
  binidx shuffle s3://corpus/en s3://corpus/code --to s3://corpus/all --seed 1 --scratch /local/nvme
  binidx shuffle --lines 'text/*.jsonl.gz' --to text/shuffled.jsonl.zst --seed 1
"""

from __future__ import annotations

import argparse
from typing import Any

from binidx.corpus.shuffle import MEMORY_BYTES, ShuffleResult, shuffle_datasets
from binidx.errors import ConfigError
from binidx.prepare.text.line_shuffle import ShuffledLines, shuffle_lines

from ._command import DATASET, add_writing, chosen, command, num_bytes, prefix, print_result, writing
from ._display import Bar, counts, human_bytes, human_seconds


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("sources", nargs="+", metavar="SOURCE", help=f"{DATASET}; with --lines, text")
    options.add_argument(
        "--to", dest="target", required=True, metavar="TARGET", help="prefix to write; with --lines, the object"
    )
    options.add_argument("--seed", type=int, required=True, help="any number; another one gives another order")
    memory = f"{MEMORY_BYTES >> 30}GiB"
    options.add_argument("--memory", type=num_bytes, default=memory, metavar="SIZE", help=f"memory bound ({memory})")
    options.add_argument("--scratch", metavar="FOLDER", help="for what lies between the passes; by default $TMPDIR")
    options.add_argument("--lines", action="store_true", help="shuffle lines of text")
    add_writing(options)


def shuffle(arguments: argparse.Namespace) -> None:
    """Shuffle documents or lines, and print a summary."""
    common = {**writing(arguments), **chosen(arguments, "seed", "scratch"), "memory_bytes": arguments.memory}
    done: Any
    with Bar("shuffle") as bar:
        if arguments.lines:
            del common["lineage"]
            done = shuffle_lines(arguments.sources, arguments.target, **common, watch=bar)
        else:
            sources, target = [dataset(source) for source in arguments.sources], dataset(arguments.target)
            done = shuffle_datasets(sources, target, **common, watch=bar)
    text = describe_lines(done) if arguments.lines else describe(done)
    print_result(done.to_json(), text, arguments)


def dataset(text: str) -> str:
    """Return the prefix of a dataset; raise ConfigError for the name of one of its files."""
    try:
        return prefix(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from None


def describe(done: ShuffleResult) -> str:
    """Return the summary of shuffled documents."""
    lineage = "with" if done.lineage else "no"
    return (
        f"{done.target}: {counts(datasets=done.num_sources)}\n"
        f"  {counts(documents=done.num_documents, sequences=done.num_sequences, tokens=done.num_tokens)}\n"
        f"  {counts(buckets=done.num_buckets)}; {lineage} lineage; {human_seconds(done.seconds)}"
    )


def describe_lines(done: ShuffledLines) -> str:
    """Return the summary of shuffled lines."""
    text = f"{counts(lines=done.num_lines)}, {human_bytes(done.num_bytes)}"
    return f"{done.target}: {text}; {counts(buckets=done.num_buckets)}; {human_seconds(done.seconds)}"


main = command("shuffle", __doc__, add_options, shuffle, "interrupted; nothing was written")
