"""Fill, list and prune a disk cache of remote objects, on a node's disk or a cluster's file system.

Training uses it when BINIDX_CACHE_DIR is set, or load_dataset has a cache_dir=, and fills it
while it reads (BINIDX_CACHE_FILL). These commands use the same directory, also while jobs read from it.
BINIDX_CACHE_BYTES, or cache_bytes there, is its limit; without one it leaves a tenth of its file system free. A full
cache evicts the least recently used blocks that are not in use.

  warm URI ...        whole objects, or both files of dataset prefixes, of a virtual merge those of its parts
  warm --run FILE     the bytes that the next --steps steps of a run read (in whole chunks of 64 KiB); FILE is a file
                      of binidx.Run.save. A step is one micro-batch of each rank
  list                per object: its size, its cached bytes, and the time of its last use
  prune               remove by size, age or URI, and files of killed processes; never blocks in use
  prune --indices     remove old indices, their bundles and leases, from a path_to_cache: those that no run of --keep
                      names. Never an index that is being built, and nothing that binidx did not write

Without a directory of a disk cache, list and prune use the directory of index files (BINIDX_INDEX_DIR).

An interrupted warm resumes. Several nodes that share a directory each fetch a part. There is no --engine: a worker
would fill the disk of its own node; start warm on each node (srun --ntasks-per-node=1).

exit status: 0 done, 1 something found no room, 2 the call is wrong

example:
  binidx cache warm s3://corpus/en --dir /nvme/binidx
  binidx cache list --dir /nvme/binidx
  binidx cache prune --indices s3://corpus/cache --older-than 30d --dry-run
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, replace
from typing import Any

from binidx.errors import ConfigError, redacted

from ._command import RESUMES, Command, add_subcommands, print_result
from ._display import counts, human_bytes, human_seconds, table
from ._options import add_json, num_bytes


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the three subcommands and their options."""
    filled, listed, pruned = add_subcommands(
        options,
        ("warm", run_warm, "fetch objects, or the bytes that a run reads"),
        ("list", run_list, "list the cached objects"),
        ("prune", run_prune, "remove blocks that are not in use"),
    )
    for each in (filled, listed, pruned):
        each.add_argument("--dir", metavar="DIR", help="the directory of the disk cache (BINIDX_CACHE_DIR)")
    filled.add_argument("uris", nargs="*", metavar="URI", help="of an object, or a dataset, also a virtual merge")
    filled.add_argument("--bytes", metavar="N", type=num_bytes, help="its bound, as 500GB (BINIDX_CACHE_BYTES)")
    filled.add_argument("--run", metavar="FILE", help="path or URI of a saved run")
    filled.add_argument("--steps", metavar="N", type=int, help="its next N steps")
    filled.add_argument("--consumed", metavar="C", type=int, help="samples served before (as the run says)")
    filled.add_argument("--rank", metavar="R", type=int, action="append", help="only for this rank, or these (all)")
    add_json(filled, "--storage-options", "fsspec's own")
    pruned.add_argument("--bytes", metavar="N", type=num_bytes, help="the least recently used, down to N, as 500GB")
    unused = "blocks unused for this time: 30m, 12h, 7d; indices written before"
    pruned.add_argument("--older-than", metavar="AGE", type=age, help=unused)
    pruned.add_argument("--uri", action="append", metavar="URI", help="only of this object, dataset prefix or folder")
    pruned.add_argument("--indices", metavar="URI", help="a path_to_cache: prune its indices, and no blocks")
    pruned.add_argument("--keep", nargs="+", default=[], metavar="RUN", help="run files whose indices stay")
    pruned.add_argument("--dry-run", action="store_true", help="only print which indices would be removed")
    add_json(pruned, "--storage-options", "fsspec's own")


