"""Options of the commands about a run: the run, its steps, its sizes, texts."""

from __future__ import annotations

import argparse
from typing import Any

from ._options import add_json


def add_run(options: argparse.ArgumentParser, of: str = "RUN and its data", nargs: str | None = None) -> None:
    """Add the argument RUN, and the storage options for `of`.

    Args:
        of: subject of the storage options, for the help.
        nargs: of RUN, as in argparse: "?" if another option can take its place.
    """
    options.add_argument("run", metavar="RUN", nargs=nargs, help="path or URI of what binidx.Run.save wrote")
    add_json(options, "--storage-options", f"fsspec's own, for {of}")


def add_normalize(options: argparse.ArgumentParser) -> None:
    """Add the option to compare normal forms of texts."""
    told = "compare texts by their Unicode NFKC, without case; a run of blanks and punctuation is one blank"
    options.add_argument("--normalize", action="store_true", help=told)


def add_steps(options: argparse._ActionsContainer, form: str = "A:B", **more: Any) -> None:
    """Add the option that selects steps, as `parse_steps` and `stop_step` read it.

    Args:
        form: its value, for the help: ":N" where all steps before N are counted.
        more: as of argparse.
    """
    told = "steps before N (all)" if form == ":N" else "steps from A to before B (all)"
    options.add_argument("--steps", metavar=form, **{"help": told, **more})


def add_text_tokenizer(options: argparse._ActionsContainer, purpose: str) -> None:
    """Add the option of the tokenizer that `decoder` opens; `purpose` is the beginning of its help."""
    options.add_argument("--tokenizer", metavar="URI", help=f"{purpose}; any that preprocess takes")


TOPOLOGY = ("sequence_length", "data_parallel_size", "micro_batch_size", "global_batch_size")
"""Arguments of `add_topology`."""


def add_topology(options: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options that replace the ranks and batch sizes of a saved run, or describe one epoch of a prefix."""
    group = options.add_argument_group("another run than RUN says")
    told = "RUN is a prefix: one epoch of it, S tokens a sample"
    group.add_argument("--sequence-length", type=int, metavar="S", help=told)
    group.add_argument("--world", dest="data_parallel_size", type=int, metavar="N", help="data parallel ranks")
    group.add_argument("--micro-batch-size", type=int, metavar="M", help="samples a rank reads at a time")
    group.add_argument("--global-batch-size", type=int, metavar="B", help="samples of a step")
    return group


def add_sizes(options: argparse.ArgumentParser) -> None:
    """Add the options that replace the data parallel size, batch sizes or length of a saved run."""
    group = add_topology(options)
    length = group.add_mutually_exclusive_group()
    length.add_argument("--train-iters", type=int, metavar="N", help="steps of training")
    length.add_argument("--train-samples", type=int, metavar="N", help="samples of training")
    group.add_argument("--eval-interval", type=int, metavar="N", help="steps between evaluations (1000)")
    group.add_argument("--eval-iters", type=int, metavar="N", help="batches of an evaluation (100)")
