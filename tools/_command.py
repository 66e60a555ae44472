"""Shared parts of the commands: exit status, one-line errors, argument types, formatting of numbers."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
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

CALL_ERRORS = (ConfigError, MissingDriverError, ObjectExistsError, ObjectNotFoundError, AccessError, UnreachableError)
"""Errors of the call; all others are errors of the data."""


def run(name: str, body: Callable[[], int], *, after_interrupt: str = "interrupted") -> int:
    """Run a command and return its exit status; errors and warnings print as one line."""
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
    except BrokenPipeError:
        # A reader such as `| head` has closed the pipe. Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
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
    """Parse an argument that must be a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"found {text}, needed a JSON object")
    return value


def add_writing(options: argparse.ArgumentParser) -> None:
    """Add the options of a command that writes datasets made of others."""
    options.add_argument("--no-lineage", action="store_true", help="do not write lineage")
    options.add_argument("--overwrite", action="store_true", help="replace an existing target")
    options.add_argument("--source-options", metavar="JSON", type=json_object, help="fsspec's options for the sources")
    options.add_argument("--target-options", metavar="JSON", type=json_object, help="the same for the target")
    options.add_argument("--json", action="store_true", help="print the summary as one JSON object")


DATASET_ENDS = (*OBJECT_SUFFIXES, PARTS[1:])
"""Endings of the files of a dataset, after its prefix and a dot."""

DATASET = "path or URI without .bin and .idx, also of a virtual merge"
"""Help of an argument that names a dataset to read."""


def prefix(text: str) -> str:
    """Parse an argument that names a dataset, not one of its files."""
    end = next((end for end in DATASET_ENDS if text.endswith(f".{end}")), None)
    if end is not None:
        raise argparse.ArgumentTypeError(
            f"found {text}, needed the prefix of its files: {text.removesuffix(f'.{end}')}"
        )
    return text


def num_bytes(text: str) -> int:
    """Parse a size: `2GB`, `512MiB`, plain digits."""
    try:
        return parse_bytes(text)
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"found {text}, needed a number of bytes such as 2GB") from None


def human_bytes(count: float) -> str:
    """Format bytes: 12_345_678 -> `11.8 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"


def counts(**numbers: int) -> str:
    """Format counts: documents=1, tokens=2034 -> `1 document, 2,034 tokens`."""
    return ", ".join(f"{count:,} {name[: -1 if count == 1 else None]}" for name, count in numbers.items())


def human_seconds(seconds: float) -> str:
    """Format seconds: 75.3 -> `1 min 15 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
