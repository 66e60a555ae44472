"""Count tokens and epochs of each source: its size, its share of the run, and its use up to a step; a card, a figure.

A sample counts its S input tokens. `epochs` is tokens read / tokens of the source. --repeats also counts how often the
first token of every document was read; it loads the indices and costs some microseconds a sample and a byte a document.
--engine counts the repeats of 131,072 samples a part, whose workers open the run; there is no --shard.
Without it, cached indices are read by ranges. For a run in stages the output ends in the seams: the position where each
source continues, and the proof that none of its samples was skipped or repeated.

A run that names the one before it, or has phases, is counted over its whole history, and the output ends in Megatron's
own counters. Without a file of the run, RUN is a prefix, with --sequence-length.

--card prints a data card in Markdown: sources, their sizes and domains, and how much of each was read. What data cannot
give stands in --about: {"s3://corpus/en": {"license": "CC-BY-4.0", "languages": "English", "kind": "scraped",
"cut_off": "2025-03"}}, with a kind of public, licensed, private, scraped, user, synthetic and other; the rest is left
open, visibly. Domains are those of the ids in the lineage of a source that are URLs (preprocess --id-key url). --public
makes the card the public summary of training content that Article 53(1)(d) of the EU AI Act asks of providers, as a
draft to complete.

--figure writes a figure at the size of a paper's column, and needs matplotlib:

  blend    the share of each source over steps, and the planned shares
  epochs   how often each source was read, over steps
  lengths  the sequences of each source; also of a dataset alone, where RUN is a prefix
  repeats  how often the documents of each source were read, for which every sample is looked at

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx account run.json --steps :41200 --json
  binidx account run.json --consumed-samples 21094400 --repeats
  binidx account run.json --card --about @about.json > CARD.md
  binidx account run.json --figure epochs --steps 0:20000 --to epochs.svg --width 6.75
"""

from __future__ import annotations

import argparse
from pathlib import PurePath

import binidx
from binidx import packed
from binidx.errors import ConfigError

from ._command import Command, print_result
from ._display import row_table, table
from ._options import add_workers, counting_workers, json_object, refuse
from ._run_options import TOPOLOGY, add_run, add_steps, add_topology

COLUMNS = ("documents", "tokens", "samples in run", "samples read", "tokens read", "epochs")
FIGURES = ("blend", "epochs", "lengths", "repeats")


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    until = options.add_mutually_exclusive_group()
    add_steps(until, ":N", help="steps before N (all); of blend and epochs also A:B")
    until.add_argument("--consumed-samples", type=int, metavar="C", help="up to a checkpoint with C samples consumed")
    options.add_argument("--repeats", action="store_true", help="numbers of documents started 0, 1, 2, ... times")
    add_workers(options, "counts of --repeats", shards=False)
    add_topology(options)
    card = options.add_argument_group("data card")
    card.add_argument("--card", action="store_true", help="print a data card in place of the table")
    card.add_argument("--public", action="store_true", help="make it the public summary of the EU AI Act")
    card.add_argument("--about", metavar="JSON", type=json_object, help="what is known of sources: JSON, or @FILE")
    card.add_argument("--domains", type=int, metavar="N", help="most domains of a source (20)")
    figure = options.add_argument_group("figure")
    figure.add_argument("--figure", choices=FIGURES, metavar="KIND", help=f"write a figure: {', '.join(FIGURES)}")
    figure.add_argument("--to", metavar="FILE", help="path or URI to write; ends in .pdf, .png or .svg")
    figure.add_argument("--width", type=float, metavar="IN", help="inches (3.3)")


def account_run(arguments: argparse.Namespace) -> None:
    """Count the tokens and epochs of each source, and print a row for each; or write a card or a figure."""
    place = counting_workers(arguments, "repeats")
    arguments.watch.begin("count", 0, 0, unit="")
    if not arguments.card:
        refuse(arguments, ("public", "about", "domains"), "only with --card")
    if arguments.figure:
        refuse(arguments, ("card", "consumed_samples", *TOPOLOGY), "not with --figure")
        write_figure(arguments)
        return
    refuse(arguments, ("to", "width"), "only with --figure")
    print_card(arguments) if arguments.card else print_accounts(arguments, place)


