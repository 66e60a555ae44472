"""Order of packed blocks as arithmetic: the block at any position of any worker or rank, without its predecessors.

    files  F0 F1 F2 ...  ── every S-th from s, S = ranks * workers ──►  the files of one worker
           in groups of n_chunks ── one permutation of the group's blocks each ──►  (file, block) by position

    worker 0   set of block i: draw i of random.choices      a a b a ...
    rank       micro-batches of its workers in turn          w0 w1 w2 w0 w1 ...

Cost: a permutation of n_chunks * num_blocks numbers for each group before the position: 81 of 8,192 for all of a
Gemstones worker, 7 ms; the generators are cached, so the next position costs at most one.

Source: lit-gpt `PackedDataset` and `CombinedDataset` under torch's DataLoader, TinyLlama, and the UMD fork of the
Gemstones; verified against them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.forks import cached_property

Rows = NDArray[np.int64]


class AtEnd(Enum):
    """Rule of a loader (lit-gpt or a fork of it) for the end of the files, where fewer than n_chunks are left."""

    stop = "lit-gpt"
    wrap = "TinyLlama, and lit-gpt with wrap=True: from the first file again, with new permutations"
    repeat = "UMD, Gemstones: from the first file again, with the same permutations"


def order_files(names: Iterable[str], seed: int) -> list[str]:
    """Return the files in the order of TinyLlama (since its #67) and the Gemstones: sorted, then shuffled with a seed.

    lit-gpt uses the order of a directory listing, which only the original run knows.

    Args:
        names: names of the files, in any order.
        seed: seed of the run.
    """
    files = sorted(names)
    random.Random(seed).shuffle(files)
    return files


@dataclass(frozen=True)
class PackedSet:
    """Parameters of one set of packed files, the same for every worker of a run.

    Args:
        num_files: number of files; they are numbered in the order of `order_files`, or as the original run listed them.
        num_blocks: number of blocks in each file, chunk_size // block_size.
        n_chunks: number of files whose blocks are shuffled together.
        seed: seed of the permutations. `PackedReading` adds the rank to it, as lit-gpt and all its forks do.
        shuffle: False to serve blocks in their stored order.
        at_end: rule for the end of the files.
    """

    num_files: int
    num_blocks: int
    n_chunks: int
    seed: int
    shuffle: bool = True
    at_end: AtEnd = AtEnd.stop


@dataclass(frozen=True)
class WorkerOrder:
    """Blocks of one set that one worker of one rank reads, by position.

    Args:
        of: the set, with this rank's seed.
        shard: number of the worker among the workers of all ranks; it reads files shard, shard + num_shards, ...
        num_shards: number of workers of all ranks.

    Raises:
        ConfigError: fewer files than one group, or no such worker.
    """

    of: PackedSet
    shard: int
    num_shards: int
    # Caches: states of the generator by permutation, and the last group. Two threads would store equal values.
    _states: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _last: list[tuple[int, Rows]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.num_shards:
            raise ConfigError(f"packed order: shard {self.shard}, needs 0 to {self.num_shards - 1}")
        if not self.num_groups:
            found = f"{self.of.num_files} files give each of {self.num_shards} workers {self.num_mine}"
            raise ConfigError(f"packed order: {found}, needs {self.of.n_chunks} at least (n_chunks)")

    @property
    def num_mine(self) -> int:
        """Number of files of each worker, rounded down; no worker reads the files left over by the division."""
        return self.of.num_files // self.num_shards

    @property
    def num_groups(self) -> int:
        """Number of groups of files in one pass over the worker's files."""
        return self.num_mine // self.of.n_chunks

    @property
    def group_blocks(self) -> int:
        return self.of.n_chunks * self.of.num_blocks

    @property
    def pass_blocks(self) -> int:
        """Number of blocks in one pass over the worker's files."""
        return self.num_groups * self.group_blocks

    def blocks(self, first: int, stop: int) -> Rows:
        """Return rows (file, block, pass) of positions first to stop, shape (stop - first, 3).

        Args:
            first, stop: positions in the worker's stream, half open.

        Raises:
            IndexError: positions below 0, or after the end of the stream, if it ends.
        """
        if not 0 <= first <= stop or (self.of.at_end is AtEnd.stop and stop > self.pass_blocks):
            raise IndexError(f"packed order: {first}-{stop} of worker {self.shard}, it has {self.pass_blocks} blocks")
        size = self.group_blocks
        parts = [self._group(group) for group in range(first // size, -(-stop // size))]
        rows = np.concatenate(parts) if parts else np.empty((0, 3), np.int64)
        start = first - first // size * size
        return rows[start : start + stop - first]

    def _group(self, group: int) -> Rows:
        """Return the rows of one group of files; the last group read is cached, as micro-batches read it in pieces."""
        for number, rows in [*self._last]:
            if number == group:
                return rows
        passes, place = divmod(group, self.num_groups)
        order = self._permutation(place if self.of.at_end is AtEnd.repeat else group)
        chunk, block = np.divmod(order, self.of.num_blocks)
        files = self.shard + (place * self.of.n_chunks + chunk) * self.num_shards
        rows = np.stack([files, block, np.full_like(block, passes)], axis=1)
        self._last[:] = [(group, rows)]
        return rows

    def _permutation(self, number: int) -> Rows:
        """Return permutation `number` of the generator, which advances from the nearest cached state."""
        if not self.of.shuffle:
            return np.arange(self.group_blocks)
        rng = np.random.default_rng(self.of.seed)
        known = max((drawn for drawn in [*self._states] if drawn <= number), default=0)
        if known:
            rng.bit_generator.state = self._states[known]
        for drawn in range(known, number + 1):
            order = rng.permutation(self.group_blocks)
            self._states[drawn + 1] = rng.bit_generator.state
        return order


@dataclass(frozen=True)
class PackedRun:
    """The blocks of one rank: of one set, or of several mixed by draws, from DataLoader workers in turn.

    Args:
        sets: packed datasets, in the order of the run's configuration.
        weights: weights of the sets; None for equal ones.
        seed: seed of the draws that mix the sets; each worker draws the same.
        rank, num_ranks: this rank, and the number of ranks.
        num_workers: number of workers of each rank's DataLoader; 0 and 1 are the same.
        micro_batch_size: number of blocks that a worker yields at a time.
        schedules: weights that change with the micro-batches of the rank, one for each set. Workers get a copy of the
            first weights, and keep it: only without workers do they change.
        max_epochs: number of passes over each set after which its weight is 0; None: without end.

    Raises:
        ConfigError: there is no set, or weights for another number of sets; some sets end and some do not; or
            micro_batch_size is below 1.

    Source: lit-gpt, `CombinedDataset` under torch's DataLoader: one draw of Python's `random.choices` per block; and
    `DataScheduler` of the UMD fork.
    """

    sets: Sequence[PackedSet]
    weights: Sequence[float] | None
    seed: int
    rank: int
    num_ranks: int
    num_workers: int
    micro_batch_size: int
    schedules: Sequence[WeightSchedule] | None = None
    max_epochs: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        if not self.sets or (self.weights is not None and len(self.weights) != len(self.sets)):
            raise ConfigError(f"packed run: {len(self.sets)} sets with weights {self.weights}, needs one each")
        if len({packed_set.at_end is AtEnd.stop for packed_set in self.sets}) > 1:
            raise ConfigError("packed run: some sets end and some do not, needs one rule for all")
        if self.micro_batch_size < 1:
            raise ConfigError(f"packed run: micro-batches of {self.micro_batch_size}, needs at least 1")

    @cached_property
    def orders(self) -> list[list[WorkerOrder]]:
        """Order of the blocks of each set for each worker, as [worker][set]."""
        count, first = self.num_ranks * self._count, self.rank * self._count
        shards = range(first, first + self._count)
        return [[WorkerOrder(packed_set, shard, count) for packed_set in self.sets] for shard in shards]

    @property
    def _count(self) -> int:
        return max(1, self.num_workers)

    def blocks(self, first: int, stop: int) -> Rows:
        """Return the rank's blocks first to stop in the order they are served.

        Args:
            first, stop: positions in the rank's stream, half open.

        Returns:
            Rows (set, file, block, pass), shape (stop - first, 4), int64.

        Raises:
            IndexError: the stream ends before `stop`, or first is below 0.
        """
        if not 0 <= first <= stop:
            raise IndexError(f"packed run: blocks {first}-{stop}, needs 0 or more, in order")
        worker, position = self._place(np.arange(first, stop))
        rows = np.empty((stop - first, 4), np.int64)
        for number in range(self._count):
            here = worker == number
            if here.any():
                rows[here] = self._worker_blocks(number, position[here])
        return rows

    def _place(self, samples: Rows) -> tuple[Rows, Rows]:
        """Return the worker of each block, and the block's position there; a worker's last micro-batch may be short."""
        batch, slot = np.divmod(samples, self.micro_batch_size)
        turn, worker = np.divmod(batch, self._count)
        position = turn * self.micro_batch_size + slot
        if self.length is None:
            return worker, position
        whole = self._worker_length // self.micro_batch_size * self.micro_batch_size
        short = self._worker_length - whole
        behind = samples - whole * self._count
        if len(samples) and samples[-1] >= self.length:
            raise IndexError(f"packed run: block {samples[-1]} of rank {self.rank}, it has {self.length}")
        tail = behind >= 0
        if tail.any():
            worker[tail], slot[tail] = np.divmod(behind[tail], short)
            position[tail] = whole + slot[tail]
        return worker, position

    @cached_property
    def length(self) -> int | None:
        """Number of blocks of the rank until a draw selects an exhausted dataset; None if datasets start again."""
        return None if self.sets[0].at_end is not AtEnd.stop else self._worker_length * self._count

    @cached_property
    def _worker_length(self) -> int:
        """Number of blocks of each worker; all workers have equally many files and the same draws."""
        left = np.array([order.pass_blocks for order in self.orders[0]])
        return int(left[0]) if len(left) == 1 else self._draws.first_beyond(left)

    def _worker_blocks(self, worker: int, positions: Rows) -> Rows:
        """Return the rows (set, file, block, pass) at ascending positions of one worker."""
        rows, start = np.empty((len(positions), 4), np.int64), int(positions[0])
        drawn, numbers = self._draws.read(start, int(positions[-1]) + 1)
        rows[:, 0], numbers = drawn[positions - start], numbers[positions - start]
        for number, order in enumerate(self.orders[worker]):
            if (here := rows[:, 0] == number).any():
                first = int(numbers[here][0])
                rows[here, 1:] = order.blocks(first, int(numbers[here][-1]) + 1)[numbers[here] - first]
        return rows

    def count_sets(self, num_blocks: int) -> Rows:
        """Return how many of the first blocks of the rank are of each set.

        Args:
            num_blocks: number of blocks from the first one on.
        """
        in_turn, whole = self.micro_batch_size * self._count, num_blocks
        if self.length is not None:
            whole = min(whole, self._worker_length // self.micro_batch_size * in_turn)
        start = whole // in_turn * in_turn  # the blocks of whole turns are divided equally
        worker, position = self._place(np.arange(start, num_blocks))
        ends = np.full(self._count, start // self._count)
        np.maximum.at(ends, worker, position + 1)
        return sum((self._draws.count(end) for end in ends.tolist()), np.zeros(len(self.sets), np.int64))

    @cached_property
    def _draws(self) -> SetDraws:
        weights = tuple(self.weights or [1 / len(self.sets)] * len(self.sets))
        if self.schedules is None and self.max_epochs is None:
            return _draws_of(self.seed, weights)
        schedules = tuple(self.schedules or [WeightSchedule("const", (weight,)) for weight in weights])
        passes = zip(self.max_epochs or [None] * len(self.sets), self.orders[0], strict=True)
        limits = tuple(None if most is None else most * order.pass_blocks for most, order in passes)
        return SetDraws(self.seed, weights, schedules, limits, 0 if self.num_workers else self.micro_batch_size)


SCHEDULES = {"const": 1, "step": 3, "linear": 3, "cosine": 3}
"""Kind of schedule -> how many numbers it has."""


@dataclass(frozen=True)
class WeightSchedule:
    """Weight of a set at each micro-batch of a rank.

        const w            w
        step w n g         w * g ** (batch // n)
        linear w e n       from w to e over n micro-batches, then e
        cosine w e n       from w to e over n micro-batches, by half a cosine, again and again

    Args:
        kind: one of these.
        numbers: its numbers.

    Raises:
        ConfigError: another kind, or other numbers.

    Source: the UMD fork of lit-gpt, `data_scheduler_utils.py`.
    """

    kind: str
    numbers: tuple[float, ...]

    def __post_init__(self) -> None:
        wrong = len(self.numbers) != SCHEDULES.get(self.kind)
        if (
            wrong
            or min(self.numbers) < 0
            or (self.kind != "const" and self.numbers[1 if self.kind == "step" else 2] < 1)
        ):
            needed = "const W, step W N G, linear W E N or cosine W E N, with numbers of 0 or more, and N of 1 or more"
            raise ConfigError(f"scheduler: found {[self.kind, *self.numbers]}, needs {needed}")

    def weight(self, batch: int) -> float:
        """Return the weight at a micro-batch, in Python's arithmetic, whose roundings decide draws."""
        first, *rest = self.numbers
        if self.kind == "step":
            return first * float(rest[1] ** (batch // rest[0]))
        if self.kind == "linear":
            return first + (rest[0] - first) * (min(batch, rest[1]) / rest[1])
        if self.kind == "cosine":
            return rest[0] + (first - rest[0]) * (1 + math.cos(math.pi * (batch % rest[1]) / rest[1])) / 2
        return first

    def weights(self, batches: Rows) -> NDArray[np.float64]:
        """Return the weights at some micro-batches, each different one computed once."""
        own, last = batches * 0, self.numbers[1 if self.kind == "step" else -1]
        if self.kind != "const":
            rule = {"step": np.floor_divide, "linear": np.minimum, "cosine": np.remainder}[self.kind]
            own = rule(batches, last)
        _, places, inverse = np.unique(own, return_index=True, return_inverse=True)
        return np.array([self.weight(batch) for batch in batches[places].tolist()], np.float64)[inverse]


DRAWN_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class SetDraws:
    """The set of each block of a worker, drawn with replacement, by position.

    The generator's state and the counts of each set are kept for every DRAWN_AT_ONCE draws, 2.5 KB for each: the next
    look at any position draws at most so many. The first one at position 6,000,000 draws all before it, in 0.1 to 0.5
    s: a Mersenne Twister can jump there, but how often each set was drawn, which decides its block, has no formula.

    Args:
        seed: seed of the draws.
        weights: weight of each set.
        schedules: weights that change, instead of these.
        limits: number of blocks of each set after which its weight is 0: the draw that selects it then is repeated.
        hold: number of blocks that are drawn with the same weights; 0: all.

    Source: CPython, `random.choices`, one draw a call.
    """

    seed: int
    weights: tuple[float, ...]
    schedules: tuple[WeightSchedule, ...] | None = None
    limits: tuple[int | None, ...] = ()
    hold: int = 0
    # Caches: states and counts, and the last stretch read. Two threads would store equal values.
    _known: list[tuple[list[Any], list[Rows]]] = field(default_factory=list, init=False, repr=False, compare=False)
    _last: list[tuple[int, Rows, Rows]] = field(default_factory=list, init=False, repr=False, compare=False)

    def read(self, first: int, stop: int) -> tuple[Rows, Rows]:
        """Return the sets at positions first to stop, and how many blocks before each are of its set."""
        stretches = range(first // DRAWN_AT_ONCE, -(-max(stop, first + 1) // DRAWN_AT_ONCE))
        parts = [self._stretch(number) for number in stretches]
        start = stretches.start * DRAWN_AT_ONCE
        drawn, numbers = (np.concatenate(column)[first - start : stop - start] for column in zip(*parts, strict=True))
        if (drawn < 0).any():
            raise IndexError(f"packed run: all weights are 0 at block {first + int(np.argmax(drawn < 0))} of a worker")
        return drawn, numbers

    def count(self, stop: int) -> Rows:
        """Return how many of the first `stop` blocks are of each set."""
        number, rest = divmod(stop, DRAWN_AT_ONCE)
        counts = self._counts_before(number)
        return counts + _count(self._stretch(number)[0][:rest], len(counts)) if rest else counts

    def first_beyond(self, limits: Rows) -> int:
        """Return the first position whose set has been drawn as often as its limit before."""
        number = 0
        while (self._counts_before(number + 1) <= limits).all():
            number += 1
        drawn, numbers = self._stretch(number)
        return int(np.flatnonzero(numbers >= limits[drawn])[0]) + number * DRAWN_AT_ONCE

    def _stretch(self, number: int) -> tuple[Rows, Rows]:
        """Return the sets of a stretch of draws, and how many draws before each are of its set."""
        for known, *columns in [*self._last]:
            if known == number:
                return columns[0], columns[1]
        counts, (states, _) = self._counts_before(number), self._known[0]
        drawn, _ = self._draw(number, states[number], counts)
        numbers = np.empty_like(drawn)
        for each in range(len(counts)):
            here = drawn == each
            numbers[here] = counts[each] + np.arange(np.count_nonzero(here))
        self._last[:] = [(number, drawn, numbers)]
        return drawn, numbers

    def _counts_before(self, number: int) -> Rows:
        """Return the counts of each set before a stretch; draw all stretches before it that are not known."""
        if not self._known:
            *key, position = random.Random(self.seed).getstate()[1]
            state = ("MT19937", np.array(key, np.uint32), position, 0, 0.0), (False,) * len(self.weights)
            self._known.append(([state], [np.zeros(len(self.weights), np.int64)]))
        states, counts = self._known[0]
        if number >= len(counts):
            states, counts = [*states], [*counts]
            while number >= len(counts):
                drawn, after = self._draw(len(counts) - 1, states[-1], counts[-1])
                states.append(after)
                counts.append(counts[-1] + _count(drawn, len(self.weights)))
            self._known[0] = states, counts
        return counts[number]

    def _draw(self, number: int, state: Any, counts: Rows) -> tuple[Rows, Any]:
        """Return the sets of a stretch, -1 where all weights are 0, and the state after it.

        NumPy's legacy generator draws what `random.Random(seed).random()` does.
        """
        rng, (drawing, exhausted) = np.random.RandomState(), state
        rng.set_state(drawing)
        if self.schedules is None:
            sums = np.cumsum(np.asarray(self.weights, np.float64))
            values, drawn = rng.random_sample(DRAWN_AT_ONCE) * sums[-1], np.zeros(DRAWN_AT_ONCE, np.int16)
            for below in sums[:-1].tolist():
                drawn += values >= below
            return drawn.astype(np.int64), (rng.get_state(), exhausted)
        weights, left, parts = self._weights(number * DRAWN_AT_ONCE), DRAWN_AT_ONCE, list[Rows]()
        while left:
            before, counts = rng.get_state(), sum((_count(part, len(counts)) for part in parts[-1:]), counts)
            sums = np.cumsum(weights[-left:] * ~np.array(exhausted), axis=1)
            part = (sums[:, :-1] <= (rng.random_sample(left) * sums[:, -1])[:, None]).sum(axis=1)
            part[sums[:, -1] <= 0] = -1
            ends = [(left, -1)]
            for each, limit in enumerate(self.limits):
                hits = np.flatnonzero(part == each)
                if limit is not None and len(hits) > limit - counts[each]:
                    ends.append((int(hits[limit - counts[each]]), each))
            end, each = min(ends)
            if each >= 0:  # its draw finds the set exhausted, and is repeated
                exhausted = tuple(gone or of == each for of, gone in enumerate(exhausted))
                rng.set_state(before)
                rng.random_sample(end + 1)
            parts.append(part[:end])
            left -= end
        return np.concatenate(parts), (rng.get_state(), exhausted)

    def _weights(self, first: int) -> NDArray[np.float64]:
        """Return the weights of the blocks from position `first` on, as if no set were exhausted."""
        hold = self.hold or first + DRAWN_AT_ONCE
        start, stop = first // hold, (first + DRAWN_AT_ONCE - 1) // hold + 1
        table = np.stack([schedule.weights(np.arange(start, stop)) for schedule in self.schedules or ()], axis=1)
        return table[np.arange(first, first + DRAWN_AT_ONCE) // hold - start]


def _count(drawn: Rows, num_sets: int) -> Rows:
    return np.bincount(drawn + 1, minlength=num_sets + 1)[1:]


@lru_cache(maxsize=4)
def _draws_of(seed: int, weights: tuple[float, ...]) -> SetDraws:
    """Return the draws of a seed; ranks that draw the same share them."""
    return SetDraws(seed, weights)
