"""Where the objects of a job lie.

OUTPUT_KEY_document.bin  .idx  .lineage.parquet      the datasets, one a key
OUTPUT_KEY_document.manifest.json                    the last to appear: it is done
OUTPUT.quarantine.jsonl
OUTPUT-parts/job.json                                the first to appear: whose parts these are
OUTPUT-parts/NAME-0.bin  .idx  .lineage.parquet      a part's dataset of the first key
OUTPUT-parts/NAME.quarantine.jsonl
OUTPUT-parts/NAME.json                               the last: its record
"""

from __future__ import annotations

from dataclasses import dataclass

from binidx.format.sidecars import LINEAGE as LINEAGE
from binidx.format.sidecars import MANIFEST as MANIFEST
from binidx.format.sidecars import SIDECARS
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.plan import Part
from binidx.storage.segments import CODECS


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
