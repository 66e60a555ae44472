"""Find the steps of a run whose loss is far above those before it, and the documents that made it so.

Neighbouring steps are one spike if their losses, less what their mixtures of sources add, are above median + K * 1.4826
* MAD of those of the WINDOW steps before, since the last change of the blend (MAD: median absolute deviation; Hampel's
identifier). A step with fewer than 10 such steps before it is not judged. Samples are ranked by their loss above the
mean of their source in the window. The losses are those that loader.record_losses wrote; the folder is by default
`losses` beside RUN.

A run that names the one before it is looked at with its whole history: each step with the losses of the run that
trained it, from `losses` beside the file of that run, or one --losses for all runs or for each, the earliest first.

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

from ._command import Command
from ._display import counts, print_above
from ._run_options import add_run, add_steps, add_text_tokenizer


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    options.add_argument("--losses", metavar="DIR", action="append", help="folder of the losses (losses, beside RUN)")
    options.add_argument("--window", type=int, default=200, metavar="N", help="steps before a step (200; at least 10)")
    options.add_argument("--threshold", type=float, default=6.0, metavar="K", help="see above (6)")
    add_steps(options, ":N")
    options.add_argument("--most-samples", type=int, default=8, metavar="N", help="samples of each spike (8)")
    add_text_tokenizer(options, "print the text of the documents, too")


def print_spikes(arguments: argparse.Namespace) -> None:
    """Print each spike with its samples."""
    from binidx.run.display.sample_rows import build_rows
    from binidx.run.provenance.spikes import find_spikes, read_run_losses

    from ._runs import decoder, open_history, print_rows, stop_step

    arguments.watch.begin("look for spikes", 0, 0, unit="")
    history, options = open_history(arguments), arguments.storage_options
    prefixes = [prefix for run in history.runs for prefix in (run.config.blend or ([],))[0]]
    decode = decoder(arguments.tokenizer, options, prefixes)
    stop = stop_step(history, arguments.steps) if arguments.steps else None
    runs = read_run_losses(history, arguments.losses or [None], arguments.run, stop)
    spikes = []
    for spike in find_spikes(runs, window=arguments.window, threshold=arguments.threshold):
        rows = [*build_rows(spike.order, spike.reads.at(slice(arguments.most_samples)), decode)]
        marks = {name: _round(getattr(spike, name)) for name in ("loss", "expected", "limit")}
        losses = zip(rows, spike.losses.tolist(), spike.excess.tolist(), strict=False)
        samples = [{**row, "loss": _round(loss), "excess": _round(excess)} for row, loss, excess in losses]
        spikes.append({"step": spike.step, "last_step": spike.last_step, **marks, "samples": samples})
        if not arguments.json:
            values = ", ".join(f"{name} {value}" for name, value in marks.items())
            print_above(f"step {spike.step:,}{f' to {spike.last_step:,}' * (spike.last_step > spike.step)}: {values}")
            for sample in samples:
                print_above(f"loss {sample['loss']}, {sample['excess']} above its source")
                print_rows(iter([sample]), False)
    arguments.watch.end_stage()
    if arguments.json:
        print(json.dumps({"spikes": spikes}))
    print(counts(spikes=len(spikes)), file=sys.stderr)


def _round(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


main = Command("spikes", __doc__, add_options, print_spikes, progress=True)
