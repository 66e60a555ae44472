"""Write the file of a run from a Megatron command line, so that the other commands can plan, trace and account it.

All that follows --from-megatron is the command, with torchrun's options or without; --to may follow it. Options of the
model are left out. Data parallel ranks are --gpus divided by tensor, pipeline and context parallel sizes.

A resume names the file of the run before it: with --previous and --first-step, the samples consumed are those of that
run at that step. Other data, another topology or another schedule then begin there.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx run --gpus 512 --from-megatron pretrain_gpt.py $ARGUMENTS --to run.json
"""

from __future__ import annotations

import argparse
from typing import Any

from binidx.errors import ConfigError
from binidx.packed.packed_run import load_packed_run
from binidx.run.megatron_command import parse_megatron_command
from binidx.run.provenance.history import RunHistory
from binidx.run.run_file import Run, is_packed_run
from binidx.storage.location import Location

from ._command import add_json, chosen, command, print_result
from ._display import counts


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("--to", metavar="RUN", help="path or URI of the run's file")
    options.add_argument("--gpus", dest="num_processes", type=int, metavar="N", help="processes of the job")
    options.add_argument("--rampup", choices=["kept", "ignored"], help="what Megatron does with --rampup-batch-size")
    options.add_argument("--previous", metavar="RUN", help="file of the run that this one resumes, or forks from")
    options.add_argument("--first-step", type=int, default=0, metavar="N", help="iterations before this run (0)")
    options.add_argument("--consumed-samples", type=int, metavar="C", help="samples before it, of this data")
    add_json(options, "--storage-options", "fsspec's own, for RUN and its data")
    options.add_argument(
        "--from-megatron", nargs=argparse.REMAINDER, required=True, metavar="...", help="the command, to its end"
    )


def write_run(arguments: argparse.Namespace) -> None:
    """Write the file, and print a summary."""
    words, to = [*arguments.from_megatron], arguments.to
    if "--to" in words:  # it may follow the command, as --json may
        place = words.index("--to")
        to, words = next(iter(words[place + 1 :]), None), [*words[:place], *words[place + 2 :]]
    arguments.json |= "--json" in words
    if not to:
        raise ConfigError("to: found none, needs the path of the file")
    options = chosen(arguments, "num_processes", "rampup", "storage_options")
    run = parse_megatron_command(words, **options, **resumed(arguments))
    run.save(to, arguments.storage_options)
    ranks, size = counts(ranks=run.data_parallel_size), counts(samples=run.schedule.stages[0].batch_size)
    text = f"{to}: steps {run.first_step:,} to {run.stop_step:,} of {size} on {ranks}, {run.micro_batch_size} at a time"
    values = {"to": to, "first_step": run.first_step, "stop_step": run.stop_step, "sizes": [*run.sizes]}
    print_result(values, text, arguments)


def resumed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a run that continues another one; the samples consumed are those of that one by default."""
    step, consumed = arguments.first_step, arguments.consumed_samples
    if arguments.previous is None:
        return {"first_step": step, "consumed_samples": consumed or 0}
    options = arguments.storage_options
    previous = Location.of(arguments.previous, options).absolute
    if is_packed_run(Location(previous, options)):  # its data is another one, of which no sample was consumed
        position, earlier = 0, load_packed_run(previous, options).reading.schedule.samples_before(step)
    else:
        history = RunHistory.of(Run.load(previous, options), load_packed=load_packed_run)
        runs = [run for run in history.runs if run.first_step <= step]
        if not runs:
            raise ConfigError(f"first_step: found {step:,}, needs a step of {previous}")
        position, earlier = runs[-1].schedule.samples_before(step), runs[-1].earlier_samples
    consumed = position if consumed is None else consumed
    names = ("previous", "first_step", "consumed_samples", "earlier_samples")
    return dict(zip(names, (previous, step, consumed, position + earlier - consumed), strict=True))


main = command("run", __doc__, add_options, write_run)
