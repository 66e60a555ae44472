"""Count tokens and epochs of each source: its size, its share of the run, and its use up to a step.

A sample counts its S input tokens. `epochs` is tokens read / tokens of the source. --repeats also counts how often the
first token of every document was read; it loads the indices and costs some microseconds a sample and a byte a document.
Without it, cached indices are read by ranges. For a run in stages the output ends in the seams: the position where each
source continues, and the proof that none of its samples was skipped or repeated.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx account run.json --before-step 41200 --json
  binidx account run.json --consumed-samples 21094400 --repeats
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from binidx.order.blended_order import BlendedOrder
from binidx.run.provenance.accounts import SourceAccount, account

from ._command import command, print_result
from ._display import table as columns
from ._runs import add_run, open_run, step_at, stop_step

COLUMNS = ("documents", "tokens", "samples in run", "samples read", "tokens read", "epochs")


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    until = options.add_mutually_exclusive_group()
    until.add_argument("--before-step", type=int, metavar="N", help="count only steps before N (default: all)")
    until.add_argument(
        "--consumed-samples", type=int, metavar="C", help="count up to a checkpoint with C samples consumed"
    )
    options.add_argument("--repeats", action="store_true", help="numbers of documents read 0, 1, 2, ... times")


def account_run(arguments: argparse.Namespace) -> None:
    """Count the tokens and epochs of each source, and print a row for each."""
    order = open_run(arguments, in_ranges=not arguments.repeats)
    asked = arguments.consumed_samples
    stop = stop_step(order, arguments.before_step if asked is None else step_at(order, asked))
    accounts = account(order, stop, repeats=arguments.repeats)
    text = table(accounts)
    if isinstance(order.order, BlendedOrder) and order.order.proof:
        text += f"\n{order.order.proof}"
    print_result([asdict(row) for row in accounts], text, arguments)


def table(accounts: Sequence[SourceAccount]) -> str:
    """Return the rows as a table, with their sum, and how often documents were read."""
    rows = []
    for source in accounts:
        values = (source.documents, source.tokens, source.samples_in_run, source.samples_read, source.tokens_read)
        rows.append([source.source, *(f"{value:,}" for value in values), f"{source.epochs_read:.3f}"])
    total = [sum(getattr(source, name) for source in accounts) for name in ("samples_read", "tokens_read")]
    rows.append(["all", "", "", "", *(f"{value:,}" for value in total), ""])
    lines = [columns(("source", *COLUMNS), rows, most_rows=len(rows))]
    for source in accounts:
        if source.seen:
            seen = ", ".join(f"{times}x: {count:,}" for times, count in enumerate(source.seen) if count)
            lines.append(f"{source.source} seen {seen}")
    return "\n".join(lines)


main = command("account", __doc__, add_options, account_run)
