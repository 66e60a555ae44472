r"""Writers of a part's objects: its datasets with their lineage, and its quarantine; the record follows later.

Each object appears whole, under its final name. A second worker of the same part makes the same bytes, so two at
once do no harm.

The quarantine has the rows that are not documents, a JSON object a line:

    {"file": URI, "line": number from 1, or null, "byte": start of the line, "reason": kind, "detail": ..., "raw": ...}

`raw` is the line as text. Bytes that are not UTF-8 become lone surrogates \udc80 to \udcff, as with Python's
`surrogateescape`: `raw.encode("utf-8", "surrogateescape")` restores the bytes. For a row with a special token `raw` has
the texts only; for a row of Parquet, or a line that is too long, nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from binidx.corpus.whole_dataset import DatasetOutput, DatasetTarget
from binidx.errors import redacted
from binidx.format.bin_file import BinWriter
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.prepare.preprocess.job import Part
from binidx.prepare.preprocess.job_files import JobFiles, TokenCounts
from binidx.prepare.text.batch import Batch, Problem
from binidx.prepare.text.jsonl import group_lines
from binidx.prepare.tokenizers.engine import Stored
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.ranges import cut
from binidx.storage.store_protocols import MultipartStore
from binidx.storage.writing.publish import create_object

QUARANTINE_BLOCK_BYTES = 1 << 20
"""Bytes of a quarantine file that are read at once."""


def format_problem(problem: Problem, slice_number: int) -> bytes:
    """Return a line of a part's quarantine, with the row counted from the first row of its slice.

    Args:
        problem: row that is not a document.
        slice_number: number of its slice in the part; `merge_quarantine` needs it.
    """
    row = {
        "file": redacted(problem.uri),
        "line": problem.row + 1,
        "byte": problem.byte,
        "reason": problem.kind,
        "detail": problem.detail,
        "raw": problem.line.decode("utf-8", "surrogateescape"),
        "slice": slice_number,
    }
    return json.dumps(row).encode() + b"\n"


def merge_quarantine(parts: Iterable[tuple[Location, Sequence[int]]], target: Location) -> None:
    """Write the quarantined rows of all parts to one file, each with its line number in its text file.

    Args:
        parts: each part's quarantine, and for each of its slices the number of earlier rows in the text file.
    """
    with create_object(target) as out:
        for file, rows_before in parts:
            for row in _read_rows(file):
                row["line"] += rows_before[row.pop("slice")]
                out.write(json.dumps(row).encode() + b"\n")


def _read_rows(file: Location) -> Iterator[dict[str, Any]]:
    reader = open_object(file, cache=False)
    pieces = ((block[0], reader.read([block])[0]) for block in cut((0, reader.size), QUARANTINE_BLOCK_BYTES))
    for lines in group_lines(pieces, QUARANTINE_BLOCK_BYTES, sys.maxsize):
        yield from map(json.loads, bytes(lines.data).splitlines())


class DatasetWriter:
    """Writer of the dataset that one part of a job makes for one key: `.bin`, `.idx` and, if the job has it, lineage.

    Call `add` for each batch, then `publish`. `close` removes the staging files that are not published.

    Args:
        files: locations of the job's objects; its job gives dtype, codec and the lineage option.
        part: the part to write.
        key: JSON key, or Parquet column, whose texts the dataset contains.
    """

    def __init__(self, files: JobFiles, part: Part, key: str) -> None:
        prefix = files.prefix(part, key)
        target = DatasetTarget(limit_part_bytes(prefix), files.job.codec)
        self._output, self._lineage = DatasetOutput(target, files.job.dtype, multimodal=False), None
        if files.job.lineage:  # imported late, as pyarrow takes a moment, and may be missing
            from binidx.corpus.lineage.lineage_writer import LineageWriter

            self._lineage = LineageWriter(prefix + LINEAGE)
        self._digest = xxhash.xxh3_64()

    def add(self, source: str, batch: Batch, stored: Stored) -> None:
        """Append the documents of a batch; `source` is the URI of their text file."""
        data = stored.tokens.view(np.uint8).data
        self._output.bin.write(data)
        self._digest.update(data)
        self._output.columns.add(stored.sequence_lengths, stored.document_indices[1:])
        if self._lineage is not None:
            ids = None if batch.ids is None else (batch.ids.bytes, batch.ids.offsets, batch.ids.present)
            self._lineage.add(source, batch.rows, batch.positions, ids, *stored)

    def publish(self) -> TokenCounts:
        """Publish the dataset's objects; return counts for the part's record, without which the objects are ignored."""
        self._output.publish()
        if self._lineage is not None:
            self._lineage.publish()
        counts = self._output.columns.counts()
        return TokenCounts(counts["sequences"], counts["tokens"], self._digest.hexdigest())

    def close(self) -> None:
        """Remove all temporary files that are not published."""
        self._output.close()
        if self._lineage is not None:
            self._lineage.abandon()


def limit_part_bytes(location: Location) -> Location:
    """Return a location with the smallest upload part of the store, unless its options name a size, to save memory.

    The default, 50 MiB, is for objects of up to 500 GB; those of a part have less than a thousandth of that.
    """
    if not isinstance(location.store, MultipartStore):
        return location
    return Location(location.uri, {"default_block_size": location.store.min_part, **(location.options or {})})


class PartWriter:
    """Writer of all objects of a part but its record. `close` removes the temporary files that are not published.

    Attributes:
        datasets: key -> writer of its dataset.
        quarantined: number of rows in the quarantine.
    """

    def __init__(self, files: JobFiles, part: Part) -> None:
        self._quarantine_file, self.quarantined = files.part_quarantine(part), 0
        with contextlib.ExitStack() as opened:
            self.datasets = {
                key: opened.enter_context(contextlib.closing(DatasetWriter(files, part, key))) for key in files.job.keys
            }
            self._opened = opened.pop_all()

    def add_problem(self, problem: Problem, slice_number: int) -> None:
        """Append a row that is not a document to the quarantine file."""
        if not self.quarantined:
            self._quarantine = BinWriter(limit_part_bytes(self._quarantine_file))
            self._opened.callback(self._quarantine.abandon)
        self._quarantine.write(format_problem(problem, slice_number))
        self.quarantined += 1

    def publish(self) -> dict[str, TokenCounts]:
        """Publish all objects; return key -> counts of its dataset."""
        if self.quarantined:
            self._quarantine.publish()
        return {key: dataset.publish() for key, dataset in self.datasets.items()}

    def close(self) -> None:
        """Remove all temporary files that are not published."""
        self._opened.close()
