"""Trace steps: their samples, sources, documents and spans, from the description of the run alone.

Tokens are read only with --tokenizer, which prints text. Of cached indices some kilobytes are read; an index without a
cache is built. Documents count from 0 in their source; a span is the part of a document in this sample, of its S tokens
and the last label ("only the last label" if it has no other token). If a source has lineage (.lineage.parquet), file
and row of each origin are printed, too, which reads a row group of it, 6 MB, for each document. Of a run that names the
one before it, or has phases, any step of the whole history is traced. Without a file of the run, RUN is a prefix, with
--sequence-length. --json prints JSON Lines: an object for each sample.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx trace run.json --steps 41200 --rank 17 --tokenizer tokenizer.json
  binidx trace run.json --steps 1000:1100 --world 64 --micro-batch-size 4
"""

from __future__ import annotations

import argparse

from binidx.errors import ConfigError

from ._command import Command
from ._run_options import add_run, add_steps, add_text_tokenizer, add_topology

STEPS_AT_ONCE = 16
"""Steps whose samples are in memory together."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    add_steps(options, "N|A:B", required=True, help="counted from 0; A to before B")
    options.add_argument("--rank", type=int, metavar="R", help="of data parallel ranks; by default all")
    add_text_tokenizer(options, "to show the text")
    options.add_argument("--no-lineage", action="store_true", help="do not look where the documents came from")
    add_topology(options)


def trace(arguments: argparse.Namespace) -> None:
    """Print the samples of the steps."""
    from binidx.run.display.sample_rows import build_rows

    from ._runs import decoder, open_order, parse_steps, print_rows

    history, rank = open_order(arguments), arguments.rank
    parts = [*history.orders(parse_steps(history, arguments.steps))]
    sources = dict.fromkeys(source.prefix for order, _ in parts for source in order.sources)
    decode = decoder(arguments.tokenizer, arguments.storage_options, sources)
    if len(parts) > 1:
        history.joined  # noqa: B018 - logs sources that may be one
    for order, part in parts:
        if rank is not None and not 0 <= rank < order.num_ranks:
            raise ConfigError(f"rank: found {rank}, the run has ranks 0 to {order.num_ranks - 1}")
        for first in part[::STEPS_AT_ONCE]:
            reads = order.readings(range(first, min(first + STEPS_AT_ONCE, part.stop)), rank)
            print_rows(build_rows(order, reads, decode, lineage=not arguments.no_lineage), arguments.json)


main = Command("trace", __doc__, add_options, trace)
