"""Rows that are no documents, written down: a JSON object a line.

    {"file": URI, "line": number from 1, or null, "byte": where it begins, "reason": kind, "detail": ..., "raw": ...}

`raw` is the line as text; bytes that are not UTF-8 stand in it as lone surrogates \udc80 to \udcff, as Python's
`surrogateescape` does: `raw.encode("utf-8", "surrogateescape")` gives the bytes back. Of a row with a special token it
is the texts, of one of parquet and of a line that is too long nothing.

A part on its way: its datasets, their lineage, its quarantine; and last its record, without which it is nothing.

Each object appears whole, under its final name. Who makes the same part again makes the same bytes, so two workers that
do so at once do no harm.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from binidx.errors import redacted
from binidx.format.bin_file import BinWriter
from binidx.format.index_writer import IndexColumns
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.prepare.preprocess.job_plan import Part, Places
from binidx.prepare.preprocess.record import TokenCounts
from binidx.prepare.text.batch import Batch, Problem
from binidx.prepare.text.jsonl import whole_lines
from binidx.prepare.tokenizers.engine import Stored
from binidx.storage.interfaces import Bytes, MultipartStore, Writer
from binidx.storage.open import open_object
from binidx.storage.ranges import cut
from binidx.storage.stores.registry import open_store
from binidx.storage.writing.publish import create_object

if TYPE_CHECKING:
    from binidx.format.sidecars.lineage import LineageWriter


QUARANTINE_BLOCK_BYTES = 1 << 20


"""Held before they are written; read at once."""


class QuarantineWriter:
    """Writes the quarantine of a part as its rows come: unseen until `publish`, and no object where there are none.

    Attributes:
        num_rows: that were written down.
    """

    def __init__(self, uri: str, options: Any) -> None:
        self._uri, self._options, self._open = uri, options, contextlib.ExitStack()
        self._out: Writer | None = None
        self._held = bytearray()
        self.num_rows = 0

    def add(self, problem: Problem, slice_number: int) -> None:
        """Write a row down."""
        self._held += format_problem(problem, slice_number)
        self.num_rows += 1
        if len(self._held) >= QUARANTINE_BLOCK_BYTES:
            self._flush()

    def publish(self) -> None:
        """Make it visible."""
        if self.num_rows:
            self._flush()
        self._open.close()

    def abandon(self) -> None:
        """Leave nothing of it; after `publish` it does nothing."""
        with contextlib.suppress(_Abandoned), self._open:
            raise _Abandoned

    def _flush(self) -> None:
        if self._out is None:
            self._out = self._open.enter_context(create_object(self._uri, self._options))
        self._out.write(bytes(self._held))
        self._held.clear()


class _Abandoned(Exception):
    """Thrown into an unfinished write so that it leaves nothing."""


def format_problem(problem: Problem, slice_number: int) -> bytes:
    """A line of a part's quarantine: its line is counted from the first of that slice."""
    told = {
        "file": redacted(problem.uri),
        "line": problem.row + 1,
        "byte": problem.byte,
        "reason": problem.kind,
        "detail": problem.detail,
        "raw": problem.line.decode("utf-8", "surrogateescape"),
        "slice": slice_number,
    }
    return json.dumps(told).encode() + b"\n"


def merge_quarantine(parts: Iterable[tuple[str, Sequence[int]]], target: str, options: Any) -> None:
    """Write the rows of all parts as one file; lines are counted in their files.

    Args:
        parts: URI of each, and the rows before the first of each of its slices.
    """
    with create_object(target, options) as out:
        for uri, bases in parts:
            for told in _lines(uri, options):
                base = bases[told.pop("slice")]
                out.write(json.dumps({**told, "line": told["line"] + base}).encode() + b"\n")


def _lines(uri: str, options: Any) -> Iterator[dict[str, Any]]:
    reader = open_object(uri, storage_options=options, cache=False)
    pieces = ((each[0], reader.read([each])[0]) for each in cut((0, reader.size), QUARANTINE_BLOCK_BYTES))
    for lines in whole_lines(pieces, QUARANTINE_BLOCK_BYTES, sys.maxsize):
        yield from map(json.loads, bytes(lines.data).splitlines())


Options = Mapping[str, Any] | None


