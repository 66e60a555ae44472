"""Options that several commands have, the types of their values, and what the library takes for them."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import binidx
from binidx.errors import ConfigError


def add_json(options: argparse._ActionsContainer, flag: str, purpose: str) -> None:
    """Add an option that takes a JSON object; a BINIDX_ variable can hold it, as other users can see arguments.

    Args:
        flag: such as `--storage-options`.
        purpose: beginning of its help.
    """
    variable = f"BINIDX_{flag.strip('-').replace('-', '_').upper()}"
    told = f"{purpose}: JSON, or @FILE with it; else {variable}"
    options.add_argument(flag, metavar="JSON", type=json_object, default=os.environ.get(variable), help=told)


def json_object(text: str) -> dict[str, Any]:
    """Parse an argument that must be a JSON object, or @FILE with one. It may be secret, so no message repeats it."""
    variables = (f"{name}: " for name, value in os.environ.items() if value == text and name.startswith("BINIDX_"))
    subject = next(variables, "")
    try:
        value = json.loads(Path(text[1:]).read_bytes() if text.startswith("@") else text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{subject}{text[1:]}: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{subject}no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{subject}found a JSON {type(value).__name__}, needed an object")
    return value


def add_stores(options: argparse._ActionsContainer, source: str = "the source", target: str = "the target") -> None:
    """Add the options of the stores of the source and of the target."""
    add_json(options, "--source-options", f"fsspec's options for {source}")
    add_json(options, "--target-options", f"the same for {target}")


DATASET = "path or URI without .bin and .idx, also of a virtual merge"
"""Help of an argument that names a dataset to read."""


def add_dataset(options: argparse.ArgumentParser, name: str, **more: Any) -> None:
    """Add an argument for the prefix of a dataset to read; `more` are arguments of argparse."""
    options.add_argument(name, **{"type": prefix, "metavar": "PREFIX", "help": DATASET, **more})


def add_target(options: argparse.ArgumentParser, told: str, **more: Any) -> None:
    """Add the option --to of what is written, with its help; `more` are arguments of argparse."""
    form = {"dest": "target", "required": True, "type": target, "metavar": "PREFIX", "help": told}
    options.add_argument("--to", **{**form, **more})


def prefix(text: str) -> str:
    """Return the prefix of a dataset that the user means."""
    from binidx.format.bin_file import as_prefix

    if not text:
        raise argparse.ArgumentTypeError("found an empty name, needed a path or a URI")
    return as_prefix(text)


def target(text: str) -> str:
    """Return the prefix to write that the user means; a folder stays one, and is an error where it is written."""
    if re.fullmatch("(s3|gs|az|oss)://[^/]+", text):
        raise argparse.ArgumentTypeError(f"found {text}, a bucket, needed a prefix in it such as {text}/en")
    return text if text.endswith("/") else prefix(text)


def add_writing(options: argparse.ArgumentParser) -> None:
    """Add the options of a command that makes datasets from other datasets."""
    options.add_argument("--no-lineage", action="store_true", help="do not write lineage")
    options.add_argument("--overwrite", action="store_true", help="replace an existing target")
    add_stores(options)


def writing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the library's arguments for the options of `add_writing`, and for the progress."""
    names = "overwrite", "source_options", "target_options", "watch"
    return {"lineage": not arguments.no_lineage, **chosen(arguments, *names)}


WORKERS = ("engine", "workers", "shard", "task_memory", "task_resources")
"""Names of the options of `add_workers`."""


