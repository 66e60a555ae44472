"""Count tokens and epochs of each source: its size, its share of the run, and its use up to a step.

A sample counts its S input tokens. `epochs` is tokens read / tokens of the source. --repeats also counts how often the
first token of every document was read; it loads the indices and costs some microseconds a sample and a byte a document.
Without it, cached indices are read by ranges. For a run in stages the output ends in the seams: the position where each
source continues, and the proof that none of its samples was skipped or repeated.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx account run.json --before-step 41200 --picture sources.png
  binidx account run.json --consumed-samples 21094400 --repeats
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

__package__ = "binidx.tools"  # for `python tools/account.py`

from binidx.dataset.staged.staged_blend import StagedBlendedDataset
from binidx.errors import MissingDriverError
from binidx.run.provenance.accounts import SourceAccount, account
from binidx.storage.writing.publish import create_object

from ._command import command
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
    options.add_argument("--to", metavar="URI", help="write the rows as parquet")
    options.add_argument("--picture", metavar="PNG", help="draw the epochs and tokens of each source")
    options.add_argument("--json", action="store_true", help="print one JSON list")


def account_run(arguments: argparse.Namespace) -> int:
    """Count the tokens and epochs of each source, and print a row for each."""
    order = open_run(arguments, in_ranges=not arguments.repeats)
    asked = arguments.consumed_samples
    stop = stop_step(order, arguments.before_step if asked is None else step_at(order, asked))
    accounts = account(order, stop, repeats=arguments.repeats)
    if arguments.to:
        write_parquet(accounts, arguments.to, arguments.storage_options)
    if arguments.picture:
        draw(accounts, arguments.picture, stop)
    print(json.dumps([asdict(each) for each in accounts]) if arguments.json else table(accounts))
    if isinstance(order.dataset, StagedBlendedDataset) and not arguments.json:
        print(order.dataset.proof)
    return 0


def table(accounts: Sequence[SourceAccount]) -> str:
    """Return the rows as a table, with their sum, and how often documents were read."""
    rows = []
    for each in accounts:
        values = (each.documents, each.tokens, each.samples_in_run, each.samples_read, each.tokens_read)
        rows.append([each.source, *(f"{value:,}" for value in values), f"{each.epochs_read:.3f}"])
    total = [sum(getattr(each, name) for each in accounts) for name in ("samples_read", "tokens_read")]
    rows.append(["all", "", "", "", *(f"{value:,}" for value in total), ""])
    lines = [columns(("source", *COLUMNS), rows, most_rows=len(rows))]
    for each in accounts:
        if each.seen:
            seen = ", ".join(f"{times}x: {count:,}" for times, count in enumerate(each.seen) if count)
            lines.append(f"{each.source} seen {seen}")
    return "\n".join(lines)


def write_parquet(accounts: Sequence[SourceAccount], uri: str, options: dict[str, object] | None) -> None:
    """Write a Parquet file with one row per source."""
    from binidx.format.arrow import pa, parquet

    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist([asdict(each) for each in accounts]), sink)
    with create_object(uri, options) as out:
        out.write(memoryview(sink.getvalue()))


def short_names(sources: Sequence[str]) -> list[str]:
    """Return the last part of each name, or the whole names if two last parts are equal."""
    names = [each.rstrip("/").rpartition("/")[2] or each for each in sources]
    return names if len({*names}) == len(names) else list(sources)


def draw(accounts: Sequence[SourceAccount], path: str, stop_step: int) -> None:
    """Draw two bars per source: its tokens, and its epochs."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise MissingDriverError(f"{path}: needs matplotlib; pip install matplotlib") from error
    names = short_names([each.source for each in accounts])
    figure = Figure(figsize=(9, 1.9 + 0.34 * len(names)), layout="constrained")
    tokens, epochs = figure.subplots(1, 2, sharey=True)
    places = range(len(names))
    tokens.barh(places, [each.tokens for each in accounts], color="#c9d4e5", label="there are")
    tokens.barh(places, [each.tokens_read for each in accounts], height=0.4, color="#2b5c9e", label="read")
    tokens.set(yticks=list(places), yticklabels=names, xlabel="tokens")
    tokens.xaxis.set_major_formatter(EngFormatter())
    tokens.set_ylim(len(names) - 0.4, -0.6)  # the first one on top, and no more room the more there are
    epochs.barh(places, [each.epochs_read for each in accounts], height=0.4, color="#2b5c9e")
    epochs.axvline(1, color="#999999", linewidth=0.8)
    epochs.set(xlabel="epochs read")
    for axes in (tokens, epochs):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"sources before step {stop_step:,}", x=0.01, ha="left")
    figure.legend(*tokens.get_legend_handles_labels(), loc="upper right", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


main = command("account", __doc__, add_options, account_run)

if __name__ == "__main__":
    raise SystemExit(main())
