"""Print a data card of a run: its sources, their sizes and domains, and how much of each was read.

What data cannot give stands in --about: {"s3://corpus/en": {"license": "CC-BY-4.0", "languages":
"English", "kind": "scraped", "cut_off": "2025-03"}}, with a kind of public, licensed, private, scraped, user, synthetic
and other; the rest is left open, visibly. Domains are those of the ids in
the lineage of a source that are URLs (preprocess --id-key url). --public prints the public summary of training content
instead that Article 53(1)(d) of the EU AI Act asks of providers, as a draft to complete. A run that names the one
before it is counted with its whole history.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx summary run.json --about @about.json > CARD.md
  binidx summary run.json --about @about.json --public > SUMMARY.md
"""

from __future__ import annotations

import argparse

from binidx.run.provenance.data_card import build_card, format_card, format_public_summary

from ._command import command, json_object, print_result
from ._runs import add_run, open_history, stop_step


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    options.add_argument("--before-step", type=int, metavar="N", help="only steps before N (default: all)")
    options.add_argument("--about", metavar="JSON", type=json_object, help="what is known of sources: JSON, or @FILE")
    options.add_argument("--repeats", action="store_true", help="how often documents were read, as by account")
    options.add_argument("--domains", type=int, default=20, metavar="N", help="most domains of a source (20)")
    options.add_argument("--public", action="store_true", help="print the public summary")


def summarise(arguments: argparse.Namespace) -> None:
    """Build the card, and print it."""
    arguments.watch.begin("count", 0, 0, unit="")
    history = open_history(arguments, whole=arguments.repeats)
    options = {"repeats": arguments.repeats, "most_domains": arguments.domains}
    if arguments.public:
        options["most_domains"] = 1 << 31
    card = build_card(history, stop_step(history, arguments.before_step), arguments.about, **options)
    print_result(card, (format_public_summary if arguments.public else format_card)(card), arguments)


main = command("summary", __doc__, add_options, summarise, progress=True)
