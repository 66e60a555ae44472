"""Build every index of a run ahead of time, on a machine without GPUs; then training only opens them.

RUN is what binidx.Run.save wrote. The names of caches depend on how many samples are asked of each split: those of RUN,
or with --train-iters or --train-samples what Megatron's trainer asks for:

  train   train_iters * global batch size, or train_samples
  valid   (train_iters // eval_interval + 1) * eval_iters * global batch size
  test    eval_iters * global batch size

A second call finds everything there. Several may run at once: each index is built by one of them. An index of less than
2^15 documents and samples is built sooner than fetched, and not kept; --for-megatron keeps those too, since Megatron
Core finds nothing but files. A blend's index is kept where the run has a path_to_cache.

There the versions of all remote objects of the run are pinned, too, for the prefixes of RUN: starts list and look up
nothing, and data that moved since is an error. Call this command again to train on data that you replaced.

--read-plan also stores the places of the tokens of each sample there. Starts whose config has read_plan=True then read
no index, but kilobytes: see binidx read-plan.

exit status: 0 all is there, 1 the data is bad or an index could not be kept, 2 the call is wrong

example:
  binidx prepare-cache run.json --train-iters 500000 --world 512 --micro-batch-size 1 --global-batch-size 2048
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from binidx.dataset.pinned_run import indexed_datasets, name_index, pin_run
from binidx.dataset.served import is_blend, list_parts
from binidx.errors import ConfigError, StorageError
from binidx.index.cache.index_cache import BUILT, NOT_KEPT, Outcome
from binidx.index.cache.index_files import MANIFEST, NpyLayout
from binidx.jobs.parts import Workers
from binidx.order.requests import find_blend
from binidx.order.source_order import distinct_sequences
from binidx.run.provenance.read_planning import prepare_read_plan
from binidx.run.run_file import Run
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.threads import available_cores

from ._command import command, print_result
from ._display import MOST_ROWS, Bar, human_bytes, human_seconds, shortened, table
from ._runs import add_run, add_sizes, load_sized

UNWRITTEN = "not written"


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options, "RUN and data")
    add_sizes(options)
    options.add_argument("--for-megatron", action="store_true", help="keep small indices, too, for Megatron Core")
    options.add_argument("--no-pin", dest="pin", action="store_false", help="pin no versions; delete the pinned file")
    options.add_argument("--read-plan", action="store_true", help="write a read plan of each split, too")
    options.add_argument("--threads", type=int, metavar="N", help="cores to build with (all)")


def prepare(arguments: argparse.Namespace) -> int:
    """Build the indices of a run, and print them."""
    given = load_sized(arguments)
    if arguments.for_megatron and given.config.path_to_cache is None and "://" in given.paths[0]:
        raise ConfigError("--for-megatron: needs path_to_cache in RUN; Megatron Core has no caches in a store")
    threads = arguments.threads or available_cores()
    small = given.config.cache_small_indices or arguments.for_megatron
    config = replace(given.config, num_dataset_builder_threads=threads, cache_small_indices=small)
    if arguments.read_plan and (config.path_to_cache is None or given.stages is not None or len(given.phases) > 1):
        needs = "needs path_to_cache in RUN, and neither stages nor phases"
        raise ConfigError(f"--read-plan: {needs}; binidx read-plan plans other runs")
    wanted = replace(given, config=config)
    rows, pinned = build(wanted, arguments.watch, pin=arguments.pin)
    plans = write_plans(wanted, threads, arguments.watch) if arguments.read_plan else []
    text = "\n".join([describe(rows), *([f"pinned: {pinned}"] if pinned else []), *(f"plan: {uri}" for uri in plans)])
    values = {"run": arguments.run, "sizes": [*given.sizes], "indices": rows, "pinned": pinned, "plans": plans}
    print_result(values, text, arguments)
    return 1 if any(row["how"] == UNWRITTEN for row in rows) else 0


def build(wanted: Run, bar: Bar, *, pin: bool) -> tuple[list[dict[str, Any]], str | None]:
    """Build all indices of a run and pin its objects; return a row for each index, and the URI of the pinned file."""
    outcomes: dict[str, Outcome] = {}
    bar.begin("indices", num_indices(wanted), 0, "indices")

    def record(outcome: Outcome) -> None:
        outcomes[outcome.files.name] = outcome if is_there(outcome) else replace(outcome, how=UNWRITTEN)
        bar.advance(1)

    built = [phase.build(on_outcome=record, pinned=False) for phase in wanted.phases]
    # Phases have one validation set, and one index where they have as many samples.
    named = {name_index(dataset): dataset for each in built for dataset in indexed_datasets(each)}
    names, datasets = [*named], [*named.values()]
    rows = [
        describe_index(dataset, name.rpartition("-")[2], outcomes.get(name))
        for dataset, name in zip(datasets, names, strict=True)
    ]
    return rows, pin_run(wanted.config, datasets if pin else [])


def write_plans(wanted: Run, threads: int, bar: Bar) -> list[str]:
    """Write the read plan of each split of a built run; return the URIs."""
    built = zip(wanted.build(), wanted.sizes, strict=True)
    datasets: list[Any] = [(dataset, size) for dataset, size in built if list_parts(dataset)]
    bar.begin("read plans", sum(len(dataset) for dataset, _ in datasets), 0, "samples")
    plans = [prepare_read_plan(dataset, size, Workers(count=threads), bar.advance) for dataset, size in datasets]
    return [uri for uri in plans if uri is not None]


def is_there(outcome: Outcome) -> bool:
    """Return False if an index was built but not written, for which the build only logs a warning; else True."""
    try:
        return outcome.how != BUILT or object_exists(outcome.files.file(MANIFEST))
    except StorageError:
        return False


def num_indices(wanted: Run) -> int:
    """Return the number of indices to build; 0 for a staged blend, where the build itself determines it."""
    if wanted.stages is not None:
        return 0
    requests = [request for phase in wanted.phases for split in phase.requests().values() for request in split]
    blends = sum(find_blend(request) is not None for request in requests) if wanted.config.path_to_cache else 0
    return sum(len(request.sources) for request in requests) + blends


def describe_index(dataset: Any, split: str, outcome: Outcome | None) -> dict[str, Any]:
    """Return the JSON values of one index; documents and epochs of a blend are None.

    Args:
        dataset: dataset with the index.
        split: name of its split.
        outcome: how the index was made; None if it is not kept.
    """
    arrays = dataset.index_arrays
    how = outcome.how if outcome else NOT_KEPT
    blended = is_blend(dataset)
    files = outcome.files if outcome and how not in (NOT_KEPT, UNWRITTEN) else None
    return {
        "split": split,
        "source": f"blend of {len(dataset.datasets):,}" if blended else dataset.dataset_path,
        "directory": files.directory.uri if files else "",
        "files": [f"{files.name}-{name}.npy" for name in arrays] if files else [],
        "documents": None if blended else len(distinct_sequences(dataset.index_order.sources[0])),
        "samples": len(dataset.index_order),
        "epochs": None if blended else dataset.num_epochs,
        "num_bytes": sum(NpyLayout(array.shape, array.dtype).size for array in arrays.values()),
        "seconds": outcome.seconds if outcome else 0.0,
        "how": how,
    }


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """Return the indices as text: a table of counts, then the locations of the files, then sums."""
    head = ["index", "documents", "samples", "epochs", "size", "time", ""]
    shown = rows if len(rows) <= MOST_ROWS else [row for row in rows if row["how"] != NOT_KEPT]
    lines = [table(head, [_cells(row) for row in shown])]
    for directory in dict.fromkeys(row["directory"] for row in shown[:MOST_ROWS] if row["directory"]):
        lines.append(f"\n{directory}")
        for row in shown[:MOST_ROWS]:
            if row["directory"] == directory:
                stem = row["files"][0].partition("-")[0]
                lines.append(f"  {stem}-*  {row['split']} {shortened(row['source'], 60)}")
    return "\n".join([*lines, "", _sum(rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = ["" if row[name] is None else f"{row[name]:,}" for name in ("documents", "samples", "epochs")]
    seconds = human_seconds(row["seconds"]) if row["seconds"] else ""
    return [f"{row['split']:<5}  {row['source']}", *numbers, human_bytes(row["num_bytes"]), seconds, row["how"]]


def _sum(rows: Sequence[dict[str, Any]]) -> str:
    counts = Counter(row["how"] for row in rows)
    kept = sum(row["num_bytes"] for row in rows if row["directory"])
    text = ", ".join(f"{count} {how}" for how, count in counts.items())
    small = "; what is not kept is built at each start, sooner than fetched" if counts[NOT_KEPT] else ""
    return f"{len(rows)} {'index' if len(rows) == 1 else 'indices'}: {text}; {human_bytes(kept)} kept{small}"


main = command("prepare-cache", __doc__, add_options, prepare, "interrupted; what is built stays", progress=True)
