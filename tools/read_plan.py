"""Write the places of the tokens of a run in training order: its read plan, from which nodes start without any index.

For runs whose many nodes start from one bucket: a node reads kilobytes, whatever the number of documents, instead of
every .idx and index. It copies no token: 56 bytes for a sample of 5 documents. Train from it with
binidx.PlannedDataset(DIR, config) in place of the run's dataset: the same samples, from any consumed_samples, on any
number of ranks. Data that changes afterwards is an error. Existing parts are kept, so an interrupted job resumes;
--shard i/n splits it between machines, as n jobs of a Slurm array.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx read-plan run.json s3://corpus/plan --threads 8
"""

from __future__ import annotations

import argparse

from binidx.run.provenance.read_planning import plan_reads, write_read_plan

from ._command import RESUMES, chosen, command, print_result
from ._display import Bar, counts
from ._runs import open_run, parse_steps
from .bake import add_options


def write_plan(arguments: argparse.Namespace) -> None:
    """Write the read plan of a run, and print a summary."""
    order = open_run(arguments)
    plan = plan_reads(order, parse_steps(order, arguments.steps))
    number, count = arguments.shard
    total = sum(map(len, mine := plan.parts()[number::count]))
    with Bar("read-plan") as bar:
        bar.begin("read-plan", total, 0, "samples")
        options = chosen(arguments, "threads", "storage_options") | {"shard": number, "num_shards": count}
        written, missing = write_read_plan(order, arguments.to, plan, **options, watch=bar.advance)
    text = f"{counts(samples=total)} in {counts(parts=len(mine))}, {written} written now, {missing} missing"
    values = {"to": arguments.to, "samples": total, "parts": len(mine), "written": written, "missing": missing}
    print_result(values, f"{arguments.to}: {text}", arguments)


main = command("read-plan", __doc__, add_options, write_plan, RESUMES)
