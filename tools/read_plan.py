"""Write the places of the tokens of a run in training order: its read plan, from which nodes start without any index.

For runs whose many nodes start from one bucket: a node reads kilobytes, whatever the number of documents, instead of
every .idx and index. It copies no token: 56 bytes for a sample of 5 documents. Train from it with
binidx.PlannedDataset(DIR, config) in place of the run's dataset: the same samples, from any consumed_samples, on any
number of ranks. Data that changes afterwards is an error. Existing parts are kept, so an interrupted job resumes;
--shard I/N splits it between machines, as N jobs of a Slurm array.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx read-plan run.json --to s3://corpus/plan --workers 8
"""

from __future__ import annotations

import argparse

from binidx.run.provenance.read_planning import plan_reads, write_read_plan

from ._command import RESUMES, add_workers, chosen, command, print_result, workers
from ._display import counts
from ._runs import add_run, open_run, parse_steps


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    options.add_argument("--to", required=True, metavar="DIR", help="where to, path or URI")
    options.add_argument("--steps", metavar="A:B", help="steps from A to before B (all)")
    add_workers(options, "parts")


def write_plan(arguments: argparse.Namespace) -> None:
    """Write the read plan of a run, and print a summary."""
    order, place = open_run(arguments), workers(arguments)
    plan = plan_reads(order, parse_steps(order, arguments.steps))
    share = place.select(plan.parts())
    total = sum(map(len, share))
    arguments.watch.begin("read-plan", total, 0, "samples")
    options = {"workers": place, **chosen(arguments, "storage_options")}
    written, missing = write_read_plan(order, arguments.to, plan, **options, watch=arguments.watch.advance)
    text = f"{counts(samples=total)} in {counts(parts=len(share))}, {written} written now, {missing} missing"
    values = {"to": arguments.to, "samples": total, "parts": len(share), "written": written, "missing": missing}
    print_result(values, f"{arguments.to}: {text}", arguments)


main = command("read-plan", __doc__, add_options, write_plan, RESUMES, progress=True)
