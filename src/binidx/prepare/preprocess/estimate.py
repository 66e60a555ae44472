"""Estimate the tokens of a corpus, and the cost of the job that makes them, from a sample.

    find inputs ─► units ─► draw ─► read, tokenise, count ─► totals with intervals ─► cost

Units are slices so small that a sample of them covers the whole corpus. They are counted, not listed:

jsonl                      each 256 KiB
.zst in frames, parquet    blocks of a MiB and more, row groups
.gz, other .zst            the file, which can only be read from its beginning

The cost is the time of cores, bytes, requests, and dollars at list price.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.cut import uniform_hash
from binidx.corpus.whole_dataset import Options
from binidx.format.idx import DType
from binidx.jobs.engines import available_cores
from binidx.prepare.preprocess.job import check_eod
from binidx.prepare.preprocess.job_plan import choose_part_bytes
from binidx.prepare.preprocess.sampling import Estimate, Stratum, StratumSample, draw_strata, estimate_total
from binidx.prepare.text.batch import Batch, Filters
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import read_slice
from binidx.prepare.text.slices import JSONL, Input, Slice, plan_slices
from binidx.prepare.text.stored_bytes import REQUEST_BYTES
from binidx.prepare.tokenizers.engine import Engine, as_stored_tokens
from binidx.prepare.tokenizers.engine_choice import choose_engine
from binidx.prepare.tokenizers.spec import TokenizerSpec
from binidx.storage.interfaces import Prices
from binidx.storage.stores.registry import local_path, prices_of
from binidx.storage.threads import map_in_flight
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

UNIT_BYTES = 256 << 10


class Units:
    """Units of the inputs, in their order.

    Attributes:
        sizes: stored bytes of each unit, shape (num_units,).
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = [each for each in inputs if each.size]
        sizes = [_unit_sizes(each) for each in self._inputs]
        self._bounds = np.cumsum([0, *map(len, sizes)])
        self.sizes: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *sizes])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Slice:
        """Return a unit as a slice."""
        position = int(np.searchsorted(self._bounds, number, "right")) - 1
        each, number = self._inputs[position], int(number - self._bounds[position])
        if each.format != JSONL:
            return plan_slices([each], 1)[number]
        first, last = number * UNIT_BYTES, min((number + 1) * UNIT_BYTES, each.size)
        return Slice(each.uri, JSONL, each.identity, first, last, first, last - first, None if first else 0)


