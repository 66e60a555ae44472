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
from collections.abc import Sequence

from tqdm import tqdm

if __name__ == "__main__":  # python tools/bake.py: see convert.py
    __package__ = "binidx.tools"

from binidx.errors import ConfigError
from binidx.run.provenance.baking import bake, plan_bake

from ._command import counts, human_bytes, parser, run
from ._order_rows import add_run, open_run, steps_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser("bake", __doc__)
    add_run(options)
    options.add_argument("to", metavar="DIR", help="where to, path or URI")
    options.add_argument("--steps", metavar="A:B", help="steps from A to before B (all)")
    options.add_argument("--threads", type=int, default=2, metavar="N", help="parts written at the same time (2)")
    options.add_argument("--shard", type=shard, default=(0, 1), metavar="I/N", help="every N-th part, from the I-th")
    arguments = options.parse_args(argv)
    hint = "interrupted; the same command resumes"
    return run("bake", lambda: body(arguments), after_interrupt=hint)


def shard(text: str) -> tuple[int, int]:
    """Parse `i/n`, i from 0."""
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(f"found {text}, needed I/N with I from 0 to N - 1")
    return int(first), int(count)


def body(arguments: argparse.Namespace) -> int:
    """Bake, and print a summary."""
    order = open_run(arguments)
    try:
        baked = plan_bake(order, steps_of(order, arguments.steps))
    except IndexError as error:
        raise ConfigError(str(error)) from error
    number, count = arguments.shard
    mine = baked.parts()[number::count]
    total = sum(map(len, mine))
    with tqdm(desc="bake", total=total, unit=" samples", unit_scale=True, disable=None) as bar:
        written = bake(
            order,
            arguments.to,
            baked,
            threads=arguments.threads,
            shard=number,
            num_shards=count,
            storage_options=arguments.storage_options,
            watch=bar.update,
        )
    size = total * baked.stored_length * order.token_dtype.itemsize
    print(f"{arguments.to}: {total:,} samples in {counts(parts=len(mine))}, {written} written now, {human_bytes(size)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
