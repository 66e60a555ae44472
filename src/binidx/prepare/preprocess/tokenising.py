"""One part from its text to its record: what a worker does.

    slice ──read_slice──► batch ──engine──► ids ──filters──► stored ──► PartWriter ... Record

Memory: a few batches of text and their ids, the engine, and what the store's driver gathers before it sends; nothing
grows with the part but the bounds of its documents, on disk.
"""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from binidx.errors import BinidxError, FormatError, MismatchError, StorageError, WorkerError
from binidx.prepare.preprocess.drive import Failed
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.part_writer import PartWriter
from binidx.prepare.preprocess.places import Places
from binidx.prepare.preprocess.plan import Part
from binidx.prepare.preprocess.record import Counts, Record
from binidx.prepare.preprocess.selection import Tokenised, total_lengths, within, without_empty, without_specials
from binidx.prepare.preprocess.stopping import stop_if_told
from binidx.redacted import redacted
from binidx.storage.publish import create_object, read_small
from binidx.storage.retries import passes
from binidx.text.batch import Batch, Problem
from binidx.text.extent import Extent
from binidx.text.read import read_slice
from binidx.tokenize.checked import FIRST, FIRST_OF_WORKER, Checked
from binidx.tokenize.engine import Engine
from binidx.tokenize.engines import choose, reference
from binidx.tokenize.sentences import SentenceSplitter
from binidx.tokenize.stored import Stored, stored

BATCH_BYTES, LEAST_BATCH_BYTES = {"gigatoken": 4 << 20}, 1 << 20
"""Of text, given to an engine at once. A call of gigatoken costs 1.5 ms, whatever it encodes, and 4 MiB cost 40 MB of
memory; the others take up to a second for one, in which nothing can be stopped."""


@dataclass(frozen=True)
class Task:
    """A part to be made. Pickles."""

    job: Job
    part: Part

    def __str__(self) -> str:
        return str(self.part)


def run_part(task: Task) -> Record | Failed:
    """Make a part, or say what was in the way."""
    try:
        return make_part(task.job, task.part)
    except BinidxError as error:
        return Failed(error.__class__(str(error)), passes(error))
    except OSError as error:  # of a disk; those of stores are BinidxErrors
        return Failed(StorageError(f"{task}: {error}"), passes(error))
    except Exception:  # ours to mend: all that is known of it must come across
        return Failed(WorkerError(f"{task}: {traceback.format_exc()}"), passing=False)


def make_part(job: Job, part: Part) -> Record:
    """Make a part, unless it is there.

    Raises:
        FormatError: a row is no document, and the job says raise.
        MismatchError, StorageError: as `tokenize` and `text` say.
    """
    places = Places(job)
    began, began_cpu = time.monotonic(), time.thread_time()
    tokeniser, counts, extents = Tokeniser(job, part), list[Counts](), [Extent() for _ in part.slices]
    with ThreadPoolExecutor(1) as thread, PartWriter(places, part) as writer:
        standing = thread.submit(read_record, places, part)  # while the first text is on its way
        for number in range(len(part.slices)):
            counts.append(tokeniser.run(number, writer, standing, extents[number]))
            if (record := standing.result()) is not None:
                return record
        if (record := read_record(places, part)) is not None:  # a twin was faster
            return record
        datasets = writer.publish()
        seconds = time.monotonic() - began, time.thread_time() - began_cpu
        record = Record(
            part.name, tokeniser.engine.name, tokeniser.engine.compared, counts, extents, datasets, writer.quarantined,
            *seconds, job.on_error, socket.gethostname(), time.time(),
        )  # fmt: skip
    with create_object(places.record_uri(part), job.target_options) as out:
        out.write(record.to_bytes())
    return record


def read_record(places: Places, part: Part) -> Record | None:
    """What became of it; None: it is not done, or has rows that this job treats otherwise."""
    uri = places.record_uri(part)
    data = read_small(uri, places.job.target_options)
    record = None if data is None else Record.of_bytes(data, uri)
    return record if record is not None and record.holds_for(places.job.on_error) else None


