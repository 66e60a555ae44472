"""Shared parts of the commands: their `main`, exit status, one-line errors, common options and argument types."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from binidx.corpus.whole_dataset import OBJECT_SUFFIXES
from binidx.errors import (
    AccessError,
    BinidxError,
    ConfigError,
    MissingDriverError,
    ObjectExistsError,
    ObjectNotFoundError,
    UnreachableError,
)
from binidx.format.virtual import SUFFIX as PARTS
from binidx.storage.settings import parse_bytes

from . import closed_pipe_is_no_error

CALL_ERRORS = (ConfigError, MissingDriverError, ObjectExistsError, ObjectNotFoundError, AccessError, UnreachableError)
"""Errors of the call, exit status 2; all other errors are of the data, exit status 1."""

RESUMES = "interrupted; the same command resumes"
"""Message after Ctrl-C, of commands that resume when they are run again."""


def command(
    name: str,
    doc: str | None,
    add_options: Callable[[argparse.ArgumentParser], None],
    body: Callable[[argparse.Namespace], int],
    after_interrupt: str = "interrupted",
) -> Callable[..., int]:
    """Return the `main` of a command, which parses its arguments, runs `body` and returns the exit status.

    Args:
        doc: docstring of the command's module, which is its help.
        after_interrupt: message after Ctrl-C.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        with closed_pipe_is_no_error():
            options = parser(name, doc)
            add_options(options)
            arguments = options.parse_args(argv)
            return run(name, lambda: body(arguments), after_interrupt=after_interrupt)
        return 0

    return main


def run(name: str, body: Callable[[], int], *, after_interrupt: str = "interrupted") -> int:
    """Run a command and return its exit status; a BinidxError or a warning is printed as one line."""
    as_before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"binidx {name}: {message}\n"
    try:
        with ended_by_signals():
            return body()
    except BinidxError as error:
        print(f"binidx {name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, CALL_ERRORS) else 1
    except KeyboardInterrupt:
        print(f"\nbinidx {name}: {after_interrupt}", file=sys.stderr)
        return 130
    finally:
        warnings.formatwarning = as_before


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Treat SIGTERM, which schedulers send, and SIGHUP like Ctrl-C, so that every `finally` runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # under nohup it stays ignored
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring: its first line, then the options, then the rest."""
    summary, _, rest = (doc or "").strip().partition("\n")
    return argparse.ArgumentParser(
        prog=f"binidx {name}",
        description=summary,
        epilog=rest.strip("\n"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def json_object(text: str) -> dict[str, Any]:
    """Parse an argument that must be a JSON object, or @FILE with one. It may be secret, so no message repeats it."""
    try:
        value = json.loads(Path(text[1:]).read_bytes() if text.startswith("@") else text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[1:]}: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"found a JSON {type(value).__name__}, needed an object")
    return value


def add_json(options: argparse._ActionsContainer, flag: str, purpose: str) -> None:
    """Add an option that takes a JSON object; a BINIDX_ variable can hold it, as other users can see arguments."""
    variable = f"BINIDX_{flag.strip('-').replace('-', '_').upper()}"
    told = f"{purpose}: JSON, or @FILE with it; else {variable}"
    options.add_argument(flag, metavar="JSON", type=json_object, default=os.environ.get(variable), help=told)


def show(found: Any, arguments: argparse.Namespace, describe: Callable[[Any], str]) -> None:
    """Print a result: as JSON with --json, else as text."""
    print(json.dumps(found.to_json()) if arguments.json else describe(found))


def add_writing(options: argparse.ArgumentParser) -> None:
    """Add the options of a command that makes datasets from other datasets."""
    options.add_argument("--no-lineage", action="store_true", help="do not write lineage")
    options.add_argument("--overwrite", action="store_true", help="replace an existing target")
    add_json(options, "--source-options", "fsspec's options for the sources")
    add_json(options, "--target-options", "the same for the target")
    options.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def writing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the library's arguments for the options of `add_writing`."""
    return {
        "lineage": not arguments.no_lineage,
        "overwrite": arguments.overwrite,
        "source_options": arguments.source_options,
        "target_options": arguments.target_options,
    }


DATASET_ENDS = (*OBJECT_SUFFIXES, PARTS[1:])
"""Endings of the files of a dataset, after its prefix and a dot."""

DATASET = "path or URI without .bin and .idx, also of a virtual merge"
"""Help of an argument that names a dataset to read."""


def strip_end(text: str) -> str | None:
    """Return the prefix of a dataset from the name of one of its files; None for other names."""
    return next((text.removesuffix(f".{end}") for end in DATASET_ENDS if text.endswith(f".{end}")), None)


def prefix(text: str) -> str:
    """Parse an argument that names a dataset, not one of its files."""
    if (files := strip_end(text)) is not None:
        raise argparse.ArgumentTypeError(f"found {text}, needed the prefix of its files: {files}")
    return text


def num_bytes(text: str) -> int:
    """Parse a size: `2GB`, `512MiB`, plain digits."""
    try:
        return parse_bytes(text)
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"found {text}, needed a number of bytes such as 2GB") from None


def shard(text: str) -> tuple[int, int]:
    """Parse a shard `I/N`, with I from 0 to N - 1, as (I, N)."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(f"found {text}, needed I/N with I from 0 to N - 1")
    return int(first), int(count)
