"""Estimate the tokens of a corpus, and the cost of the job that makes them, from a stratified sample.

    find inputs ─► units ─► draw ─► read, tokenize, count ─► totals with intervals ─► cost

Units are slices so small that a sample of them covers the whole corpus:

jsonl                      each 256 KiB, of more than 256 GiB a millionth of the text
.zst in frames, parquet    blocks of a MiB and more, row groups
.gz, other .zst            the file, which can only be read from its beginning

    units      |--|--|----|--|--|--|----|--|-|-|-|--|    in the order of the corpus, of known stored bytes x
    strata     |   0    |    1    |    2    |    3   |    equal bytes of neighbours: each file gets its share
    sample        ^  ^     ^   ^     ^ ^      ^   ^      two of each stratum, at random

The estimated quantity is the ratio R of tokens y to stored bytes x over the whole sample (the combined ratio
estimator): the stored bytes of every unit are known and predict its tokens well. So files in other languages cost
little accuracy, and the beginning of a file does not stand for the rest.

    total   R X            X: stored bytes of all units
    error   the spread of y - R x between the two units of each stratum, and the unread part of a unit

The cost is the time of cores, bytes, requests, and dollars at list price.

Source: Cochran, Sampling Techniques, 3rd ed., 6.11 (combined ratio estimate), 11.7 (two stages); the strata are ours.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.whole_dataset import Options
from binidx.errors import FormatError
from binidx.format.idx import DType
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.prepare.preprocess.job import Job, check_eod, choose_part_bytes
from binidx.prepare.preprocess.tokenize_part import find_remedy
from binidx.prepare.text.batch import Batch, Filters
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import REQUEST_BYTES, read_slice
from binidx.prepare.text.slices import CUT_ANYWHERE, Input, Slice, plan_slices
from binidx.prepare.tokenizers.engine import Engine
from binidx.prepare.tokenizers.engine_choice import choose_engine
from binidx.storage.location import Location
from binidx.storage.store_protocols import Prices
from binidx.storage.threads import available_cores, map_in_flight
from binidx.tokenizers.spec import TokenizerSpec

UNIT_BYTES = 256 << 10
MOST_UNITS = 1 << 20
"""Most units of plain jsonl, which are larger above 256 GiB: a unit takes 0.4 KB of memory."""


def plan_units(inputs: Sequence[Input], unit_bytes: int = UNIT_BYTES) -> list[Slice]:
    """Return the inputs as units, in their order: slices so small that a sample of them covers all inputs."""
    unit_bytes = max(unit_bytes, sum(file.size for file in inputs) // MOST_UNITS)
    files = [file for file in inputs if file.size]
    return [unit for file in files for unit in plan_slices([file], unit_bytes if file.format in CUT_ANYWHERE else 1)]


OF_EACH = 2
"""Number of units sampled from a stratum: the fewest that show a variance, so that there are as many strata as
possible."""


@dataclass(frozen=True)
class Sample:
    """Sampled units, in their order.

    Attributes:
        units: number of each sampled unit, shape (n,).
        strata: stratum of each sampled unit, shape (n,).
        num_units: number of units in each stratum, shape (num_strata,).
    """

    units: NDArray[np.int64]
    strata: NDArray[np.int64]
    num_units: NDArray[np.int64]


def draw_sample(sizes: NDArray[np.int64], count: int, seed: int) -> Sample:
    """Draw about `count` units: two of each of count / 2 strata of about equal bytes, or all of a smaller stratum.

    Args:
        sizes: bytes of each unit, shape (num_units,).
        seed: seed of the sample.
    """
    num_strata, middles = max(1, count // OF_EACH), np.cumsum(sizes) - sizes / 2
    strata = np.minimum((middles * num_strata / max(int(sizes.sum()), 1)).astype(np.int64), num_strata - 1)
    firsts = np.flatnonzero(np.diff(strata, prepend=-1))
    lengths = np.diff(np.append(firsts, len(sizes)))
    rng = np.random.Generator(np.random.Philox(key=seed % 2**64))
    drawn = [
        first + np.sort(rng.choice(length, min(OF_EACH, length), replace=False))
        for first, length in zip(firsts, lengths, strict=True)
    ]
    units = np.concatenate([np.empty(0, np.int64), *drawn])
    return Sample(units, np.repeat(np.arange(len(lengths)), np.minimum(lengths, OF_EACH)), lengths)


@dataclass(frozen=True)
class Estimate:
    """Estimated total with its 95 % confidence interval."""

    total: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Half the width of the interval, as a share of the total."""
        return (self.high - self.low) / 2 / self.total if self.total else 0.0


