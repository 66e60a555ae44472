"""Stages of a job, one after the other, and its finish, once for all calls.

    parts of the first stage ──► of the next, planned from their results ──► ... ──► finish, once every record exists

Several calls may finish a job at once. Each writes the same bytes, and the first one to be ready removes the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from binidx import errors
from binidx.jobs.job_folder import JobFolder, PartResults
from binidx.jobs.parts import PartType, Values, Workers, make_parts_steps
from binidx.jobs.progress import ProgressWatcher, Unit
from binidx.jobs.task_queue import ATTEMPTS
from binidx.storage.effects import AtOnce, Call, Chance, DeleteObject, Sleep, Steps, blocking
from binidx.storage.location import Location
from binidx.storage.requests.retries import longest_pause


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


def run_stages_steps(
    stages: Sequence[JobStage[Any]], folder: JobFolder | None, workers: Workers, watch: ProgressWatcher, **options: Any
) -> Steps[tuple[list[PartResults[Any]], int]]:
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
        yield from folder.claim_steps()
    results, missing = list[PartResults[Any]](), 0
    for stage in stages:
        tasks = yield from Call(stage.plan, (results[-1] if results else {},))

        def begin(total: int, done: int, stage: JobStage[Any] = stage) -> None:
            watch.begin(stage.name, total, done, stage.unit)

        records = folder if stage.recorded else None
        watched: dict[str, Any] = {"advance": watch.advance, "begin": begin, "unit": stage.unit}
        shell = make_parts_steps(stage.make, tasks, workers, records, **watched, **options)
        results.append((yield from shell))
        if missing := len({task.name for task in tasks}) - len(results[-1]):
            break
    return results, missing


def finish_once_steps(
    finish: Callable[[], object], is_finished: Callable[[], bool], attempts: int = ATTEMPTS
) -> Steps[bool]:
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
            yield from Call(finish)
            return True
        except errors.BinidxError as error:
            if (yield from Call(is_finished)):
                return False
            if not isinstance(error, errors.ObjectChangedError) or attempt == attempts:
                raise
        yield from Sleep((yield from Chance(0.0, longest_pause(attempt))))
        attempt += 1


def make_recorded_parts_steps(
    make: Callable[[PartType], Values],
    parts: Sequence[PartType],
    workers: Workers,
    records: Location | None,
    identity: Mapping[str, Any],
    watch: ProgressWatcher,
    *,
    remote_data: bool = False,
    is_final: Callable[[Values], bool] = lambda result: True,
) -> Steps[dict[str, Values]]:
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
    workers.check_records(records)
    folder = None if records is None else JobFolder(Location(records.absolute, records.options), identity)
    stage = JobStage("tokens", make, lambda _: parts)
    (results,), _ = yield from run_stages_steps([stage], folder, workers, watch, remote_data=remote_data)
    if folder is not None and workers.shard is None:
        yield from folder.remove_steps(parts)
    elif folder is not None:
        again = [part for part in parts if part.name in results and not is_final(results[part.name])]
        yield from AtOnce([DeleteObject(folder.file(part)) for part in again])
    return results


run_stages = blocking(run_stages_steps)
"""Run the stages of a job in order, up to one whose tasks other shards must make; arguments: `run_stages_steps`."""
finish_once = blocking(finish_once_steps)
make_recorded_parts = blocking(make_recorded_parts_steps)
