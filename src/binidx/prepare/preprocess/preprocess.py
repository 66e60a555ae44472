"""`preprocess`: text in, datasets out, whatever happens in between.

    look at the inputs ─► plan ─► finished already? ─► whose parts stand there? ─► make those that miss ─► finish

A restart is the same call: it makes the parts that have no record. `shard` makes every n-th part and nothing else, for
Slurm arrays and indexed Jobs; whoever finds all records there finishes.

How far a job is, seen from elsewhere: by its records alone, whether it runs or has stopped. Nothing is written.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from binidx.errors import BinidxError, ConfigError, ObjectChangedError, ObjectExistsError, redacted
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.sidecars.dataset_manifest import MANIFEST, Machine, read_manifest
from binidx.jobs.engines import Borrowed, available_cores, workers_of
from binidx.jobs.scheduling import ATTEMPTS, Workers, drive
from binidx.prepare.preprocess.finish import finish, job_difference, mark_of, remove_parts, take_place
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.job_plan import Part, Places, plan_digest, plan_parts, undivided
from binidx.prepare.preprocess.progress import Unwatched, Watched, Watcher, count_machines, pace, sizes_of
from binidx.prepare.preprocess.record import Record, problems_of
from binidx.prepare.preprocess.tokenize_part import Task, read_record, run_part
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.slices import Input
from binidx.storage.requests.retries import pause
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.concatenate import IN_FLIGHT
from binidx.storage.writing.publish import read_small


@dataclass(frozen=True)
class Report:
    """What was done.

    Attributes:
        parts: of the job; `parts_made` by this call, `parts_missing` that a shard left to others.
        manifests: of each key's dataset, once all is done; empty before.
        machines: name -> what it has done of the parts whose records were seen.
    """

    job: Job
    parts: int
    parts_made: int
    parts_missing: int
    manifests: dict[str, dict[str, Any]]
    seconds: float
    machines: dict[str, Machine]

    @property
    def finished(self) -> bool:
        return bool(self.manifests)

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        told = {name: getattr(self, name) for name in ("finished", "parts", "parts_made", "parts_missing", "seconds")}
        machines = {name: asdict(each) for name, each in self.machines.items()}
        return {**told, "machines": machines, "datasets": self.job.datasets, "manifests": self.manifests}


@dataclass(frozen=True)
class Shard:
    """Every `count`-th part, from number `index` on; `index` None: no part, only the end."""

    index: int | None
    count: int

    def __post_init__(self) -> None:
        if self.index is not None and not 0 <= self.index < self.count:
            raise ConfigError(f"shard: found {self.index}/{self.count}, needed a number from 0 to {self.count - 1}")

    def of(self, parts: Sequence[Part]) -> Sequence[Part]:
        return parts[:0] if self.index is None else parts[self.index :: self.count]


def preprocess(
    job: Job,
    *,
    engine: str = "local",
    workers: int | None = None,
    executor: Executor | None = None,
    shard: Shard | None = None,
    overwrite: bool = False,
    watch: Watcher | None = None,
) -> Report:
    """Tokenise the text of a job into its datasets, or go on with it.

    Args:
        engine: where parts are made, see `engines`; `workers` at once.
        executor: instead of an engine; it stays open.
        shard: make these parts only; finish if they were the last.
        overwrite: replace datasets that stand there, and parts of another job. They stand until the new ones are ready.

    Raises:
        ConfigError: the options contradict each other.
        FormatError: a row is no document and `on_error` is raise, or the counts do not add up.
        MismatchError: an engine gave other tokens than the reference.
        ObjectExistsError: a dataset, or parts of another job, stand there.
        ObjectChangedError: an input was replaced meanwhile.
        WorkerError, StorageError: a part failed again and again.
    """
    if shard is not None and overwrite:
        raise ConfigError("shard and overwrite: shards know nothing of each other; remove the old dataset before them")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers: {workers}, needed 1 or more")
    began, watch, job = time.monotonic(), watch or Unwatched(), located(job)
    inputs = inputs_of(job)
    parts = plan_parts(job, inputs)
    if manifests := finished(job, parts):
        remove_parts(Places(job), parts)
        return Report(job, len(parts), 0, 0, manifests, time.monotonic() - began, machines_of(manifests))
    for uri, count in repeated(inputs).items():
        watch.say(f"{redacted(uri)}: named {count} times, so its documents will be there {count} times")
    if whole := undivided(parts):
        largest = max(whole, key=lambda each: each.num_bytes)
        watch.say(
            f"{redacted(largest.uri)}: {largest.num_bytes >> 20:,} MiB that cannot be cut, the largest of {len(whole)} "
            "such inputs: one worker reads each; docs/text.md says what can be cut"
        )
    records = read_records(job, parts) if take_place(job, parts, overwrite) else {}
    wanted = parts if shard is None else shard.of(parts)
    kept, watched = len(records), Watched(watch, parts, records, wanted or parts)
    tasks = [Task(job, part) for part in unique(wanted) if part.name not in records]
    if tasks:
        far = is_far(job, parts)
        chosen = workers_of(engine, workers, far=far) if executor is None else borrowed(executor, workers)
        for task, record in drive(run_part, tasks, chosen):
            records[task.part.name] = record
            watched.add(record)
    made = len(records) - kept
    if shard is not None:
        records |= read_records(job, [part for part in parts if part.name not in records])
    missing = sum(part.name not in records for part in unique(parts))
    if not missing:
        finish_once(job, parts, records, overwrite, watch)
    elif finished(job, parts):  # by another shard, while this one made what was made already
        remove_parts(Places(job), parts)
        missing = 0
    manifests = {} if missing else finished(job, parts)
    machines = machines_of(manifests) or count_machines(parts, records)
    return Report(job, len(parts), made, missing, manifests, time.monotonic() - began, machines)


def located(job: Job) -> Job:
    """With whole paths for local ones: workers may stand elsewhere."""

    def whole(uri: str) -> str:
        path = local_path(uri)
        return uri if path is None else os.path.abspath(path)

    told = job.tokenizer
    tokenizer = replace(told, uri=whole(told.uri), merges=told.merges and whole(told.merges))
    return replace(job, inputs=tuple(map(whole, job.inputs)), output=whole(job.output), tokenizer=tokenizer)


def inputs_of(job: Job) -> list[Input]:
    """What it reads, without what it writes itself into the same folder."""
    leave_out = Places(job).is_output
    return find_inputs(job.inputs, format=job.format, storage_options=job.source_options, leave_out=leave_out)


def repeated(inputs: Sequence[Input]) -> dict[str, int]:
    """URI -> how often it was named, of those named more than once: by a glob and by itself, say."""
    return {uri: count for uri, count in Counter(each.uri for each in inputs).items() if count > 1}


def is_far(job: Job, parts: Sequence[Part]) -> bool:
    """Whether anything of it lies in a store."""
    uris = [job.output, *(piece.uri for part in parts for piece in part.slices)]
    return any(local_path(uri) is None for uri in uris)


def unique(parts: Sequence[Part]) -> list[Part]:
    """Each once: an input that is named twice is made once, and stored twice."""
    return list({part.name: part for part in parts}.values())


def borrowed(executor: Executor, workers: int | None) -> Workers:
    """Somebody's executor; when it breaks, it is for them to mend."""
    return Workers(lambda: Borrowed(executor), lambda _: workers or available_cores())


