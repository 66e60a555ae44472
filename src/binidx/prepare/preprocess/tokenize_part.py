"""Make one part, from its text to its record: the work of a worker.

    slice ──read_slice──► batch ──engine──► ids ──filters──► stored tokens ──► PartWriter ... Record

Memory: a few batches of text and their ids, the engine, and the buffers of the store's driver. Only the document bounds
grow with the part, on disk.

With `Job.split_sentences` NLTK's Punkt model makes a text of each sentence first, as in Megatron:

    texts      "One. Two."  "Three."     two documents
    sentences  "One." "Two." "Three."    documents 0 2 3

Source: Megatron-LM, tools/preprocess_data.py (Encoder.split and its rule for newlines); Kiss and Strunk 2006 for Punkt.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx import errors
from binidx.format.sidecars.dataset_manifest import RowCounts
from binidx.jobs.runner import check_stop
from binidx.prepare.preprocess.job import Job, Part
from binidx.prepare.preprocess.job_files import SPECIAL, UNENCODED, JobFiles, Record
from binidx.prepare.preprocess.part_writer import PartWriter
from binidx.prepare.text.batch import Batch, Problem, cumulative_offsets, join_texts, select_items
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import TABLES, Extent, Slice
from binidx.prepare.tokenizers.checked_engine import FIRST, FIRST_OF_WORKER, CheckedEngine
from binidx.prepare.tokenizers.engine import Engine, build_stored_tokens, count_specials, count_unknown, decode_texts
from binidx.prepare.tokenizers.engine_choice import choose_engine, reference_engine
from binidx.tokenizers.library import LibraryError
from binidx.tokenizers.spec import TokenizerSpec

KEEPS_NEWLINES = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
"""Pattern of the end of a sentence that keeps the blanks after it in the sentence."""


def split_sentences(batch: Batch, split: Callable[[str], list[str]], most: int = 1_000_000) -> Batch:
    """Return the batch with each sentence as a text of its own, in the same documents.

    Args:
        split: splits one text.
        most: characters of a text that are split at once, as Punkt's time grows faster than the text's length.
    """
    rows = []
    for text in decode_texts(batch.texts, batch.offsets):
        pieces = (text[start : start + most] for start in range(0, len(text), most))
        rows.append([sentence.encode() for piece in pieces for sentence in split(piece)])
    texts, offsets = join_texts([sentence for row in rows for sentence in row])
    documents = cumulative_offsets(list(map(len, rows)))[batch.documents]
    return replace(batch, texts=texts, offsets=offsets, documents=documents)


def load_punkt(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return the function that splits a text into sentences.

    Args:
        language: name of a model in NLTK's data, such as `english`.
        keep_newlines: whether sentences keep the newlines after them.

    Raises:
        MissingDriverError: NLTK is not installed.
        ConfigError: NLTK's data has no model of this language.
    """
    try:
        from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer, PunktTokenizer
    except ImportError as error:
        raise errors.MissingDriverError("sentences: nltk is not installed; pip install 'binidx[sentences]'") from error
    try:
        punkt: Any = PunktTokenizer(language)
    except (LookupError, ValueError) as error:
        raise errors.ConfigError(
            f"sentences: no Punkt model of {language!r} in NLTK's data; python -m nltk.downloader punkt_tab fetches it"
        ) from error
    if keep_newlines:
        rules = type("KeepsNewlines", (PunktLanguageVars,), {"_period_context_fmt": KEEPS_NEWLINES})
        punkt = PunktSentenceTokenizer(train_text=punkt._params, lang_vars=rules())
    cut: Callable[[str], list[str]] = punkt.tokenize
    return cut


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

    def select(self, chosen: NDArray[np.bool_]) -> TokenizedBatch:
        """Return the chosen documents; `chosen` is a mask of shape (num_documents,)."""
        if chosen.all():
            return self
        texts = np.repeat(chosen, np.diff(self.batch.documents))
        return TokenizedBatch(self.batch.select(chosen), *select_items(self.ids, self.offsets, texts))

    def count_specials(self, tokenizer: TokenizerSpec) -> NDArray[np.int64]:
        """Return the number of special tokens in each document's text, shape (num_documents,)."""
        counts = count_specials(self.ids, self.offsets, tokenizer)
        counts = counts + count_unknown(self.batch.texts, self.batch.offsets, tokenizer)
        return np.diff(cumulative_offsets(counts)[self.batch.documents])


def total_lengths(batches: Sequence[TokenizedBatch]) -> NDArray[np.int64]:
    """Return the number of ids of each document in all keys together, shape (num_documents,)."""
    total: NDArray[np.int64] = np.sum([batch.lengths for batch in batches], axis=0)
    return total


