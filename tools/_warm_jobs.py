"""Jobs of `binidx cache warm`: readers of a disk cache, and the ranges to fetch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from binidx.errors import ConfigError
from binidx.format.bin_file import open_bin
from binidx.format.idx import get_idx_path
from binidx.format.virtual_source import open_source
from binidx.storage.adapters import JoinedReader
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.maintenance import Job
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import open_object
from binidx.storage.writing.publish import object_exists


def jobs_of_uris(uris: Sequence[str], options: Mapping[str, Any]) -> list[Job]:
    """Return jobs for all bytes of objects, and of both files of datasets, virtual merges included.

    Raises:
        ObjectNotFoundError: a URI is neither an object nor a dataset.
        ConfigError: an object is local, or cannot be cached.
    """
    return [(reader, [(0, reader.size)]) for uri in uris for reader in _readers(uri, options)]


def _readers(uri: str, options: Mapping[str, Any]) -> Iterator[DiskCache]:
    if object_exists(uri, options):
        yield cached(open_object(uri, storage_options=options))
        return
    for pair in open_source(uri, options).pairs:
        yield cached(open_object(get_idx_path(pair.prefix), storage_options=options))
        yield cached(open_bin(pair.prefix, storage_options=options))


def cached(reader: RangeReader) -> DiskCache:
    """Return the reader, which must be one of a disk cache."""
    if isinstance(reader, DiskCache):
        return reader
    if getattr(reader, "identity", None) is None or "://" not in reader.uri:
        raise ConfigError(f"{reader.uri}: lies on this machine, needs no cache")
    raise ConfigError(
        f"{reader.uri}: cannot be cached, its store gives no mark of its content (ETag, generation, time)"
    )


def jobs_of_run(arguments: argparse.Namespace, options: Mapping[str, Any]) -> list[Job]:
    """Return jobs for the bytes of `.bin` files in the next steps of a run; missing indices are built."""
    from binidx.dataset.read_plan import ranges_of_samples
    from binidx.run.run_file import Run

    run = Run.load(arguments.run, options)
    if arguments.consumed is not None:
        run = replace(run, consumed_samples=arguments.consumed)
    check_ranks(arguments.rank, run.data_parallel_size)
    train = run.build()[0]
    if train is None or isinstance(train, list):
        raise ConfigError(f"{arguments.run}: has no train split to take samples from")
    steps = range(arguments.steps)
    idxs = [idx for rank in arguments.rank or [None] for step in run.samples_of_steps(steps, rank) for idx in step]
    jobs: list[Job] = []
    for stored, ranges in ranges_of_samples(train, idxs):
        for reader, wanted in parts_of(stored.bin_reader, [(start, stop) for start, stop in ranges.tolist()]):
            if isinstance(reader, DiskCache):
                jobs.append((reader, wanted))
            else:
                print(f"binidx cache: {reader.uri}: local, or without an ETag; left out", file=sys.stderr)
    return jobs


def parts_of(reader: RangeReader, ranges: Sequence[Range]) -> Iterator[tuple[RangeReader, Sequence[Range]]]:
    """Split the ranges of a virtual merge into the ranges of its parts."""
    if isinstance(reader, JoinedReader):
        yield from reader.split(ranges)[1]
    else:
        yield reader, ranges


def check_ranks(ranks: Sequence[int] | None, count: int) -> None:
    """Raise ConfigError unless the run has these ranks."""
    for rank in ranks or ():
        if not 0 <= rank < count:
            raise ConfigError(f"--rank {rank}: the run has ranks 0 to {count - 1}")