Floats = NDArray[np.float64]


def estimate_total(sample: Sample, sizes: Floats, counts: Floats, variances: Floats, total_bytes: int) -> Estimate:
    """Return the estimated count in all units: the sample's ratio of count to stored bytes, times `total_bytes`.

    Args:
        sizes: stored bytes of each sampled unit, shape (n,).
        counts: count, such as of tokens, in each sampled unit, shape (n,).
        variances: variance of each count, shape (n,); 0 for a unit that was counted whole.
    """
    strata, num_drawn = sample.strata, np.bincount(sample.strata)
    weights = sample.num_units / num_drawn
    size, count = float(weights[strata] @ sizes), float(weights[strata] @ counts)
    if not size:
        return Estimate(0.0, 0.0, 0.0)
    rest = counts - count / size * sizes
    rest -= (np.bincount(strata, rest) / num_drawn)[strata]
    spread = np.bincount(strata, rest**2) / np.maximum(num_drawn - 1, 1)
    variance = (weights * (sample.num_units - num_drawn)) @ spread + weights[strata] @ variances
    degrees = int((num_drawn - 1)[num_drawn < sample.num_units].sum())
    scale = total_bytes / size
    total, margin = count * scale, student_quantile(degrees) * math.sqrt(variance) * scale
    return Estimate(total, max(total - margin, 0.0), total + margin)


DEGREES = np.array([np.inf, 30, 10, 6, 5, 4, 3, 2, 1])
QUANTILES = (1.960, 2.042, 2.228, 2.447, 2.571, 2.776, 3.182, 4.303, 12.706)
"""Student's t at 97.5 % for these degrees of freedom; nearly linear in their reciprocals."""


def student_quantile(degrees: int) -> float:
    """Return Student's t at 97.5 %; 1.96 for 0 degrees of freedom, when all units were sampled."""
    return float(np.interp(1 / degrees if degrees else 0, 1 / DEGREES, QUANTILES))


IDX_BYTES = 20
"""Bytes of a document with one sequence in the `.idx`."""

WRITES_PER_PART = 5
"""Write requests of a part: tokens, index, lineage, record, and the copy of its tokens into the dataset."""


@dataclass(frozen=True)
class Cost:
    """Approximate cost of the whole job.

    Attributes:
        cpu_hours: hours of cores like those of this machine, to read the text and tokenize it.
        cores: number of cores of this machine.
        bytes_in, bytes_out: stored bytes read, and plain bytes written.
        reads, writes: requests, if text and tokens are in a store.
        dollars: price of the requests if the tokens are written to the store of the text; 0 if it has no list price.
    """

    cpu_hours: float
    cores: int
    bytes_in: int
    bytes_out: int
    parts: int
    reads: int
    writes: int
    dollars: float


