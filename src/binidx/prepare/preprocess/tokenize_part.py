"""Make one part, from its text to its record: the work of a worker.

    slice ──read_slice──► batch ──engine──► ids ──filters──► stored tokens ──► PartWriter ... Record

Memory: a few batches of text and their ids, the engine, and the buffers of the store's driver. Only the document bounds
grow with the part, on disk.
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
from binidx.jobs import TaskFailure, check_stop
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.job_plan import JobUris, Part
from binidx.prepare.preprocess.part_writer import PartWriter
from binidx.prepare.preprocess.record import SPECIAL, Record
from binidx.prepare.text.batch import Batch, Problem, cumulative_offsets
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import Extent, Slice
from binidx.prepare.tokenizers.engine import Engine, Stored, as_stored_tokens
from binidx.prepare.tokenizers.engine_choice import (
    FIRST,
    FIRST_OF_WORKER,
    CheckedEngine,
    choose_engine,
    reference_engine,
)
from binidx.prepare.tokenizers.sentences import SentenceSplitter
from binidx.prepare.tokenizers.spec import TokenizerSpec, count_specials, count_unknown
from binidx.storage.requests.retries import passes
from binidx.storage.threads import READS
from binidx.storage.writing.publish import create_object, read_small

MIN_TOKENS, MAX_TOKENS, EMPTY = "min tokens", "max tokens", "empty"
"""Reasons to drop a row, besides those of `prepare.text`."""


@dataclass(frozen=True)
class TokenizedBatch:
    """Batch of one key with the ids of its texts; `ids[offsets[i]:offsets[i + 1]]` belong to text i."""

    batch: Batch
    ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of ids of each document, shape (num_documents,)."""
        return np.diff(self.offsets[self.batch.documents])

    def document_bytes(self, document: int) -> bytes:
        """Return all texts of a document."""
        first, last = self.batch.documents[document : document + 2]
        return self.batch.texts[self.batch.offsets[first] : self.batch.offsets[last]].tobytes()

    def select(self, chosen: NDArray[np.bool_]) -> TokenizedBatch:
        """Return the chosen documents, shape (num_documents,)."""
        if chosen.all():
            return self
        texts, lengths = np.repeat(chosen, np.diff(self.batch.documents)), np.diff(self.offsets)
        ids = self.ids[np.repeat(texts, lengths)]
        return TokenizedBatch(self.batch.select(chosen), ids, cumulative_offsets(lengths[texts]))

    def count_specials(self, tokenizer: TokenizerSpec) -> NDArray[np.int64]:
        """Return the number of special tokens in each document's text, shape (num_documents,)."""
        counts = count_specials(self.ids, self.offsets, tokenizer)
        counts = counts + count_unknown(self.batch.texts, self.batch.offsets, tokenizer)
        return np.diff(cumulative_offsets(counts)[self.batch.documents])


def total_lengths(batches: Sequence[TokenizedBatch]) -> NDArray[np.int64]:
    """Return the number of ids of each document in all keys together, shape (num_documents,)."""
    total: NDArray[np.int64] = np.sum([each.lengths for each in batches], axis=0)
    return total


def drop_by_length(batches: Sequence[TokenizedBatch], job: Job, counts: RowCounts) -> list[TokenizedBatch]:
    """Drop and count the documents with too few or too many tokens in all keys together, or with none."""
    lengths = total_lengths(batches)
    short = lengths < (job.min_tokens or 0)
    long = ~short & (lengths > (np.iinfo(np.int64).max if job.max_tokens is None else job.max_tokens))
    empty = ~short & ~long & (lengths == 0) & (job.empty == "drop")
    counts.drop({MIN_TOKENS: int(short.sum()), MAX_TOKENS: int(long.sum()), EMPTY: int(empty.sum())})
    return [each.select(~(short | long | empty)) for each in batches]


def split_specials(
    piece: Slice, batches: Sequence[TokenizedBatch], tokenizer: TokenizerSpec
) -> tuple[list[Problem], list[TokenizedBatch]]:
    """Return the documents with a special token in their text as problems, and the other documents."""
    counts: NDArray[np.int64] = np.sum([each.count_specials(tokenizer) for each in batches], axis=0)
    first = batches[0].batch
    problems = [
        Problem(
            SPECIAL,
            piece.uri,
            int(first.rows[number]),
            int(first.positions[number]),
            f"row {first.rows[number]}" if piece.has_rows else f"byte {first.positions[number]}",
            f"{counts[number]} of them in its text",
            b"\n".join(each.document_bytes(number) for each in batches),
        )
        for number in np.flatnonzero(counts).tolist()
    ]
    return problems, [each.select(counts == 0) for each in batches]


BATCH_BYTES, LEAST_BATCH_BYTES = {"gigatoken": 4 << 20}, 1 << 20
"""Bytes of text given to an engine at once. A call of gigatoken costs 1.5 ms, whatever it encodes, and 4 MiB cost 40 MB
of memory; the others take up to a second for 1 MiB, during which nothing can be stopped."""


@dataclass(frozen=True)
class PartTask:
    """Part to make. Pickles."""

    job: Job
    part: Part

    def __str__(self) -> str:
        return str(self.part)


def run_part(task: PartTask) -> Record | TaskFailure:
    """Make a part; return its record, or the failure."""
    try:
        return make_part(task.job, task.part)
    except BinidxError as error:
        return TaskFailure(error.__class__(str(error)), passes(error))
    except OSError as error:  # of a disk; those of stores are BinidxErrors
        return TaskFailure(StorageError(f"{task}: {error}"), passes(error))
    except Exception:  # a defect of ours: the traceback must cross processes
        return TaskFailure(WorkerError(f"{task}: {traceback.format_exc()}"), False)


