"""Installed packages, the missing ones, and whether URIs can be reached with these credentials; this node, for a run.

Each row is a package: its version and what needs it, or the line that installs it. Each URI is a dataset, an object or
a folder: it is looked up, as binidx would do it, and nothing is written.

An argument that ends in .json is the file of a run, and with --nodes or --strict one of any name. Then this node is
checked for the run. Each bucket is measured: latency, bandwidth, and whether it refuses some of 64 requests sent at
once. In the directories for index files and cached tokens 64 MiB are written, read back and removed; they must have
room for what the plan of the run needs. An object is written where indices are kept, read and removed; the clock is
compared there. Run it on each node of a job before the training. What is slower than a limit is a warning, and with
--compare what differs from the result of another node, which --json printed there.

exit status: 0 all is well, 1 a URI was not reached, a check failed or, with --strict, there is a warning, 2 the call is
wrong

example:
  binidx doctor s3://corpus/en s3://corpus/cache/
  binidx doctor run.json --nodes 16 --strict
  binidx doctor run.json --compare node-0.json --max-latency 0.2
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import textwrap
import time
from collections.abc import Mapping
from typing import Any

import binidx
from binidx.errors import BinidxError, ConfigError, ObjectNotFoundError

from ._command import Command, print_result
from ._display import counts
from ._options import add_json, chosen, num_bytes, refuse

OK, FAILED, MISSING = "ok", "failed", "missing"

LIMITS = ("max_latency", "min_bandwidth", "min_disk")
"""Options that are fields of `NodeLimits`."""

PACKAGES = {
    "torch": ("torch", "samples as tensors, the loader"),
    "s3fs": ("s3", "s3://"),
    "gcsfs": ("gcs", "gs://"),
    "adlfs": ("azure", "abfs://"),
    "ossfs": ("oss", "oss://"),
    "huggingface_hub": ("hub", "hf://"),
    "gigatoken": ("gigatoken", "the fastest tokenizer engine"),
    "tokenizers": ("tokenizers", "tokenizer.json"),
    "sentencepiece": ("sentencepiece", ".model tokenizers"),
    "pyarrow": ("parquet", "Parquet, lineage, exported orders"),
    "isal": ("gzip", ".gz text, faster"),
    "matplotlib": ("plot", "binidx account --figure, figures"),
    "shtab": ("completion", "binidx --completion"),
    "starlette": ("explore", "binidx explore"),
    "nltk": ("sentences", "--split-sentences"),
    "ray": ("ray", "--engine ray"),
    "distributed": ("dask", "--engine dask"),
    "prometheus-client": ("telemetry", "serve_metrics"),
}
"""Package -> the extra that brings it, and what needs it."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    told = "prefix of a dataset, object or folder to reach; or a run, a file *.json"
    options.add_argument("uris", nargs="*", metavar="URI", help=told)
    add_json(options, "--storage-options", "fsspec's own, for these URIs, and the data of a run")
    options.add_argument("--nodes", type=int, metavar="N", help="nodes that share the ranks of the run (1)")
    options.add_argument("--strict", action="store_true", help="exit with status 1 if there is a warning about the run")
    group = options.add_argument_group("of a run")
    group.add_argument("--max-latency", type=float, metavar="SECONDS", help="most to the first byte of a bucket (0.5)")
    group.add_argument("--min-bandwidth", type=num_bytes, metavar="BYTES", help="least a second of a bucket (10MB)")
    told = "least a second that a directory writes and reads (50MB)"
    group.add_argument("--min-disk", type=num_bytes, metavar="BYTES", help=told)
    group.add_argument("--compare", metavar="FILE", help="what --json printed on another node")
    group.add_argument("--factor", type=float, metavar="F", help="by which it may differ (2)")


def examine(arguments: argparse.Namespace) -> int:
    """Check this node for a run, if the arguments name one; else the packages and each URI."""
    uris = arguments.uris
    runs = [uri for uri in uris if uri.endswith(".json")]
    if not runs and arguments.nodes is None and not arguments.strict:
        refuse(arguments, (*LIMITS, "compare", "factor"), "only for a run, a file *.json, or with --nodes")
        return examine_uris(arguments)
    if len(uris) != 1:
        found = f"found {counts(URIs=len(uris))}, needed one: the file of a run, by a call of its own"
        raise ConfigError(f"{runs[0] if runs else '--nodes, --strict'}: {found}")
    return examine_node(uris[0], arguments)


