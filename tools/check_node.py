"""Check this node for a run before it starts: stores, disks, clock, and the place of the index caches.

Each bucket is measured: latency, bandwidth, and whether it refuses some of 64 requests sent at once. The directories
for index files and cached tokens must be writable and have room for what the plan of the run needs. An object is
written where indices are kept, read and removed. Run it on each node of a job before the training.

exit status: 0 all is well, 1 a check failed or, with --strict, there is a warning, 2 the call is wrong

example:
  binidx check-node run.json --nodes 16 --strict
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from binidx.run.plan.node_check import FAILED, WARNING, NodeCheck, check_node, worst_state
from binidx.run.run_file import Run

from ._command import command, print_result
from ._runs import add_run


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options, "RUN and data")
    options.add_argument("--nodes", type=int, default=1, metavar="N", help="that share the ranks of the run (1)")
    options.add_argument("--strict", action="store_true", help="exit with status 1 if there is a warning")
    options.add_argument("--json", action="store_true", help="print one JSON object")


def check(arguments: argparse.Namespace) -> int:
    """Check the node, and print a line for each check."""
    checks = check_node(Run.load(arguments.run, arguments.storage_options), nodes=arguments.nodes)
    worst = worst_state(checks)
    print_result({"state": worst, "checks": [*map(asdict, checks)]}, describe(checks), arguments)
    return int(worst == FAILED or (arguments.strict and worst == WARNING))


def describe(checks: Sequence[NodeCheck]) -> str:
    """Return the checks as text: the state, what was checked, and below it what was found."""
    width = max(shutil.get_terminal_size().columns, 40)
    lines = []
    for done in checks:
        lines.append(f"{done.state:<8} {done.what}")
        lines.append(textwrap.fill(done.detail, width, initial_indent=" " * 9, subsequent_indent=" " * 9))
    return "\n".join(lines)


main = command("check-node", __doc__, add_options, check)
