"""A job cut into parts, each made without knowing of the others. No I/O happens here.

    slices of the text    |---- en.jsonl ----|---- en.jsonl ----|-- a.jsonl --|b|c|---- d.parquet ----|
    parts                 |        0         |        1         |        2        |         3         |

A part is named by the digest of its slices and of the recipe: the same work has the same name in every run, on every
machine, and any change of the text, the tokenizer or an option gives another one.

Where the objects of a job lie.

OUTPUT_KEY_document.bin  .idx  .lineage.parquet      the datasets, one a key
OUTPUT_KEY_document.manifest.json                    the last to appear: it is done
OUTPUT.quarantine.jsonl
OUTPUT-parts/job.json                                the first to appear: whose parts these are
OUTPUT-parts/NAME-0.bin  .idx  .lineage.parquet      a part's dataset of the first key
OUTPUT-parts/NAME.quarantine.jsonl
OUTPUT-parts/NAME.json                               the last: its record
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
"""Parts, and bytes of text in one: few for little text, so that many cores have work; 64 MiB and 512 parts for more.
From there on a part has tokens beyond the 5 MiB that S3 needs to copy it itself, and work beyond the ten requests that
it takes. The most is some seconds of a fast engine, and minutes of a slow one, to be lost."""


@dataclass(frozen=True)
class Part:
    """Work that is done whole or not at all."""

    number: int
    name: str
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        """Stored bytes of its text."""
        return sum(each.num_bytes for each in self.slices)

    def __str__(self) -> str:
        first, last = self.slices[0], self.slices[-1]
        more = f" to {redacted(last.uri)}" if last.uri != first.uri else ""
        return f"part {self.number} ({redacted(first.uri)} from byte {first.stored}{more})"


def plan_parts(job: Job, inputs: Sequence[Input]) -> list[Part]:
    """Parts of about the same size, in the order of the inputs. Neighbouring small slices share one."""
    part_bytes = job.part_bytes or part_bytes_of(sum(each.size for each in inputs))
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


def part_bytes_of(total_bytes: int) -> int:
    """Bytes of text in a part. A function of the text alone: with other workers a restart finds the same parts."""
    few = min(max(total_bytes // FEW, FEW_BYTES[0]), FEW_BYTES[1])
    return min(max(total_bytes // MANY, few), MOST_BYTES)


def group_slices(slices: Sequence[Slice], part_bytes: int) -> list[list[Slice]]:
    """Runs of neighbours of about `part_bytes`: half as much again at most, as the last slice of a file may be tiny."""
    groups: list[list[Slice]] = []
    held = 0
    for each in slices:
        if not groups or held + each.num_bytes > part_bytes * 3 // 2:
            groups.append([])
            held = 0
        groups[-1].append(each)
        held += each.num_bytes
    return groups


def undivided(parts: Sequence[Part]) -> list[Slice]:
    """What is larger than a part ought to be, as it cannot be cut: a .gz, a .zst of one frame, a huge row group."""
    return [each for part in parts for each in part.slices if each.num_bytes > MOST_BYTES]


def plan_digest(job: Job, parts: Sequence[Part]) -> str:
    """What identifies a job: all of its parts; and the recipe, as there may be none."""
    return json_digest([json_digest(job.recipe), *(each.name for each in parts)])


@dataclass(frozen=True)
class Places:
    """The URIs of one job."""

    job: Job

    @property
    def folder(self) -> str:
        """Of the parts."""
        return f"{self.job.output}-parts"

    @property
    def job_uri(self) -> str:
        return f"{self.folder}/job.json"

    @property
    def quarantine_uri(self) -> str:
        return f"{self.job.output}.quarantine.jsonl"

    @property
    def bin_suffix(self) -> str:
        return f".bin{CODECS[self.job.codec].suffix}"

    def prefix(self, part: Part, key: str) -> str:
        """Of a part's dataset."""
        return f"{self.folder}/{part.name}-{self.job.keys.index(key)}"

    def record_uri(self, part: Part) -> str:
        return f"{self.folder}/{part.name}.json"

    def part_quarantine_uri(self, part: Part) -> str:
        return f"{self.folder}/{part.name}.quarantine.jsonl"

    def objects(self, part: Part) -> list[str]:
        """All that a part may have left: the record first, for without it the rest is nothing."""
        ends = [self.bin_suffix, ".idx", LINEAGE]
        made = [self.prefix(part, key) + end for key in self.job.keys for end in ends]
        return [self.record_uri(part), *made, self.part_quarantine_uri(part)]

    def is_output(self, uri: str) -> bool:
        """Whether the job itself writes it: it may read the folder that it writes to."""
        beside = (prefix + end for prefix in self.job.datasets.values() for end in SIDECARS)
        return uri.startswith(f"{self.folder}/") or uri in (self.quarantine_uri, *beside)