def print_accounts(arguments: argparse.Namespace, place: binidx.Workers | None) -> None:
    """Print a row for each source."""
    from binidx.order.blended_order import BlendedOrder

    from ._runs import open_order, stop_before, stop_step

    history = open_order(arguments, whole=arguments.repeats)
    if isinstance(history, packed.PackedRunOrder):
        refuse(arguments, ("repeats", "consumed_samples"), "packed files have no counts of documents; give --steps :N")
        counted = history.account(stop_step(history, arguments.steps))
        print_result(counted, row_table(counted, "{:,}"), arguments)
        return
    stop = stop_before(history, arguments)
    accounts = binidx.account(history, stop, repeats=arguments.repeats, workers=place)
    names = [*COLUMNS[:-1], *["tokens trained"] * any(each.samples_trained < each.samples_read for each in accounts)]
    values = [[getattr(source, name.replace(" ", "_")) for name in names] for source in accounts]
    rows = [
        [source.source, *(f"{value:,}" for value in row), f"{source.epochs_read:.3f}"]
        for source, row in zip(accounts, values, strict=True)
    ]
    sums = [f"{sum(column):,}" for column in zip(*values, strict=True)]
    total = ["" if name in COLUMNS[:3] else text for name, text in zip(names, sums, strict=True)]
    lines = [table(("source", *names, COLUMNS[-1]), [*rows, ["all", *total, ""]], most_rows=len(rows) + 1)]
    for source in accounts:
        if source.seen:
            started = ", ".join(f"{times}x: {count:,}" for times, count in enumerate(source.seen) if count)
            lines.append(f"{source.source}: first token read {started}")
    lines += [*accounts.notes, *counters(history, stop)]
    if isinstance(history.last.order, BlendedOrder) and history.last.order.proof:
        lines.append(history.last.order.proof)
    print_result(accounts, "\n".join(lines), arguments)


def counters(history: binidx.RunHistory, stop_step: int) -> list[str]:
    """Return a line with Megatron's counters before a step; none for one run that trains all that it reads."""
    consumed = skipped = 0
    for order, steps in history.orders(range(history.first_step, stop_step)):
        schedule, run = order.reading.schedule, order.run
        consumed = schedule.samples_before(steps.stop) + (run.earlier_samples if run else 0)
        skipped += schedule.skipped_before(steps.stop)
    if len(history.runs) == 1 and history.packed is None and not skipped:
        return []
    return [f"consumed_train_samples {consumed:,}, skipped_train_samples {skipped:,}"]


def print_card(arguments: argparse.Namespace) -> None:
    """Print the data card, or the public summary."""
    from binidx.run.provenance.data_card import build_card, format_card, format_public_summary

    from ._runs import open_history, stop_before

    history = open_history(arguments, whole=arguments.repeats)
    most = 1 << 31 if arguments.public else 20 if arguments.domains is None else arguments.domains
    stop, repeats = stop_before(history, arguments), arguments.repeats
    card = build_card(history, stop, arguments.about, repeats=repeats, most_domains=most)
    print_result(card, (format_public_summary if arguments.public else format_card)(card), arguments)


def write_figure(arguments: argparse.Namespace) -> None:
    """Draw the figure of --figure, and write it."""
    from binidx.explore.explored import Explored
    from binidx.explore.token_counts import count_lengths
    from binidx.explore.views import BINS
    from binidx.format.indexed_dataset import as_pair
    from binidx.run.display.figures import COLUMN_INCHES, FORMATS, draw_blend, draw_epochs, draw_lengths, figure_bytes
    from binidx.storage.location import Location
    from binidx.storage.writing.publish import write_object

    from ._runs import parse_steps, stop_step

    kind, width = PurePath(arguments.to or "").suffix.removeprefix("."), arguments.width
    if kind not in FORMATS:
        raise ConfigError(f"to: found {arguments.to or 'none'}, needs a name that ends in .{', .'.join(FORMATS)}")
    width = COLUMN_INCHES if width is None else width
    explored = Explored.open(arguments.run, arguments.storage_options)
    history, steps = explored.history, explored.steps
    if arguments.figure == "lengths":
        bars = {source.name: count_lengths(as_pair(source.dataset)).bars for source in explored.sources}
        figure = draw_lengths(bars, width)
    elif history is None:
        raise ConfigError(f"figure: {arguments.run} is a dataset, which has lengths alone; name the file of a run")
    elif arguments.figure != "repeats":
        timeline = explored.timeline(parse_steps(history, arguments.steps) if arguments.steps else steps, BINS)
        figure = (draw_blend if arguments.figure == "blend" else draw_epochs)(timeline, width)
    elif isinstance(history, binidx.RunHistory):
        stop = stop_step(history, arguments.steps) if arguments.steps else steps.stop
        figure = binidx.account(history, stop, repeats=True).plot(width)
    else:
        raise ConfigError(f"figure: {arguments.run} is over packed files, needs a run over .bin and .idx")
    write_object(Location.of(arguments.to, arguments.storage_options), [figure_bytes(figure, kind)])
    print_result({"figure": arguments.to}, arguments.to, arguments)


main = Command("account", __doc__, add_options, account_run, progress=True)
