"""Checks of a node before a run starts on it: its stores, its disks, its clock, and the place of the indices.

What is measured is compared with limits, and with the result of another node: a node that is slow among equal ones is
found by that alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from binidx.errors import BinidxError, ConfigError, redacted
from binidx.format.source import DatasetFiles
from binidx.json_models import JsonFile
from binidx.run.plan.forecast import STREAM_BYTES, STREAMS, measure_link
from binidx.run.plan.run_plan import RunPlan, plan_run
from binidx.run.run_file import Run
from binidx.storage.cache.block_files import directory_of_index, place_of_cache
from binidx.storage.location import Location
from binidx.storage.open import read_document
from binidx.storage.requests.remote_object import RemoteObject, read_small
from binidx.storage.settings import ReadSettings
from binidx.storage.usage_report import bytes_text
from binidx.storage.writing.publish import delete_object, write_object

OK, WARNING, FAILED = "ok", "warning", "failed"

NUM_PROBES, PROBE_BYTES = 64, 4096
"""Requests that are sent at once to see whether the store refuses some."""

DISK_PROBE_BYTES, DISK_BLOCK_BYTES = 64 << 20, 1 << 20
"""Bytes of the file by which a disk is measured, and of one write of it."""

MEASUREMENTS = {
    "latency_seconds": "first byte after",
    "bytes_per_second": "fetches",
    "written_per_second": "writes",
    "read_per_second": "reads",
}
"""Measurement -> the words before it."""

MOST_SKEW_SECONDS = 5.0
"""Difference between the clocks of a node and of a shared file system from which on times of files mislead."""


@dataclass(frozen=True)
class NodeCheck:
    """Result of one check.

    Attributes:
        what: the checked thing, such as a bucket or a directory.
        state: OK, WARNING or FAILED.
        detail: the finding; of a failure also the way out.
        measured: seconds and bytes a second by name.
    """

    what: str
    state: str
    detail: str
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeResult:
    """Result of all checks of a node, as `binidx doctor RUN --json` prints it."""

    state: str
    checks: list[NodeCheck]
    node: str = ""


NODE_RESULT = JsonFile(NodeResult, error=ConfigError, hint="needs what binidx doctor RUN --json printed", open=True)


@dataclass(frozen=True)
class NodeLimits:
    """Measurements from which on a check is a warning.

    Attributes:
        max_latency: most seconds to the first byte of a bucket.
        min_bandwidth: least bytes a second of a bucket, where it holds 8 MiB.
        min_disk: least bytes a second that a directory writes, and reads.
    """

    max_latency: float = 0.5
    min_bandwidth: float = 10e6
    min_disk: float = 50e6

    def judge(self, measured: Mapping[str, float]) -> list[str]:
        """Return a text for each measurement beyond its limit."""
        latency, bandwidth = measured.get("latency_seconds", 0.0), measured.get("bytes_per_second")
        wrong = [f"slower than --max-latency {self.max_latency:g} s"] if latency > self.max_latency else []
        if bandwidth is not None and bandwidth < self.min_bandwidth:
            wrong.append(f"less than --min-bandwidth {bytes_text(self.min_bandwidth)}/s")
        disk = [measured[name] for name in ("written_per_second", "read_per_second") if name in measured]
        return wrong + [f"less than --min-disk {bytes_text(self.min_disk)}/s"] * (
            min(disk, default=1e99) < self.min_disk
        )


DEFAULT_LIMITS = NodeLimits()


def check_node(run: Run, *, nodes: int = 1, limits: NodeLimits = DEFAULT_LIMITS) -> list[NodeCheck]:
    """Check this node for a run; nothing is built, and what is written is removed again.

    Args:
        run: the run.
        nodes: number of nodes that share its ranks.
        limits: from which on what is measured is a warning.

    Returns:
        The results: of each bucket that the run reads, of the directories of this node, and of the indices.

    Raises:
        BinidxError: the run cannot be planned: its data is absent or malformed.

    Source: ours.
    """
    plan = plan_run(run, nodes=nodes)
    return [*_check_stores(plan, limits), *_check_directories(plan, limits), *_check_caches(plan, limits)]


def compare_nodes(checks: Sequence[NodeCheck], other: Location, factor: float) -> list[NodeCheck]:
    """Return a warning for each check of which a measurement differs from that of another node.

    Args:
        checks: of this node.
        other: the result of the other node.
        factor: least factor of a difference.

    Raises:
        ConfigError: the file is not such a result, or the factor is not above 1.
        ObjectNotFoundError: there is no such file.
    """
    if not factor > 1:
        raise ConfigError(f"factor: found {factor}, needs a number above 1")
    result = NODE_RESULT.decode(read_document(NODE_RESULT, other), other.uri)
    theirs = {check.what: check.measured for check in result.checks}
    found, name = list[NodeCheck](), result.node or other.uri
    for check in checks:
        wrong = [f"not measured on {name}"] if check.measured and not theirs.get(check.what) else []
        for key in check.measured.keys() & theirs.get(check.what, {}).keys():
            here, there = (max(values[key], 1e-9) for values in (check.measured, theirs[check.what]))
            if max(here / there, there / here) > factor:
                wrong.append(f"{MEASUREMENTS[key]} {_number(key, here)} here, {_number(key, there)} on {name}")
        if wrong:
            found.append(NodeCheck(check.what, WARNING, "; ".join(sorted(wrong))))
    missing = sorted(
        what for what, measured in theirs.items() if measured and what not in {each.what for each in checks}
    )
    return found + [NodeCheck(what, WARNING, f"not measured here, but on {name}") for what in missing]


def _number(name: str, value: float) -> str:
    """Return a measurement as text: seconds, or bytes a second."""
    if name.endswith("per_second"):
        return f"{bytes_text(value)}/s"
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _measured(what: str, state: str, detail: str, measured: Mapping[str, float], limits: NodeLimits) -> NodeCheck:
    """Return a check whose state is a warning if a measurement is beyond its limit."""
    wrong = limits.judge(measured)
    state = WARNING if wrong and state == OK else state
    return NodeCheck(what, state, "; ".join([detail, *wrong]), measured)


def _check_stores(plan: RunPlan, limits: NodeLimits) -> Iterator[NodeCheck]:
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
        measured = {"latency_seconds": link.latency_seconds}
        speed = f"{_number('latency_seconds', link.latency_seconds)} to the first byte"
        if reader.size >= STREAMS * STREAM_BYTES:  # less comes with the first byte
            measured["bytes_per_second"] = link.bytes_per_second
            speed += f", {bytes_text(link.bytes_per_second)}/s"
        requests = f"{reader.stats.refused} of {NUM_PROBES} requests refused (429, 503)"
        state = WARNING if reader.stats.refused else OK
        yield _measured(redacted(place), state, f"{speed}, {requests}", measured, limits)


def _check_directories(plan: RunPlan, limits: NodeLimits) -> Iterator[NodeCheck]:
    settings = ReadSettings.of(plan.inventory.run.config.storage_options)
    if plan.is_remote:
        needed = plan.index_dir_bytes
        if (directory := directory_of_index(settings)) is None:
            detail = f"none: each process keeps its own copy, {bytes_text(needed)}; BINIDX_INDEX_DIR names a directory"
            yield NodeCheck("directory of index files", WARNING, detail)
        else:
            yield _check_directory(directory, needed, "index files", limits)
    directory, limit = place_of_cache(settings)
    if directory is not None:
        most = plan.epoch_bytes if limit is None else min(plan.epoch_bytes, limit)
        yield _check_directory(directory, most, "an epoch of this node's tokens", limits)


def _check_directory(directory: str, needed: float, content: str, limits: NodeLimits) -> NodeCheck:
    """Check that a directory can be written to, has room, and how fast it is."""
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        free = shutil.disk_usage(directory).free
        measured = measure_disk(directory)
    except OSError as error:
        return NodeCheck(directory, FAILED, f"{error.strerror}; needed a directory that this user can write to")
    room = f"{_speed(measured)}, {bytes_text(free)} free, {bytes_text(needed)} needed for {content}"
    return _measured(directory, OK if free >= needed else WARNING, room, measured, limits)


def measure_disk(directory: str) -> dict[str, float]:
    """Write a file of DISK_PROBE_BYTES to a disk and read it back; return the bytes a second of both, and remove it.

    Raises:
        OSError: it cannot be written, or other bytes are read.
    """
    probe, block = os.path.join(directory, f"check-{uuid.uuid4().hex}.tmp"), os.urandom(DISK_BLOCK_BYTES)
    times = [time.perf_counter()]
    try:
        with open(probe, "xb", buffering=0) as file:
            for _ in range(DISK_PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            times.append(time.perf_counter())
            with contextlib.suppress(AttributeError):  # macOS; so that the disk is read, not the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with open(probe, "rb", buffering=0) as file:
            while part := file.read(len(block)):
                if part != block:
                    raise OSError(errno.EIO, "reads other bytes than were written")
        times.append(time.perf_counter())
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)
    written, read = (DISK_PROBE_BYTES / max(seconds, 1e-9) for seconds in np.diff(times).tolist())
    return {"written_per_second": written, "read_per_second": read}


def _speed(measured: Mapping[str, float]) -> str:
    return f"writes {bytes_text(measured['written_per_second'])}/s, reads {bytes_text(measured['read_per_second'])}/s"


def _check_caches(plan: RunPlan, limits: NodeLimits) -> Iterator[NodeCheck]:
    """Write, read and remove an object where the indices of the run are kept."""
    folder = plan.inventory.indices[0].wanted.index_name().files.directory
    canary, directory = folder / f"check-{uuid.uuid4().hex}.tmp", folder.uri
    content, began = uuid.uuid4().hex.encode(), time.time()
    try:
        write_object(canary, [content], patient=False)  # an outage is to be reported, not outlasted
        found, skew = read_small(canary, patient=False), _clock_skew(canary, began)
        measured = {} if folder.local_path is None else measure_disk(folder.local_path)
    except (BinidxError, OSError, NotImplementedError) as error:
        detail = f"indices cannot be kept here, so that every start builds them: {error}"
        yield NodeCheck(redacted(directory), WARNING, detail)
        return
    finally:
        with contextlib.suppress(BinidxError, OSError, NotImplementedError):
            delete_object(canary, patient=False)
    if found != content:
        yield NodeCheck(redacted(directory), FAILED, "an object that was just written has other bytes when it is read")
    elif skew > MOST_SKEW_SECONDS:
        detail = f"its clock and that of this node differ by {skew:.0f} s; set both by NTP"
        yield NodeCheck(redacted(directory), WARNING, detail)
    else:
        speed = f", {_speed(measured)}" if measured else ""
        yield _measured(redacted(directory), OK, f"an object was written, read and removed{speed}", measured, limits)


def _clock_skew(canary: Location, began: float) -> float:
    """Return the seconds by which a file just written is dated before `began` or after now; 0 for stores."""
    if canary.local_path is None:
        return 0.0  # a store refuses requests whose signature has another time
    written = os.stat(canary.local_path).st_mtime
    return max(began - written, written - time.time(), 0.0)


def worst_state(checks: Sequence[NodeCheck]) -> str:
    """Return the worst state of some checks."""
    return max((check.state for check in checks), key=(OK, WARNING, FAILED).index, default=OK)
