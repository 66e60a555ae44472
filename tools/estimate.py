"""Estimate the tokens of text, and what it costs to make them, out of a sample.

Pieces of 256 KiB (row groups, frames of .zst, whole .gz files) are drawn from all over the text, two of each stratum of
neighbours, so that no file is left out for long and no head stands for the whole; only they are read. The interval
holds the true count in 95 of 100 samples; another --seed draws another one. A larger --sample makes it narrower.

The cost is that of `binidx preprocess` with the same tokenizer: hours of one core of this machine, bytes read and
written, requests and their list price. Compression of the output and moving parts are not in it.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx estimate 's3://corpus/en/*.jsonl.zst' --tokenizer tokenizer.json
  binidx estimate text/ --tokenizer tokenizer.json --append-eod --sample 256MB --json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from glob import has_magic
from typing import TYPE_CHECKING, Any

import binidx
from binidx.errors import ConfigError

from ._command import Command, print_result
from ._display import counts, human_bytes, human_seconds
from ._options import chosen, num_bytes
from ._text_options import add_filters, add_text, add_tokenizer, parse_filters, parse_tokenizer

if TYPE_CHECKING:
    from binidx.prepare.preprocess.estimate import CorpusEstimate, Estimate


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("inputs", nargs="+", metavar="INPUT", help="path, URI, glob or folder")
    add_text(options, "all counted together")
    add_tokenizer(options)
    options.add_argument("--append-eod", action="store_true", help="count an EOD for each document")
    add_filters(options, "leave {} out")
    options.add_argument("--sample", type=num_bytes, default="64MiB", metavar="SIZE", help="text to read (64MiB)")
    options.add_argument("--seed", type=int, default=0, help="of the sample (0)")


def estimate(arguments: argparse.Namespace) -> int:
    """Estimate the tokens, and print the result; return 1 if the sample has problems and no document."""
    from binidx.prepare.preprocess.estimate import estimate_tokens

    if arguments.format is None:
        check_text(arguments.inputs, arguments.source_options)
    tokenizer = parse_tokenizer(arguments)
    estimated = estimate_tokens(
        tokenizer=tokenizer,
        filters=parse_filters(arguments),
        engine=arguments.tokenizer_engine,
        sample_bytes=arguments.sample,
        **chosen(arguments, "inputs", "keys", "append_eod", "format", "seed", "source_options", "watch"),
    )
    print_result(estimated, describe(estimated), arguments)
    return 1 if estimated.problems and not estimated.documents.total else 0


def check_text(inputs: Sequence[str], storage_options: dict[str, Any] | None) -> None:
    """Raise ConfigError for inputs that are datasets, which have tokens already."""
    from binidx.format.bin_file import as_prefix

    for name in inputs:
        prefix = name if name.endswith("/") else as_prefix(name)
        bare = "." not in name.rpartition("/")[2] and not name.endswith("/") and not has_magic(name)
        if prefix != name or (bare and binidx.IndexedDataset.exists(name, storage_options=storage_options)):
            raise ConfigError(f"{name}: is a dataset, needed text; binidx inspect {prefix} says its tokens")


def describe(corpus: CorpusEstimate) -> str:
    """Return the estimate as text."""
    cost = corpus.cost
    sampled, stored = human_bytes(corpus.sampled_bytes), human_bytes(corpus.stored_bytes)
    dollars = f", ${cost.dollars:,.2f} at list price" if cost.dollars else ""
    lines = [
        f"tokens     {interval(corpus.tokens)}",
        f"documents  {interval(corpus.documents)}",
        f"looked at {sampled} of {stored} in {counts(files=corpus.num_inputs)}; {human_seconds(corpus.seconds)}",
        f"to make them: {cost.cpu_hours:,.2f} CPU-hours with {corpus.engine}, "
        f"{human_seconds(cost.cpu_hours * 3600 / cost.cores)} on the {cost.cores} cores here",
        f"  {human_bytes(cost.bytes_in)} in, {human_bytes(cost.bytes_out)} out, in {counts(parts=cost.parts)}; "
        f"{counts(requests=cost.reads)} to read and {cost.writes:,} to write{dollars}",
    ]
    if corpus.problems:
        rows = f"{corpus.problems:,} rows of the sample are no documents; they are not counted"
        none = "" if corpus.documents.total else ", and no other was found: look at --json-keys and --format"
        lines.append(rows + none)
    return "\n".join(lines)


def interval(count: Estimate) -> str:
    """Return a text such as `1,230; 95 %: 1,200 to 1,260 (± 2.44%)`."""
    return f"{count.total:,.0f}; 95 %: {count.low:,.0f} to {count.high:,.0f} (± {count.error:.2%})"


main = Command("estimate", __doc__, add_options, estimate, progress=True)