def age(text: str) -> float:
    """Parse a time in seconds: `90`, `30m`, `12h`, `7d`."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:], 0)
    try:
        return float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text}, needed a time: 90s, 30m, 12h, 7d") from None


def cache_directory(arguments: argparse.Namespace) -> str:
    """Return the cache directory; by default, except for `warm`, the directory of index files."""
    from binidx.storage.cache.block_files import directory_of_index, place_of_cache
    from binidx.storage.settings import ReadSettings

    settings = ReadSettings.of(getattr(arguments, "storage_options", None))
    directory, _ = place_of_cache(replace(settings, cache_dir=arguments.dir or settings.cache_dir))
    if not directory and arguments.body is not run_warm and (of_index := directory_of_index(settings)):
        print(f"binidx cache: {of_index}: index files; no directory of a disk cache given", file=sys.stderr)
        directory = of_index
    if not directory:
        raise ConfigError("no directory of a disk cache given: needs --dir or BINIDX_CACHE_DIR")
    return os.path.abspath(directory)


# warm


def run_warm(arguments: argparse.Namespace) -> int:
    """Fetch objects, or the bytes that a run reads, into the cache; print a summary."""
    from binidx.storage.cache.maintenance import Warming
    from binidx.storage.settings import OURS, ReadSettings

    from ._warming import find_jobs

    directory = cache_directory(arguments)
    given = dict(arguments.storage_options or {})
    ours = {**given.get(OURS, {}), "cache_dir": directory}
    if arguments.bytes is not None:
        ours["cache_bytes"] = arguments.bytes
    options = {**given, OURS: ours}
    warming = Warming(find_jobs(arguments, options))
    total, limit = warming.wanted_bytes, ReadSettings.of(options).cache_bytes
    if limit is not None and total > limit:
        raise ConfigError(f"{directory}: needs {human_bytes(total)}, its bound is {human_bytes(limit)}; raise --bytes")
    began = time.monotonic()
    arguments.watch.begin("warm", total, 0)
    done = warming.run(arguments.watch.advance)
    seconds = time.monotonic() - began
    values = {**asdict(done), "num_objects": len(warming.jobs), "seconds": seconds}
    rate = human_bytes(done.fetched_bytes / max(seconds, 1e-9))
    rest = ", the rest was cached" if done.fetched_bytes + done.lacking_bytes < done.num_bytes else ""
    lines = [f"{directory}: {human_bytes(done.num_bytes)} of {counts(objects=len(warming.jobs))}"]
    lines.append(f"  {human_bytes(done.fetched_bytes)} fetched in {human_seconds(seconds)} ({rate}/s){rest}")
    if done.lacking_bytes:
        lines.append(f"  {human_bytes(done.lacking_bytes)} did not fit: raise --bytes, or prune")
    print_result(values, "\n".join(lines), arguments)
    return 1 if done.lacking_bytes else 0


# list


def run_list(arguments: argparse.Namespace) -> None:
    """Print the cached objects."""
    from binidx.storage.cache.maintenance import cached_contents

    contents = cached_contents(cache_directory(arguments))
    disk_bytes, now = sum(kept.disk_bytes for kept in contents), time.time()
    rows, lines = list[dict[str, Any]](), []
    for kept in contents:
        content, age_seconds = kept.content, max(0.0, now - kept.used_at)
        uri, size = (redacted(content.uri), content.size) if content else (None, 0)
        rows.append({"uri": uri, "size": size, "identity": dict(content.identity) if content else {}})
        rows[-1] |= {"cached_bytes": kept.num_bytes, "disk_bytes": kept.disk_bytes, "used_at": kept.used_at}
        used = f"{human_seconds(age_seconds)} ago" if kept.used_at else "never"
        share = f"{human_bytes(kept.num_bytes)} of {human_bytes(size)}"
        lines.append(f"{uri or '(unknown object; prune removes it)'}\n  {share}, used {used}")
    lines.append(f"{len(rows)} objects, {human_bytes(disk_bytes)} on the disk")
    print_result({"objects": rows, "disk_bytes": disk_bytes}, "\n".join(lines), arguments)


# prune


def run_prune(arguments: argparse.Namespace) -> None:
    """Remove cached data, and print the number of removed bytes."""
    from binidx.storage.cache.maintenance import prune

    uris = arguments.uri
    if arguments.indices:
        prune_indices(arguments)
        return
    if arguments.keep or arguments.dry_run:
        raise ConfigError("prune: --keep and --dry-run need --indices URI")
    done = prune(
        cache_directory(arguments),
        limit=arguments.bytes,
        older_than=arguments.older_than,
        chosen=(lambda uri: any(belongs(uri, redacted(name)) for name in uris)) if uris else None,
    )
    text = f"{human_bytes(done.num_bytes)} removed, {done.num_litter} leftovers of killed processes"
    if done.in_use_bytes:
        text += f"\n{human_bytes(done.in_use_bytes)} kept: in use"
    print_result(asdict(done), text, arguments)


def prune_indices(arguments: argparse.Namespace) -> None:
    """Remove the old indices of a `path_to_cache` that no run needs, and print all of its indices."""
    from binidx.index.cache.pruning import find_indices
    from binidx.run.plan.needed_indices import NeededIndices
    from binidx.run.run_file import Run
    from binidx.storage.location import Location

    if arguments.older_than is None or arguments.dir or arguments.bytes is not None or arguments.uri:
        raise ConfigError("prune --indices: needs --older-than AGE, and neither --dir, --bytes nor --uri")
    options, rows, cells, now = arguments.storage_options, list[dict[str, Any]](), list[list[str]](), time.time()
    needed = NeededIndices.of([Run.load(uri, options) for uri in arguments.keep])
    directory = Location(arguments.indices, options)
    for index in find_indices(directory, needed.has, arguments.older_than, now):
        state: str = index.state
        if state == "remove" and not arguments.dry_run:
            state = "removed" if index.remove(directory) else "being built"
        measured = {"num_bytes": index.num_bytes, "changed_at": index.changed_at}
        rows.append({**asdict(index), "state": state, **measured})
        age_seconds = max(now - index.changed_at, 0.0)
        cells.append([index.name, human_bytes(index.num_bytes), human_seconds(age_seconds), state])
    gone = sum(row["num_bytes"] for row in rows if row["state"] in ("remove", "removed"))
    text = f"{human_bytes(gone)} {'would be ' if arguments.dry_run else ''}removed"
    result = {"indices": rows, "removed_bytes": 0 if arguments.dry_run else gone}
    print_result(result, f"{table(['index', 'size', 'age', 'state'], cells)}\n{text}", arguments)


def belongs(uri: str, chosen: str) -> bool:
    """Return whether an object is `chosen`, a file of the dataset prefix `chosen`, or in the folder `chosen`.

    Args:
        uri: of an object.
        chosen: URI that the user named.
    """
    return uri == chosen or uri.startswith((f"{chosen}.", f"{chosen.rstrip('/')}/"))


main = Command("cache", __doc__, add_options, None, RESUMES, progress=True)
