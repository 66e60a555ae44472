"""Documents of a batch left out after they were tokenised: too short, too long, or with a special token in them.

One part from its text to its record: what a worker does.

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
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from binidx.errors import BinidxError, FormatError, MismatchError, StorageError, WorkerError, redacted
from binidx.format.sidecars.dataset_manifest import RowCounts
from binidx.jobs.scheduling import TaskFailure, check_stop
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.job_plan import Part, Places
from binidx.prepare.preprocess.part_writer import PartWriter
from binidx.prepare.preprocess.record import SPECIAL, Record
from binidx.prepare.text.batch import Batch, Problem, Strings
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import PARQUET, Extent, Slice
from binidx.prepare.tokenizers.engine import Engine, Stored, as_stored_tokens
from binidx.prepare.tokenizers.registry import FIRST, FIRST_OF_WORKER, CheckedEngine, choose_engine, reference_engine
from binidx.prepare.tokenizers.sentences import SentenceSplitter
from binidx.prepare.tokenizers.spec import TokenizerSpec, count_specials, count_unknown
from binidx.storage.requests.retries import passes
from binidx.storage.threads import READS
from binidx.storage.writing.publish import create_object, read_small

MIN_TOKENS, MAX_TOKENS, EMPTY = "min tokens", "max tokens", "empty"
"""Reasons to drop a row, besides those of `text`."""


@dataclass(frozen=True)
class Tokenised:
    """A batch of one key and the ids of its texts, `ids[offsets[i]:offsets[i + 1]]` those of text i."""

    batch: Batch
    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Ids of each document, shape (num_documents,)."""
        found: NDArray[np.int64] = np.diff(self.offsets[self.batch.documents])
        return found

    def text(self, document: int) -> bytes:
        """All texts of a document."""
        first, last = self.batch.documents[document : document + 2]
        return self.batch.texts[self.batch.offsets[first] : self.batch.offsets[last]].tobytes()

    def per_document(self, of_texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of something over the texts of each document."""
        sums = np.zeros(len(of_texts) + 1, np.int64)
        np.cumsum(of_texts, out=sums[1:])
        found: NDArray[np.int64] = np.diff(sums[self.batch.documents])
        return found

    def select(self, wanted: NDArray[np.bool_]) -> Tokenised:
        """Some of the documents, in their order; their texts are not brought along."""
        if wanted.all():
            return self
        texts = np.repeat(wanted, np.diff(self.batch.documents))
        lengths = np.diff(self.offsets)
        ids = self.ids[np.repeat(texts, lengths)]
        batch = replace(
            self.batch,
            texts=self.batch.texts[:0],
            offsets=np.zeros(1, np.int64),
            documents=_bounds(np.diff(self.batch.documents)[wanted]),
            rows=self.batch.rows[wanted],
            positions=self.batch.positions[wanted],
            ids=None if self.batch.ids is None else select_strings(self.batch.ids, wanted),
        )
        return Tokenised(batch, ids, _bounds(lengths[texts]))


def total_lengths(found: Sequence[Tokenised]) -> NDArray[np.int64]:
    """Ids of each document in all keys together, shape (num_documents,)."""
    total: NDArray[np.int64] = np.sum([each.lengths for each in found], axis=0)
    return total


def within_lengths(
    found: Sequence[Tokenised], least: int | None, most: int | None, counts: RowCounts
) -> list[Tokenised]:
    """Documents that have so many tokens in all keys together; the others are counted."""
    if least is None and most is None:
        return list(found)
    lengths = total_lengths(found)
    short = lengths < (0 if least is None else least)
    long = ~short & (lengths > (np.iinfo(np.int64).max if most is None else most))
    counts.drop({MIN_TOKENS: int(short.sum()), MAX_TOKENS: int(long.sum())})
    return [each.select(~(short | long)) for each in found]


def without_empty(found: Sequence[Tokenised], counts: RowCounts) -> list[Tokenised]:
    """Documents that have a token in any key; the others are counted."""
    full = total_lengths(found) > 0
    counts.drop({EMPTY: int((~full).sum())})
    return [each.select(full) for each in found]


def without_specials(
    piece: Slice, found: Sequence[Tokenised], tokenizer: TokenizerSpec
) -> tuple[list[Problem], list[Tokenised]]:
    """Documents with a special token in their text as problems, and the others."""
    each_has = [
        each.per_document(
            count_specials(each.ids, each.offsets, tokenizer)
            + count_unknown(each.batch.texts, each.batch.offsets, tokenizer)
        )
        for each in found
    ]
    counts: NDArray[np.int64] = np.sum(each_has, axis=0)
    first = found[0].batch
    problems = [
        Problem(
            SPECIAL,
            piece.uri,
            int(first.rows[number]),
            int(first.positions[number]),
            f"row {first.rows[number]}" if piece.format == PARQUET else f"byte {first.positions[number]}",
            f"{counts[number]} of them in its text",
            b"\n".join(each.text(number) for each in found),
        )
        for number in np.flatnonzero(counts).tolist()
    ]
    return problems, [each.select(counts == 0) for each in found]


def select_strings(strings: Strings, wanted: NDArray[np.bool_]) -> Strings:
    """Some of them."""
    lengths = np.diff(strings.offsets)
    data = strings.bytes[strings.offsets[0] : strings.offsets[-1]][np.repeat(wanted, lengths)]
    return Strings(data, _bounds(lengths[wanted]), strings.present[wanted])


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


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


def run_part(task: Task) -> Record | TaskFailure:
    """Make a part, or say what was in the way."""
    try:
        return make_part(task.job, task.part)
    except BinidxError as error:
        return TaskFailure(error.__class__(str(error)), passes(error))
    except OSError as error:  # of a disk; those of stores are BinidxErrors
        return TaskFailure(StorageError(f"{task}: {error}"), passes(error))
    except Exception:  # ours to mend: all that is known of it must come across
        return TaskFailure(WorkerError(f"{task}: {traceback.format_exc()}"), transient=False)


def make_part(job: Job, part: Part) -> Record:
    """Make a part, unless it is there.

    Raises:
        FormatError: a row is no document, and the job says raise.
        MismatchError, StorageError: as `tokenize` and `text` say.
    """
    places = Places(job)
    began, began_cpu = time.monotonic(), time.thread_time()
    tokeniser, counts, extents = Tokeniser(job, part), list[RowCounts](), [Extent() for _ in part.slices]
    with READS.executor(1) as thread, PartWriter(places, part) as writer:
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
        self.engine = CheckedEngine(engine, exact, share=job.compared_share, first=first)

    def run(self, number: int, writer: PartWriter, standing: Future[Record | None], extent: Extent) -> RowCounts:
        """All documents of one slice, and what was read for it; none if there is a record that stands."""
        job, piece, counts = self._job, self._part.slices[number], RowCounts()
        for batches in read_slice(
            piece,
            job.keys,
            id_key=job.id_key,
            filters=job.filters,
            batch_bytes=BATCH_BYTES.get(self.engine.name, LEAST_BATCH_BYTES),
            storage_options=job.source_options,
            extent=extent,
        ):
            check_stop()
            if standing.result() is not None:
                break
            self._take(number, batches, writer, counts)
        counts.check(str(self._part))
        _kept.seen = self._seen + self.engine.seen
        return counts

    def _take(self, number: int, batches: tuple[Batch, ...], writer: PartWriter, counts: RowCounts) -> None:
        job, piece = self._job, self._part.slices[number]
        count_rows(batches, counts)
        self._refuse(batches[0].problems, number, writer, counts)
        found = [self._tokenised(each) for each in batches]
        if job.tokenizer.specials == "error":
            problems, found = without_specials(piece, found, job.tokenizer)
            self._refuse(problems, number, writer, counts)
        found = within_lengths(found, job.min_tokens, job.max_tokens, counts)
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

    def _refuse(self, problems: Iterable[Problem], number: int, writer: PartWriter, counts: RowCounts) -> None:
        """Rows that are no documents."""
        for problem in problems:
            if self._job.on_error == "raise":
                raise FormatError(f"{problem}; --on-error skip or quarantine leaves such rows out")
            counts.drop({problem.kind: 1})
            if self._job.on_error == "quarantine":
                writer.quarantine(problem, number)


def count_rows(batches: Sequence[Batch], counts: RowCounts) -> None:
    """What was read."""
    counts.num_rows += batches[0].num_rows
    counts.stored_bytes += batches[0].num_bytes
    counts.text_bytes += sum(len(each.texts) for each in batches)
    counts.drop(batches[0].dropped)


def count_documents(found: Sequence[Tokenised], counts: RowCounts) -> None:
    """What is stored."""
    counts.num_documents += found[0].batch.num_documents
    counts.num_empty += int((total_lengths(found) == 0).sum())


def as_stored(found: Tokenised, job: Job) -> Stored:
    """Its tokens as they will lie in the `.bin`."""
    empty_too = job.empty == "eod"
    return as_stored_tokens(found.ids, found.offsets, found.batch.documents, job.dtype, job.eod, empty_too=empty_too)


_kept = threading.local()


def ready_engines(job: Job) -> tuple[Engine, Engine]:
    """The engine and the reference, made once in each thread: to make one takes up to a second."""
    asked = job.tokenizer, job.engine
    if getattr(_kept, "asked", None) != asked:
        engine = choose_engine(*asked, storage_options=job.source_options)
        exact = reference_engine(job.tokenizer, job.source_options)
        _kept.asked, _kept.engines, _kept.seen = asked, (engine, exact), 0
    found: tuple[Engine, Engine] = _kept.engines
    return found
