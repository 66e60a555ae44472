"""Parts of a job: each is made whole or not at all, by any worker, and leaves a record.

    parts ──► of this call's shard, without a record ──► engine ──► objects of the part, then its record
                                                                                            │
    finish, once every record exists ◄──────────────────────────────────────────────────────┘

FOLDER/job.json       identity of the job; first object to appear, last to go
FOLDER/NAME.json      {"binidx_record": 1, "result": values}: proof that the part NAME is finished

The name of a part is a digest of all that decides its bytes, so a record is valid for any later call. A restart is the
same call, which finds job.json

    absent               and writes it
    of this job          and continues
    of another job       and is an error with the differences; `overwrite` removes the parts of that job

Several calls may finish a job at once. Each writes the same bytes, and the first one to be ready removes the folder.
Work without a folder has no records: each part is a file of the result, and is kept if it exists.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from binidx import errors
from binidx.jobs.engines import open_engine
from binidx.jobs.runner import ATTEMPTS, JobEngine, TaskFailure, run_tasks
from binidx.json_models import JsonFile
from binidx.storage.location import Location
from binidx.storage.requests.listing import list_matches
from binidx.storage.requests.remote_object import read_small
from binidx.storage.requests.retries import is_transient, pause
from binidx.storage.threads import READS, REQUESTS, available_cores
from binidx.storage.writing.copy import ProgressWatcher, Unit
from binidx.storage.writing.publish import delete_object, put_if_absent, write_object

Item = TypeVar("Item")
Result = TypeVar("Result")
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

    def check_overwrite(self, overwrite: bool) -> None:
        """Raise ConfigError if a shard is to overwrite the target."""
        if overwrite and self.shard is not None:
            raise errors.ConfigError("shard, overwrite: shards do not know of each other; remove the old dataset first")

    def open(self, *, remote_data: bool = False, task_bytes: int = 0) -> JobEngine:
        """Return the engine.

        Args:
            remote_data: as in `open_engine`.
            task_bytes: memory of a task; limits the default number of tasks at once to those that fit this machine.

        Returns:
            The engine, not open yet.
        """
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = max(1, memory_bytes // task_bytes) if task_bytes else available_cores()
        count = self.count or min(most, available_cores())
        if (executor := self.executor) is not None:
            return JobEngine(lambda: executor, lambda _: count, owned=False)
        if self.engine is None:
            return JobEngine(lambda: ThreadPoolExecutor(count), lambda _: count)
        return open_engine(self.engine, count if task_bytes else self.count, remote_data=remote_data)


@dataclass(frozen=True)
class RecordFile:
    """Field of a record besides its version."""

    result: Values


RECORD_FILE = JsonFile(RecordFile, {"binidx_record": 1}, hint="delete it and give the same command again")


class PartResults(dict[str, Result]):
    """Results by the names of their parts; `num_made` of them are of this call, the others had records."""

    num_made = 0


class JobFolder:
    """Folder of a job's parts and records. Results are `Values`, unless a subclass gives records another form.

    Args:
        location: the folder.
        identity: all that decides the result of the job, in JSON values; no secrets. Workers do not get it.
        replaceable: whether another job that has made no part is replaced, as a call that failed before its first part.
    """

    IDENTITY_FILE: ClassVar = JsonFile(dict[str, Any], open=True)
    """Form of job.json."""

    def __init__(self, location: Location, identity: Mapping[str, Any], *, replaceable: bool = False) -> None:
        self.location, self.identity, self.replaceable = location, identity, replaceable

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "identity": {}}

    @property
    def job_file(self) -> Location:
        """Location of job.json."""
        return self.location / "job.json"

    @property
    def content(self) -> bytes:
        """Bytes of job.json."""
        return self.IDENTITY_FILE.encode(self.identity, sort_keys=True)

    def is_claimed(self) -> bool:
        """Return whether parts of this job may exist."""
        return read_small(self.job_file) == self.content

    def claim(
        self,
        *,
        overwrite: bool | None = None,
        parts: Sequence[JobPart] = (),
        check_free: Callable[[], object] = lambda: None,
    ) -> None:
        """Write job.json, unless it is there.

        Args:
            overwrite: whether to remove parts of another job; None if the caller has no such option.
            parts: those of this job; if another job had them, they stay.
            check_free: called before a job begins that may not overwrite; raises an error if the target is taken.

        Raises:
            ObjectExistsError: the folder holds parts of another job, or another job has begun at this moment.
        """
        if (found := read_small(self.job_file)) == self.content:
            return
        others = [] if found is None else self._list_others()
        if not overwrite:
            if found is not None and (others or not self.replaceable):
                way = "or remove the folder" if overwrite is None else "or give --overwrite, which removes them"
                raise self.refusal(found, f"finish that job, {way}")
            check_free()
        kept = {file.name for part in parts if others for file in self.files(part)}
        REQUESTS.map(delete_object, [file for file in others if file.name not in kept])
        if found is not None:
            write_object(self.job_file, [self.content])
        elif not put_if_absent(self.job_file, self.content):
            raise errors.ObjectExistsError(f"{self.job_file}: another job has just begun; give the same command again")

    def _list_others(self) -> list[Location]:
        """Return all objects but job.json."""
        found = [Location(uri, self.location.options) for uri in list_matches(self.location + "/")]
        return [file for file in found if file.name != self.job_file.name]

    def refusal(self, found: bytes, way: str) -> errors.ObjectExistsError:
        """Return the error for a job.json of another job, with the remedy `way`."""
        try:
            problem = self.describe_difference(found)
        except errors.FormatError as error:
            problem = f"of an unknown form ({error})"
        return errors.ObjectExistsError(f"{self.job_file}: parts of another job, {problem}; {way}")

    def describe_difference(self, found: bytes) -> str:
        """Return a clause for a message: the settings in which the job of another job.json differs.

        Raises:
            FormatError: it is malformed.
        """
        other = self.IDENTITY_FILE.decode(found, "")
        names = [name for name in {**self.identity, **other} if other.get(name) != self.identity.get(name)]
        return f"which differs in {', '.join(names)}"

    def file(self, part: JobPart) -> Location:
        """Return the location of a part's record."""
        return self.location / f"{part.name}.json"

    def files(self, part: Any) -> list[Location]:
        """Return the locations of a part's record and, in a subclass, its other objects."""
        return [self.file(part)]

    def read(self, part: JobPart) -> Any:
        """Return the result in a part's record; None if it has no record that is valid for this job."""
        data = read_small(self.file(part))
        return None if data is None else self.parse(part, data)

    def parse(self, part: Any, data: bytes) -> Any:
        """Return the result in the bytes of a part's record; None if it is not valid for this job."""
        return RECORD_FILE.decode(data, self.file(part).uri).result

    def read_all(self, parts: Sequence[JobPart]) -> PartResults[Any]:
        """Return the result of each part that has a record, by its name."""
        found = zip(parts, READS.map(self.read, parts), strict=True)
        return PartResults({part.name: result for part, result in found if result is not None})

    def write(self, part: JobPart, result: Any) -> None:
        """Write a part's record, after all its objects."""
        write_object(self.file(part), [self.format(result)])

    def format(self, result: Any) -> bytes:
        """Return the bytes of a record."""
        return RECORD_FILE.encode({"result": result})

    def remove(self, parts: Iterable[JobPart], objects: Iterable[Location] = ()) -> None:
        """Remove the records and all objects of the parts, then job.json and, on a disk, the folder."""
        of_parts = [self.files(part) for part in parts]
        REQUESTS.map(delete_object, [record for record, *_ in of_parts])  # first: a record names what exists
        REQUESTS.map(delete_object, [*objects, *(file for _, *files in of_parts for file in files)])
        delete_object(self.job_file)
        if (path := self.location.local_path) is not None:
            with contextlib.suppress(OSError):
                for staging in Path(path).glob("*.tmp"):  # of killed workers
                    staging.unlink()
                os.rmdir(path)


