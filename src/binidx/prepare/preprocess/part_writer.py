"""A part on its way: its datasets, their lineage, its quarantine; and last its record, without which it is nothing.

Each object appears whole, under its final name. Who makes the same part again makes the same bytes, so two workers that
do so at once do no harm.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from binidx.format.bin_writer import BinWriter
from binidx.format.index_columns import IndexColumns
from binidx.prepare.preprocess.places import LINEAGE, Places
from binidx.prepare.preprocess.plan import Part
from binidx.prepare.preprocess.quarantine import QuarantineWriter
from binidx.prepare.preprocess.record import Tokens
from binidx.storage.filesystem import protocols
from binidx.storage.publish import create_object
from binidx.storage.ranges import Bytes
from binidx.text.batch import Batch, Problem
from binidx.tokenize.stored import Stored

if TYPE_CHECKING:
    from binidx.prepare.preprocess.lineage import LineageWriter

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

    def told(self) -> Tokens:
        """What there is of it."""
        return Tokens(len(self._columns.lengths), self._num_tokens, self._digest.hexdigest())

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


BLOCK_BYTES = 5 << 20


def in_small_blocks(uri: str, options: Options) -> Options:
    """A stream holds 50 MiB before it sends them, for objects up to 500 GB; a part has less than a thousandth of it."""
    on_s3 = protocols(uri)[:1] in (["s3"], ["s3a"])
    return {"default_block_size": BLOCK_BYTES, **(options or {})} if on_s3 else options


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

    def publish(self) -> dict[str, Tokens]:
        """Make all of it visible; what there is of each key."""
        steps = [step for dataset in self._datasets.values() for step in dataset.publishing()]
        steps.append(self._problems.publish)
        with ThreadPoolExecutor(len(steps)) as threads:  # each asks the store several times
            list(threads.map(lambda step: step(), steps))
        return {key: dataset.told() for key, dataset in self._datasets.items()}


def open_lineage(uri: str, places: Places) -> LineageWriter:
    """Imported when it is wanted: pyarrow takes a moment, and may not be there."""
    from binidx.prepare.preprocess.lineage import LineageWriter

    return LineageWriter(uri, places.job.target_options)
