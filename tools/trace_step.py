"""Trace a step: its samples, their sources, documents and spans, from the description of the run alone.

Tokens are read only with --tokenizer, which prints text. Of cached indices some kilobytes are read; an index without a
cache is built. Documents count from 0 in their source; a span is the part of a document in this sample, of its S tokens
and the last label. If a source has lineage (.lineage.parquet), the file and row of each origin are printed, too, which
reads a row group of it, 6 MB, for each document.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx trace run.json --step 41200 --rank 17 --tokenizer tokenizer.json
"""

from __future__ import annotations

import argparse

from binidx.errors import ConfigError
from binidx.run.provenance.sample_rows import build_rows

from ._command import command
from ._runs import add_run, decoder, open_run, print_rows, require_steps


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    options.add_argument("--step", type=int, required=True, metavar="N", help="counted from 0")
    options.add_argument("--rank", type=int, metavar="R", help="of data parallel ranks; by default all")
    options.add_argument("--tokenizer", metavar="URI", help="to show the text; any that preprocess takes")
    options.add_argument("--no-lineage", action="store_true", help="do not look where the documents came from")


def trace(arguments: argparse.Namespace) -> None:
    """Print the samples of the step."""
    order = open_run(arguments, in_ranges=True)
    if arguments.rank is not None and not 0 <= arguments.rank < order.num_ranks:
        raise ConfigError(f"rank: found {arguments.rank}, the run has {order.num_ranks}, counted from 0")
    steps = range(arguments.step, arguments.step + 1)
    require_steps(order, steps, "step")
    readings, contents = order.trace(steps, arguments.rank)
    decode = decoder(arguments.tokenizer, arguments.storage_options)
    print_rows(build_rows(order, readings, contents, decode, lineage=not arguments.no_lineage), arguments.json)


main = command("trace", __doc__, add_options, trace)
