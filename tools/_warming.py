"""Objects and byte ranges that `binidx cache warm` fetches."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from binidx.errors import ConfigError
from binidx.format.bin_file import open_bin
from binidx.format.source import open_source
from binidx.storage.adapters import JoinedReader
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.ranges import coalesce
from binidx.storage.requests.remote_object import object_exists

if TYPE_CHECKING:
    from binidx.loader.dataset_protocols import LocatedSamples

Job = tuple[DiskCache, Sequence[Range]]
"""An object, and the ranges of it to cache."""


def find_jobs(arguments: argparse.Namespace, options: Mapping[str, Any]) -> list[Job]:
    """Return jobs that fetch the objects, or what a run reads."""
    if bool(arguments.uris) == bool(arguments.run):
        raise ConfigError("warm: needs URIs, or --run FILE; one of the two")
    if arguments.run and arguments.steps is None:
        raise ConfigError("warm --run: needs --steps N")
    return jobs_for_run(arguments, options) if arguments.run else jobs_for_uris(arguments.uris, options)


def jobs_for_uris(uris: Sequence[str], options: Mapping[str, Any]) -> list[Job]:
    """Return jobs that fetch whole objects, or both files of datasets, virtual merges included.

    Raises:
        ObjectNotFoundError: a URI is neither an object nor a dataset.
        ConfigError: an object is local, or cannot be cached.
    """
    readers = [reader for uri in uris for reader in open_readers(uri, options)]
    return [(check_cached(reader), [(0, reader.size)]) for reader in readers]


def open_readers(uri: str, options: Mapping[str, Any]) -> Iterator[RangeReader]:
    """Yield a reader of an object, or readers of the files of a dataset."""
    location = Location(uri, options)
    if object_exists(location):
        yield open_object(location)
        return
    for pair in open_source(location).pairs:
        yield open_object(pair.prefix + ".idx")
        yield open_bin(pair.prefix)


def check_cached(reader: RangeReader) -> DiskCache:
    """Return the reader if it is that of a disk cache; raise ConfigError otherwise."""
    if isinstance(reader, DiskCache):
        return reader
    if getattr(reader, "identity", None) is None or "://" not in reader.uri:
        raise ConfigError(f"{reader.uri}: lies on this machine, needs no disk cache")
    raise ConfigError(
        f"{reader.uri}: cannot be in the disk cache, its store gives no mark of its content (ETag, generation, time)"
    )


def jobs_for_run(arguments: argparse.Namespace, options: Mapping[str, Any]) -> list[Job]:
    """Return jobs that fetch the bytes of `.bin` files for the next steps of a run; missing indices are built."""
    from binidx.run.run_file import Run

    run = Run.load(arguments.run, options)
    if arguments.consumed is not None:
        run = replace(run, consumed_samples=arguments.consumed)
    for rank in arguments.rank or ():
        if not 0 <= rank < run.data_parallel_size:
            raise ConfigError(f"rank: found {rank}, the run has ranks 0 to {run.data_parallel_size - 1}")
    train = run.build(planned=False)[0]
    if train is None or isinstance(train, list):
        raise ConfigError(f"{arguments.run}: has no train split to take samples from")
    steps = range(run.first_step, run.first_step + arguments.steps)
    idxs = [idx for rank in arguments.rank or [None] for step in run.samples_of_steps(steps, rank) for idx in step]
    jobs: list[Job] = []
    for reader, ranges in sample_ranges(train, idxs):
        parts = reader.split(ranges)[1] if isinstance(reader, JoinedReader) else [(reader, ranges)]
        for part, wanted in parts:
            if isinstance(part, DiskCache):
                jobs.append((part, wanted))
            else:
                print(f"binidx cache: {part.uri}: local, or without an ETag; left out", file=sys.stderr)
    return jobs


def sample_ranges(
    dataset: LocatedSamples, idxs: Sequence[int], at_once: int = 4096
) -> list[tuple[RangeReader, list[Range]]]:
    """Return the byte ranges of the tokens of samples.

    Args:
        idxs: numbers of the samples, in any order.
        at_once: number of samples whose spans are in memory together, by default in 1 MB.

    Returns:
        For each reader with some of the samples its ranges, sorted and disjoint; once if a blend names it twice.
    """
    ranges: dict[str, tuple[RangeReader, list[Range]]] = {}
    for first in range(0, len(idxs), at_once):
        for reader, own, _ in dataset.locate_bytes(np.asarray(idxs[first : first + at_once], np.int64)):
            ranges.setdefault(reader.uri, (reader, []))[1].extend(join_ranges(own.tolist()))
    return [(reader, join_ranges(parts)) for reader, parts in ranges.values() if parts]


def join_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Return the same bytes as sorted, disjoint ranges; adjacent ranges are joined."""
    return coalesce(ranges, max_gap=0, max_request=sys.maxsize)
