"""Find the steps of a run whose loss is far above those before it, and the documents that made it so.

A step is a spike if its loss is above median + K * 1.4826 * MAD of the losses of the WINDOW steps before it (MAD:
median absolute deviation; Hampel's identifier). Its samples are ranked by their loss above the mean of their source in
these steps. The losses are those that loader.record_losses wrote; the folder is by default `losses` beside RUN.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx spikes run.json --losses s3://runs/a/losses --most-samples 4
  binidx spikes run.json --threshold 10 --tokenizer tokenizer.json --json
"""

from __future__ import annotations

import argparse
import json
import math
import sys

from binidx.loader.losses import read_losses
from binidx.run.global_order import SampleReads
from binidx.run.provenance.contents import trace_contents
from binidx.run.provenance.sample_rows import build_rows
from binidx.run.provenance.spikes import find_spikes
from binidx.storage.location import Location

from ._command import command
from ._display import counts
from ._runs import add_run, decoder, open_run, print_rows, stop_step


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    options.add_argument("--losses", metavar="DIR", help="folder of the losses (losses, beside RUN)")
    options.add_argument("--window", type=int, default=200, metavar="N", help="steps before a step (200)")
    options.add_argument("--threshold", type=float, default=6.0, metavar="K", help="see above (6)")
    options.add_argument("--before-step", type=int, metavar="N", help="only steps before N")
    options.add_argument("--most-samples", type=int, default=8, metavar="N", help="samples of each spike (8)")
    options.add_argument("--tokenizer", metavar="URI", help="print the text of the documents, too")


def print_spikes(arguments: argparse.Namespace) -> None:
    """Print each spike with its samples."""
    order, options = open_run(arguments, in_ranges=True), arguments.storage_options
    folder = Location(arguments.losses or f"{arguments.run.rpartition('/')[0] or '.'}/losses", options)
    decode = decoder(arguments.tokenizer, options)
    stop = None if arguments.before_step is None else stop_step(order, arguments.before_step)
    spikes = []
    judged = {"window": arguments.window, "threshold": arguments.threshold, "stop_step": stop}
    for spike in find_spikes(order, *read_losses(folder), **judged):
        reads = SampleReads(*(column[: arguments.most_samples] for column in spike.reads))
        rows = [*build_rows(order, reads, trace_contents(order.order, reads.sample), decode)]
        marks = {name: _round(getattr(spike, name)) for name in ("loss", "median", "limit")}
        losses = zip(rows, spike.losses.tolist(), spike.excess.tolist(), strict=False)
        samples = [{**row, "loss": _round(loss), "excess": _round(excess)} for row, loss, excess in losses]
        spikes.append({"step": spike.step, **marks, "samples": samples})
        if not arguments.json:
            print(f"step {spike.step:,}: " + ", ".join(f"{name} {value}" for name, value in marks.items()))
            for sample in samples:
                print(f"loss {sample['loss']}, {sample['excess']} above its source")
                print_rows(iter([sample]), False)
    if arguments.json:
        print(json.dumps({"spikes": spikes}))
    print(counts(spikes=len(spikes)), file=sys.stderr)


def _round(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


main = command("spikes", __doc__, add_options, print_spikes)
