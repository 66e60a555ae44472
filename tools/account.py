"""Count tokens and epochs of each source: its size, its share of the run, and its use up to a step.

A sample counts its S input tokens. `epochs` is tokens read / tokens of the source. --repeats also counts how often the
first token of every document was read; it loads the indices and costs some microseconds a sample and a byte a document.
Without it, cached indices are read by ranges. For a run in stages the output ends in the seams: the position where each
source continues, and the proof that none of its samples was skipped or repeated.

A run that names the one before it, or has phases, is counted over its whole history, and the output ends in Megatron's
own counters. Without a file of the run, RUN is a prefix, with --sequence-length.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx account run.json --before-step 41200 --json
  binidx account run.json --consumed-samples 21094400 --repeats
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from binidx.errors import ConfigError
from binidx.order.blended_order import BlendedOrder
from binidx.packed.packed_run import PackedRunOrder
from binidx.run.provenance.accounts import SourceAccount, account
from binidx.run.provenance.history import RunHistory

from ._command import command, print_result
from ._display import row_table
from ._display import table as columns
from ._runs import add_run, add_topology, open_order, step_at, stop_step

COLUMNS = ("documents", "tokens", "samples in run", "samples read", "tokens read", "epochs")


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    until = options.add_mutually_exclusive_group()
    until.add_argument("--before-step", type=int, metavar="N", help="count only steps before N (default: all)")
    until.add_argument(
        "--consumed-samples", type=int, metavar="C", help="count up to a checkpoint with C samples consumed"
    )
    options.add_argument("--repeats", action="store_true", help="numbers of documents started 0, 1, 2, ... times")
    add_topology(options)


def account_run(arguments: argparse.Namespace) -> None:
    """Count the tokens and epochs of each source, and print a row for each."""
    arguments.watch.begin("count", 0, 0, unit="")
    history, asked = open_order(arguments, whole=arguments.repeats), arguments.consumed_samples
    if isinstance(history, PackedRunOrder):
        if arguments.repeats or asked is not None:
            raise ConfigError(
                "--repeats, --consumed-samples: packed files have no counts of documents; give --before-step"
            )
        rows = history.account(stop_step(history, arguments.before_step))
        print_result(rows, row_table(rows, "{:,}"), arguments)
        return
    stop = stop_step(history, arguments.before_step if asked is None else step_at(history, asked))
    accounts = account(history, stop, repeats=arguments.repeats)
    text = "\n".join([table(accounts), *accounts.notes]) + counters(history, stop)
    if isinstance(history.last.order, BlendedOrder) and history.last.order.proof:
        text += f"\n{history.last.order.proof}"
    print_result([asdict(row) for row in accounts], text, arguments)


def counters(history: RunHistory, stop_step: int) -> str:
    """Return a line with Megatron's counters before a step; "" for one run that trains all that it reads."""
    consumed = skipped = 0
    for order, steps in history.orders(range(history.first_step, stop_step)):
        schedule, run = order.reading.schedule, order.run
        consumed = schedule.samples_before(steps.stop) + (run.earlier_samples if run else 0)
        skipped += schedule.skipped_before(steps.stop)
    if len(history.runs) == 1 and history.packed is None and not skipped:
        return ""
    return f"\nconsumed_train_samples {consumed:,}, skipped_train_samples {skipped:,}"


def table(accounts: Sequence[SourceAccount]) -> str:
    """Return the rows as a table, with their sum, and how often documents were read."""
    names = [*COLUMNS[:-1], *["tokens trained"] * any(each.samples_trained < each.samples_read for each in accounts)]
    values = [[getattr(source, name.replace(" ", "_")) for name in names] for source in accounts]
    rows = [
        [source.source, *(f"{value:,}" for value in row), f"{source.epochs_read:.3f}"]
        for source, row in zip(accounts, values, strict=True)
    ]
    sums = [f"{sum(column):,}" for column in zip(*values, strict=True)]
    total = ["" if name in COLUMNS[:3] else text for name, text in zip(names, sums, strict=True)]
    lines = [columns(("source", *names, COLUMNS[-1]), [*rows, ["all", *total, ""]], most_rows=len(rows) + 1)]
    for source in accounts:
        if source.seen:
            started = ", ".join(f"{times}x: {count:,}" for times, count in enumerate(source.seen) if count)
            lines.append(f"{source.source}: first token read {started}")
    return "\n".join(lines)


main = command("account", __doc__, add_options, account_run, progress=True)