class Tokeniser:
    """Brings the documents of a part to its writer.

    Attributes:
        engine: with the reference beside it.
    """

    def __init__(self, job: Job, part: Part) -> None:
        self._job, self._part = job, part
        self._splitter = SentenceSplitter(job.language, job.keep_newlines) if job.split_sentences else None
        engine, exact = ready_engines(job)
        # The first texts of a job, and of each worker, are compared whatever their hash: a wrong engine, or another
        # version of its library on one node, is found in seconds.
        self._seen = _kept.seen
        first = FIRST if part.number == 0 else max(0, FIRST_OF_WORKER - self._seen)
        self.engine = Checked(engine, exact, share=job.compared_share, first=first)

    def run(self, number: int, writer: PartWriter, standing: Future[Record | None], extent: Extent) -> Counts:
        """All documents of one slice, and what was read for it; none if there is a record that stands."""
        job, piece, counts = self._job, self._part.slices[number], Counts()
        for batches in read_slice(
            piece,
            job.keys,
            id_key=job.id_key,
            filters=job.filters,
            batch_bytes=BATCH_BYTES.get(self.engine.name, LEAST_BATCH_BYTES),
            storage_options=job.source_options,
            extent=extent,
        ):
            stop_if_told()
            if standing.result() is not None:
                break
            self._take(number, batches, writer, counts)
        counts.check(str(self._part))
        _kept.seen = self._seen + self.engine.seen
        return counts

    def _take(self, number: int, batches: tuple[Batch, ...], writer: PartWriter, counts: Counts) -> None:
        job, piece = self._job, self._part.slices[number]
        count_rows(batches, counts)
        self._refuse(batches[0].problems, number, writer, counts)
        found = [self._tokenised(each) for each in batches]
        if job.tokenizer.specials == "error":
            problems, found = without_specials(piece, found, job.tokenizer)
            self._refuse(problems, number, writer, counts)
        found = within(found, job.min_tokens, job.max_tokens, counts)
        if job.empty == "drop":
            found = without_empty(found, counts)
        count_documents(found, counts)
        writer.add(redacted(piece.uri), [(each.batch, as_stored(each, job)) for each in found])

    def _tokenised(self, batch: Batch) -> Tokenised:
        if self._splitter is not None:
            batch = replace(batch, **self._splitter.split(batch.texts, batch.offsets, batch.documents)._asdict())
        try:
            return Tokenised(batch, *self.engine.encode(batch.texts, batch.offsets))
        except MismatchError as error:
            raise MismatchError(f"{self._part}: {error}") from error

    def _refuse(self, problems: Iterable[Problem], number: int, writer: PartWriter, counts: Counts) -> None:
        """Rows that are no documents."""
        for problem in problems:
            if self._job.on_error == "raise":
                raise FormatError(f"{problem}; --on-error skip or quarantine leaves such rows out")
            counts.drop({problem.kind: 1})
            if self._job.on_error == "quarantine":
                writer.quarantine(problem, number)


def count_rows(batches: Sequence[Batch], counts: Counts) -> None:
    """What was read."""
    counts.num_rows += batches[0].num_rows
    counts.stored_bytes += batches[0].num_bytes
    counts.text_bytes += sum(len(each.texts) for each in batches)
    counts.drop(batches[0].dropped)


def count_documents(found: Sequence[Tokenised], counts: Counts) -> None:
    """What is stored."""
    counts.num_documents += found[0].batch.num_documents
    counts.num_empty += int((total_lengths(found) == 0).sum())


def as_stored(found: Tokenised, job: Job) -> Stored:
    """Its tokens as they will lie in the `.bin`."""
    empty_too = job.empty == "eod"
    return stored(found.ids, found.offsets, found.batch.documents, job.dtype, job.eod, empty_too=empty_too)


_kept = threading.local()


def ready_engines(job: Job) -> tuple[Engine, Engine]:
    """The engine and the reference, made once in each thread: to make one takes up to a second."""
    asked = job.tokenizer, job.engine
    if getattr(_kept, "asked", None) != asked:
        engine = choose(*asked, storage_options=job.source_options)
        exact = reference(job.tokenizer, job.source_options)
        _kept.asked, _kept.engines, _kept.seen = asked, (engine, exact), 0
    found: tuple[Engine, Engine] = _kept.engines
    return found
