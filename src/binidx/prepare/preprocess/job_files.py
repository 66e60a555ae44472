"""Objects of a job, and the form of its job.json and records, which is older than `jobs`; what records say of a job.

OUTPUT_KEY_document.bin  .idx  .lineage.parquet      the datasets, one a key
OUTPUT_KEY_document.manifest.json                    last object to appear: the dataset is finished
OUTPUT.quarantine.jsonl
OUTPUT-parts/job.json                                first object to appear: identifies the job
OUTPUT-parts/NAME-0.bin  .idx  .lineage.parquet      a part's dataset of the first key
OUTPUT-parts/NAME.quarantine.jsonl
OUTPUT-parts/NAME.json                               the part's last object: its record

    {"binidx_part": 2, "name": ..., "engine": ..., "compared": ..., "seconds": ...,
     "host": ..., "ended": ..., "slices": [Counts, ...], "extents": [Extent, ...], "datasets": {key: Tokens},
     "quarantined": rows}

A record is the proof that its part is finished, and the only source of counts: it appears once, whole. The progress of
a job is computed from records, too: counters that run during the work would lose the counts of a killed worker, and
count repeated work twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.corpus.whole_dataset import DatasetTarget
from binidx.errors import FormatError
from binidx.format.sidecars.dataset_manifest import LINEAGE, SIDECARS, Machine, RowCounts
from binidx.jobs.job_folder import JobFolder
from binidx.json_models import JsonFile
from binidx.prepare.preprocess.job import Job, Part, plan_digest
from binidx.prepare.text.batch import PROBLEMS_BY_KIND
from binidx.prepare.text.slices import Extent
from binidx.storage.location import Location
from binidx.storage.open import suffix_of

VERSION = 2
SPECIAL, UNENCODED = "special token", "not tokenized"
"""Kinds of problems besides those of `prepare.text`."""


def count_problems(dropped: Mapping[str, int]) -> int:
    """Return the number of dropped rows that are not documents, from reason -> number of dropped rows."""
    return sum(count for reason, count in dropped.items() if reason in (*PROBLEMS_BY_KIND, SPECIAL, UNENCODED))


@dataclass(frozen=True)
class TokenCounts:
    """Counts of a part's dataset of one key.

    Attributes:
        num_tokens: number of tokens, EODs included.
        digest: xxh3_64 of the tokens before compression, hex.
    """

    num_sequences: int
    num_tokens: int
    digest: str


@dataclass(frozen=True)
class Record:
    """Record of a finished part.

    Attributes:
        engine: name of the tokenizer's engine.
        compared: number of texts that were compared with the reference.
        slices: counts of each slice, in their order.
        extents: for each slice the part of its input that was read.
        datasets: key -> counts of its dataset.
        quarantined: number of rows in the quarantine file.
        seconds, cpu_seconds: elapsed time, and CPU time.
        on_error: policy for rows that are not documents.
        host: name of the machine; "" in records of older versions.
        ended: end time, seconds since 1970 by the machine's clock; 0 in records of older versions.
    """

    name: str
    engine: str
    compared: int
    slices: list[RowCounts]
    extents: list[Extent]
    datasets: dict[str, TokenCounts]
    quarantined: int
    seconds: float
    cpu_seconds: float
    on_error: str = "raise"
    host: str = ""
    ended: float = 0.0

    def valid_for(self, on_error: str) -> bool:
        """Return whether a job with this policy for bad rows would have made the same part."""
        return on_error == self.on_error or not count_problems(self.counts.dropped)

    @property
    def counts(self) -> RowCounts:
        """Counts of the rows of the whole part."""
        return sum(self.slices, RowCounts())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the part, summed over the datasets of all JSON keys."""
        return sum(dataset.num_tokens for dataset in self.datasets.values())


HINT = "finish with the binidx that began, or delete it and give the same command again"
RECORD_FILE = JsonFile(Record, {"binidx_part": VERSION}, hint=HINT)


@dataclass(frozen=True)
class JobFile:
    """Fields of job.json besides its version."""

    plan: str
    inputs: list[str]
    recipe: dict[str, Any]


JOB_FILE = JsonFile(JobFile, {"binidx_job": 1}, open=True)


