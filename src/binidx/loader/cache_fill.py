"""Uses of each extent of a dataset by the steps ahead of this node, counted from the order, to fill its disk caches.

    sampler   steps ahead of this node's ranks ─► sample numbers
    order     sample numbers                   ─► byte ranges           no token is read
    count     byte ranges                      ─► bytes of each extent, its first and its last step

A baked run without a disk cache is read in extents, too: those are held in memory (`open_forward`).

Of a long run, stretches of steps at equal distances are counted: 262,144 samples show the share of each extent.

The ranks of a node are not known. From the launcher's numbers of processes, on the node and in the run, follows the
number of data-parallel ranks on a node, which are taken to be consecutive, as launchers and Megatron number them. If
pipeline stages lie on different nodes, more ranks share the node than this, and the counted share is too small.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.torch_bridge import find_topology, reading_worker
from binidx.loader.dataset_protocols import ForwardSamples, LocatedSamples, StoredSamples
from binidx.loader.samplers import PretrainingSampler
from binidx.storage.adapters import JoinedReader
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.fill_plan import EXTENT_BYTES, FOREVER, PAYING_SHARE, ExtentUses
from binidx.storage.cache.filling import CacheFilling
from binidx.storage.interfaces import RangeReader
from binidx.storage.ranges import as_composite
from binidx.storage.requests.cancellation import Scope
from binidx.storage.settings import leading_number
from binidx.storage.stores.registry import local_path

SAMPLES_AT_ONCE, NUM_STRETCHES = 1 << 13, 32
"""Samples of a stretch, about, and stretches that are counted: at most 0.3 s, and 26 MB of the rows of a read plan."""

FORWARD_EXTENTS, FORWARD_SHARE = 8, 0.25
"""Extents of a baked run that are fetched ahead, 550 MB/s at 90 MB/s a connection; and the share of them that a process
reads at least: a quarter costs as much CPU as exact ranges of 8 samples (82 us a sample of 4,096 tokens)."""

LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")
"""Variables of torchrun, MPI and Slurm with the number of processes on this node; Slurm's may be "8(x16)"."""


def open_filling(dataset: Any, sampler: PretrainingSampler) -> CacheFilling | None:
    """Return the filling of a dataset's disk caches, not started yet; None if there is nothing to fill.

    Args:
        dataset: of the loader.
        sampler: its sampler, in the state before the first batch.
    """
    if not isinstance(dataset, LocatedSamples) or not isinstance(dataset, StoredSamples):
        return None
    places = ExtentPlaces(dataset.token_readers())
    steps = steps_ahead(sampler)
    if not places.objects or not len(steps):
        return None
    ranks = ranks_of_node(sampler.data_parallel_rank, sampler.data_parallel_size)
    samples = sampler.batch(int(steps[0]))
    sample_bytes = sum(np.diff(ranges).sum() for _, ranges, _ in dataset.locate_bytes(np.array(samples, np.int64)))
    share = sample_bytes * len(ranks) * len(steps) / max(1, sum(reader.size for reader in places.objects))
    count = partial(count_uses, dataset, sampler, steps, ranks, places)
    return CacheFilling(places.objects, count, is_expected=bool(share >= PAYING_SHARE))


