"""Write the tokens of a run again in training order, so that each micro-batch is one contiguous range.

For runs whose thousands of nodes read one bucket. Costs a copy of the tokens that are read, once. Train from it with
binidx.BakedDataset(DIR, config) in place of the run's dataset: the same samples, from any consumed_samples, on any
number of ranks.

Three stages, each read and written from start to end: the places of all tokens, the tokens of each chunk of the
sources, the parts of the bake. What lies between them is in DIR/exchange, as large as the bake, and removed at the end.
A worker needs 1.5 GiB of memory, 3 GiB for a trillion tokens; beyond 128 GiB of tokens also 8 MiB of --scratch for each
GiB of them.

An interrupted bake resumes. --engine makes the tasks on processes, Ray or Dask; --shard I/N splits each stage between
machines: give the same commands again, three times in all, each time when all shards have ended.

exit status: 0 done, or this shard's share is; 1 the data is bad, 2 the call is wrong

example:
  binidx bake run.json --to s3://corpus/baked --engine local --workers 8
"""

from __future__ import annotations

import argparse

from binidx.run.provenance.baking import BakeProgress, bake, plan_bake

from ._command import RESUMES, add_workers, chosen, command, print_result, workers
from ._display import counts, human_bytes
from ._runs import add_run, open_run, parse_steps


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    options.add_argument("--to", required=True, metavar="DIR", help="where to, path or URI")
    options.add_argument("--steps", metavar="A:B", help="steps from A to before B (all)")
    options.add_argument("--scratch", metavar="FOLDER", help="scratch disk of a worker; by default $TMPDIR")
    add_workers(options, "tasks")


def bake_run(arguments: argparse.Namespace) -> None:
    """Write the tokens of a run in training order, and print a summary."""
    order = open_run(arguments)
    baked = plan_bake(order, parse_steps(order, arguments.steps))
    options = chosen(arguments, "scratch", "storage_options", "watch")
    done = bake(order, arguments.to, baked, workers=workers(arguments), **options)
    count = baked.stop - baked.first
    size = count * baked.stored_length * order.token_dtype.itemsize
    parts = {"parts": len(baked.parts()), "written": done.written, "missing": done.missing}
    values = {"to": arguments.to, "samples": count, **parts, "num_bytes": size}
    more = {"stage": done.stage, "waits_for": done.waits_for}
    held = f"{counts(samples=count)} in {counts(parts=parts['parts'])}, {human_bytes(size)}"
    print_result({**values, **more}, f"{arguments.to}: {held}; {describe(done)}", arguments)


def describe(done: BakeProgress) -> str:
    """Return a text about the work of this call and the tasks of other shards."""
    if not done.missing:
        return f"{done.written} written now, complete"
    again = "give the same command again when the other shards have ended"
    if done.waits_for:
        return f"stage {done.stage}: {counts(tasks=done.waits_for)} of other shards missing; {again}"
    return f"{done.written} written now, {done.missing} missing; {again}"


main = command("bake", __doc__, add_options, bake_run, RESUMES, progress=True)
