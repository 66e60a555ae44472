"""Plan of a job: its parts, each made without knowledge of the others, and the URIs of its objects. No I/O.

    slices of the text    |---- en.jsonl ----|---- en.jsonl ----|-- a.jsonl --|b|c|---- d.parquet ----|
    parts                 |        0         |        1         |        2        |         3         |

The name of a part is the digest of its slices and of the recipe: the same work has the same name in every run and on
every machine, and any change of the text, the tokenizer or an option gives another name.

OUTPUT_KEY_document.bin  .idx  .lineage.parquet      the datasets, one a key
OUTPUT_KEY_document.manifest.json                    last object to appear: the dataset is finished
OUTPUT.quarantine.jsonl
OUTPUT-parts/job.json                                first object to appear: identifies the job
OUTPUT-parts/NAME-0.bin  .idx  .lineage.parquet      a part's dataset of the first key
OUTPUT-parts/NAME.quarantine.jsonl
OUTPUT-parts/NAME.json                               the part's last object: its record
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from binidx.errors import redacted
from binidx.format.sidecars.dataset_manifest import LINEAGE, SIDECARS
from binidx.prepare.preprocess.job import Job, json_digest
from binidx.prepare.text.slices import Input, Slice, plan_slices
from binidx.storage.codecs.segments import CODECS

FEW, FEW_BYTES = 16, (4 << 20, 64 << 20)
MANY, MOST_BYTES = 512, 512 << 20
"""Number of parts, and bytes of text in one: small parts for little text, so that many cores have work; 64 MiB and
up to 512 parts for more. From there on a part has more tokens than the 5 MiB that S3 needs to copy it itself, and more
work than its ten requests cost. The largest part takes some seconds of a fast engine, and minutes of a slow one."""


@dataclass(frozen=True)
class Part:
    """Unit of work, which is done whole or not at all."""

    number: int
    name: str
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        """Stored bytes of the text."""
        return sum(each.num_bytes for each in self.slices)

    def __str__(self) -> str:
        first, last = self.slices[0], self.slices[-1]
        more = f" to {redacted(last.uri)}" if last.uri != first.uri else ""
        return f"part {self.number} ({redacted(first.uri)} from byte {first.stored}{more})"


def plan_parts(job: Job, inputs: Sequence[Input]) -> list[Part]:
    """Return parts of about the same size, in the order of the inputs; small neighbouring slices share one."""
    part_bytes = job.part_bytes or choose_part_bytes(sum(each.size for each in inputs))
    slices = plan_slices(inputs, part_bytes)
    recipe = json_digest(job.recipe)
    return [
        Part(
            number,
            json_digest([recipe, [{**each.to_json(), "uri": redacted(each.uri)} for each in group]]),
            tuple(group),
        )
        for number, group in enumerate(group_slices(slices, part_bytes))
    ]


def choose_part_bytes(total_bytes: int) -> int:
    """Return the bytes of text in a part; they depend on the text alone, so that any restart finds the same parts."""
    few = min(max(total_bytes // FEW, FEW_BYTES[0]), FEW_BYTES[1])
    return min(max(total_bytes // MANY, few), MOST_BYTES)


def group_slices(slices: Sequence[Slice], part_bytes: int) -> list[list[Slice]]:
    """Return runs of neighbours of up to 1.5 times `part_bytes`: the last slice of a file may be tiny."""
    groups: list[list[Slice]] = []
    size = 0
    for each in slices:
        if not groups or size + each.num_bytes > part_bytes * 3 // 2:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += each.num_bytes
    return groups


def find_oversized_slices(parts: Sequence[Part]) -> list[Slice]:
    """Return the slices above the largest part, which cannot be cut: a .gz, a .zst of one frame, a huge row group."""
    return [each for part in parts for each in part.slices if each.num_bytes > MOST_BYTES]


def plan_digest(job: Job, parts: Sequence[Part]) -> str:
    """Return the identity of a job: all of its parts, and the recipe, as there may be no part."""
    return json_digest([json_digest(job.recipe), *(each.name for each in parts)])


@dataclass(frozen=True)
class JobUris:
    """URIs of a job's objects."""

    job: Job

    @property
    def folder(self) -> str:
        """Folder of the parts."""
        return f"{self.job.output}-parts"

    @property
    def job_uri(self) -> str:
        """URI of the file that identifies the job."""
        return f"{self.folder}/job.json"

    @property
    def quarantine_uri(self) -> str:
        """URI of the job's quarantine."""
        return f"{self.job.output}.quarantine.jsonl"

    @property
    def bin_suffix(self) -> str:
        """Suffix of the token files."""
        return f".bin{CODECS[self.job.codec].suffix}"

    def prefix(self, part: Part, key: str) -> str:
        """Return the prefix of a part's dataset."""
        return f"{self.folder}/{part.name}-{self.job.keys.index(key)}"

    def record_uri(self, part: Part) -> str:
        """Return the URI of a part's record."""
        return f"{self.folder}/{part.name}.json"

    def part_quarantine_uri(self, part: Part) -> str:
        """Return the URI of a part's quarantine."""
        return f"{self.folder}/{part.name}.quarantine.jsonl"

    def objects(self, part: Part) -> list[str]:
        """Return the URIs of all objects of a part, the record first."""
        suffixes = [self.bin_suffix, ".idx", LINEAGE]
        datasets = [self.prefix(part, key) + suffix for key in self.job.keys for suffix in suffixes]
        return [self.record_uri(part), *datasets, self.part_quarantine_uri(part)]

    def is_output(self, uri: str) -> bool:
        """Return whether the job writes this object: it may read the folder to which it writes."""
        sidecars = (prefix + suffix for prefix in self.job.datasets.values() for suffix in SIDECARS)
        return uri.startswith(f"{self.folder}/") or uri in (self.quarantine_uri, *sidecars)