class JobFiles(JobFolder):
    """Locations of a job's objects, and the folder of its parts.

    Args:
        parts: all parts of the job; without them only locations are known, and records.

    Attributes:
        quarantine: file with the rows of the job that are not documents.
        datasets: prefix of the dataset of each key.
        bin_suffix: suffix of the token files.
    """

    def __init__(self, job: Job, parts: Sequence[Part] | None = None) -> None:
        output = Location(job.output, job.target_options)
        own = None if parts is None else JobFile(plan_digest(job, parts), job.to_json()["inputs"], job.recipe)
        identity = {} if own is None else {**JOB_FILE.tags, **asdict(own)}
        super().__init__(output + "-parts", identity, replaceable=True)
        self.job, self.quarantine = job, output + ".quarantine.jsonl"
        self.datasets = {key: Location(prefix, job.target_options) for key, prefix in job.datasets.items()}
        self.bin_suffix = f".bin{suffix_of(job.codec)}"

    @property
    def content(self) -> bytes:
        return JOB_FILE.encode(self.identity)

    def describe_difference(self, found: bytes) -> str:
        other, inputs = JOB_FILE.decode(found, ""), self.identity["inputs"]
        if names := list(unequal_names(other.recipe, self.identity["recipe"])):
            return f"which differs in {', '.join(names)}"
        if other.inputs != inputs:
            return f"of other inputs: {', '.join(other.inputs[:3])}{', ...' if len(other.inputs) > 3 else ''}"
        return "of inputs that changed since, or of another --part-bytes or --format"

    def parse(self, part: Part, data: bytes) -> Record | None:
        """Return a part's record; None if this job would have treated its bad rows differently.

        Raises:
            FormatError: it is the record of another version, or of other slices or keys.
        """
        uri = self.file(part).uri
        record = RECORD_FILE.decode(data, uri)
        if not record.valid_for(self.job.on_error):
            return None
        if {len(record.slices), len(record.extents)} != {len(part.slices)} or {*record.datasets} != {*self.job.keys}:
            raise FormatError(f"{uri}: not the record of {part}; delete it and give the same command again")
        return record

    def format(self, result: Record) -> bytes:
        return RECORD_FILE.encode(result)

    def check_free(self) -> None:
        """Raise ObjectExistsError if a dataset of the job exists."""
        for prefix in self.datasets.values():
            DatasetTarget(prefix, self.job.codec).check_free()

    def prefix(self, part: Part, key: str) -> Location:
        """Return the prefix of a part's dataset of one key."""
        return self.location / f"{part.name}-{self.job.keys.index(key)}"

    def part_quarantine(self, part: Part) -> Location:
        """Return the location of a part's quarantine."""
        return self.location / f"{part.name}.quarantine.jsonl"

    def files(self, part: Part) -> list[Location]:
        suffixes = [self.bin_suffix, ".idx", LINEAGE]
        datasets = [self.prefix(part, key) + suffix for key in self.job.keys for suffix in suffixes]
        return [self.file(part), *datasets, self.part_quarantine(part)]

    def is_output(self, uri: str) -> bool:
        """Return whether an object found among the inputs is an output: a job may write to a folder that it reads."""
        sidecars = (prefix + suffix for prefix in self.datasets.values() for suffix in SIDECARS)
        return uri.startswith(f"{self.location}/") or uri in (self.quarantine.uri, *sidecars)


def unequal_names(theirs: Mapping[str, Any], ours: Mapping[str, Any], parent: str = "") -> Iterator[str]:
    """Yield the names of settings with different values, such as `append_eod` or `tokenizer eod`."""
    for name, value in ours.items():
        other = theirs.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from unequal_names(other, value, f"{name} ")
        elif value != other:
            yield parent + name


RECENT_PARTS = 100
"""Number of last parts that determine the present speed: several for each worker of a machine."""


def part_sizes(parts: Iterable[Part]) -> dict[str, int]:
    """Return the stored bytes of each part's text, by the part's name."""
    return {part.name: part.size for part in parts}


def count_machines(parts: Iterable[Part], records: Mapping[str, Record]) -> dict[str, Machine]:
    """Return the work of each machine of a job: finished parts, documents, tokens, stored bytes of text, and speed.

    Args:
        parts: all parts of the job, finished or not; they give the stored bytes.
        records: part name -> record, for each finished part.

    Returns:
        Machine name -> its work, sorted by name. A record of an older version has no machine name; its work is under
        "". `bytes_per_second` is None if no record of the machine has an end time.
    """
    sizes, machines = part_sizes(parts), dict[str, Machine]()
    for host in sorted({record.host for record in records.values()}):
        own = [record for record in records.values() if record.host == host]
        machines[host] = Machine(
            parts=len(own),
            documents=sum(record.counts.num_documents for record in own),
            tokens=sum(record.num_tokens for record in own),
            stored_bytes=sum(sizes[record.name] for record in own),
            bytes_per_second=_speed(sizes, own),
        )
    return machines


def recent_speed(sizes: Mapping[str, int], records: Iterable[Record]) -> float | None:
    """Return the stored bytes per second of the last parts on all machines; None if it is unknown.

    Args:
        sizes: name of each part -> stored bytes of its text.
        records: records of finished parts, in any order.
    """
    timed = sorted(records, key=lambda record: record.ended)
    since = timed[-RECENT_PARTS - 1].ended if len(timed) > RECENT_PARTS else 0.0
    return _speed(sizes, timed[-RECENT_PARTS:], since)


def _speed(sizes: Mapping[str, int], records: Collection[Record], since: float = 0.0) -> float | None:
    """Return the stored bytes of parts per second in which at least one of them was made; None if it is unknown."""
    timed = [record for record in records if record.ended]
    busy = busy_seconds((max(record.ended - record.seconds, since), record.ended) for record in timed)
    return sum(sizes[record.name] for record in timed) / busy if busy else None


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total time covered by the spans (begin, end); overlaps count once, gaps between runs do not count."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
