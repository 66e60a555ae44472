"""Parts of a job: each is made whole or not at all, by any worker, and leaves a record.

    parts ──► of this call's shard, without a record ──► engine ──► objects of the part, then its record
                                                                                            │
    finish, once every record exists ◄──────────────────────────────────────────────────────┘

FOLDER/job.json       identity of the job; first object to appear, last to go
FOLDER/NAME.json      {"binidx_record": 1, "result": values}: proof that the part NAME is finished

The name of a part is a digest of all that decides its bytes, so a record is valid for any later call. A restart is the
same call. Work without a folder has no records: each part is a file of the result, and is kept if it exists.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import xxhash

from binidx import errors
from binidx.jobs.engines import open_engine
from binidx.jobs.runner import JobEngine, TaskFailure, run_tasks
from binidx.json_models import JsonFile
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small
from binidx.storage.requests.retries import is_transient
from binidx.storage.threads import READS, REQUESTS, available_cores
from binidx.storage.writing.copy import ProgressWatcher, Unit
from binidx.storage.writing.publish import delete_object, put_if_absent, write_object

Item = TypeVar("Item")
Result = TypeVar("Result")
Value = TypeVar("Value")
Values = dict[str, Any]
"""Result of a part, in JSON values."""


class JobPart(Protocol):
    """Unit of work. `str()` names it in errors."""

    @property
    def name(self) -> str:
        """Digest of all that decides its result."""

    @property
    def size(self) -> int:
        """Units of work, for progress: bytes, rows or samples."""


PartType = TypeVar("PartType", bound=JobPart)


@dataclass(frozen=True)
class RangePart:
    """Part that is a range of tokens, samples or other items."""

    name: str
    items: range

    @property
    def size(self) -> int:
        return len(self.items)

    def __str__(self) -> str:
        return self.name


def json_digest(value: Any) -> str:
    """Return the 128-bit digest of a JSON value, hex."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


@dataclass(frozen=True)
class Shard:
    """Share of one call in the parts of a job: every `count`-th part, from number `index` on.

    Args:
        index: number of the share, from 0; None: no part, the call only finishes the job.
        count: number of shares.

    Raises:
        ConfigError: there is no such share.

    Source: ours.
    """

    index: int | None
    count: int

    def __post_init__(self) -> None:
        if self.index is not None and not 0 <= self.index < self.count:
            raise errors.ConfigError(
                f"shard: found {self.index}/{self.count}, need a number from 0 to {self.count - 1}"
            )

    def select(self, parts: Sequence[Item]) -> Sequence[Item]:
        """Return the parts of this shard.

        Args:
            parts: all parts of the job.

        Returns:
            The parts of this share, in their order.
        """
        return parts[:0] if self.index is None else parts[self.index :: self.count]