def open_forward(dataset: Any, sampler: PretrainingSampler, scope: Scope) -> Any:
    """Return a baked dataset that fetches extents ahead into memory; None if exact ranges or a disk cache are better.

    Args:
        dataset: of the loader.
        sampler: its sampler, in the state before the first batch.
        scope: cancels the extents in flight.
    """
    if not isinstance(dataset, ForwardSamples) or not dataset.is_uncached:
        return None
    worker, num_workers = reading_worker()
    count = -(-EXTENT_BYTES // (dataset.sample_bytes * sampler.micro_batch_size))
    samples = [*chain(*map(sampler.batch, steps_ahead(sampler)[worker::num_workers][:count].tolist()))]
    pays = samples and len(samples) >= FORWARD_SHARE * (max(samples) + 1 - min(samples))
    return dataset.read_forward(FORWARD_EXTENTS, scope) if pays else None


class SourceExtents(NamedTuple):
    """Parts of the objects that hold the bytes of one reader, one after the other; each array has shape (parts,).

    Attributes:
        stops: first byte after the part, in the reader.
        shifts: what to add to a byte of the reader for that of the object.
        bases: number of the object's first extent among all; -1: nothing fills the object.
    """

    stops: NDArray[np.int64]
    shifts: NDArray[np.int64]
    bases: NDArray[np.int64]


class ExtentPlaces:
    """Extents of the objects behind the readers of a dataset.

    Attributes:
        objects: reader of each object that has a disk cache to fill, or may have one when it is opened.
        sizes, owners, numbers: of each extent its bytes, its object, and its number in that.
        sources: by the URI of a reader.
    """

    def __init__(self, readers: Sequence[RangeReader]) -> None:
        self.objects: list[RangeReader] = []
        self.sources: dict[str, SourceExtents] = {}
        bases: dict[str, int] = {}
        num_extents = 0
        for reader in readers:
            joined = reader if isinstance(reader, JoinedReader) else JoinedReader(reader.uri, [reader], [reader.size])
            parts, starts, sizes = joined.parts, joined.starts, joined.sizes
            for part in parts:
                if part.uri not in bases and may_fill(part):
                    self.objects.append(part)
                    bases[part.uri], num_extents = num_extents, num_extents - (-part.size // EXTENT_BYTES)
            stops = np.cumsum(sizes, dtype=np.int64)
            own = np.array([bases.get(part.uri, -1) for part in parts], np.int64)
            self.sources[reader.uri] = SourceExtents(stops, starts - (stops - sizes), own)
        counts = [-(-reader.size // EXTENT_BYTES) for reader in self.objects]
        self.owners = np.repeat(np.arange(len(counts)), counts)
        self.numbers = np.concatenate([np.arange(count) for count in [*counts, 0]]).astype(np.int64)
        ends = np.repeat(np.array([reader.size for reader in self.objects], np.int64), counts)
        self.sizes = np.minimum(EXTENT_BYTES, ends - self.numbers * EXTENT_BYTES)

    def locate(self, reader: RangeReader, ranges: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the extents of ranges, and the bytes that each range has in them; each of shape (n, 2).

        A range of less than 8 MiB lies in two extents at most. Extents are -1 where nothing is filled.

        Args:
            reader: of the ranges.
            ranges: (start, stop) in bytes of the reader, shape (n, 2); each within one part.
        """
        source = self.sources[reader.uri]
        part = np.minimum(np.searchsorted(source.stops, ranges[:, 0], side="right"), len(source.stops) - 1)
        start, stop = (ranges + source.shifts[part][:, None]).T
        first, last = start // EXTENT_BYTES, np.maximum(stop - 1, start) // EXTENT_BYTES
        in_last = np.where(last > first, stop - last * EXTENT_BYTES, 0)
        extents = np.column_stack([first, last]) + source.bases[part][:, None]
        extents[source.bases[part] < 0] = -1
        return extents, np.column_stack([stop - start - in_last, in_last])


def may_fill(reader: RangeReader) -> bool:
    """Return whether a reader has a disk cache that is to be filled, or may have one once it is opened."""
    if isinstance(reader, DiskCache):
        return reader.fill != "never"
    return as_composite(reader) is not None and local_path(reader.uri) is None


def steps_ahead(sampler: PretrainingSampler) -> NDArray[np.int64]:
    """Return the steps that follow the state of a sampler.

    Of endless epochs these are the steps of one: those that are left of the present one, then the others, since the
    next epoch reads the same samples.
    """
    step, steps = sampler.consumed_samples // sampler.samples_per_step, sampler.num_batches
    if not sampler.is_endless:
        return np.arange(step, sampler.total_samples // sampler.samples_per_step)
    return step - step % steps + (np.arange(steps) + step) % steps


def ranks_of_node(rank: int, size: int) -> range:
    """Return the data-parallel ranks on this node, as far as the launcher's variables show: the module says how.

    Args:
        rank, size: data-parallel rank of this process, and number of ranks.
    """
    names = [name for name in LOCAL_SIZES if os.environ.get(name)]
    number = leading_number(names[0]) if names else None
    processes = 1 if number is None else number
    local = max(1, size * processes // max(find_topology().size, processes, 1 if names else size))
    first = rank // local * local
    return range(first, min(first + local, size))


def count_uses(
    dataset: LocatedSamples,
    sampler: PretrainingSampler,
    steps: NDArray[np.int64],
    ranks: Sequence[int],
    places: ExtentPlaces,
    samples_at_once: int = SAMPLES_AT_ONCE,
) -> ExtentUses:
    """Count what steps read of each extent.

    Args:
        dataset: of the samples.
        sampler: of one rank.
        steps: numbers of the steps; the first one is step 0 of the result.
        ranks: data-parallel ranks whose samples are counted.
        places: of the extents.
        samples_at_once: samples of a stretch of steps.
    """
    samplers = [copy.copy(sampler) for _ in ranks]
    for own, rank in zip(samplers, ranks, strict=True):
        own.data_parallel_rank = rank
    at_once = max(1, samples_at_once // (sampler.micro_batch_size * len(ranks)))
    every = max(1, -(-len(steps) // (at_once * NUM_STRETCHES)))
    used = np.zeros(len(places.sizes))
    first, last = np.full(len(used), FOREVER), np.full(len(used), -1)
    for here in range(0, len(steps), at_once * every):
        relative = np.arange(here, min(here + at_once, len(steps)))
        batches = [[sample for own in samplers for sample in own.batch(step)] for step in steps[relative].tolist()]
        of_sample = np.repeat(relative, [len(batch) for batch in batches])
        for reader, ranges, sample in dataset.locate_bytes(np.array([*chain(*batches)], np.int64)):
            extents, num_bytes = places.locate(reader, ranges)
            is_filled = (extents >= 0) & (num_bytes > 0)
            number, step = extents[is_filled], np.broadcast_to(of_sample[sample][:, None], extents.shape)[is_filled]
            used += np.bincount(number, num_bytes[is_filled] * every, len(used))
            np.minimum.at(first, number, step)
            np.maximum.at(last, number, step + (every - 1) * at_once)
    if sampler.is_endless:
        last[last >= 0] = FOREVER
    return ExtentUses(places.owners, places.numbers, places.sizes, used, first, last)