def examine_node(uri: str, arguments: argparse.Namespace) -> int:
    """Print a line for each check of this node for a run; return 1 if it is not fit for the run."""
    from binidx.run.plan.node_check import WARNING, NodeLimits, NodeResult, check_node, compare_nodes, worst_state
    from binidx.storage.location import Location

    if arguments.compare is None:
        refuse(arguments, ("factor",), "only with --compare")

    try:
        run = binidx.Run.load(uri, arguments.storage_options)
    except ConfigError as error:
        other = "; to reach an object named .json that is no run, give its folder" if uri.endswith(".json") else ""
        raise ConfigError(f"{error}{other}") from error
    limits = {name: value for name, value in chosen(arguments, *LIMITS).items() if value is not None}
    checks = check_node(run, nodes=1 if arguments.nodes is None else arguments.nodes, limits=NodeLimits(**limits))
    if arguments.compare is not None:
        factor = 2.0 if arguments.factor is None else arguments.factor
        checks += compare_nodes(checks, Location.of(arguments.compare, arguments.storage_options), factor)
    worst, width = worst_state(checks), max(shutil.get_terminal_size().columns, 40)
    lines = []
    for done in checks:
        lines.append(f"{done.state:<8} {done.what}")
        lines.append(textwrap.fill(done.detail, width, initial_indent=" " * 9, subsequent_indent=" " * 9))
    print_result(NodeResult(worst, checks, platform.node()), "\n".join(lines), arguments)
    return int(worst == FAILED or (arguments.strict and worst == WARNING))


def examine_uris(arguments: argparse.Namespace) -> int:
    """Print a line for each package and each URI; return 1 if a URI was not reached."""
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    rows = [(OK, f"binidx {binidx.__version__}", machine), *map(find_package, PACKAGES)]
    rows += [reach(uri, arguments.storage_options) for uri in arguments.uris]
    values = {"checks": [dict(zip(("state", "what", "detail"), row, strict=True)) for row in rows]}
    width = max(len(what) for _, what, _ in rows[: len(PACKAGES) + 1])
    print_result(values, "\n".join(f"{state:<8} {what:<{width}}  {detail}" for state, what, detail in rows), arguments)
    return int(any(state == FAILED for state, _, _ in rows))


def find_package(name: str) -> tuple[str, str, str]:
    """Return the state of a package, its name and version, and what needs it."""
    from importlib import metadata

    extra, purpose = PACKAGES[name]
    try:
        return OK, f"{name} {metadata.version(name)}", purpose
    except metadata.PackageNotFoundError:
        return MISSING, name, f"{purpose}: pip install 'binidx[{extra}]'"


def reach(uri: str, storage_options: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Return the state of a URI, the URI, and what is there."""
    began = time.perf_counter()
    try:
        found = find(uri, storage_options)
    except BinidxError as error:
        return FAILED, uri, str(error)
    return OK, uri, f"{found}, in {(time.perf_counter() - began) * 1e3:,.0f} ms"


def find(uri: str, storage_options: Mapping[str, Any] | None) -> str:
    """Return what is at a URI.

    Raises:
        ObjectNotFoundError: nothing is there.
        StorageError: the store refuses, or cannot be reached.
    """
    from binidx.format.bin_file import as_prefix
    from binidx.format.prefix_advice import did_you_mean
    from binidx.format.virtual import PARTS
    from binidx.storage.location import Location
    from binidx.storage.requests.remote_object import list_page, object_identity

    location = Location.of(uri, storage_options)
    prefix = Location(as_prefix(uri), location.options)
    for each, name in ((prefix + ".idx", "a dataset"), (prefix + PARTS, "a virtual merge"), (location, "an object")):
        if not each.uri.endswith("/") and not os.path.isdir(each.local_path or ""):
            with contextlib.suppress(ObjectNotFoundError):
                size = object_identity(each)["size"]
                return f"{name} of {size:,} bytes" if each is location else name
    if location.local_path and os.path.isdir(location.local_path):
        return "a folder"
    if names := list_page(Location(uri.rstrip("/") + "/", location.options)):
        return f"a folder, with objects such as {names[0]}"
    raise ObjectNotFoundError(f"no such object, though its store answers{did_you_mean(location)}")


main = Command("doctor", __doc__, add_options, examine)
