"""Tokenize text into datasets, with restarts; report the status of a job.

    find inputs ─► plan ─► finished? ─► claim the output ─► make the missing parts ─► finish

A restart is the same call: it makes the parts that have no record. With `shard` a call makes every n-th part only, for
Slurm arrays and indexed Jobs; the call that finds all records there finishes the job.

The status comes from the records of the parts alone, whether the job runs or has stopped, and writes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from typing import Any

from binidx.errors import (
    BinidxError,
    ConfigError,
    FormatError,
    ObjectChangedError,
    ObjectExistsError,
    redacted,
    trims_traceback,
)
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.sidecars.dataset_manifest import MANIFEST, Machine, read_manifest
from binidx.jobs.parts import Shard, Workers
from binidx.jobs.runner import ATTEMPTS, run_tasks
from binidx.prepare.preprocess.finish import (
    Records,
    claim_output,
    describe_job_difference,
    finish,
    format_job_file,
    remove_parts,
)
from binidx.prepare.preprocess.job import MOST_BYTES, Job, JobFiles, Part, plan_digest, plan_parts
from binidx.prepare.preprocess.record import Record, count_machines, count_problems, part_sizes, recent_speed
from binidx.prepare.preprocess.tokenize_part import PartTask, read_record, run_part
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.slices import Input
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small
from binidx.storage.requests.retries import pause
from binidx.storage.threads import READS
from binidx.storage.writing.concatenate import IN_FLIGHT
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

Manifests = dict[str, dict[str, Any]]
"""Key -> manifest of its dataset."""


@dataclass(frozen=True)
class Report:
    """Result of a call of `preprocess`.

    Attributes:
        parts, parts_made, parts_missing: parts of the job; those made by this call; those left to other shards.
        manifests: key -> manifest of its dataset; empty before the job is finished.
        seconds: duration of the call.
        machines: name of each machine -> its counts, over the parts with known records.
    """

    job: Job
    parts: int
    parts_made: int
    parts_missing: int
    manifests: Manifests
    seconds: float
    machines: dict[str, Machine]

    @property
    def finished(self) -> bool:
        """True if the datasets are complete."""
        return bool(self.manifests)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        names = ("finished", "parts", "parts_made", "parts_missing", "seconds")
        machines = {name: asdict(machine) for name, machine in self.machines.items()}
        values = {name: getattr(self, name) for name in names}
        return {**values, "machines": machines, "datasets": self.job.datasets, "manifests": self.manifests}


@trims_traceback
def preprocess(
    job: Job,
    *,
    engine: str = "local",
    workers: int | None = None,
    executor: Executor | None = None,
    shard: Shard | None = None,
    overwrite: bool = False,
    watch: ProgressWatcher | None = None,
) -> Report:
    """Tokenize the text of a job into its datasets, or continue the job.

    Args:
        job: inputs, output, tokenizer and options.
        engine: where parts are made: `local`, `ray`, `ray:ADDRESS` or `dask=ADDRESS`.
        workers: parts made at once. Default: the number of cores, twice as many if data is in an object store.
        executor: any `concurrent.futures.Executor`, used instead of an engine; it stays open.
        shard: make only these parts; finish the job if no part is missing then.
        overwrite: replace existing datasets, which stay until the new ones are ready; parts of another job are removed
            at once.
        watch: receiver of the progress, in stored bytes of the text of finished parts.

    Returns:
        The number of parts made, and the manifests of the datasets if the job is finished.

    Raises:
        ConfigError: contradictory options.
        FormatError: a row is not a document and `on_error` is `raise`, or the counts do not add up.
        MismatchError: an engine gave other tokens than the reference.
        MissingDriverError: the lineage or an engine needs a package that is not installed.
        ObjectExistsError: a dataset, or parts of another job, exist, and `overwrite` is False.
        ObjectChangedError: an input was replaced during the job.
        WorkerError, StorageError: a part failed repeatedly.

    Example:
        >>> preprocess(job, workers=16).manifests["text"]["dataset"]  # doctest: +SKIP
        {'key': 'text', 'dtype': 'int32', 'documents': 1000000, 'sequences': 1000000, 'tokens': 712345678}

    Source: Megatron Core, tools/preprocess_data.py: the same bytes for clean text; parts and restarts are ours.
    """
    if not isinstance(job, Job):
        raise ConfigError(f"job: found {job!r}, needs a binidx.Job")
    if shard is not None and overwrite:
        raise ConfigError("shard, overwrite: shards do not know of each other; remove the old dataset first")
    began, watch, job = time.monotonic(), watch or SilentWatcher(), make_paths_absolute(job)
    place, inputs = Workers(engine, workers, executor), find_job_inputs(job)
    parts = plan_parts(job, inputs)
    if manifests := remove_parts_of_finished(job, parts):
        return Report(job, len(parts), 0, 0, manifests, time.monotonic() - began, machines_of(manifests))
    if job.lineage:
        import binidx.format.arrow  # noqa: F401 - MissingDriverError before any work
    warn_of_inputs(inputs, parts, watch)
    records = read_records(job, parts) if claim_output(job, parts, overwrite) else {}
    share = parts if shard is None else shard.select(parts)
    num_earlier, sizes = len(records), part_sizes(share)
    if tasks := [PartTask(job, part) for part in unique_parts(share) if part.name not in records]:
        done_bytes = sum(size for name, size in sizes.items() if name in records)
        watch.begin("tokenize", sum(sizes.values()), done_bytes)
        uris = [job.output, *(file.uri for file in inputs)]
        remote = any(Location(uri).local_path is None for uri in uris)
        try:
            for task, record in run_tasks(run_part, tasks, place.open(remote_data=remote)):
                records[task.part.name] = record
                watch.advance(sizes[record.name])
        except FormatError:  # of the first rows: there is nothing to resume
            if shard is None and not read_records(job, parts):
                remove_parts(JobFiles(job), parts)
            raise
    num_made = len(records) - num_earlier
    if shard is not None:
        records |= read_records(job, [part for part in parts if part.name not in records])
    num_missing = sum(part.name not in records for part in unique_parts(parts))
    if not num_missing:
        finish_once(job, parts, records, overwrite, watch)
    if manifests := remove_parts_of_finished(job, parts):  # maybe by another shard, after this one had made its parts
        num_missing = 0
    machines = machines_of(manifests) or count_machines(parts, records)
    return Report(job, len(parts), num_made, num_missing, manifests, time.monotonic() - began, machines)


def make_paths_absolute(job: Job) -> Job:
    """Return the job with absolute local paths: workers may have another working directory."""
    spec = job.tokenizer
    merges = spec.merges and Location(spec.merges).absolute
    tokenizer = replace(spec, uri=Location(spec.uri).absolute, merges=merges)
    inputs = tuple(Location(uri).absolute for uri in job.inputs)
    return replace(job, inputs=inputs, output=Location(job.output).absolute, tokenizer=tokenizer)


def find_job_inputs(job: Job) -> list[Input]:
    """Return the inputs of a job, without its own outputs in the same folder."""
    exclude, keep = JobFiles(job).is_output, job.on_error != "raise"
    return find_inputs(
        job.inputs, format=job.format, storage_options=job.source_options, exclude=exclude, damaged_too=keep
    )


def warn_of_inputs(inputs: Sequence[Input], parts: Sequence[Part], watch: ProgressWatcher) -> None:
    """Report inputs that are named more than once, and large ones that cannot be cut."""
    for uri, count in Counter(file.uri for file in inputs).items():
        if count > 1:
            watch.say(f"{redacted(uri)}: named {count} times; its documents will be stored {count} times")
    # A .gz, a .zst of one frame, or a huge row group.
    if slices := [piece for part in parts for piece in part.slices if piece.num_bytes > MOST_BYTES]:
        largest = max(slices, key=lambda piece: piece.num_bytes)
        watch.say(
            f"{redacted(largest.uri)}: {largest.num_bytes >> 20:,} MiB that cannot be cut, the largest of "
            f"{len(slices)} such inputs: one worker reads each; docs/reference/text-inputs.md lists the formats "
            "that can be cut"
        )


def unique_parts(parts: Sequence[Part]) -> list[Part]:
    """Return each part once: an input that is named twice is tokenized once, and stored twice."""
    return list({part.name: part for part in parts}.values())


def read_finished_manifests(job: Job, parts: Sequence[Part]) -> Manifests:
    """Return the manifest of each dataset, by its key in the text, if this same job wrote all of them; else {}."""
    manifests = {key: read_manifest(prefix + MANIFEST) for key, prefix in JobFiles(job).datasets.items()}
    own = {key: file for key, file in manifests.items() if file is not None and belongs_to(file, job, parts)}
    exist = all(IndexedDataset.exists(prefix, storage_options=job.target_options) for prefix in job.datasets.values())
    return own if exist and len(own) == len(manifests) else {}


def remove_parts_of_finished(job: Job, parts: Sequence[Part]) -> Manifests:
    """Remove the parts if the job is finished; return the result of `read_finished_manifests`."""
    if manifests := read_finished_manifests(job, parts):
        remove_parts(JobFiles(job), parts)
    return manifests


def machines_of(manifests: Manifests) -> dict[str, Machine]:
    """Return the counts of each machine in the manifests; manifests of older versions have none."""
    manifest = next(iter(manifests.values()), {})
    return {name: Machine(**machine) for name, machine in manifest.get("machines", {}).items()}


def belongs_to(manifest: dict[str, Any], job: Job, parts: Sequence[Part]) -> bool:
    """Return whether a manifest describes the dataset that this job would write.

    Both must have the same plan digest (part names and recipe). `on_error` may differ only if the manifest counts no
    row that is not a document, since the policy then changed nothing.

    Args:
        manifest: parsed content of the manifest of a dataset.
        job: the job to compare with.
        parts: all parts of the job.
    """
    dropped = manifest.get("counts", {}).get("dropped", {})
    same_policy = manifest.get("job", {}).get("on_error") == job.on_error
    return (same_policy or not count_problems(dropped)) and manifest.get("plan") == plan_digest(job, parts)


def finish_once(
    job: Job, parts: Sequence[Part], records: dict[str, Record], overwrite: bool, watch: ProgressWatcher
) -> None:
    """Finish the job, unless another process finishes it first.

    Args:
        records: name of each part -> its record.
        overwrite, watch: as in `preprocess`.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            finish(job, parts, records, overwrite=overwrite, watch=watch)
            return
        except BinidxError as error:  # the other process may have removed the parts, or published the dataset
            if read_finished_manifests(job, parts):
                return
            # A second worker of a part may write the same bytes again, while they are read.
            if not isinstance(error, ObjectChangedError) or attempt == ATTEMPTS:
                raise
            time.sleep(pause(attempt))