@dataclass(frozen=True)
class _Work(Generic[PartType, Result]):
    """Picklable call in a worker that makes a part and writes its record."""

    make: Callable[[PartType], Result]
    folder: JobFolder | None

    def __call__(self, part: PartType) -> Result | TaskFailure:
        try:
            return self._make_once(part)
        except errors.BinidxError as error:
            return TaskFailure(error.__class__(str(error)), is_transient(error))
        except OSError as error:  # of a disk; those of stores are BinidxErrors
            return TaskFailure(errors.StorageError(f"{part}: {error}"), is_transient(error))
        except Exception:  # a defect of ours: the traceback must cross processes
            return TaskFailure(errors.WorkerError(f"{part}: {traceback.format_exc()}"), False)

    def _make_once(self, part: PartType) -> Result:
        if self.folder is None:
            return self.make(part)
        found: Result | None = self.folder.read(part)
        if found is None:
            self.folder.write(part, found := self.make(part))
        return found


def make_parts(
    make: Callable[[PartType], Result],
    parts: Sequence[PartType],
    workers: Workers,
    folder: JobFolder | None = None,
    *,
    advance: Callable[[int], object] = lambda size: None,
    begin: Callable[[int, int], object] | None = None,
    remote_data: bool = False,
    task_bytes: int = 0,
) -> PartResults[Result]:
    """Make the parts of a job that have no record, of this call's shard.

    Args:
        make: makes a part and returns its result; it can be pickled and is called in the workers.
        parts: all parts of the job.
        workers: where the parts are made, and which.
        folder: folder of the records, claimed before; None: no records.
        advance: called with the size of each part that is made, and without `begin` of each that has a record.
        begin: called before parts are made, with the size of all parts of the shard, and of those that have a record.
        remote_data, task_bytes: as in `Workers.open`.

    Returns:
        Name of each part -> its result. With a shard, parts of other shards that have no record yet are missing.

    Raises:
        BinidxError: a part failed permanently, or repeatedly; the other errors of `run_tasks`.
    """
    unique = list({part.name: part for part in parts}.values())
    results = PartResults[Result]() if folder is None else folder.read_all(unique)
    share = workers.select(unique)
    tasks = [part for part in share if part.name not in results]
    total, left = (sum(part.size for part in some) for some in (share, tasks))
    if begin is None and left < total:
        advance(total - left)
    if tasks:
        if begin is not None:
            begin(total, total - left)
        for part, result in run_tasks(
            _Work(make, folder), tasks, workers.open(remote_data=remote_data, task_bytes=task_bytes)
        ):
            results[part.name] = result
            results.num_made += 1
            advance(part.size)
    if workers.shard is not None and folder is not None:
        results.update(folder.read_all([part for part in unique if part.name not in results]))
    return results


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
    make: Callable[[PartType], Any]
    plan: Callable[[dict[str, Any]], Sequence[PartType]]
    unit: Unit = "bytes"
    recorded: bool = True