def finished(job: Job, parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """key -> manifest, if this very job was finished; else nothing."""
    found = {key: read_manifest(prefix + MANIFEST, job.target_options) for key, prefix in job.datasets.items()}
    told = {key: manifest for key, manifest in found.items() if manifest is not None and is_of(manifest, job, parts)}
    there = all(IndexedDataset.exists(prefix, storage_options=job.target_options) for prefix in job.datasets.values())
    return told if there and len(told) == len(found) else {}


def machines_of(manifests: Mapping[str, dict[str, Any]]) -> dict[str, Machine]:
    """Name -> what it has done; nothing in manifests of before it was told."""
    manifest = next(iter(manifests.values()), {})
    return {name: Machine(**each) for name, each in manifest.get("machines", {}).items()}


def is_of(manifest: dict[str, Any], job: Job, parts: Sequence[Part]) -> bool:
    """Whether it is of this plan, and has no rows that `on_error` would have treated otherwise."""
    dropped = manifest.get("counts", {}).get("dropped", {})
    same = manifest.get("job", {}).get("on_error") == job.on_error or not problems_of(dropped)
    return same and manifest.get("plan") == plan_digest(job, parts)


def finish_once(job: Job, parts: Sequence[Part], records: dict[str, Record], overwrite: bool, watch: Watcher) -> None:
    """Finish; if somebody else did meanwhile, his work is ours."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            finish(job, parts, records, overwrite=overwrite, watch=watch)
            return
        except BinidxError as error:  # its parts may be gone, its dataset stand: what is told then depends on the store
            if finished(job, parts):
                remove_parts(Places(job), parts)
                return
            # A twin of who made a part may put the same bytes there once more, while they are read.
            if not isinstance(error, ObjectChangedError) or attempt == ATTEMPTS:
                raise
            time.sleep(pause(attempt))


def read_records(job: Job, parts: Sequence[Part]) -> dict[str, Record]:
    """Of the parts that are done, by name."""
    places = Places(job)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        found = threads.map(lambda part: read_record(places, part), unique(parts))
        return {record.name: record for record in found if record is not None}


@dataclass(frozen=True)
class JobStatus:
    """What is there.

    Attributes:
        finished: the datasets stand.
        total_bytes: stored bytes of all text; `done_bytes` of the parts that are done.
        bytes_per_second: of the last parts, all machines together.
        last_part_seconds: since the last part was done, by the clock of its machine.
        machines: name -> what it has done.
    """

    output: str
    finished: bool
    parts: int
    parts_done: int
    total_bytes: int
    done_bytes: int
    bytes_per_second: float | None
    last_part_seconds: float | None
    machines: dict[str, Machine]

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the last parts; None: nothing is known of it."""
        if self.finished or not self.bytes_per_second:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_second

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return {**asdict(self), "seconds_left": self.seconds_left}


def job_status(job: Job) -> JobStatus:
    """Look at a job that runs, or ran.

    Raises:
        ObjectExistsError: the parts that lie there are of another job.
    """
    job = located(job)
    parts = plan_parts(job, inputs_of(job))
    if manifests := finished(job, parts):
        return _finished(job, parts, manifests)
    _check_ours(job, parts)
    records = read_records(job, parts)
    # It may have ended in this moment: its records are gone then.
    manifests = finished(job, parts)
    return _finished(job, parts, manifests) if manifests else under_way(job, parts, records, time.time())


def under_way(job: Job, parts: Sequence[Part], records: Mapping[str, Record], now: float) -> JobStatus:
    """Of a job that is not finished.

    Args:
        now: seconds since 1970.
    """
    sizes = sizes_of(parts)
    last = max((each.ended for each in records.values()), default=0.0)
    return JobStatus(
        output=redacted(job.output),
        finished=False,
        parts=len(sizes),
        parts_done=len(records),
        total_bytes=sum(sizes.values()),
        done_bytes=sum(sizes[name] for name in records),
        bytes_per_second=pace(sizes, records.values()),
        last_part_seconds=max(0.0, now - last) if last else None,
        machines=count_machines(parts, records),
    )


def _finished(job: Job, parts: Sequence[Part], manifests: Mapping[str, dict[str, Any]]) -> JobStatus:
    count, total = len(unique(parts)), sum(sizes_of(parts).values())
    return JobStatus(redacted(job.output), True, count, count, total, total, None, None, machines_of(manifests))


def _check_ours(job: Job, parts: Sequence[Part]) -> None:
    uri, told = Places(job).job_uri, mark_of(job, parts)
    standing = read_small(uri, job.target_options)
    if standing not in (None, told):
        assert standing is not None
        raise ObjectExistsError(f"{uri}: parts of another job, {job_difference(standing, told)}; give its command")
