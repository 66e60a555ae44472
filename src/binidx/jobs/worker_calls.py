"""Calls that a worker of a cluster can carry out without binidx, and that find another version of it.

    driver                                          worker
    text of `SOURCE`, needed version      ──►       host, and the version of binidx there
    the same, and a task as bytes         ──►       this version: unpickles the task and carries it out
                                                    another one, or none: ImportError with host and version

A task that is pickled by reference imports binidx where a worker unpickles it: outside of any task, on the event loop
of Dask's worker, which then dies of it. Here the worker gets builtins, text and bytes until it has named its version.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import binidx
from binidx import errors

SOURCE = '''
def run_binidx(needed, payload=b""):
    """Return host and version of binidx; with a payload, the result of its call if the version is the needed one."""
    import pickle
    import socket

    found = "none"
    try:
        import binidx

        found = f"{binidx.__version__} of other modules"
        from binidx.jobs.worker_calls import describe_version

        found = describe_version()
    except Exception as error:
        found += f" ({type(error).__name__}: {error})" if found == "none" else ""
    if not payload:
        return socket.gethostname(), found
    if found.partition(" ")[2] != needed.partition(" ")[2]:
        raise ImportError(f"worker on {socket.gethostname()}: found binidx {found}, needed {needed}; install that one")
    function, arguments = pickle.loads(payload)
    return function(*arguments)
'''
"""Function of builtins and text, which needs no binidx until it has named its version."""

CALL = "exec(source, globals()) or run_binidx(*arguments)"
"""Expression for `eval`, with the globals `source` and `arguments`: for engines that pickle a builtin by its name."""

MOST_HOSTS = 4
"""Number of hosts of a version that a message names."""


@functools.cache
def describe_version() -> str:
    """Return the version of this binidx, and a digest of its modules, by which workers are compared.

    Two states of a clone may have one version, and equal modules several: an editable installation keeps the version of
    its time.
    """
    root, digest = Path(binidx.__file__).parent, hashlib.blake2b(digest_size=4)
    files = (Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names)
    for file in sorted(file for file in files if file.suffix == ".py"):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return f"{binidx.__version__} (modules {digest.hexdigest()})"


def own_function() -> Any:
    """Return the function of `SOURCE`, of a module that does not exist: cloudpickle therefore pickles its code."""
    names: dict[str, Any] = {"__name__": "binidx_worker_call"}
    exec(SOURCE, names)
    return names["run_binidx"]


def check_versions(cluster: str, found: Mapping[str, str]) -> None:
    """Check that workers have this binidx.

    Args:
        cluster: as the user named it.
        found: host or address of each worker -> version, as `describe_version` returns it.

    Raises:
        WorkerError: a worker has another binidx, or none.
    """
    needed, others = describe_version(), defaultdict[str, list[str]](list)
    for place, version in sorted(found.items()):
        if version.partition(" ")[2] != needed.partition(" ")[2]:
            others[version].append(place)
    if others:
        clauses = []
        for version, places in others.items():
            more = f" and {len(places) - MOST_HOSTS} more" if len(places) > MOST_HOSTS else ""
            clauses.append(f"{version} on {', '.join(places[:MOST_HOSTS])}{more}")
        problem = f"workers with another binidx (found {'; '.join(clauses)}; needed {needed})"
        raise errors.WorkerError(f"{cluster}: {problem}; install that one on them and give the same command again")