def drop_by_length(batches: Sequence[TokenizedBatch], job: Job, counts: RowCounts) -> list[TokenizedBatch]:
    """Drop documents with too few or too many tokens in all keys together, or none with `empty="drop"`; count them.

    Args:
        batches: the same documents, a batch for each key.
        counts: counts of the slice, updated.
    """
    lengths = total_lengths(batches)
    short = lengths < (job.min_tokens or 0)
    long = ~short & (lengths > (np.iinfo(np.int64).max if job.max_tokens is None else job.max_tokens))
    empty = ~short & ~long & (lengths == 0) & (job.empty == "drop")
    counts.drop({"min tokens": int(short.sum()), "max tokens": int(long.sum()), "empty": int(empty.sum())})
    return [batch.select(~(short | long | empty)) for batch in batches]


def split_specials(
    piece: Slice, batches: Sequence[TokenizedBatch], tokenizer: TokenizerSpec
) -> tuple[list[Problem], list[TokenizedBatch]]:
    """Return the documents with a special token in their text as problems, and the other documents.

    Args:
        piece: slice of the documents.
        batches: the same documents, a batch for each key.
    """
    counts: NDArray[np.int64] = np.sum([batch.count_specials(tokenizer) for batch in batches], axis=0)
    texts = [batch.batch for batch in batches]
    problems = [
        document_problem(SPECIAL, piece, texts, number, f"{counts[number]} of them in its text")
        for number in np.flatnonzero(counts).tolist()
    ]
    return problems, [batch.select(counts == 0) for batch in batches]


def document_problem(kind: str, piece: Slice, batches: Sequence[Batch], number: int, detail: str) -> Problem:
    """Return the Problem of a document; its `line`, for the quarantine file, is the document's texts of all keys.

    Args:
        kind: a key of KINDS, SPECIAL or UNENCODED.
        piece: slice of the document.
        batches: the same documents, a batch for each key.
        number: number of the document in the batches.
        detail: description for the message.
    """
    row, position = int(batches[0].rows[number]), int(batches[0].positions[number])
    where = f"row {row}" if piece.format in TABLES else f"byte {position}"
    line = b"\n".join(batch.document_bytes(number) for batch in batches)
    return Problem(kind, piece.uri, row, position, where, detail, line)


BATCH_BYTES, LEAST_BATCH_BYTES = {"gigatoken": 4 << 20}, 1 << 20
"""Bytes of text given to an engine at once. A call of gigatoken costs 1.5 ms, whatever it encodes, and 4 MiB cost 40 MB
of memory; other engines take up to a second for 1 MiB, during which a worker cannot be stopped."""


def make_part(job: Job, part: Part) -> Record:
    """Write the objects of a part, in a worker; return its record.

    Raises:
        FormatError: a row is not a document and `on_error` is `raise`, or the counts do not add up.
        MismatchError: the engine gave other tokens than the reference.
        ObjectChangedError: an input was replaced.
        StorageError: a store fails.
    """
    files, began, began_cpu = JobFiles(job), time.monotonic(), time.thread_time()
    with contextlib.closing(PartWriter(files, part)) as writer:
        tokenizer = PartTokenizer(job, part, writer)
        for number in range(len(part.slices)):
            tokenizer.run(number)
        record: Record | None = files.read(part)
        if record is not None:  # another worker was faster, and its objects may be read now
            return record
        datasets = writer.publish()
        seconds = time.monotonic() - began, time.thread_time() - began_cpu
        return Record(
            part.name, tokenizer.engine.name, tokenizer.engine.compared, tokenizer.counts, tokenizer.extents, datasets,
            writer.quarantined, *seconds, job.on_error, socket.gethostname(), time.time(),
        )  # fmt: skip


