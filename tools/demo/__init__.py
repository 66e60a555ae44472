"""Run the whole pipeline on this machine: text, tokens, a bucket, a training run, and its exact continuation.

    binidx demo                    about a minute on two cores
    binidx demo --keep             keeps the bucket up afterwards
    binidx demo --json             all figures as one object

Starts a real S3 server on loopback, makes a corpus from the text of this Python's standard library, trains a tokenizer,
writes .bin/.idx, converts them to s3://, and trains a small GPT on a blend of them. The training process is killed
half-way; a new one resumes, and its batches must equal those of an uninterrupted run. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import signal
import sys
import tempfile
from pathlib import Path

from binidx.errors import ConfigError, MissingDriverError

from .._command import command

MIN_STEPS = 4
NEEDED = ("torch", "s3fs", "tokenizers")


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("--steps", type=int, default=200, metavar="N", help="training steps of the whole run (200)")
    options.add_argument("--directory", type=Path, help="work in this new or empty directory, and leave it there")
    options.add_argument("--keep", action="store_true", help="leave the bucket up at the end, until Ctrl-C")


def check(options: argparse.Namespace) -> None:
    """Raise an error before the start if a package is missing or an option is wrong."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDriverError(f"needs {', '.join(missing)}; pip install 'binidx[demo]'")
    if options.steps < MIN_STEPS:
        raise ConfigError(f"--steps: found {options.steps}, needs at least {MIN_STEPS}")
    if options.directory and options.directory.exists() and any(options.directory.iterdir()):
        raise ConfigError(f"--directory: {options.directory} is not empty; name a new one")


def demonstrate(options: argparse.Namespace) -> None:
    """Run the demo and print its figures, as text or as one JSON object."""
    check(options)
    from .stages import ENVIRONMENT, run_demo, show_access, show_figures

    with contextlib.ExitStack() as stack:
        directory = options.directory
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="binidx-demo-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(temporary))
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO() if options.json else sys.stdout):
            server, figures = stack.enter_context(run_demo(options.steps, directory))
            show_figures(figures)
        environment = {name: server.environment[name] for name in ENVIRONMENT}
        if options.json:
            print(json.dumps({**figures, "environment": environment}, indent=1), flush=True)
        elif options.keep:
            show_access(environment)
        if options.keep:
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()


main = command("demo", __doc__, add_options, demonstrate)
