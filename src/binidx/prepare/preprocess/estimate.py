"""The units of a corpus: slices so small that a sample of them is spread all over it. They are counted, not listed.

jsonl                      each 256 KiB
.zst in frames, parquet    blocks of a MiB and more, row groups
.gz, other .zst            the file: it can be read from its beginning only

What the run costs that makes a dataset out of text: time of cores, bytes, requests, dollars at list price.

`estimate`: a sample of a corpus is read and tokenised; what follows for all of it, and for the run that makes it.

find the inputs ─► units ─► draw ─► read, tokenise, count ─► totals with intervals ─► cost
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.cut import uniform
from binidx.corpus.whole_dataset import Options
from binidx.errors import ConfigError
from binidx.format.idx import DType
from binidx.jobs.engines import available_cores
from binidx.prepare.preprocess.job_plan import part_bytes_of
from binidx.prepare.preprocess.sampling import Estimate, Seen, Stratum, draw, estimate_total
from binidx.prepare.text.batch import Batch, Filters
from binidx.prepare.text.inputs import find_inputs
from binidx.prepare.text.read import REQUEST_BYTES, read_slice
from binidx.prepare.text.slices import JSONL, Input, Slice, plan_slices
from binidx.prepare.tokenizers.engine import Engine, as_stored_tokens
from binidx.prepare.tokenizers.registry import choose_engine
from binidx.prepare.tokenizers.spec import TokenizerSpec
from binidx.storage.interfaces import Prices
from binidx.storage.stores.registry import local_path, prices_of
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher, map_in_flight

UNIT_BYTES = 256 << 10


class Units:
    """All units of some inputs, in their order.

    Attributes:
        sizes: stored bytes of each, shape (num_units,).
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = [each for each in inputs if each.size]
        sizes = [_sizes(each) for each in self._inputs]
        self._bounds = np.cumsum([0, *map(len, sizes)])
        self.sizes: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *sizes])

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> Slice:
        """One of them, to be read."""
        place = int(np.searchsorted(self._bounds, number, "right")) - 1
        each, number = self._inputs[place], int(number - self._bounds[place])
        if each.format != JSONL:
            return plan_slices([each], 1)[number]
        first, last = number * UNIT_BYTES, min((number + 1) * UNIT_BYTES, each.size)
        return Slice(each.uri, JSONL, each.identity, first, last, first, last - first, None if first else 0)


