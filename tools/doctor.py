"""Installed packages, the missing ones and what needs them, and whether URIs can be reached with these credentials.

Each row is a package: its version, or the line that installs it. Each URI is a dataset, an object or a folder: it is
looked up, as binidx would do it, and nothing is written. binidx check-node checks a node for a run.

exit status: 0 each URI was reached, 1 one was not, 2 the call is wrong

example:
  binidx doctor s3://corpus/en_text_document s3://corpus/cache/
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import binidx
from binidx.errors import BinidxError, ObjectNotFoundError
from binidx.format.bin_file import as_prefix, did_you_mean
from binidx.format.virtual import PARTS
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import head, list_page

from ._command import add_json, command, print_result

OK, MISSING, FAILED = "ok", "missing", "failed"

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
    "matplotlib": ("plot", "binidx plot, figures"),
    "starlette": ("explore", "binidx explore"),
    "nltk": ("sentences", "--split-sentences"),
    "ray": ("ray", "--engine ray"),
    "distributed": ("dask", "--engine dask"),
    "prometheus-client": ("telemetry", "serve_metrics"),
}
"""Package -> the extra that brings it, and what needs it."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_argument("uris", nargs="*", metavar="URI", help="prefix of a dataset, object or folder to reach")
    add_json(options, "--storage-options", "fsspec's own, for these URIs")


def examine(arguments: argparse.Namespace) -> int:
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
    extra, purpose = PACKAGES[name]
    try:
        return OK, f"{name} {metadata.version(name)}", purpose
    except metadata.PackageNotFoundError:
        return MISSING, name, f"{purpose}: pip install 'binidx[{extra}]'"


def reach(uri: str, storage_options: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Return the state of a URI, the URI, and what is there."""
    began = time.perf_counter()
    try:
        found = find(uri, Location.of(uri, storage_options))
    except BinidxError as error:
        return FAILED, uri, str(error)
    return OK, uri, f"{found}, in {(time.perf_counter() - began) * 1e3:,.0f} ms"


def find(uri: str, location: Location) -> str:
    """Return what is at a URI.

    Raises:
        ObjectNotFoundError: nothing is there.
        StorageError: the store refuses, or cannot be reached.
    """
    prefix = Location(as_prefix(uri), location.options)
    for each, name in ((prefix + ".idx", "a dataset"), (prefix + PARTS, "a virtual merge"), (location, "an object")):
        if not each.uri.endswith("/") and not os.path.isdir(each.local_path or ""):
            with contextlib.suppress(ObjectNotFoundError):
                size = head(each, each.settings).size
                return f"{name} of {size:,} bytes" if each is location else name
    if location.local_path and os.path.isdir(location.local_path):
        return "a folder"
    if names := list_page(Location(uri.rstrip("/") + "/", location.options)):
        return f"a folder, with objects such as {names[0]}"
    raise ObjectNotFoundError(f"no such object, though its store answers{did_you_mean(location)}")


main = command("doctor", __doc__, add_options, examine)
