"""Checks of a node before a run starts on it: its stores, its disks, its clock, and the place of the index caches."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from binidx.errors import BinidxError, redacted
from binidx.format.source import DatasetFiles
from binidx.run.plan.forecast import measure_link
from binidx.run.plan.run_plan import RunPlan, plan_run
from binidx.run.run_file import Run
from binidx.storage.cache.block_files import directory_of_index, place_of_cache
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject, read_small
from binidx.storage.settings import ReadSettings
from binidx.storage.usage_report import bytes_text
from binidx.storage.writing.publish import delete_object, write_object

OK, WARNING, FAILED = "ok", "warning", "failed"

NUM_PROBES, PROBE_BYTES = 64, 4096
"""Requests that are sent at once to see whether the store refuses some."""

MOST_SKEW_SECONDS = 5.0
"""Difference between the clocks of a node and of a shared file system from which on times of files mislead."""


@dataclass(frozen=True)
class NodeCheck:
    """Result of one check.

    Attributes:
        what: the checked thing, such as a bucket or a directory.
        state: OK, WARNING or FAILED.
        detail: the finding; of a failure also the way out.
    """

    what: str
    state: str
    detail: str


def check_node(run: Run, *, nodes: int = 1) -> list[NodeCheck]:
    """Check this node for a run; nothing is built, and what is written is removed again.

    Args:
        run: the run.
        nodes: number of nodes that share its ranks.

    Returns:
        The results: of each bucket that the run reads, of the directories of this node, and of the index caches.

    Raises:
        BinidxError: the run cannot be planned: its data is absent or malformed.

    Source: ours.
    """
    plan = plan_run(run, nodes=nodes)
    return [*_check_stores(plan), *_check_directories(plan), *_check_caches(plan)]


def _check_stores(plan: RunPlan) -> Iterator[NodeCheck]:
    """Measure the largest dataset of each bucket."""
    largest: dict[str, DatasetFiles] = {}
    for dataset in sorted(plan.inventory.datasets.values(), key=lambda dataset: dataset.stored_bytes):
        if dataset.prefix.local_path is None and dataset.stored_bytes and not dataset.num_parts:
            largest[dataset.prefix.place] = dataset
    for place, dataset in largest.items():
        try:
            link = measure_link(dataset)
            reader = RemoteObject(dataset.bin)
            starts = np.linspace(0, max(reader.size - PROBE_BYTES, 0), NUM_PROBES).astype(np.int64).tolist()
            reader.read([(start, min(start + PROBE_BYTES, reader.size)) for start in starts])
        except BinidxError as error:
            yield NodeCheck(redacted(place), FAILED, str(error))
            continue
        speed = f"{link.latency_seconds * 1e3:.1f} ms to the first byte, {bytes_text(link.bytes_per_second)}/s"
        requests = f"{reader.stats.refused} of {NUM_PROBES} requests refused (429, 503)"
        yield NodeCheck(redacted(place), WARNING if reader.stats.refused else OK, f"{speed}, {requests}")


def _check_directories(plan: RunPlan) -> Iterator[NodeCheck]:
    settings = ReadSettings.of(plan.inventory.run.config.storage_options)
    if plan.is_remote:
        needed = plan.index_dir_bytes
        if (directory := directory_of_index(settings)) is None:
            detail = f"none: each process keeps its own copy, {bytes_text(needed)}; BINIDX_INDEX_DIR names a directory"
            yield NodeCheck("directory of index files", WARNING, detail)
        else:
            yield _check_directory(directory, needed, "index files")
    directory, limit = place_of_cache(settings)
    if directory is not None:
        most = plan.epoch_bytes if limit is None else min(plan.epoch_bytes, limit)
        yield _check_directory(directory, most, "an epoch of this node's tokens")


def _check_directory(directory: str, needed: float, content: str) -> NodeCheck:
    """Check that a directory can be written to, and has room."""
    probe = os.path.join(directory, f"check-{uuid.uuid4().hex}.tmp")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        with open(probe, "xb"):
            pass
        os.unlink(probe)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return NodeCheck(directory, FAILED, f"{error.strerror}; needed a directory that this user can write to")
    room = f"{bytes_text(free)} free, {bytes_text(needed)} needed for {content}"
    return NodeCheck(directory, OK if free >= needed else WARNING, room)


def _check_caches(plan: RunPlan) -> Iterator[NodeCheck]:
    """Write, read and remove an object where the indices of the run are kept."""
    folder = plan.inventory.indices[0].wanted.index_name().files.directory
    canary, directory = folder / f"check-{uuid.uuid4().hex}.tmp", folder.uri
    content, began = uuid.uuid4().hex.encode(), time.time()
    try:
        write_object(canary, [content])
        found, skew = read_small(canary), _clock_skew(canary, began)
    except (BinidxError, OSError, NotImplementedError) as error:
        detail = f"indices cannot be kept here, so that every start builds them: {error}"
        yield NodeCheck(redacted(directory), WARNING, detail)
        return
    finally:
        with contextlib.suppress(BinidxError, OSError, NotImplementedError):
            delete_object(canary)
    if found != content:
        yield NodeCheck(redacted(directory), FAILED, "an object that was just written has other bytes when it is read")
    elif skew > MOST_SKEW_SECONDS:
        detail = f"its clock and that of this node differ by {skew:.0f} s; set both by NTP"
        yield NodeCheck(redacted(directory), WARNING, detail)
    else:
        yield NodeCheck(redacted(directory), OK, "an object was written, read and removed")


def _clock_skew(canary: Location, began: float) -> float:
    """Return the seconds by which a file just written is dated before `began` or after now; 0 for stores."""
    if canary.local_path is None:
        return 0.0  # a store refuses requests whose signature has another time
    written = os.stat(canary.local_path).st_mtime
    return max(began - written, written - time.time(), 0.0)


def worst_state(checks: Sequence[NodeCheck]) -> str:
    """Return the worst state of some checks."""
    return max((check.state for check in checks), key=(OK, WARNING, FAILED).index, default=OK)
