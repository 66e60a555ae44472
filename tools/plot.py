"""Plot a run at the size of a paper's column: blend, epochs, lengths or repeats.

blend shows the share of each source over steps, and the planned shares; epochs how often each was read; lengths the
sequences of each source; repeats how often its documents were read, for which every sample is looked at. Of a
dataset alone, by its prefix, lengths can be plotted. Needs matplotlib.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx plot run.json blend --to blend.pdf
  binidx plot run.json epochs --steps 0:20000 --to epochs.svg --width 6.75
"""

from __future__ import annotations

import argparse
from pathlib import PurePath
from typing import Any

from binidx.errors import ConfigError
from binidx.explore.explored import Explored
from binidx.explore.token_counts import count_lengths
from binidx.explore.views import BINS
from binidx.format.indexed_dataset import as_pair
from binidx.run.display.figures import (
    COLUMN_INCHES,
    FORMATS,
    draw_blend,
    draw_epochs,
    draw_lengths,
    figure_bytes,
)
from binidx.run.provenance.accounts import account
from binidx.run.provenance.history import RunHistory
from binidx.storage.location import Location
from binidx.storage.writing.publish import write_object

from ._command import add_json, command, print_result
from ._runs import parse_steps

FIGURES = ("blend", "epochs", "lengths", "repeats")


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("run", metavar="RUN", help="file of a run, or prefix of a dataset; path or URI")
    options.add_argument("figure", choices=FIGURES, metavar="FIGURE", help=", ".join(FIGURES))
    options.add_argument("--to", required=True, metavar="URI", help=f"target; ends in .{', .'.join(FORMATS)}")
    options.add_argument("--steps", metavar="A:B", help="steps of blend and epochs (all)")
    options.add_argument("--width", type=float, default=COLUMN_INCHES, metavar="IN", help=f"inches ({COLUMN_INCHES})")
    add_json(options, "--storage-options", "fsspec's own, for RUN, its data and the target")


def plot(arguments: argparse.Namespace) -> None:
    """Draw the figure, and write it."""
    arguments.watch.begin("count", 0, 0, unit="")
    explored = Explored.open(arguments.run, arguments.storage_options)
    kind = PurePath(arguments.to).suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(f"to: found {arguments.to}, needs a name that ends in .{', .'.join(FORMATS)}")
    write_object(Location.of(arguments.to, arguments.storage_options), [figure_bytes(draw(explored, arguments), kind)])
    print_result({"figure": arguments.to}, arguments.to, arguments)


def draw(explored: Explored, arguments: argparse.Namespace) -> Any:
    """Return the figure that the arguments name."""
    if arguments.figure == "lengths":
        bars = {source.name: count_lengths(as_pair(source.dataset)).bars for source in explored.sources}
        return draw_lengths(bars, arguments.width)
    if explored.history is None:
        raise ConfigError(f"figure: {arguments.run} is a dataset, which has lengths alone; name the file of a run")
    if arguments.figure == "repeats":
        if not isinstance(explored.history, RunHistory):
            raise ConfigError(f"figure: {arguments.run} is over packed files, needs a run over .bin and .idx")
        return account(explored.history, explored.steps.stop, repeats=True).plot(arguments.width)
    steps = parse_steps(explored.history, arguments.steps) if arguments.steps else explored.steps
    timeline = explored.timeline(steps, BINS)
    return (draw_blend if arguments.figure == "blend" else draw_epochs)(timeline, arguments.width)


main = command("plot", __doc__, add_options, plot, progress=True)