def run_stages(
    stages: Sequence[JobStage[Any]], folder: JobFolder | None, workers: Workers, watch: ProgressWatcher, **options: Any
) -> tuple[list[PartResults[Any]], int]:
    """Run the stages of a job in order, up to one whose tasks other shards must make.

    Args:
        folder: folder of the records, which is claimed; None: no records.
        options: of `make_parts`.

    Returns:
        The results of each stage that ran, and the number of tasks of the last of them that have no result.

    Raises:
        ObjectExistsError: the folder holds parts of another job.
    """
    if folder is not None:
        folder.claim()
    results, missing = list[PartResults[Any]](), 0
    for stage in stages:
        tasks = stage.plan(results[-1] if results else {})

        def begin(total: int, done: int, stage: JobStage[Any] = stage) -> None:
            watch.begin(stage.name, total, done, stage.unit)

        records = folder if stage.recorded else None
        results.append(make_parts(stage.make, tasks, workers, records, advance=watch.advance, begin=begin, **options))
        if missing := len({task.name for task in tasks}) - len(results[-1]):
            break
    return results, missing


def finish_once(finish: Callable[[], object], is_finished: Callable[[], bool], attempts: int = ATTEMPTS) -> bool:
    """Do the last stage of a job in this process, unless another call does it first; return whether this one did.

    Args:
        finish: puts the parts together; several calls may do so at once, as they write the same bytes.
        is_finished: returns whether another call has finished the job, and so may have removed the parts.
        attempts: most attempts after an ObjectChangedError: a second worker of a part may write the same bytes again,
            while they are read.
    """
    attempt = 1
    while True:
        try:
            finish()
            return True
        except errors.BinidxError as error:
            if is_finished():
                return False
            if not isinstance(error, errors.ObjectChangedError) or attempt == attempts:
                raise
        time.sleep(pause(attempt))
        attempt += 1


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
    stage = JobStage("tokens", make, lambda _: parts)
    (results,), _ = run_stages([stage], folder, workers, watch, remote_data=remote_data)
    if folder is not None and shard is None:
        folder.remove(parts)
    elif folder is not None:
        again = [part for part in parts if part.name in results and not is_final(results[part.name])]
        REQUESTS.map(delete_object, map(folder.file, again))
    return results
