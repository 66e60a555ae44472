"""Options that replace the data parallel size, batch sizes or length of a saved run."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from binidx.errors import ConfigError
from binidx.run.run_file import Run
from binidx.run.schedule import split_sizes


def add_sizes(options: argparse.ArgumentParser) -> None:
    """Add --world and the other options."""
    group = options.add_argument_group("another run than RUN says")
    group.add_argument("--world", type=int, metavar="N", help="data parallel ranks")
    group.add_argument("--micro-batch-size", type=int, metavar="M", help="samples a rank reads at a time")
    group.add_argument("--global-batch-size", type=int, metavar="B", help="samples of a step")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--train-iters", type=int, metavar="N", help="steps of training")
    length.add_argument("--train-samples", type=int, metavar="N", help="samples of training")
    group.add_argument("--eval-interval", type=int, metavar="N", help="steps between evaluations (1000)")
    group.add_argument("--eval-iters", type=int, metavar="N", help="batches of an evaluation (100)")


def sized(run: Run, arguments: argparse.Namespace) -> Run:
    """Return the run with the values of the command line.

    Raises:
        ConfigError: evaluations without a length, or invalid numbers.
    """
    named = {
        "data_parallel_size": arguments.world,
        "micro_batch_size": arguments.micro_batch_size,
        "global_batch_size": arguments.global_batch_size,
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    found = replace(run, **given) if given else run
    evaluated = {"eval_interval": arguments.eval_interval, "eval_iters": arguments.eval_iters}
    evaluation: dict[str, Any] = {name: value for name, value in evaluated.items() if value is not None}
    if arguments.train_iters is None and arguments.train_samples is None:
        if evaluation:
            raise ConfigError("--eval-interval, --eval-iters: need --train-iters or --train-samples")
        return found
    if run.stages is not None:
        raise ConfigError("--train-iters, --train-samples: stages have sizes of their own")
    sizes = split_sizes(
        found.schedule,
        train_iters=arguments.train_iters,
        train_samples=arguments.train_samples,
        full_validation=bool(found.config.full_validation),
        **evaluation,
    )
    return replace(found, sizes=sizes)
