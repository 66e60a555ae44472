"""Objects of a job, and the form of its job.json and records, which is older than `jobs`.

OUTPUT_KEY_document.bin  .idx  .lineage.parquet      the datasets, one a key
OUTPUT_KEY_document.manifest.json                    last object to appear: the dataset is finished
OUTPUT.quarantine.jsonl
OUTPUT-parts/job.json                                first object to appear: identifies the job
OUTPUT-parts/NAME-0.bin  .idx  .lineage.parquet      a part's dataset of the first key
OUTPUT-parts/NAME.quarantine.jsonl
OUTPUT-parts/NAME.json                               the part's last object: its record
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.corpus.whole_dataset import DatasetTarget
from binidx.errors import FormatError
from binidx.format.sidecars.dataset_manifest import LINEAGE, SIDECARS
from binidx.jobs.job_folder import JobFolder
from binidx.json_models import JsonFile
from binidx.prepare.preprocess.job import Job, Part, plan_digest
from binidx.prepare.preprocess.record import RECORD_FILE, Record
from binidx.storage.location import Location
from binidx.storage.open import suffix_of


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
