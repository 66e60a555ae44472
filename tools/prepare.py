"""Do work of a run ahead of its start, on machines without GPUs: its indices, a read plan, its tokens in order.

RUN is what binidx.Run.save wrote.

  index      build every index; then training only opens them. Several may run at once: each index is built by one of
             them. Also pins the versions of all remote objects, for the prefixes of RUN
  read-plan  write the places of the tokens, in training order: a node then starts without any index, from kilobytes
  bake       write the tokens again, in training order: each micro-batch is then one contiguous range

index, and read-plan without --to, depend on how many samples are asked of each split: those of RUN, or with
--train-iters or --train-samples what Megatron's trainer asks for:

  train   train_iters * global batch size, or train_samples
  valid   (train_iters // eval_interval + 1) * eval_iters * global batch size
  test    eval_iters * global batch size

index: what is less than 2^15 documents and samples is built sooner than fetched, and not kept; --for-megatron keeps
those too, since Megatron Core finds nothing but files. The index of a blend is kept where RUN has a path_to_cache.
There lie the pinned versions, too: starts list and look up nothing, and data that moved since is an error. Give the
command again to train on data that you replaced. Data of which the store sends no ETags is not pinned, and a line says
so.

read-plan: for runs whose many nodes start from one bucket. It copies no token: 56 bytes for a sample of 5 documents.
With --to DIR it plans the steps of RUN: train by binidx.PlannedDataset(DIR, config) in place of the run's dataset. The
samples are the same, from any consumed_samples, on any number of ranks. Without --to it plans each split, beside the
indices in path_to_cache, where binidx.Run.load(RUN).build() finds it, and starts with read_plan=True. It builds
the indices that are missing, and pins nothing: call index before. Data that changes afterwards is an error.

bake: for runs whose thousands of nodes read one bucket. It costs a copy of the tokens that are read, once. Train by
binidx.BakedDataset(DIR, config), as by a read plan. It has three stages, each read and written from start to end: the
places of all tokens, the tokens of each chunk of the sources, the parts of the bake. What lies between them is in
DIR/exchange, as large as the bake, and removed at the end. A worker needs 1.6 GiB of memory, 3 GiB for a trillion
tokens; beyond 128 GiB of tokens also 8 MiB of --scratch for each GiB of them.

All resume when they are interrupted. index has no --engine: an index is one shuffle of one array, and several calls,
on any machines, build different ones at once. Of the others --engine makes the parts on processes, Ray or Dask.
--shard I/N splits them between machines, as N jobs of a Slurm array; of bake it splits each stage: give the same
commands again, three times in all, each time when all shards have ended.

exit status: 0 done, or this shard's share is; 1 the data is bad or an index could not be kept, 2 the call is wrong

example:
  binidx prepare index run.json --train-iters 500000 --world 512 --micro-batch-size 1 --global-batch-size 2048
  binidx prepare read-plan run.json --to s3://corpus/plan --workers 8
  binidx prepare bake run.json --to s3://corpus/baked --engine local --workers 8
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import binidx
from binidx.errors import ConfigError

from ._command import RESUMES, Command, add_subcommands, print_result
from ._display import counts, human_bytes
from ._options import add_workers, chosen, workers
from ._run_options import add_run, add_sizes, add_steps


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the three subcommands and their options."""
    indices, plan, baked = add_subcommands(
        options,
        ("index", build_indices, "build every index, so that training only opens them"),
        ("read-plan", write_plan, "write the places of the tokens: nodes start without an index"),
        ("bake", bake_run, "write the tokens again in training order: a range a micro-batch"),
    )
    for each in (indices, plan, baked):
        add_run(each)
    indices.add_argument("--for-megatron", action="store_true", help="keep small indices, too, for Megatron Core")
    indices.add_argument("--no-pin", dest="pin", action="store_false", help="pin no versions; delete the pinned file")
    indices.add_argument("--threads", type=int, metavar="N", help="cores to build with (all)")
    plan.add_argument("--to", metavar="DIR", help="where to, path or URI (each split, in path_to_cache)")
    baked.add_argument("--to", required=True, metavar="DIR", help="where to, path or URI")
    for ordered, parts in ((plan, "parts"), (baked, "tasks")):
        add_steps(ordered)
        add_workers(ordered, parts)
    baked.add_argument("--scratch", metavar="FOLDER", help="scratch disk of a worker; by default $TMPDIR")
    for sized in (indices, plan):
        add_sizes(sized)


# index