def _sizes(each: Input) -> NDArray[np.int64]:
    """Stored bytes of its units."""
    if each.format != JSONL:
        return np.array([piece.num_bytes for piece in plan_slices([each], 1)], np.int64)
    sizes = np.full(-(-each.size // UNIT_BYTES), UNIT_BYTES, np.int64)
    sizes[-1] = each.size - (len(sizes) - 1) * UNIT_BYTES
    return sizes


IDX_BYTES = 20


"""Of a document of one sequence."""


WRITES_PER_PART = 5


"""Tokens, index, lineage, record, and the copy into the whole."""


@dataclass(frozen=True)
class Cost:
    """Of the whole run, about.

    Attributes:
        cpu_hours: of cores like those of this machine, reading text and tokenising it; `cores` it has.
        bytes_in, bytes_out: read as they are stored, and written plain.
        reads, writes: requests, if text and tokens are in a store.
        dollars: of the requests, if both are in the store of the text; 0 where that has no list price.
    """

    cpu_hours: float
    cores: int
    bytes_in: int
    bytes_out: int
    parts: int
    reads: int
    writes: int
    dollars: float


def cost_of(inputs: Sequence[Input], cpu_seconds: float, tokens: float, documents: float, item_bytes: int) -> Cost:
    """Of a run over these inputs, in parts of the size that `preprocess` gives them."""
    bytes_in = sum(each.size for each in inputs)
    parts = -(-bytes_in // part_bytes_of(bytes_in)) if bytes_in else 0
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


"""However large they are: fewer would say little of how much they differ."""


BATCH_BYTES = 64 << 10


"""What is tokenised, or not, of a unit that is too large for all of it."""


READ_AT_ONCE = 8


@dataclass(frozen=True)
class Estimated:
    """What a corpus has, and what it costs.

    Attributes:
        tokens, documents, text_bytes: of all of it.
        stored_bytes, sampled_bytes: of its inputs; of the units that were looked at.
        sampled_texts: bytes that were tokenised.
        problems: rows of the sample that are no documents.
        engine: that tokenised.
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
        """All of it as one JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class UnitCounts:
    """What a unit holds; `variance` of the tokens, where not all texts were tokenised."""

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
) -> Estimated:
    """Estimate the tokens of text, with an interval that holds the truth in 95 of 100 samples.

    Rows that are no documents are counted and left out, as `on_error="skip"` would.

    Args:
        inputs, keys, append_eod, filters, format, engine: as in `prepare.preprocess.job.Job`.
        sample_bytes: of text to be tokenised, about. Half the interval is some 1 % at 64 MiB, and falls by the root.
        seed: of the sample.

    Raises:
        ConfigError, ObjectNotFoundError, FormatError, ObjectChangedError, StorageError: as `preprocess`.
    """
    if append_eod and tokenizer.eod is None:
        raise ConfigError(f"{tokenizer.uri}: append_eod, and no EOD is known; name the token with eod (--eod)")
    began, watch = time.monotonic(), watch or SilentWatcher()
    found = find_inputs(list(inputs), format=format, storage_options=source_options)
    units, chosen_engine = Units(found), choose_engine(tokenizer, engine, storage_options=source_options)
    total_bytes = int(units.sizes.sum())
    mean = total_bytes / max(len(units), 1)
    strata = draw(units.sizes, max(LEAST_UNITS, int(sample_bytes / max(mean, 1))), seed)
    sampled = int(sum(units.sizes[list(each.chosen)].sum() for each in strata))
    counter = _Counter(chosen_engine, tokenizer, keys, append_eod, filters, source_options, seed)
    share = min(1.0, sample_bytes / sampled) if mean > 4 * UNIT_BYTES else 1.0
    watch.begin("sample", sampled, 0)
    counts: dict[int, UnitCounts] = {}
    for number, counted in counter.count(units, strata, share):
        counts[number] = counted
        watch.advance(int(units.sizes[number]))
    tokens, documents, text = (_estimate(units, strata, counts, name) for name in ("tokens", "documents", "text_bytes"))
    tokenised = sum(each.tokenised_bytes for each in counts.values())
    cpu_seconds = counter.cpu_seconds / max(tokenised, 1) * text.total
    item_bytes = np.dtype(DType.optimal_dtype(tokenizer.vocab_size)).itemsize
    return Estimated(
        len(found),
        tokens,
        documents,
        text,
        total_bytes,
        sampled,
        tokenised,
        sum(each.problems for each in counts.values()),
        chosen_engine.name,
        cost_of(found, cpu_seconds, tokens.total, documents.total, item_bytes),
        time.monotonic() - began,
    )


def _estimate(units: Units, strata: Sequence[Stratum], counts: dict[int, UnitCounts], name: str) -> Estimate:
    seen = [
        Seen(
            each.num_units,
            units.sizes[list(each.chosen)].astype(np.float64),
            np.array([getattr(counts[number], name) for number in each.chosen], np.float64),
            np.array([counts[number].variance if name == "tokens" else 0.0 for number in each.chosen]),
        )
        for each in strata
    ]
    return estimate_total(seen, int(units.sizes.sum()))


class _Counter:
    """Reads units and counts what they hold.

    Attributes:
        cpu_seconds: of reading and tokenising what was tokenised.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenizerSpec,
        keys: Sequence[str],
        append_eod: bool,
        filters: Filters | None,
        options: Options,
        seed: int,
    ) -> None:
        self._engine, self._keys, self._filters, self._options = engine, keys, filters, options
        self._eod = tokenizer.eod if append_eod else None
        self._dtype = DType.optimal_dtype(tokenizer.vocab_size)
        self._seed, self.cpu_seconds = seed, 0.0

    def count(self, units: Units, strata: Sequence[Stratum], share: float) -> Iterator[tuple[int, UnitCounts]]:
        """Each unit that was drawn; of its texts a share is tokenised."""
        numbers = [number for each in strata for number in each.chosen]
        if share < 1.0:
            yield from ((number, self._count_part(units[number], number, share)) for number in numbers)
            return
        began = time.process_time()
        # Small ones: several on their way at once, as each costs a round trip.
        read = map_in_flight(lambda number: list(self._read(units[number])), numbers, READ_AT_ONCE)
        with contextlib.closing(read):
            for number, batches in zip(numbers, read, strict=True):
                yield number, self._whole(batches)
        self.cpu_seconds += time.process_time() - began

    def _read(self, piece: Slice, batch_bytes: int = 1 << 20) -> Iterator[tuple[Batch, ...]]:
        return read_slice(
            piece, self._keys, filters=self._filters, batch_bytes=batch_bytes, storage_options=self._options
        )

    def _whole(self, found: Sequence[tuple[Batch, ...]]) -> UnitCounts:
        total = UnitCounts()
        for batches in found:
            total = self._plus(total, batches)
            tokens, size = self._tokens(batches), _text_bytes(batches)
            total = replace(total, tokens=total.tokens + tokens, tokenised_bytes=total.tokenised_bytes + size)
        return total

    def _count_part(self, piece: Slice, number: int, share: float) -> UnitCounts:
        """A large unit: all of it is read, a share of its batches tokenised, the rest told by their bytes."""
        total, sizes, counts = UnitCounts(), list[float](), list[float]()
        lowest, spare, num_batches = 1.0, None, 0
        began, tokenising = time.process_time(), 0.0
        for batches in self._read(piece, BATCH_BYTES):
            total = self._plus(total, batches)
            place = float(uniform(self._seed + number, num_batches, 1)[0])
            num_batches += 1
            if place < share:
                before = time.process_time()
                sizes.append(_text_bytes(batches))
                counts.append(self._tokens(batches))
                tokenising += time.process_time() - before
            elif not sizes and place < lowest:
                lowest, spare = place, batches
        reading = time.process_time() - began - tokenising
        if not sizes and spare is not None:  # one at least, and not the first: heads are unlike the rest
            sizes, counts = [_text_bytes(spare)], [self._tokens(spare)]
        tokenised = int(sum(sizes))
        if not tokenised:
            return total
        self.cpu_seconds += tokenising + reading * tokenised / max(total.text_bytes, 1)
        tokens, variance = estimate_unit(np.array(sizes), np.array(counts), total.text_bytes, num_batches)
        return replace(total, tokens=tokens, variance=variance, tokenised_bytes=tokenised)

    def _plus(self, total: UnitCounts, batches: Sequence[Batch]) -> UnitCounts:
        return replace(
            total,
            documents=total.documents + batches[0].num_documents,
            text_bytes=total.text_bytes + _text_bytes(batches),
            problems=total.problems + len(batches[0].problems),
        )

    def _tokens(self, batches: Sequence[Batch]) -> int:
        """Of all keys, as they would be stored."""
        encoded = [self._engine.encode(each.texts, each.offsets) for each in batches]
        return sum(
            len(as_stored_tokens(*found, each.documents, self._dtype, self._eod).tokens)
            for found, each in zip(encoded, batches, strict=True)
        )


def estimate_unit(
    sizes: NDArray[np.float64], counts: NDArray[np.float64], total_bytes: float, num_batches: int
) -> tuple[float, float]:
    """The count of a unit by that of some of its batches, and its variance."""
    ratio = counts.sum() / sizes.sum()
    spread = np.var(counts - ratio * sizes, ddof=1) if len(sizes) > 1 else 0.0
    return float(ratio * total_bytes), float(num_batches**2 * (1 - len(sizes) / num_batches) * spread / len(sizes))


def _text_bytes(batches: Sequence[Batch]) -> int:
    return sum(len(each.texts) for each in batches)