def _unit_sizes(each: Input) -> NDArray[np.int64]:
    if each.format != JSONL:
        return np.array([piece.num_bytes for piece in plan_slices([each], 1)], np.int64)
    sizes = np.full(-(-each.size // UNIT_BYTES), UNIT_BYTES, np.int64)
    sizes[-1] = each.size - (len(sizes) - 1) * UNIT_BYTES
    return sizes


IDX_BYTES = 20
"""Bytes of a document with one sequence in the `.idx`."""

WRITES_PER_PART = 5
"""Tokens, index, lineage, record, and the copy into the whole."""


@dataclass(frozen=True)
class Cost:
    """Approximate cost of the whole job.

    Attributes:
        cpu_hours: hours of cores like those of this machine, to read the text and tokenise it.
        cores: number of cores of this machine.
        bytes_in, bytes_out: stored bytes read, and plain bytes written.
        reads, writes: requests, if text and tokens are in a store.
        dollars: price of the requests, if both are in the store of the text; 0 if it has no list price.
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
    inputs: Sequence[Input], cpu_seconds: float, tokens: float, documents: float, item_bytes: int
) -> Cost:
    """Return the cost of a job over these inputs, in parts of the size that `preprocess` chooses."""
    bytes_in = sum(each.size for each in inputs)
    parts = -(-bytes_in // choose_part_bytes(bytes_in)) if bytes_in else 0
    reads = sum(-(-each.size // REQUEST_BYTES) for each in inputs) + parts
    writes = parts * WRITES_PER_PART
    return Cost(
        cpu_seconds / 3600,
        available_cores(),
        bytes_in,
        int(tokens * item_bytes + documents * IDX_BYTES),
        parts,
        reads,
        writes,
        _dollars(inputs, reads, writes),
    )


def _dollars(inputs: Sequence[Input], reads: int, writes: int) -> float:
    """Return the list price of requests to the store of the text."""
    remote = [each.uri for each in inputs if local_path(each.uri) is None]
    prices = prices_of(remote[0]) if remote else Prices()
    return reads * prices.dollars_per_read + writes * prices.dollars_per_write


SAMPLE_BYTES = 64 << 20

LEAST_UNITS = 32
"""Least number of sampled units, whatever their size: fewer would say little about their variance."""

BATCH_BYTES = 64 << 10
"""Bytes of text that are tokenised, or not, in a unit that is too large to be tokenised whole."""

IN_FLIGHT = 8


@dataclass(frozen=True)
class CorpusEstimate:
    """Estimated contents of a corpus, and the cost of its job.

    Attributes:
        tokens, documents, text_bytes: totals of the corpus.
        stored_bytes, sampled_bytes: stored bytes of the inputs, and of the sampled units.
        sampled_texts: bytes of text that were tokenised.
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

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass
class UnitCounts:
    """Counts of a unit; `variance` of the tokens, if only a share of the text was tokenised."""

    tokens: float = 0.0
    variance: float = 0.0
    documents: int = 0
    text_bytes: int = 0
    tokenised_bytes: int = 0
    problems: int = 0


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
    seed: int = 0,
    source_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> CorpusEstimate:
    """Estimate the tokens of text, with an interval that contains the true number in 95 of 100 samples.

    Rows that are not documents are counted and left out, as with `on_error="skip"`.

    Args:
        inputs, keys, append_eod, filters, format, engine: as in `prepare.preprocess.job.Job`.
        sample_bytes: approximate bytes of text to tokenise. Half the interval is about 1 % at 64 MiB, and shrinks with
            the square root.
        seed: of the sample.

    Raises:
        ConfigError, ObjectNotFoundError, FormatError, ObjectChangedError, StorageError: as `preprocess`.
    """
    check_eod(tokenizer, append_eod)
    began, watch = time.monotonic(), watch or SilentWatcher()
    found = find_inputs(list(inputs), format=format, storage_options=source_options)
    units, chosen_engine = Units(found), choose_engine(tokenizer, engine, storage_options=source_options)
    total_bytes = int(units.sizes.sum())
    mean = total_bytes / max(len(units), 1)
    strata = draw_strata(units.sizes, max(LEAST_UNITS, int(sample_bytes / max(mean, 1))), seed)
    sampled = int(sum(units.sizes[list(each.chosen)].sum() for each in strata))
    eod, dtype = tokenizer.eod if append_eod else None, DType.optimal_dtype(tokenizer.vocab_size)
    counter = _UnitCounter(chosen_engine, keys, eod, dtype, filters, source_options, seed)
    share = min(1.0, sample_bytes / sampled) if mean > 4 * UNIT_BYTES else 1.0
    watch.begin("sample", sampled, 0)
    counts: dict[int, UnitCounts] = {}
    for number, counted in counter.count(units, strata, share):
        counts[number] = counted
        watch.advance(int(units.sizes[number]))
    tokens, documents, text = (_estimate(units, strata, counts, name) for name in ("tokens", "documents", "text_bytes"))
    tokenised = sum(each.tokenised_bytes for each in counts.values())
    return CorpusEstimate(
        len(found),
        tokens,
        documents,
        text,
        total_bytes,
        sampled,
        tokenised,
        sum(each.problems for each in counts.values()),
        chosen_engine.name,
        estimate_cost(
            found, counter.seconds_per_byte * text.total, tokens.total, documents.total, np.dtype(dtype).itemsize
        ),
        time.monotonic() - began,
    )


def _estimate(units: Units, strata: Sequence[Stratum], counts: dict[int, UnitCounts], name: str) -> Estimate:
    samples = [
        StratumSample(
            each.num_units,
            units.sizes[list(each.chosen)].astype(np.float64),
            np.array([getattr(counts[number], name) for number in each.chosen], np.float64),
            np.array([counts[number].variance if name == "tokens" else 0.0 for number in each.chosen]),
        )
        for each in strata
    ]
    return estimate_total(samples, int(units.sizes.sum()))


@dataclass
class _UnitCounter:
    """Reader of units that counts their contents.

    Attributes:
        seconds_per_byte: CPU time to read and tokenise a byte of text.
    """

    engine: Engine
    keys: Sequence[str]
    eod: int | None
    dtype: type[np.number[Any]]
    filters: Filters | None
    options: Options
    seed: int
    seconds_per_byte: float = 0.0
    _tokenising: float = 0.0

    def count(self, units: Units, strata: Sequence[Stratum], share: float) -> Iterator[tuple[int, UnitCounts]]:
        """Yield the number and counts of each drawn unit; a share of its text is tokenised."""
        numbers, began = [number for each in strata for number in each.chosen], time.process_time()
        text_bytes = tokenised_bytes = 0
        # Units that are tokenised whole are small: several are read at once, as each costs a round trip.
        with contextlib.closing(
            map_in_flight(lambda number: list(self._read(units[number], 1 << 20)), numbers, IN_FLIGHT)
            if share == 1
            else (self._read(units[number], BATCH_BYTES) for number in numbers)
        ) as read:
            for number, batches in zip(numbers, read, strict=True):
                counts = self._count_unit(batches, number, share)
                text_bytes += counts.text_bytes
                tokenised_bytes += counts.tokenised_bytes
                yield number, counts
        reading = time.process_time() - began - self._tokenising
        self.seconds_per_byte = reading / max(text_bytes, 1) + self._tokenising / max(tokenised_bytes, 1)

    def _read(self, piece: Slice, batch_bytes: int) -> Iterator[tuple[Batch, ...]]:
        return read_slice(piece, self.keys, filters=self.filters, batch_bytes=batch_bytes, storage_options=self.options)

    def _count_unit(self, read: Iterable[tuple[Batch, ...]], number: int, share: float) -> UnitCounts:
        """Count all of a unit, and tokenise a share of its batches."""
        total, sizes, tokens = UnitCounts(), list[int](), list[int]()
        lowest, spare, num_batches = 2.0, None, 0
        for batches in read:
            size = sum(len(each.texts) for each in batches)
            total.documents += batches[0].num_documents
            total.text_bytes += size
            total.problems += len(batches[0].problems)
            drawn = float(uniform_hash(self.seed + number, num_batches, 1)[0])
            num_batches += 1
            if drawn < share:
                sizes.append(size)
                tokens.append(self._count_tokens(batches))
            elif drawn < lowest:
                lowest, spare = drawn, batches
        if not sizes and spare is not None:  # at least one, and not always the first: beginnings differ from the rest
            sizes, tokens = [sum(len(each.texts) for each in spare)], [self._count_tokens(spare)]
        total.tokenised_bytes = sum(sizes)
        if len(sizes) == num_batches:
            total.tokens = float(sum(tokens))
        elif total.tokenised_bytes:
            total.tokens, total.variance = estimate_unit(
                np.array(sizes, np.float64), np.array(tokens, np.float64), total.text_bytes, num_batches
            )
        return total

    def _count_tokens(self, batches: Sequence[Batch]) -> int:
        """Return the stored tokens of all keys."""
        began = time.process_time()
        encoded = [self.engine.encode(each.texts, each.offsets) for each in batches]
        stored = [
            as_stored_tokens(*ids, each.documents, self.dtype, self.eod)
            for ids, each in zip(encoded, batches, strict=True)
        ]
        self._tokenising += time.process_time() - began
        return sum(len(each.tokens) for each in stored)


def estimate_unit(
    sizes: NDArray[np.float64], counts: NDArray[np.float64], total_bytes: float, num_batches: int
) -> tuple[float, float]:
    """Return the count of a unit from those of some of its batches, and its variance."""
    ratio = counts.sum() / sizes.sum()
    spread = np.var(counts - ratio * sizes, ddof=1) if len(sizes) > 1 else 0.0
    return float(ratio * total_bytes), float(num_batches**2 * (1 - len(sizes) / num_batches) * spread / len(sizes))