def add_workers(
    options: argparse._ActionsContainer, what: str, engine: str | None = None, *, shards: bool = True
) -> argparse._ActionsContainer:
    """Add the options of a command whose work can leave the machine; return the group of `--shard`, of which one holds.

    Args:
        what: the parts, in plural: "files".
        engine: default engine; None: this process.
        shards: whether --shard is shown; `counting_workers` refuses it.
    """
    engines = f"local, ray, ray:ADDRESS, dask=ADDRESS ({engine or 'this process'})"
    options.add_argument("--engine", default=engine, help=f"where {what} are made: {engines}")
    options.add_argument("--workers", type=int, metavar="N", help=f"{what} made at once (a core each)")
    told = "memory of one, which engines hold free (512MiB; of shuffle and bake, which keep to it, 1600MiB)"
    options.add_argument("--task-memory", type=num_bytes, metavar="BYTES", help=told)
    told = "what one takes of a cluster's resources, as CPU=2,highmem=1 (on Ray CPU=1)"
    options.add_argument("--task-resources", type=resources, metavar="NAME=N,...", help=told)
    share = options.add_mutually_exclusive_group() if shards else options  # argparse fails at a group of hidden options
    told = "only each N-th, from the I-th, from 0" if shards else argparse.SUPPRESS
    share.add_argument("--shard", type=shard, metavar="I/N", help=told)
    return share


def workers(arguments: argparse.Namespace) -> binidx.Workers:
    """Return the workers that the options of `add_workers` choose."""
    shard = arguments.shard and binidx.Shard(*arguments.shard)
    return binidx.Workers(
        arguments.engine, arguments.workers, shard=shard, **chosen(arguments, "task_memory", "task_resources")
    )


def counting_workers(arguments: argparse.Namespace, counts: str) -> binidx.Workers | None:
    """Return the workers that the options choose for a count, which has no shards and is asked for by `counts`."""
    if (place := chosen_workers(arguments)) is not None:
        place.refuse_shard()
        if not getattr(arguments, counts):
            raise ConfigError(f"engine, workers, task_memory, task_resources: only with --{counts}, which workers make")
    return place


def chosen_workers(arguments: argparse.Namespace) -> binidx.Workers | None:
    """Return the workers that the options choose; None if none of them was given: this process does the work."""
    return workers(arguments) if any(value is not None for value in chosen(arguments, *WORKERS).values()) else None


def chosen(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the arguments with these names, which are those of a library function's parameters, too."""
    return {name: getattr(arguments, name) for name in names}


def refuse(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raise ConfigError with the reason if any of these arguments was given.

    Args:
        names: of arguments whose default is None or False.
        reason: rest of the message, after the names.
    """
    if given := [name for name in names if not (getattr(arguments, name) is None or getattr(arguments, name) is False)]:
        raise ConfigError(f"{', '.join(given)}: {reason}")


class Names:
    """Type of an argument that is a name of a table of the library, which is imported when a value is parsed.

    Args:
        module, table: the table.
        more: further names.
    """

    def __init__(self, module: str, table: str, *more: str) -> None:
        self.module, self.table, self.more = module, table, more

    def __iter__(self) -> Iterator[str]:
        yield from (*self.more, *getattr(import_module(self.module), self.table))

    def __call__(self, text: str) -> str:
        if text not in self:
            raise argparse.ArgumentTypeError(f"found {text}, needed one of {', '.join(self)}")
        return text


def num_bytes(text: str) -> int:
    """Parse a size: `2GB`, `512MiB`, plain digits."""
    from binidx.storage.settings import parse_bytes

    try:
        if (size := parse_bytes(text)) >= 0:
            return size
        raise ValueError
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"found {text}, needed a number of bytes such as 2GB or 512MiB") from None


def seed(text: str) -> int:
    """Parse a seed: a whole number of 64 bits."""
    if not (text.isdecimal() and int(text) < 2**64):
        raise argparse.ArgumentTypeError(f"found {text}, needed a whole number from 0 to 2^64 - 1")
    return int(text)


def resources(text: str) -> dict[str, float]:
    """Parse amounts of resources: `CPU=2,highmem=1`."""
    try:
        return {name: float(amount) for name, amount in (each.split("=") for each in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text}, needed amounts such as CPU=2,highmem=1") from None


def shard(text: str) -> tuple[int, int]:
    """Parse a shard `I/N`, with I from 0 to N - 1, as (I, N)."""
    first, _, count = text.partition("/")
    if not (first.isdecimal() and count.isdecimal() and int(first) < int(count)):
        raise argparse.ArgumentTypeError(f"found {text}, needed I/N with I from 0 to N - 1")
    return int(first), int(count)