def make_part(job: Job, part: Part) -> Record:
    """Make a part and return its record; return the record that another worker has written, if there is one.

    Raises:
        FormatError: a row is not a document, and `on_error` is raise.
        MismatchError, StorageError: of the tokenizer, the inputs and the target.
    """
    uris = JobUris(job)
    began, began_cpu = time.monotonic(), time.thread_time()
    tokenizer, counts, extents = PartTokenizer(job, part), list[RowCounts](), [Extent() for _ in part.slices]
    with READS.executor(1) as thread, PartWriter(uris, part) as writer:
        earlier = thread.submit(read_record, uris, part)  # in parallel to the first text
        for number in range(len(part.slices)):
            counts.append(tokenizer.run(number, writer, earlier, extents[number]))
            if (record := earlier.result()) is not None:
                return record
        if (record := read_record(uris, part)) is not None:
            return record
        datasets = writer.publish()
        seconds = time.monotonic() - began, time.thread_time() - began_cpu
        record = Record(
            part.name, tokenizer.engine.name, tokenizer.engine.compared, counts, extents, datasets, writer.quarantined,
            *seconds, job.on_error, socket.gethostname(), time.time(),
        )  # fmt: skip
    with create_object(uris.record_uri(part), job.target_options) as out:
        out.write(record.to_bytes())
    return record


def read_record(uris: JobUris, part: Part) -> Record | None:
    """Return a part's record; None if there is none, or if this job would have treated its bad rows differently."""
    uri = uris.record_uri(part)
    data = read_small(uri, uris.job.target_options)
    record = None if data is None else Record.from_bytes(data, uri)
    return record if record is not None and record.valid_for(uris.job.on_error) else None


class PartTokenizer:
    """Tokenizer of the documents of a part.

    Attributes:
        engine: compares a sample of the texts with the reference.
    """

    def __init__(self, job: Job, part: Part) -> None:
        self._job, self._part = job, part
        self._splitter = SentenceSplitter(job.language, job.keep_newlines) if job.split_sentences else None
        engine, reference = _worker.open(job)
        # The first texts of a job, and of each worker, are compared whatever their hash: a wrong engine, or another
        # version of its library on one node, is found in seconds.
        self._seen = _worker.num_texts
        first = FIRST if part.number == 0 else max(0, FIRST_OF_WORKER - self._seen)
        self.engine = CheckedEngine(engine, reference, share=job.compared_share, first=first)

    def run(self, number: int, writer: PartWriter, earlier: Future[Record | None], extent: Extent) -> RowCounts:
        """Tokenise all documents of one slice and return their counts; stop if another worker has made the part."""
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
            if earlier.result() is not None:
                break
            self._tokenize(number, batches, writer, counts)
        counts.check(str(self._part))
        _worker.num_texts = self._seen + self.engine.seen
        return counts

    def _tokenize(self, number: int, batches: tuple[Batch, ...], writer: PartWriter, counts: RowCounts) -> None:
        job, piece, first = self._job, self._part.slices[number], batches[0]
        counts.num_rows += first.num_rows
        counts.stored_bytes += first.num_bytes
        counts.text_bytes += sum(len(each.texts) for each in batches)
        counts.drop(first.dropped)
        self._drop_problems(first.problems, number, writer, counts)
        tokenized = [self._encode(each) for each in batches]
        if job.tokenizer.specials == "error":
            problems, tokenized = split_specials(piece, tokenized, job.tokenizer)
            self._drop_problems(problems, number, writer, counts)
        tokenized = drop_by_length(tokenized, job, counts)
        counts.num_documents += tokenized[0].batch.num_documents
        counts.num_empty += int((total_lengths(tokenized) == 0).sum())
        writer.add(redacted(piece.uri), [(each.batch, as_stored(each, job)) for each in tokenized])

    def _encode(self, batch: Batch) -> TokenizedBatch:
        if self._splitter is not None:
            batch = replace(batch, **self._splitter.split(batch.texts, batch.offsets, batch.documents)._asdict())
        try:
            return TokenizedBatch(batch, *self.engine.encode(batch.texts, batch.offsets))
        except MismatchError as error:
            raise MismatchError(f"{self._part}: {error}") from error

    def _drop_problems(self, problems: Iterable[Problem], number: int, writer: PartWriter, counts: RowCounts) -> None:
        for problem in problems:
            if self._job.on_error == "raise":
                raise FormatError(f"{problem}; --on-error skip or quarantine leaves such rows out")
            counts.drop({problem.kind: 1})
            if self._job.on_error == "quarantine":
                writer.add_problem(problem, number)


def as_stored(tokenized: TokenizedBatch, job: Job) -> Stored:
    """Return the stored form of a batch."""
    documents, empty_too = tokenized.batch.documents, job.empty == "eod"
    return as_stored_tokens(tokenized.ids, tokenized.offsets, documents, job.dtype, job.eod, empty_too=empty_too)


class _Worker(threading.local):
    """State of a worker thread between parts: loading an engine takes up to a second."""

    key: object = None
    engines: tuple[Engine, Engine]
    num_texts = 0

    def open(self, job: Job) -> tuple[Engine, Engine]:
        """Return the engine of the job, and its reference."""
        if self.key != (job.tokenizer, job.engine):
            engine = choose_engine(job.tokenizer, job.engine, storage_options=job.source_options)
            reference = reference_engine(job.tokenizer, job.source_options)
            self.key, self.engines, self.num_texts = (job.tokenizer, job.engine), (engine, reference), 0
        return self.engines


_worker = _Worker()