def estimate_cost(
    inputs: Sequence[Input], cpu_seconds: float, bytes_out: float, storage_options: Options = None
) -> Cost:
    """Return the cost of a job over these inputs, in parts of the size that `preprocess` chooses.

    Args:
        inputs: objects with the text, of known sizes.
        cpu_seconds: CPU time of the whole job.
        bytes_out: plain bytes of tokens and indices.
        storage_options: fsspec's options of the inputs.
    """
    bytes_in = sum(file.size for file in inputs)
    parts = -(-bytes_in // choose_part_bytes(bytes_in))
    reads = sum(-(-file.size // REQUEST_BYTES) for file in inputs) + parts
    writes = parts * WRITES_PER_PART
    remote = [location for file in inputs if (location := Location(file.uri, storage_options)).local_path is None]
    prices = remote[0].store.prices() if remote else Prices()
    dollars = reads * prices.dollars_per_read + writes * prices.dollars_per_write
    return Cost(cpu_seconds / 3600, available_cores(), bytes_in, int(bytes_out), parts, reads, writes, dollars)


SAMPLE_BYTES = 64 << 20

LEAST_UNITS = 32
"""Least number of sampled units, whatever their size: fewer would show little of their variance."""

BATCH_BYTES = 64 << 10
"""Bytes of a batch of text in a unit that is too large to be tokenized whole; only some batches are tokenized."""

IN_FLIGHT = 8


@dataclass(frozen=True)
class CorpusEstimate:
    """Estimated contents of a corpus, and the cost of the job that tokenizes it.

    Attributes:
        tokens, documents, text_bytes: totals of the corpus.
        stored_bytes, sampled_bytes: stored bytes of the inputs, and of the sampled units.
        sampled_texts: bytes of text that were tokenized.
        problems: rows of the sample that are not documents.
        engine: name of the tokenizer engine.
    """

    num_inputs: int
    tokens: Estimate
    documents: Estimate
    text_bytes: Estimate
    stored_bytes: int
    sampled_bytes: int
    sampled_texts: int
    problems: int
    engine: str
    cost: Cost
    seconds: float


def estimate_tokens(
    inputs: Sequence[str | os.PathLike[str]],
    tokenizer: TokenizerSpec,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    filters: Filters | None = None,
    format: str | None = None,
    engine: str = "auto",
    sample_bytes: int = SAMPLE_BYTES,
    unit_bytes: int = UNIT_BYTES,
    batch_bytes: int = BATCH_BYTES,
    seed: int = 0,
    source_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> CorpusEstimate:
    """Estimate the tokens of text, with an interval that contains the true number in 95 of 100 samples.

    Rows that are not documents are counted and left out, as with `on_error="skip"`.

    Args:
        inputs, keys, append_eod, filters, format, engine: as in `prepare.preprocess.job.Job`.
        sample_bytes: approximate bytes of text to tokenize. Half the interval is about 1 % of the total at 64 MiB, and
            half as wide with four times as many bytes.
        unit_bytes: approximate bytes of a unit of which the sample is drawn.
        batch_bytes: approximate bytes that are tokenized at once, of a unit that is not tokenized whole.
        seed: seed of the sample.

    Raises:
        ConfigError, ObjectNotFoundError, FormatError, ObjectChangedError, StorageError: as `preprocess`.
    """
    check_eod(tokenizer, append_eod)
    began, watch = time.monotonic(), watch or SilentWatcher()
    files = find_inputs(list(inputs), format=format, storage_options=source_options)
    units, chosen = plan_units(files, unit_bytes), choose_engine(tokenizer, engine, storage_options=source_options)
    unit_sizes = np.array([unit.num_bytes for unit in units], np.int64)
    total_bytes, mean = int(unit_sizes.sum()), unit_sizes.sum() / max(len(units), 1)
    sample = draw_sample(unit_sizes, max(LEAST_UNITS, int(sample_bytes / max(mean, 1))), seed)
    sizes = unit_sizes[sample.units].astype(np.float64)
    share = min(1.0, sample_bytes / sizes.sum()) if mean > 4 * unit_bytes else 1.0
    counter, began_cpu = _UnitCounter(chosen, append_eod, share, seed), time.process_time()

    def read(number: int, at_once: int = batch_bytes) -> Iterator[tuple[Batch, ...]]:
        return read_slice(units[number], keys, filters=filters, batch_bytes=at_once, storage_options=source_options)

    watch.begin("sample", int(sizes.sum()), 0)
    numbers, rows = sample.units.tolist(), list[tuple[float, ...]]()
    # Units that are tokenized whole are small: several are read at once, as each costs a round trip.
    with contextlib.closing(
        map_in_flight(lambda number: list(read(number, 1 << 20)), numbers, IN_FLIGHT)
        if share == 1
        else (read(number) for number in numbers)
    ) as batches:
        for number, unit in zip(numbers, batches, strict=True):
            rows.append(counter.count(unit, number))
            watch.advance(units[number].num_bytes)
    reading = time.process_time() - began_cpu - counter.seconds
    tokens, variances, documents, text, tokenized, problems = np.array(rows, np.float64).reshape(-1, 6).T

    def total(counts: Floats, spread: Floats) -> Estimate:
        return estimate_total(sample, sizes, counts, spread, total_bytes)

    totals = total(tokens, variances), total(documents, 0 * sizes), total(text, 0 * sizes)
    seconds_per_byte = reading / max(text.sum(), 1) + counter.seconds / max(tokenized.sum(), 1)
    item_bytes = np.dtype(DType.optimal_dtype(tokenizer.vocab_size)).itemsize
    bytes_out = totals[0].total * item_bytes + totals[1].total * IDX_BYTES
    cost = estimate_cost(files, seconds_per_byte * totals[2].total, bytes_out, source_options)
    sums = total_bytes, int(sizes.sum()), int(tokenized.sum()), int(problems.sum())
    return CorpusEstimate(len(files), *totals, *sums, chosen.name, cost, time.monotonic() - began)


@dataclass(frozen=True)
class TokenizedText:
    """A document's text and the ids that are stored for it."""

    text: str
    ids: list[int]


def first_documents(job: Job, count: int) -> list[TokenizedText]:
    """Return the first documents of a job, tokenized, of its first key.

    Args:
        count: most documents; those of the first batch of the first input.

    Raises:
        FormatError: a row before them is not a document, and `on_error` is `raise`.
    """
    inputs = find_inputs(job.inputs, format=job.format, storage_options=job.source_options)
    engine = choose_engine(job.tokenizer, job.engine, storage_options=job.source_options)
    for unit in plan_units(inputs)[:1]:
        for batch, *_ in read_slice(
            unit, job.keys, filters=job.filters, batch_bytes=BATCH_BYTES, storage_options=job.source_options
        ):
            if batch.problems and job.on_error == "raise":
                raise FormatError(f"{batch.problems[0]}; {find_remedy(batch.problems[0])}")
            stop = min(count, batch.num_documents)
            bounds = batch.documents[: stop + 1].tolist()
            offsets = batch.offsets[: bounds[-1] + 1]
            ids, ends = engine.encode(batch.texts[: offsets[-1]], offsets)
            eod = [] if job.eod is None else [job.eod]
            return [
                TokenizedText(batch.document_bytes(number).decode(), [*ids[ends[first] : ends[last]].tolist(), *eod])
                for number, (first, last) in enumerate(pairwise(bounds))
            ]
    return []


@dataclass
class _UnitCounter:
    """Counter of the contents of units, which tokenizes a share of their batches.

    Attributes:
        seconds: CPU time spent on tokenizing so far.
    """

    engine: Engine
    append_eod: bool
    share: float
    seed: int
    seconds: float = 0.0

    def count(self, read: Iterable[tuple[Batch, ...]], number: int) -> tuple[float, ...]:
        """Return a unit's estimated tokens and their variance, its documents, text bytes, tokenized bytes, problems."""
        rng, drawn, lowest, spare = np.random.default_rng([self.seed % 2**64, number]), list[Any](), 2.0, None
        num_batches = documents = text_bytes = problems = 0
        for batches in read:
            size = sum(len(batch.texts) for batch in batches)
            documents += batches[0].num_documents
            text_bytes += size
            problems += len(batches[0].problems)
            num_batches += 1
            if (draw := rng.random()) < self.share:
                drawn.append((size, self._count_tokens(batches)))
            elif draw < lowest:
                lowest, spare = draw, (size, batches)
        if not drawn and spare is not None:  # at least one, and not always the first: beginnings differ from the rest
            drawn = [(spare[0], self._count_tokens(spare[1]))]
        sizes, tokens = np.array(drawn, np.float64).reshape(-1, 2).T
        tokenized = sizes.sum()
        spread = np.var(tokens - tokens.sum() / max(tokenized, 1) * sizes, ddof=1) if len(drawn) > 1 else 0.0
        variance = num_batches * (num_batches / max(len(drawn), 1) - 1) * spread
        total = tokens.sum() * (text_bytes / tokenized if tokenized else 1)
        return total, variance, documents, text_bytes, tokenized, problems

    def _count_tokens(self, batches: Sequence[Batch]) -> int:
        """Return the number of tokens that a dataset would store for the batches of all keys."""
        began, count = time.process_time(), 0
        for batch in batches:
            _, bounds = self.engine.encode(batch.texts, batch.offsets)
            lengths = np.diff(bounds[batch.documents])
            count += int(lengths.sum()) + int(np.count_nonzero(lengths)) * self.append_eod
        self.seconds += time.process_time() - began
        return count
