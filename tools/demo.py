"""Run the whole pipeline on this machine: text, tokens, a bucket, a training run, and its exact continuation.

    binidx demo                    about a minute on two cores
    binidx demo --keep             keeps the bucket up afterwards
    binidx demo --json             all figures as one object

Starts a real S3 server on loopback, makes a corpus from the text of this Python's standard library, trains a tokenizer,
writes .bin/.idx, converts them to s3://, and trains a small GPT on a blend of them. The training process is killed
half-way; a new one resumes, and its batches must equal those of an uninterrupted run. Nothing is downloaded.

It is examples/demo of the repository, and runs in a clone alone.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import binidx
from binidx.errors import ConfigError

from ._command import Command

PACKAGE = Path(binidx.__file__).resolve().parent
CLONE = PACKAGE.parents[1]
"""Folder of the repository, if the package lies in its src."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("--steps", type=int, default=200, metavar="N", help="training steps of the whole run (200)")
    options.add_argument("--directory", type=Path, help="work in this new or empty directory, and leave it there")
    options.add_argument("--keep", action="store_true", help="leave the bucket up at the end, until Ctrl-C")


def run_example(options: argparse.Namespace) -> None:
    """Run the example of the clone that holds the package."""
    if not (CLONE / "examples" / "demo").is_dir():
        raise ConfigError(
            f"examples/demo: not installed with {PACKAGE}, needs a clone of the repository; in its folder "
            "run make demo, or pip install -e '.[demo]' and then binidx demo"
        )
    sys.path[:0] = [str(CLONE / "examples"), str(CLONE / "tests")]  # its server is one of the tests
    import_module("demo").demonstrate(options)


main = Command("demo", __doc__, add_options, run_example)