def read_records(job: Job, parts: Sequence[Part]) -> dict[str, Record]:
    """Return the records of the finished parts, by name."""
    files = JobFiles(job)
    with READS.executor(IN_FLIGHT) as threads:
        records = threads.map(lambda part: read_record(files, part), unique_parts(parts))
        return {record.name: record for record in records if record is not None}


@dataclass(frozen=True)
class JobStatus:
    """Status of a job.

    Attributes:
        finished: True if the datasets are complete.
        total_bytes, done_bytes: stored bytes of all text, and of the finished parts.
        bytes_per_second: speed of the last parts, all machines together; None if it is unknown.
        last_part_seconds: time since the last part was finished, by the clock of its machine.
        machines: name of each machine -> its counts.
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
        """Time left at the speed of the last parts; None if it is unknown."""
        if self.finished or not self.bytes_per_second:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        return {**asdict(self), "seconds_left": self.seconds_left}


def job_status(job: Job) -> JobStatus:
    """Return the status of a running or stopped job.

    Raises:
        ObjectExistsError: the existing parts belong to another job.
    """
    job = make_paths_absolute(job)
    parts = plan_parts(job, find_job_inputs(job))
    manifests = read_finished_manifests(job, parts)
    records: dict[str, Record] = {}
    if not manifests:
        file, content = JobFiles(job).job_file, format_job_file(job, parts)
        existing = read_small(file)
        if existing is not None and existing != content:
            differs = describe_job_difference(existing, content)
            raise ObjectExistsError(f"{file}: parts of another job, {differs}; give the options of that job")
        records = read_records(job, parts)
        manifests = read_finished_manifests(job, parts)  # it may have finished meanwhile and removed the records
    return build_status(job, parts, {} if manifests else records, manifests, time.time())


def build_status(job: Job, parts: Sequence[Part], records: Records, manifests: Manifests, now: float) -> JobStatus:
    """Return the status of a job.

    Args:
        records: name of each finished part -> its record; empty for a finished job.
        manifests: key -> manifest of its dataset; empty for an unfinished job.
        now: seconds since 1970.
    """
    sizes = part_sizes(parts)
    done = sizes if manifests else records
    last = max((record.ended for record in records.values()), default=0.0)
    return JobStatus(
        output=redacted(job.output),
        finished=bool(manifests),
        parts=len(sizes),
        parts_done=len(done),
        total_bytes=sum(sizes.values()),
        done_bytes=sum(sizes[name] for name in done),
        bytes_per_second=recent_speed(sizes, records.values()),
        last_part_seconds=max(0.0, now - last) if last else None,
        machines=machines_of(manifests) or count_machines(parts, records),
    )
