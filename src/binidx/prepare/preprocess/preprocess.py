"""Tokenize text into datasets, as a job of two stages; report its status.

    tokenize    a part of the text  ─►  its datasets in OUTPUT-parts, and a record
    finish      all parts           ─►  the datasets of the job, joined inside the store where it can

Restarts and shards are those of all jobs (`jobs`). A finished job is found by the manifests of its datasets.

The status comes from the records of the parts alone, whether the job runs or has stopped, and writes nothing.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from typing import Any

from binidx.errors import ConfigError, FormatError, ObjectExistsError, redacted, trims_traceback
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.sidecars.dataset_manifest import MANIFEST, Machine, read_manifest
from binidx.jobs.parts import Shard, Workers
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.jobs.stages import JobStage, finish_once, run_stages
from binidx.prepare.preprocess.finish import Records, finish
from binidx.prepare.preprocess.job import MOST_BYTES, Job, Part, plan_digest, plan_parts
from binidx.prepare.preprocess.job_files import JobFiles, count_machines, count_problems, part_sizes, recent_speed
from binidx.prepare.preprocess.tokenize_part import make_part
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.slices import Input
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small

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
    task_memory: int | None = None,
    task_resources: Mapping[str, float] | None = None,
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
        task_memory, task_resources: of a part, as in `Workers`.

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
    place = Workers(engine, workers, executor, shard, task_memory, task_resources)
    place.check_overwrite(overwrite)
    began, watch, job = time.monotonic(), watch or SilentWatcher(), make_paths_absolute(job)
    inputs = find_job_inputs(job)
    parts = plan_parts(job, inputs)
    files = JobFiles(job, parts)

    def report(manifests: Manifests, num_made: int = 0, num_missing: int = 0, records: Records | None = None) -> Report:
        machines = machines_of(manifests) or count_machines(parts, records or {})
        return Report(job, len(parts), num_made, num_missing, manifests, time.monotonic() - began, machines)

    if manifests := remove_parts_of_finished(files, parts):
        return report(manifests)
    if job.lineage:
        from binidx.format.arrow import pa  # noqa: F401 - MissingDriverError before any work
    warn_of_inputs(inputs, parts, watch)
    try:
        files.claim(overwrite=overwrite, parts=parts, check_free=files.check_free)
    except ObjectExistsError:  # maybe another call of this job has finished it since
        if manifests := remove_parts_of_finished(files, parts):
            return report(manifests)
        raise
    remote = any(Location(uri).local_path is None for uri in [job.output, *(file.uri for file in inputs)])
    stage = JobStage("tokenize", functools.partial(make_part, job), lambda _: parts)
    try:
        (records,), missing = run_stages([stage], files, place, watch, remote_data=remote)
    except FormatError:  # of the first rows: there is nothing to resume
        if shard is None and not files.read_all(parts):
            files.remove(parts)
        raise
    if not missing:
        finish_once(
            lambda: finish(job, parts, records, overwrite=overwrite, watch=watch),
            lambda: bool(read_finished_manifests(job, parts)),
        )
    # Maybe another shard has finished the job, after this one had made its parts.
    manifests = remove_parts_of_finished(files, parts)
    return report(manifests, records.num_made, 0 if manifests else missing, records)


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


def read_finished_manifests(job: Job, parts: Sequence[Part]) -> Manifests:
    """Return the manifest of each dataset, by its key in the text, if this same job wrote all of them; else {}."""
    manifests = {key: read_manifest(prefix + MANIFEST) for key, prefix in JobFiles(job).datasets.items()}
    own = {key: file for key, file in manifests.items() if file is not None and belongs_to(file, job, parts)}
    exist = all(IndexedDataset.exists(prefix, storage_options=job.target_options) for prefix in job.datasets.values())
    return own if exist and len(own) == len(manifests) else {}


def remove_parts_of_finished(files: JobFiles, parts: Sequence[Part]) -> Manifests:
    """Remove the parts if the job is finished; return the result of `read_finished_manifests`."""
    manifests = read_finished_manifests(files.job, parts)
    if manifests and files.holds_parts():
        files.remove(parts)
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
    records: Records = {}
    if not manifests:
        files = JobFiles(job, parts)
        found = read_small(files.job_file)
        if found not in (None, files.content):
            raise files.refusal(found, "give the options of that job")
        records = files.read_all(parts)
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