@dataclass(frozen=True)
class Workers:
    """Workers that make the parts of a job, and this call's share of the parts.

    Args:
        engine: name of an engine, see `jobs.engines`; None: threads of this process.
        count: parts made at once. Default: the number of cores, or what a cluster has.
        executor: any `concurrent.futures.Executor`, used instead of an engine; it stays open.
        shard: make only these parts; None: all.

    Raises:
        ConfigError: `count` is below 1.

    Example:
        >>> bake(order, "s3://corpus/baked", baked, workers=Workers("ray", shard=Shard(0, 4)))  # doctest: +SKIP

    Source: ours.
    """

    engine: str | None = None
    count: int | None = None
    executor: Executor | None = None
    shard: Shard | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise errors.ConfigError(f"workers: too few (found {self.count}, need 1 or more)")

    def select(self, parts: Sequence[Item]) -> Sequence[Item]:
        """Return the parts of this call's shard.

        Args:
            parts: all parts of the job.

        Returns:
            The parts of the shard, in their order; all without one.
        """
        return parts if self.shard is None else self.shard.select(parts)

    def open(self, *, remote_data: bool = False, task_bytes: int = 0) -> JobEngine:
        """Return the engine.

        Args:
            remote_data: as in `open_engine`.
            task_bytes: memory of a task; limits the default number of tasks at once to those that fit this machine.

        Returns:
            The engine, not open yet.
        """
        most = max(1, memory_bytes() // task_bytes) if task_bytes else available_cores()
        count = self.count or min(most, available_cores())
        if (executor := self.executor) is not None:
            return JobEngine(lambda: executor, lambda _: count, owned=False)
        if self.engine is None:
            return JobEngine(lambda: ThreadPoolExecutor(count), lambda _: count)
        return open_engine(self.engine, count if task_bytes else self.count, remote_data=remote_data)


def memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


ONE_THREAD = Workers(count=1)
"""One part after the other, in this process."""


class PerProcess(Generic[Value]):
    """Value for all parts of a job, such as an opened dataset, which each worker process opens once.

    Args:
        value: the value in this process.
        open: picklable call that returns it in another process. Default: the value is pickled.
    """

    _opening = threading.Lock()
    _opened: ClassVar[dict[str, Any]] = {}

    def __init__(self, value: Value, open: Callable[[], Value] | None = None) -> None:
        self._value = value
        self._state = uuid.uuid4().hex, open or functools.partial(_return, value)

    def __getstate__(self) -> dict[str, Any]:
        return {"_state": self._state}

    def get(self) -> Value:
        """Return the value; another process keeps the value of the last job."""
        if "_value" in vars(self):
            return self._value
        job, open = self._state
        with self._opening:
            if job not in self._opened:
                self._opened.clear()
                self._opened[job] = open()
            value: Value = self._opened[job]
        return value


def _return(value: Value) -> Value:
    return value


@dataclass(frozen=True)
class RecordFile:
    """Field of a record besides its version."""

    result: Values


RECORD_FILE = JsonFile(RecordFile, {"binidx_record": 1}, hint="delete it and give the same command again")


@dataclass(frozen=True)
class JobFolder:
    """Folder of a job's parts and records.

    Args:
        location: the folder.
        identity: all that decides the result of the job, in JSON values; no secrets.
    """

    location: Location
    identity: Mapping[str, Any]

    @property
    def job_file(self) -> Location:
        """Location of job.json."""
        return self.location / "job.json"

    @property
    def content(self) -> bytes:
        """Bytes of job.json."""
        return json.dumps(self.identity, sort_keys=True).encode()

    def is_claimed(self) -> bool:
        """Return whether parts of this job may exist."""
        return read_small(self.job_file) == self.content

    def claim(self) -> None:
        """Write job.json; raise ObjectExistsError if the folder holds parts of another job."""
        file, content = self.job_file, self.content
        if not put_if_absent(file, content) and (found := read_small(file)) != content:
            problem = f"parts of another job{describe_difference(found, self.identity)}"
            raise errors.ObjectExistsError(f"{file}: {problem}; finish that job, or remove the folder")

    def file(self, part: JobPart) -> Location:
        """Return the location of a part's record."""
        return self.location / f"{part.name}.json"

    def read(self, part: JobPart) -> Values | None:
        """Return the result in a part's record; None if it has no record."""
        data = read_small(self.file(part))
        return None if data is None else RECORD_FILE.decode(data, self.file(part).uri).result

    def write(self, part: JobPart, result: Values) -> None:
        """Write a part's record, after all its objects."""
        write_object(self.file(part), [json.dumps({**RECORD_FILE.tags, "result": result}).encode()])

    def remove(self, parts: Iterable[JobPart], objects: Iterable[Location] = ()) -> None:
        """Remove all objects of the parts and their records, then job.json and, on a disk, the folder."""
        REQUESTS.map(delete_object, [*objects, *map(self.file, parts)])
        delete_object(self.job_file)
        remove_folder(self.location)


def remove_folder(folder: Location) -> None:
    """Remove the staging files of killed workers and, if it is empty then, a folder; only of a disk."""
    if (path := folder.local_path) is not None:
        with contextlib.suppress(OSError):
            for staging in Path(path).glob("*.tmp"):
                staging.unlink()
            os.rmdir(path)


def describe_difference(found: bytes | None, identity: Mapping[str, Any]) -> str:
    """Return a clause for a message: the settings in which the job of a job.json differs; "" if it is malformed."""
    try:
        other = json.loads(found or b"null")
    except ValueError:
        other = None
    names = [name for name in identity if isinstance(other, dict) and other.get(name) != identity[name]]
    return f", which differs in {', '.join(names)}" if names else ""


@dataclass(frozen=True)
class _Work(Generic[PartType]):
    """Picklable call in a worker that makes a part and writes its record."""

    make: Callable[[PartType], Values]
    folder: JobFolder | None

    def __call__(self, part: PartType) -> Values | TaskFailure:
        return guarded(functools.partial(self._make_once, part), str(part))

    def _make_once(self, part: PartType) -> Values:
        if self.folder is None:
            return self.make(part)
        if (result := self.folder.read(part)) is not None:
            return result
        result = self.make(part)
        self.folder.write(part, result)
        return result


def guarded(call: Callable[[], Result], task: str) -> Result | TaskFailure:
    """Return the result of a call in a worker, or its error as a TaskFailure.

    Args:
        task: name of the task in errors.
    """
    try:
        return call()
    except errors.BinidxError as error:
        return TaskFailure(error.__class__(str(error)), is_transient(error))
    except OSError as error:  # of a disk; those of stores are BinidxErrors
        return TaskFailure(errors.StorageError(f"{task}: {error}"), is_transient(error))
    except Exception:  # a defect of ours: the traceback must cross processes
        return TaskFailure(errors.WorkerError(f"{task}: {traceback.format_exc()}"), False)


def make_parts(
    make: Callable[[PartType], Values],
    parts: Sequence[PartType],
    workers: Workers,
    folder: JobFolder | None = None,
    *,
    advance: Callable[[int], object] = lambda size: None,
    remote_data: bool = False,
    task_bytes: int = 0,
) -> dict[str, Values]:
    """Make the parts of a job that have no record, of this call's shard.

    Args:
        make: makes a part and returns its result; it can be pickled and is called in the workers.
        parts: all parts of the job.
        workers: where the parts are made, and which.
        folder: folder of the records, claimed before; None: no records.
        advance: called with the size of each part that is made or has a record.
        remote_data, task_bytes: as in `Workers.open`.

    Returns:
        Name of each part -> its result. With a shard, parts of other shards that have no record yet are missing.

    Raises:
        BinidxError: a part failed permanently, or repeatedly; the other errors of `run_tasks`.
    """
    unique = list({part.name: part for part in parts}.values())
    results = {} if folder is None else read_results(folder, unique)
    share = workers.select(unique)
    for part in share:
        if part.name in results:
            advance(part.size)
    if tasks := [part for part in share if part.name not in results]:
        for part, result in run_tasks(
            _Work(make, folder), tasks, workers.open(remote_data=remote_data, task_bytes=task_bytes)
        ):
            results[part.name] = result
            advance(part.size)
    if workers.shard is not None and folder is not None:
        results |= read_results(folder, [part for part in unique if part.name not in results])
    return results


def make_recorded_parts(
    make: Callable[[PartType], Values],
    parts: Sequence[PartType],
    workers: Workers,
    records: Location | None,
    identity: Mapping[str, Any],
    watch: ProgressWatcher,
    *,
    remote_data: bool = False,
    is_final: Callable[[Values], bool] = lambda result: True,
) -> dict[str, Values]:
    """Make parts without objects, whose results the caller combines; `records` keep the results for a restart.

    A call without a shard removes the records at its end.

    Args:
        make, parts, workers, remote_data: as in `make_parts`.
        records: folder of the results; None: they are not kept.
        identity: all that decides the results, in JSON values.
        watch: gets the bytes of the parts.
        is_final: whether the record of a result is kept; another part is made again by the next call.

    Raises:
        ConfigError: a shard without `records`.
        ObjectExistsError: `records` are of another job.
    """
    shard, folder = workers.shard, None
    if records is None and shard is not None:
        raise errors.ConfigError("shard, records: a shard needs a folder for its findings; name one")
    if records is not None:
        folder = JobFolder(Location(records.absolute, records.options), identity)
        folder.claim()
    watch.begin("tokens", sum(part.size for part in workers.select(parts)), 0)
    results = make_parts(make, parts, workers, folder, advance=watch.advance, remote_data=remote_data)
    if folder is not None and shard is None:
        folder.remove(parts)
    elif folder is not None:
        again = [part for part in parts if part.name in results and not is_final(results[part.name])]
        REQUESTS.map(delete_object, map(folder.file, again))
    return results


def read_results(folder: JobFolder, parts: Sequence[JobPart]) -> dict[str, Values]:
    """Return the result of each part that has a record, by its name."""
    found = zip(parts, READS.map(folder.read, parts), strict=True)
    return {part.name: result for part, result in found if result is not None}


@dataclass(frozen=True)
class JobStage(Generic[PartType]):
    """Stage of a job: tasks that need the results of all tasks of the stage before.

    Args:
        name: name of the stage, for progress.
        make: as in `make_parts`.
        plan: returns the tasks, from the results of the stage before; {} for the first one.
        unit: unit of the sizes of its tasks.
        recorded: whether its tasks have records; without, a task is done anew or finds its own result.
    """

    name: str
    make: Callable[[PartType], Values]
    plan: Callable[[dict[str, Values]], Sequence[PartType]]
    unit: Unit = "bytes"
    recorded: bool = True


def run_stages(
    stages: Sequence[JobStage[Any]], folder: JobFolder, workers: Workers, watch: ProgressWatcher, **options: Any
) -> tuple[list[dict[str, Values]], int]:
    """Run the stages of a job in order, up to one whose tasks other shards must make.

    Args:
        folder: folder of the records, which is claimed.
        options: of `make_parts`.

    Returns:
        The results of each stage that ran, and the number of tasks of the last of them that have no result.

    Raises:
        ObjectExistsError: the folder holds parts of another job.
    """
    folder.claim()
    results, missing = list[dict[str, Values]](), 0
    for stage in stages:
        tasks = stage.plan(results[-1] if results else {})
        watch.begin(stage.name, sum(task.size for task in tasks), 0, stage.unit)
        records = folder if stage.recorded else None
        results.append(make_parts(stage.make, tasks, workers, records, advance=watch.advance, **options))
        if missing := len(tasks) - len(results[-1]):
            break
    return results, missing
