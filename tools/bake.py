"""Write the tokens of a run again in training order, so that each micro-batch is one contiguous range.

For runs whose thousands of nodes read one bucket. Costs a copy of the tokens that are read, once. Train from it with
binidx.BakedDataset(DIR, config) in place of the run's dataset: the same samples, from any consumed_samples, on any
number of ranks. Existing parts are kept, so an interrupted bake resumes; --shard i/n splits it between machines, as
n jobs of a Slurm array.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx bake run.json s3://corpus/baked --threads 8
"""

from __future__ import annotations

import argparse

from binidx.run.provenance.baking import bake, plan_bake

from ._command import RESUMES, chosen, command, print_result, shard
from ._display import Bar, counts, human_bytes
from ._runs import add_run, open_run, parse_steps


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    options.add_argument("to", metavar="DIR", help="where to, path or URI")
    options.add_argument("--steps", metavar="A:B", help="steps from A to before B (all)")
    options.add_argument("--threads", type=int, default=2, metavar="N", help="parts written at the same time (2)")
    options.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N", help="every N-th part, from the I-th")


def bake_run(arguments: argparse.Namespace) -> None:
    """Write the tokens of a run in training order, and print a summary."""
    order = open_run(arguments)
    baked = plan_bake(order, parse_steps(order, arguments.steps))
    number, count = arguments.shard
    mine = baked.parts()[number::count]
    total = sum(map(len, mine))
    with Bar("bake") as bar:
        bar.begin("bake", total, 0, "samples")
        options = chosen(arguments, "threads", "storage_options")
        written = bake(order, arguments.to, baked, shard=number, num_shards=count, **options, watch=bar.advance)
    size = total * baked.stored_length * order.token_dtype.itemsize
    text = f"{counts(samples=total)} in {counts(parts=len(mine))}, {written} written now, {human_bytes(size)}"
    values = {"to": arguments.to, "samples": total, "parts": len(mine), "written": written, "num_bytes": size}
    print_result(values, f"{arguments.to}: {text}", arguments)


main = command("bake", __doc__, add_options, bake_run, RESUMES)