class PartTokenizer:
    """Tokenizer of the documents of a part.

    Attributes:
        engine: compares a sample of the texts with the reference.
        counts, extents: for each slice the counts, and the part of its input that was read.
    """

    def __init__(self, job: Job, part: Part, writer: PartWriter) -> None:
        self._job, self._part, self._writer = job, part, writer
        self._split = load_punkt(job.language, job.keep_newlines) if job.split_sentences else None
        self.counts, self.extents = [RowCounts() for _ in part.slices], [Extent() for _ in part.slices]
        self.engine = _worker.open(job, part)

    def run(self, number: int) -> None:
        """Tokenize all documents of one slice."""
        job = self._job
        for batches in read_slice(
            self._part.slices[number],
            job.keys,
            id_key=job.id_key,
            filters=job.filters,
            batch_bytes=BATCH_BYTES.get(self.engine.name, LEAST_BATCH_BYTES),
            storage_options=job.source_options,
            extent=self.extents[number],
        ):
            check_stop()
            self._tokenize(number, batches)
        self.counts[number].check(str(self._part))

    def _tokenize(self, number: int, batches: tuple[Batch, ...]) -> None:
        job, piece, counts, first = self._job, self._part.slices[number], self.counts[number], batches[0]
        counts.num_rows += first.num_rows
        counts.stored_bytes += first.num_bytes
        counts.text_bytes += sum(len(batch.texts) for batch in batches)
        counts.drop(first.dropped)
        self._drop_problems(first.problems, number)
        tokenized = self._encode_all(number, batches)
        if job.tokenizer.specials == "error":
            problems, tokenized = split_specials(piece, tokenized, job.tokenizer)
            self._drop_problems(problems, number)
        tokenized = drop_by_length(tokenized, job, counts)
        counts.num_documents += tokenized[0].batch.num_documents
        counts.num_empty += int((total_lengths(tokenized) == 0).sum())
        for batch in tokenized:
            ids, documents, empty_too = (batch.ids, batch.offsets), batch.batch.documents, job.empty == "eod"
            stored = build_stored_tokens(*ids, documents, job.dtype, job.eod, empty_too=empty_too)
            self._writer.datasets[batch.batch.key].add(errors.redacted(piece.uri), batch.batch, stored)

    def _encode_all(self, number: int, batches: Sequence[Batch]) -> list[TokenizedBatch]:
        """Return the batches with ids; documents on which the tokenizer's library fails become problems."""
        try:
            return [self._encode(batch) for batch in batches]
        except LibraryError:
            failures = [self._failure(batches, document) for document in range(batches[0].num_documents)]
        piece = self._part.slices[number]
        failed = [(at, text) for at, text in enumerate(failures) if text]
        problems = [document_problem(UNENCODED, piece, batches, at, text) for at, text in failed]
        self._drop_problems(problems, number)
        good = np.array([not text for text in failures], np.bool_)
        return [self._encode(batch.select(good)) for batch in batches]

    def _failure(self, batches: Sequence[Batch], document: int) -> str:
        """Return the error of the tokenizer's library on a document; empty if there is none."""
        alone = np.arange(batches[0].num_documents) == document
        try:
            for batch in batches:
                self._encode(batch.select(alone))
        except LibraryError as error:
            return str(error)
        return ""

    def _encode(self, batch: Batch) -> TokenizedBatch:
        if self._split is not None:
            batch = split_sentences(batch, self._split)
        try:
            return TokenizedBatch(batch, *self.engine.encode(batch.texts, batch.offsets))
        except errors.MismatchError as error:
            raise errors.MismatchError(f"{self._part}: {error}") from error

    def _drop_problems(self, problems: Iterable[Problem], number: int) -> None:
        for problem in problems:
            if self._job.on_error == "raise":
                raise errors.FormatError(f"{problem}; {find_remedy(problem)}")
            self.counts[number].drop({problem.kind: 1})
            if self._job.on_error == "quarantine":
                self._writer.add_problem(problem, number)


def find_remedy(problem: Problem) -> str:
    """Return what to do about a row that is no document."""
    if not problem.byte and problem.line.lstrip().startswith(b"["):
        return "a file that is one JSON array needs a line for each row: jq -c '.[]' FILE"
    if not problem.byte and problem.kind == "malformed" and problem.line.rstrip() == b"{":
        return "one value over many lines is no JSON Lines; name the files with text, such as FOLDER/*.jsonl"
    if problem.kind in ("missing key", "not text") and "--json-keys" not in problem.detail:
        return "--json-keys names the text; --on-error skip or quarantine leaves such rows out"
    return "--on-error skip or quarantine leaves such rows out"


class _Worker(threading.local):
    """Engines that a worker thread keeps between parts, as loading one takes up to a second.

    Attributes:
        key, engines: the tokenizer and the name of the engine; and that engine, and its reference.
        used: the same engine in each part that was begun.
    """

    key: object = None
    engines: tuple[Engine, Engine]
    used: list[CheckedEngine]

    def open(self, job: Job, part: Part) -> CheckedEngine:
        """Return the engine of a part.

        The first texts of a job, and of each worker, are all compared: a wrong engine, or another version of its
        library on one node, is found in seconds.
        """
        if self.key != (job.tokenizer, job.engine):
            engine = choose_engine(job.tokenizer, job.engine, storage_options=job.source_options)
            self.engines = engine, reference_engine(job.tokenizer, job.source_options)
            self.key, self.used = (job.tokenizer, job.engine), []
        first = FIRST if part.number == 0 else FIRST_OF_WORKER - sum(each.seen for each in self.used)
        self.used.append(CheckedEngine(*self.engines, share=job.compared_share, first=first, seed=part.number))
        return self.used[-1]


_worker = _Worker()
