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
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from binidx.errors import MissingDriverError

from .._command import parser, run

MIN_STEPS = 4
NEEDED = ("s3fs", "tokenizers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return 1 if the resumed order differs from the uninterrupted one."""
    options = parse(argv)
    return run("demo", lambda: demonstrate(options))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    options_of = parser("demo", __doc__)
    options_of.add_argument("--steps", type=int, default=200, metavar="N", help="training steps of the whole run (200)")
    options_of.add_argument("--directory", type=Path, help="work in this new or empty directory, and leave it there")
    options_of.add_argument("--keep", action="store_true", help="leave the bucket up at the end, until Ctrl-C")
    options_of.add_argument("--json", action="store_true", help="print all figures as one object, and nothing else")
    options_of.add_argument("--plain", action="store_true", help="no colours and no progress bars")
    options = options_of.parse_args(argv)
    if options.steps < MIN_STEPS:
        options_of.error(f"--steps: found {options.steps}, needs at least {MIN_STEPS}")
    if options.directory and options.directory.exists() and any(options.directory.iterdir()):
        options_of.error(f"--directory: {options.directory} is not empty; name a new one")
    return options


def check_installed() -> None:
    """Raise MissingDriverError before the start if a package is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDriverError(f"needs {', '.join(missing)}; pip install 'binidx[demo]'")


def demonstrate(options: argparse.Namespace) -> int:
    """Run the demo and print its figures, as text or as one JSON object."""
    check_installed()
    from .report import environment, show_next, show_outcome
    from .screen import Screen
    from .stages import run_demo

    screen = Screen(None if options.json else sys.stdout, plain=options.plain)
    with workplace(options.directory) as directory, run_demo(options.steps, directory, screen) as outcome:
        show_outcome(outcome, screen)
        show_next(outcome, screen, directory=options.directory, keep=options.keep)
        if options.json:
            more = {"environment": environment(outcome)} if options.keep else {}
            print(json.dumps({**outcome.figures(), **more}, indent=1), flush=True)
        if options.keep:
            wait_for_ctrl_c()
    return 0


@contextlib.contextmanager
def workplace(directory: Path | None) -> Iterator[Path]:
    """Return the directory that the user named, which is kept, or a temporary one."""
    if directory:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
    else:
        with tempfile.TemporaryDirectory(prefix="binidx-demo-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)


def wait_for_ctrl_c() -> None:
    """Wait for Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(3600)
