"""Workers of a job, and the parts that they make: each whole or not at all, by any worker, and then recorded.

    parts ──► of this call's shard, without a record ──► engine ──► objects of the part, then its record

Work without a folder has no records: each part is a file of the result, and is kept if it exists.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from binidx import errors
from binidx.jobs.engines import TaskNeeds, ThreadExecutor, open_engine
from binidx.jobs.job_folder import JobFolder, JobPart, PartResults
from binidx.jobs.progress import Unit
from binidx.jobs.runner import TaskRunner
from binidx.jobs.task_queue import JobEngine, TaskFailure
from binidx.storage.effects import Call, Steps, blocking, run
from binidx.storage.requests.retries import is_transient
from binidx.storage.threads import available_cores

Item = TypeVar("Item")
PartType = TypeVar("PartType", bound=JobPart)
Result = TypeVar("Result")
PART_MEMORY = 512 << 20
"""Estimate of the memory of a part, unless the job has one."""

Values = dict[str, Any]
"""Result of a part, in JSON values."""


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
        task_memory: bytes of memory that a part takes; by default an estimate. A local engine makes fewer parts at once
            by default if more do not fit this machine; a Dask worker never makes more at once than fit its limit; Ray
            reserves it.
        task_resources: amounts that a part takes of what workers of a cluster declare. Ray: by default {"CPU": 1}.

    Raises:
        ConfigError: `count` is below 1; or memory or resources without an engine that has them.

    Example:
        >>> bake(order, "s3://corpus/baked", baked, workers=Workers("ray", shard=Shard(0, 4)))  # doctest: +SKIP

    Source: ours.
    """

    engine: str | None = None
    count: int | None = None
    executor: Executor | None = None
    shard: Shard | None = None
    task_memory: int | None = None
    task_resources: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.engine is None and self.task_memory is not None:
            raise errors.ConfigError("task_memory: needs an engine")
        if self.engine in (None, "local") and self.task_resources:
            raise errors.ConfigError("task_resources: needs an engine that is a cluster, as ray or dask=ADDRESS")
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

    def refuse_shard(self) -> None:
        """Raise ConfigError if there is a shard, for work without records, whose parts no other call could find."""
        if self.shard is not None:
            raise errors.ConfigError("shard: a count needs the results of all parts; name an engine instead")

    def check_records(self, records: object) -> None:
        """Raise ConfigError if there is a shard, and no folder for its findings."""
        if records is None and self.shard is not None:
            raise errors.ConfigError("shard, records: a shard needs a folder for its findings; name one")

    def check_overwrite(self, overwrite: bool) -> None:
        """Raise ConfigError if a shard is to overwrite the target."""
        if overwrite and self.shard is not None:
            raise errors.ConfigError("shard, overwrite: shards do not know of each other; remove the old dataset first")

    def memory_of(self, task_bytes: int) -> int:
        """Return the bytes of memory to reserve for a part, from the job's estimate; 0: it has none."""
        return self.task_memory or task_bytes or PART_MEMORY

    def open(self, *, remote_data: bool = False, task_bytes: int = 0) -> JobEngine:
        """Return the engine.

        Args:
            remote_data: as in `open_engine`.
            task_bytes: estimate of the memory of a task; limits the default number of tasks at once to those that fit
                this machine, or each worker of a cluster. 0: it does not limit this machine.

        Returns:
            The engine, not open yet.
        """
        needs = TaskNeeds(self.memory_of(task_bytes), self.task_resources or {}, not self.task_memory)
        task_bytes = self.task_memory or task_bytes
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = max(1, memory_bytes // task_bytes) if task_bytes else available_cores()
        count = self.count or min(most, available_cores())
        if (executor := self.executor) is not None:
            return JobEngine(lambda: executor, lambda _: count, owned=False)
        if self.engine is None:
            return JobEngine(lambda: ThreadExecutor(count), lambda _: count)
        return open_engine(self.engine, count if task_bytes else self.count, remote_data=remote_data, needs=needs)


@dataclass(frozen=True)
class _Work(Generic[PartType, Result]):
    """Picklable call in a worker that makes a part and writes its record."""

    make: Callable[[PartType], Result]
    folder: JobFolder | None

    def __call__(self, part: PartType) -> Result | TaskFailure:
        return run(self.steps(part))

    def steps(self, part: PartType) -> Steps[Result | TaskFailure]:
        """Make a part unless it has a record; return its result, or the failure."""
        try:
            found: Result | None = (yield from self.folder.read_steps(part)) if self.folder else None
            if found is None:
                found = yield from Call(self.make, (part,))
                if self.folder:
                    yield from self.folder.write_steps(part, found)
            return found
        except errors.BinidxError as error:
            return TaskFailure(error.__class__(str(error)), is_transient(error))
        except OSError as error:  # of a disk; those of stores are BinidxErrors
            return TaskFailure(errors.StorageError(f"{part}: {error}"), is_transient(error))
        except Exception:  # a defect of ours: the traceback must cross processes
            return TaskFailure(errors.WorkerError(f"{part}: {traceback.format_exc()}"), False)


def make_parts_steps(
    make: Callable[[PartType], Result],
    parts: Sequence[PartType],
    workers: Workers,
    folder: JobFolder | None = None,
    *,
    advance: Callable[[int], object] = lambda size: None,
    begin: Callable[[int, int], object] | None = None,
    keep: Callable[[PartType, Result], Any] = lambda part, result: result,
    unit: Unit = "",
    remote_data: bool = False,
    task_bytes: int = 0,
) -> Steps[PartResults[Result]]:
    """Make the parts of a job that have no record, of this call's shard.

    Args:
        make: makes a part and returns its result; it can be pickled and is called in the workers.
        parts: all parts of the job.
        workers: where the parts are made, and which.
        folder: folder of the records, claimed before; None: no records.
        advance: called with the size of each part that is made, and without `begin` of each that has a record.
        begin: called before parts are made, with the size of all parts of the shard, and of those that have a record.
        keep: called with each part that is made, and its result; returns what is kept of it, by default the result.
        unit: unit of the sizes of the parts, for the line that an engine's job logs before it begins.
        remote_data, task_bytes: as in `Workers.open`.

    Returns:
        Name of each part -> its result. With a shard, parts of other shards that have no record yet are missing.

    Raises:
        BinidxError: a part failed permanently, or repeatedly; the other errors of `run_tasks`.
    """
    unique = list({part.name: part for part in parts}.values())
    results = PartResults[Result]() if folder is None else (yield from folder.read_all_steps(unique))
    share = workers.select(unique)
    tasks = [part for part in share if part.name not in results]
    total, left = (sum(part.size for part in some) for some in (share, tasks))
    if begin is None and left < total:
        advance(total - left)
    if tasks:
        if begin is not None:
            begin(total, total - left)
        estimate = describe_parts(len(tasks), left / len(tasks), unit, workers.memory_of(task_bytes))
        is_local = workers.executor is None and workers.engine in (None, "local")
        engine = workers.open(remote_data=remote_data, task_bytes=task_bytes)
        runner = TaskRunner(_Work(make, folder), tasks, engine, "" if is_local else estimate)
        try:
            while (ended := (yield from runner.turn())) is not None:
                for part, result in ended:
                    results[part.name] = keep(part, result)
                    results.num_made += 1
                    advance(part.size)
        finally:
            yield from runner.close()
    if workers.shard is not None and folder is not None:
        results.update((yield from folder.read_all_steps([part for part in unique if part.name not in results])))
    return results


def describe_parts(count: int, size: float, unit: Unit, memory: int) -> str:
    """Return the estimate of a job for people: so many parts, their mean size, and the memory of each."""
    each = {"": "", "bytes": f" of about {size / 2**20:,.1f} MiB"}.get(unit, f" of about {size:,.0f} {unit}")
    return f"{count:,} part{'s'[count == 1 :]}{each}, {memory >> 20:,} MiB of memory each"


make_parts = blocking(make_parts_steps)
"""Make the parts of a job that have no record, of this call's shard; arguments and errors: `make_parts_steps`."""
