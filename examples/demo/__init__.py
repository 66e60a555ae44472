"""From text to an exactly resumed training run over a real S3 server: the job of `binidx demo`, which has its options.

corpus.py    text, tokenizer, datasets
train.py     the training process, which runs by itself over any such run.json
stages.py    the stages in their order: server, corpus, order, training, kill, resume
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

MIN_STEPS = 4
NEEDED = ("torch", "s3fs", "tokenizers")


def check(options: argparse.Namespace) -> None:
    """Raise an error before the start if a package is missing or an option is wrong."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDriverError(f"needs {', '.join(missing)}; in the clone: pip install -e '.[demo]'")
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
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"directory: {directory}: {error.strerror}; name another place") from None
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