def build_indices(arguments: argparse.Namespace) -> int:
    """Build the indices of a run, and print them."""
    from binidx.storage.threads import available_cores

    from ._indices import UNWRITTEN, build, describe_indices, describe_unpinned
    from ._runs import load_sized

    given = load_sized(arguments)
    if arguments.for_megatron and given.config.path_to_cache is None and "://" in given.paths[0]:
        raise ConfigError("--for-megatron: needs path_to_cache in RUN; Megatron Core keeps no indices in a store")
    threads, small = arguments.threads or available_cores(), given.config.cache_small_indices or arguments.for_megatron
    config = replace(given.config, num_dataset_builder_threads=threads, cache_small_indices=small)
    rows, pinned, unpinned = build(replace(given, config=config), arguments.watch, pin=arguments.pin)
    lines = [f"pinned: {pinned}"] if pinned else []
    lines += [describe_unpinned(unpinned)] if unpinned else []
    text = "\n".join([describe_indices(rows), *lines])
    values = {"run": arguments.run, "sizes": [*given.sizes], "indices": rows, "pinned": pinned}
    values["not_pinned"] = unpinned
    print_result(values, text, arguments)
    return 1 if any(row["how"] == UNWRITTEN for row in rows) else 0


# read-plan


def write_plan(arguments: argparse.Namespace) -> None:
    """Write the read plan of a run, or those of its splits beside its indices, and print a summary."""
    from ._runs import load_sized, open_run, parse_steps

    run = load_sized(arguments)
    if arguments.to is None:
        plans = plan_splits(run, arguments)
        print_result({"plans": plans}, "\n".join(f"plan: {uri}" for uri in plans), arguments)
        return
    order, place = open_run(arguments, run), workers(arguments)
    plan = binidx.plan_reads(order, parse_steps(order, arguments.steps))
    share = place.select(plan.parts())
    total = sum(map(len, share))
    arguments.watch.begin("read-plan", total, 0, "samples")
    options = {"workers": place, **chosen(arguments, "storage_options")}
    written, missing = binidx.write_read_plan(order, arguments.to, plan, **options, watch=arguments.watch.advance)
    text = f"{counts(samples=total)} in {counts(parts=len(share))}, {written} written now, {missing} missing"
    values = {"to": arguments.to, "samples": total, "parts": len(share), "written": written, "missing": missing}
    print_result(values, f"{arguments.to}: {text}", arguments)


def plan_splits(run: binidx.Run, arguments: argparse.Namespace) -> list[str]:
    """Write the read plan of each split of a run into its `path_to_cache`; return the URIs."""
    from binidx.dataset.served import list_parts
    from binidx.run.stored.read_planning import prepare_read_plan

    if arguments.steps or arguments.engine or arguments.shard:
        raise ConfigError("--steps, --engine, --shard: need --to DIR; in path_to_cache lie whole splits")
    if run.config.path_to_cache is None or run.stages is not None or len(run.phases) > 1:
        raise ConfigError(f"{arguments.run}: needs path_to_cache, and neither stages nor phases; or give --to DIR")
    built = zip(run.build(planned=False), run.sizes, strict=True)
    datasets: list[Any] = [(each, size) for each, size in built if list_parts(each)]
    arguments.watch.begin("read plans", sum(len(dataset) for dataset, _ in datasets), 0, "samples")
    place, advance = binidx.Workers(count=arguments.workers), arguments.watch.advance
    plans = [prepare_read_plan(dataset, size, place, advance) for dataset, size in datasets]
    return [uri for uri in plans if uri is not None]


# bake


def bake_run(arguments: argparse.Namespace) -> None:
    """Write the tokens of a run in training order, and print a summary."""
    from ._runs import load_run, open_run, parse_steps

    order = open_run(arguments, load_run(arguments))
    baked = binidx.plan_bake(order, parse_steps(order, arguments.steps))
    options = chosen(arguments, "scratch", "storage_options", "watch")
    done = binidx.bake(order, arguments.to, baked, workers=workers(arguments), **options)
    count = baked.stop - baked.first
    size = count * baked.stored_length * order.token_dtype.itemsize
    parts = {"parts": len(baked.parts()), "written": done.written, "missing": done.missing}
    values = {"to": arguments.to, "samples": count, **parts, "num_bytes": size}
    more = {"stage": done.stage, "waits_for": done.waits_for}
    held = f"{counts(samples=count)} in {counts(parts=parts['parts'])}, {human_bytes(size)}"
    again = "give the same command again when the other shards have ended"
    left = f"{done.missing} missing; {again}" if done.missing else "complete"
    text = f"{done.written} written now, {left}"
    if done.missing and done.waits_for:
        text = f"stage {done.stage}: {counts(tasks=done.waits_for)} of other shards missing; {again}"
    print_result({**values, **more}, f"{arguments.to}: {held}; {text}", arguments)


main = Command("prepare", __doc__, add_options, None, RESUMES, progress=True)