class DatasetWriter:
    """What a part has of one key."""

    def __init__(self, places: Places, part: Part, key: str) -> None:
        self._prefix, self._options = places.prefix(part, key), places.job.target_options
        self._columns = IndexColumns(places.job.dtype)
        bin_uri = self._prefix + places.bin_suffix
        self._bin = BinWriter(bin_uri, in_small_blocks(bin_uri, self._options))
        self._behind = WriteBehind(self._bin.write)
        self._lineage = open_lineage(self._prefix + LINEAGE, places) if places.job.lineage else None
        self._digest, self._num_tokens = xxhash.xxh3_64(), 0

    def add(self, source: str, batch: Batch, found: Stored) -> None:
        """Append the documents of a batch."""
        data = found.tokens.view(np.uint8).data
        self._behind.write(data)
        self._digest.update(data)
        self._num_tokens += len(found.tokens)
        before = len(self._columns.lengths)
        self._columns.lengths.extend(found.sequence_lengths)
        self._columns.add_bounds(found.document_indices[1:], plus=before)
        if self._lineage is not None:
            self._lineage.add(source, batch, found)

    def publishing(self) -> list[Callable[[], object]]:
        """What makes all of it visible: in any order, for without its record a part is nothing."""
        return [self._publish_bin, self._publish_idx, *([self._lineage.publish] if self._lineage is not None else [])]

    def told(self) -> TokenCounts:
        """What there is of it."""
        return TokenCounts(len(self._columns.lengths), self._num_tokens, self._digest.hexdigest())

    def _publish_bin(self) -> None:
        self._behind.wait()
        self._bin.publish()

    def _publish_idx(self) -> None:
        with create_object(f"{self._prefix}.idx", self._options) as writer:
            for block in self._columns.format():
                writer.write(block)

    def close(self) -> None:
        """Leave nothing of what is not published."""
        self._columns.close()
        self._behind.close()
        self._bin.abandon()
        if self._lineage is not None:
            self._lineage.abandon()


def in_small_blocks(uri: str, options: Options) -> Options:
    """A stream holds 50 MiB before it sends them, for objects up to 500 GB; a part has less than a thousandth of it."""
    store = open_store(uri, options)
    return {"default_block_size": store.min_part, **(options or {})} if isinstance(store, MultipartStore) else options


class WriteBehind:
    """Calls `write` in a thread, some pieces behind: a store is waited for while the next text is tokenised."""

    MOST = 2
    """Pieces on their way: half as large as a batch of text each."""

    def __init__(self, write: Callable[[Bytes], object]) -> None:
        self._write, self._thread = write, ThreadPoolExecutor(1)
        self._pending: deque[Future[object]] = deque()

    def write(self, data: Bytes) -> None:
        """Soon; raises what an earlier one did. Nobody may change these bytes afterwards."""
        if len(self._pending) >= self.MOST:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._write, data))

    def wait(self) -> None:
        """Until all is written."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Without the rest."""
        self._thread.shutdown(cancel_futures=True)


class PartWriter:
    """All that a part leaves, but for its record.

    Attributes:
        quarantined: rows in its quarantine.
    """

    def __init__(self, places: Places, part: Part) -> None:
        uri, options = places.part_quarantine_uri(part), places.job.target_options
        self._problems = QuarantineWriter(uri, in_small_blocks(uri, options))
        self._datasets: dict[str, DatasetWriter] = {}
        with contextlib.ExitStack() as opened:  # if one cannot be opened, those before it leave nothing
            opened.callback(self._problems.abandon)
            for key in places.job.keys:
                self._datasets[key] = opened.enter_context(contextlib.closing(DatasetWriter(places, part, key)))
            self._open = opened.pop_all()

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @property
    def quarantined(self) -> int:
        return self._problems.num_rows

    def add(self, source: str, documents: Sequence[tuple[Batch, Stored]]) -> None:
        """Append the same documents of each key."""
        for batch, found in documents:
            self._datasets[batch.key].add(source, batch, found)

    def quarantine(self, problem: Problem, slice_number: int) -> None:
        """Write a row down."""
        self._problems.add(problem, slice_number)

    def publish(self) -> dict[str, TokenCounts]:
        """Make all of it visible; what there is of each key."""
        steps = [step for dataset in self._datasets.values() for step in dataset.publishing()]
        steps.append(self._problems.publish)
        with ThreadPoolExecutor(len(steps)) as threads:  # each asks the store several times
            list(threads.map(lambda step: step(), steps))
        return {key: dataset.told() for key, dataset in self._datasets.items()}


def open_lineage(uri: str, places: Places) -> LineageWriter:
    """Imported when it is wanted: pyarrow takes a moment, and may not be there."""
    from binidx.format.sidecars.lineage import LineageWriter

    return LineageWriter(uri, places.job.target_options)
