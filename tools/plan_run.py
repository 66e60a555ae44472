"""Plan a run before it starts: steps, epochs, indices, requests, bytes, cost.

Nothing is built, and nothing written but the file of --to. Of each dataset some dozens of bytes are read (its header,
and where its splits begin), of each cached index the manifest: no .idx and no array, so it takes a moment however large
the data is. For remote data, 6 small requests and one read of 8 MiB measure the link.

Tokens, samples, epochs and sizes are exact. Requests and bytes are expected values for documents of the mean length,
shuffled. Build times are those of two cores. Prices are list prices of requests; traffic within a region is free.

A start is planned as one with cached indices: its requests, of all ranks, and the bytes that each node fetches. Advice
follows, a line each, with the figure that is its reason. A run with phase transitions has a plan for each phase.
Without a file of the run, RUN is a prefix, with --sequence-length.

S3 grants its limit to each partition of a bucket. As far as names tell these are the folders with tokens, once they
were hot; --partitions says how many its provider has made. No partition is smaller than an object.

--from-megatron takes the place of RUN: all that follows it is a Megatron command, with torchrun's options or without;
--to may follow that. Options of the model are left out. Data parallel ranks are --gpus divided by tensor, pipeline and
context parallel sizes. With --to the file of the run is written first, so that the other commands can trace and account
it; if the data is out of reach, the file stands, and the plan is an error.

A resume names the file of the run before it: with --previous and --first-step, the samples consumed are those of that
run at that step. Other data, another topology or another schedule then begin there.

exit status: 0 done, 1 the data is bad, the ranks would ask a store for more than it publishes as its limit (at
--tokens-per-second) or, with --strict, there is a warning, 2 the call is wrong

example:
  binidx plan run.json --tokens-per-second 2000000 --nodes 16 --world 128
  binidx plan --gpus 512 --from-megatron pretrain_gpt.py $ARGUMENTS --to run.json
"""

from __future__ import annotations

import argparse
import math
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import binidx
from binidx import packed
from binidx.errors import BinidxError, ConfigError, redacted

from ._command import Command, print_result
from ._display import MOST_ROWS, counts, human_bytes, human_seconds, print_note, table
from ._options import chosen, refuse
from ._run_options import TOPOLOGY, add_run, add_sizes

if TYPE_CHECKING:
    from binidx.run.plan.run_plan import RunPlan

RANKS_OF_A_NODE = 8
MOST_PLACES = 3
OF_MEGATRON = ("to", "num_processes", "rampup", "previous", "first_step", "consumed_samples")
"""Arguments that only a Megatron command takes."""
OF_RUN = (*TOPOLOGY, "train_iters", "train_samples", "eval_interval", "eval_iters")
"""Arguments that replace what RUN says."""
BEFORE_IT = {
    *("--gpus", "--rampup", "--previous", "--first-step", "--consumed-samples"),
    *("--nodes", "--tokens-per-second", "--partitions", "--strict", "--storage-options"),
}
"""Options that Megatron lacks, and would seem to be given if they followed its command."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options, "RUN and data", nargs="?")
    add_sizes(options)
    options.add_argument("--nodes", type=int, metavar="N", help="that share the ranks (8 ranks each)")
    options.add_argument("--tokens-per-second", type=float, metavar="T", help="what all ranks together train on")
    told = "into which the store has divided each bucket (one a folder with tokens)"
    options.add_argument("--partitions", type=int, metavar="N", help=told)
    options.add_argument("--strict", action="store_true", help="exit with status 1 if there is a warning")
    group = options.add_argument_group("from a Megatron command")
    group.add_argument("--to", metavar="RUN", help="path or URI of the run's file, to write")
    group.add_argument("--gpus", dest="num_processes", type=int, metavar="N", help="processes of the job")
    group.add_argument("--rampup", choices=["kept", "ignored"], help="what Megatron does with --rampup-batch-size")
    group.add_argument("--previous", metavar="RUN", help="file of the run that this one resumes, or forks from")
    group.add_argument("--first-step", type=int, metavar="N", help="iterations before this run (0)")
    group.add_argument("--consumed-samples", type=int, metavar="C", help="samples before it, of this data")
    group.add_argument("--from-megatron", nargs=argparse.REMAINDER, metavar="...", help="the command, to its end")


def plan(arguments: argparse.Namespace) -> int:
    """Compute the plan, and print it."""
    from ._runs import load_sized

    if (arguments.run is None) == (arguments.from_megatron is None):
        raise ConfigError(f"run, from_megatron: found {'none' if arguments.run is None else 'both'}, need one")
    if arguments.run is not None:
        refuse(arguments, OF_MEGATRON, "only with --from-megatron")
        return print_plan(load_sized(arguments), arguments)
    run = run_of_megatron(arguments)
    if arguments.to is None:
        return print_plan(run, arguments)
    run.save(arguments.to, arguments.storage_options)
    ranks, size = counts(ranks=run.data_parallel_size), counts(samples=run.schedule.stages[0].batch_size)
    steps = f"steps {run.first_step:,} to {run.stop_step:,} of {size} on {ranks}, {run.micro_batch_size} at a time"
    print_note("binidx plan", f"{arguments.to}: written, {steps}")
    try:
        return print_plan(run, arguments)
    except BinidxError as error:
        error.args = (f"{arguments.to}: is written, but there is no plan of it yet: {error}", *error.args[1:])
        raise


def print_plan(run: binidx.Run, arguments: argparse.Namespace) -> int:
    """Compute the plan of a run and print it; return the exit status."""
    from binidx.run.plan.run_plan import plan_run

    nodes = -(-run.data_parallel_size // RANKS_OF_A_NODE) if arguments.nodes is None else arguments.nodes
    options = chosen(arguments, "tokens_per_second", "partitions")
    plans = [plan_run(phase, nodes=nodes, **options) for phase in run.phases]
    values = [planned.to_json() for planned in plans]
    text = "\n\n".join(f"{_phase(planned, len(plans))}{describe(planned)}" for planned in plans)
    print_result(values[0] if len(plans) == 1 else values, text, arguments)
    return int(any(planned.exceeds_a_limit or (arguments.strict and planned.cautions) for planned in plans))


def run_of_megatron(arguments: argparse.Namespace) -> binidx.Run:
    """Return the run of the command after --from-megatron, and take --to and --json out of the command."""
    from binidx.run.megatron_command import parse_megatron_command

    refuse(arguments, OF_RUN, "give it in the command after --from-megatron")
    words = [*arguments.from_megatron]
    if late := " ".join(word for word in words if word in BEFORE_IT):
        raise ConfigError(f"from_megatron: found {late} in the command; give it before --from-megatron")
    if "--to" in words:
        place = words.index("--to")
        if not (named := words[place + 1 : place + 2]):
            raise ConfigError("to: found none, needs the path of the file")
        arguments.to, words = named[0], [*words[:place], *words[place + 2 :]]
    arguments.json |= "--json" in words
    options = chosen(arguments, "num_processes", "rampup", "storage_options")
    return parse_megatron_command(words, **options, **resumed(arguments))


def resumed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a run that continues another one; the samples consumed are those of that one by default."""
    from binidx.run.run_kind import is_packed_run
    from binidx.storage.location import Location

    step, consumed = arguments.first_step or 0, arguments.consumed_samples
    if arguments.previous is None:
        return {"first_step": step, "consumed_samples": consumed or 0}
    options = arguments.storage_options
    previous = Location.of(arguments.previous, options).absolute
    if is_packed_run(Location(previous, options)):  # its data is another one, of which no sample was consumed
        position, earlier = 0, packed.load_packed_run(previous, options).reading.schedule.samples_before(step)
    else:
        history = binidx.RunHistory.of(binidx.Run.load(previous, options), load_packed=packed.load_packed_run)
        runs = [run for run in history.runs if run.first_step <= step]
        if not runs:
            raise ConfigError(f"first_step: found {step:,}, needs a step of {previous}")
        position, earlier = runs[-1].schedule.samples_before(step), runs[-1].earlier_samples
    consumed = position if consumed is None else consumed
    names = ("previous", "first_step", "consumed_samples", "earlier_samples")
    return dict(zip(names, (previous, step, consumed, position + earlier - consumed), strict=True))


def _phase(planned: RunPlan, num_phases: int) -> str:
    """Return a headline for the plan of a phase; "" for the only one."""
    run = planned.inventory.run
    stop = "the end" if run.stop_step is None else f"before step {run.stop_step:,}"
    return f"phase from step {run.first_step:,} to {stop}\n\n" if num_phases > 1 else ""


def describe(planned: RunPlan) -> str:
    """Return the plan as text."""
    width = shutil.get_terminal_size().columns
    parts = (
        _pairs(_head(planned), width),
        table(["source", "share", "documents", "tokens", "epochs", "repeated", "stored"], _sources(planned), width),
        table(["index", "samples", "epochs", "size", "memory", "build", "kept"], _indices(planned), width),
        _pairs(_costs(planned), width),
        _pairs(_start(planned), width),
        _pairs([("!", caution) for caution in planned.cautions], width, gap=1),
        _pairs([("+", line) for line in planned.advice], width, gap=1),
    )
    return "\n\n".join(filter(None, parts))


def _pairs(rows: Sequence[tuple[str, str]], width: int, gap: int = 2) -> str:
    """Return a line for each pair of a name and its value, with the values aligned."""
    left = max((len(name) for name, _ in rows), default=0) + gap
    return "\n".join(
        textwrap.fill(
            text, max(width, 40), initial_indent=f"{name:<{left}}", subsequent_indent=" " * left, break_on_hyphens=False
        )
        for name, text in rows
    )


def _head(planned: RunPlan) -> list[tuple[str, str]]:
    given = planned.inventory.run
    steps = "no end: cyclic, here one epoch" if planned.num_steps is None else counts(steps=planned.num_steps)
    ranks = counts(ranks=given.data_parallel_size)
    sizes = f"{counts(samples=given.schedule.global_batch_size)} on {ranks}, {given.micro_batch_size} at a time"
    tokens = f"{planned.num_samples * given.config.sequence_length:,} in all"
    requested = given.sizes[0]
    if requested and len(planned.costs) == 1 and planned.num_samples + given.consumed_samples > requested:
        tokens += f": {requested:,} samples requested, and the rest of their last epoch"
    rows = [
        ("train", f"{counts(samples=planned.num_samples)} of {given.config.sequence_length:,} tokens, {tokens}"),
        ("steps", f"{steps} of {sizes}; {counts(nodes=planned.nodes)}"),
    ]
    if (most := planned.same_order_up_to) is not None:
        room = f"to {most:,} requested samples;" if most > (requested or 0) else "no:"
        rows.append(("may grow", f"{room} a request for more reorders all of them"))
    return rows


def _sources(planned: RunPlan) -> list[list[str]]:
    rows = []
    for cost in planned.costs:
        dataset = cost.dataset
        parts = counts(parts=dataset.num_parts) if dataset.num_parts else ""
        kinds = [dataset.codec if dataset.compressed else "", "checked" if dataset.checked else "", parts]
        stored = " ".join(filter(None, [human_bytes(dataset.stored_bytes), *kinds]))
        share = f"{cost.samples / max(planned.num_samples, 1):.1%}"
        numbers = [f"{cost.documents:,}", f"{cost.tokens:,}", f"{cost.epochs:.2f}", f"{cost.repeated_documents:,}"]
        rows.append([dataset.prefix.uri, share, *numbers, stored])
    return rows


def _indices(planned: RunPlan) -> list[list[str]]:
    from binidx.index.cache.inspection import CacheState

    rows = []
    every = planned.index_rows()
    for row in every if len(every) <= MOST_ROWS else [row for row in every if row["cache"] != CacheState.SMALL_ONE]:
        memory = human_bytes(row["memory_bytes"]) if row["memory_bytes"] else ""
        epochs = "" if row["epochs"] is None else f"{row['epochs']:,}"
        numbers = [f"{row['samples']:,}", epochs, human_bytes(row["num_bytes"]), memory, _seconds(row["build_seconds"])]
        rows.append([f"{row['split']:<5}  {row['source']}", *numbers, row["cache"]])
    return rows


def _seconds(seconds: float) -> str:
    return "< 1 ms" if seconds < 0.001 else f"{seconds * 1000:.0f} ms" if seconds < 1 else human_seconds(seconds)


def _costs(planned: RunPlan) -> list[tuple[str, str]]:
    if not planned.is_remote:
        return [("reading", "all lies on this machine: no requests, nothing to pay")]
    whole = planned.reading
    steps = max(planned.num_steps or 0, 1)
    samples = max(planned.num_samples, 1)

    def words(factor: float) -> str:
        part = whole.times(factor)
        return f"{part.requests:,.0f} requests, {human_bytes(part.num_bytes)}"

    a_sample = whole.times(1 / samples)
    rows = [
        ("a sample", f"{a_sample.requests:.2f} requests, {human_bytes(a_sample.num_bytes)}"),
        ("a step", words(1 / steps)),
    ]
    if planned.tokens_per_second:
        share = planned.tokens_per_second * 3600 / (samples * planned.inventory.run.config.sequence_length)
        rows.append(("an hour", f"{words(share)} at {planned.tokens_per_second:,.0f} tokens/s"))
        for rate in planned.request_rates[:MOST_PLACES]:
            limit = f", {rate.prices.reads_per_second:,.0f} published" if rate.prices.reads_per_second else ""
            if limit and rate.partitions > 1:
                limit = f", {rate.to_busiest:,.0f} to the busiest of {rate.partitions:,} partitions{limit} for each"
            if rate.ramp_seconds:
                limit += f" at first, granted after {human_seconds(rate.ramp_seconds)}"
            rows.append(("a second", f"{rate.requests_per_second:,.0f} requests of all ranks to {rate.place}{limit}"))
    rows += [("at once", text) for text in _bursts(planned)]
    rows.append(("a node", f"{words(1 / planned.nodes)} in the whole run"))
    price = sum(planned.dollars.values())
    rows.append(("the run", f"{words(1.0)}, ${price:,.2f} at list price"))
    rows.append(("disk cache", f"{human_bytes(planned.epoch_bytes)} a node for its part of an epoch"))
    rows += [("cache fill", text) for text in _fills(planned)]
    keeper = "node, BINIDX_INDEX_DIR" if planned.shares_index_files else "process, as there is no BINIDX_INDEX_DIR"
    moved = f"; {_seconds(seconds)} of its link" if (seconds := planned.index_files_seconds) else ""
    rows.append(("index files", f"{human_bytes(planned.index_dir_bytes)} a {keeper}{moved}"))
    return rows


def _bursts(planned: RunPlan) -> Iterator[str]:
    """Yield what all ranks together ask a bucket at one moment."""
    step, begin = planned.samples_at_once
    for rate in planned.sample_rates[:MOST_PLACES]:
        counted = [f"{rate.requests_per_second * samples:,.0f}" for samples in (step, begin)]
        limit = f", at least {human_seconds(rate.seconds(begin))} as published" if rate.prices.reads_per_second else ""
        yield (
            f"{counted[0]} requests to {redacted(rate.place)} when all ranks read a micro-batch in lock-step, "
            f"{counted[1]} when they begin{limit}"
        )


def _fills(planned: RunPlan) -> Iterator[str]:
    """Yield what loaders fill of each source into the disk cache, and why."""
    from binidx.storage.cache.fill_plan import EXTENT_BYTES

    for cost in planned.costs[:MOST_PLACES]:
        if (fill := cost.fill) is None:
            continue
        requests = math.ceil(fill.node_bytes / EXTENT_BYTES)
        price = f"${requests * cost.prices.dollars_per_read:,.2g}"
        done = f"{human_bytes(fill.node_bytes)} a node, {counts(requests=requests)}, {price}, {_seconds(fill.seconds)}"
        why = f"a node reads {fill.share:.2g} times its bytes, {fill.paying_share:.2g} pays"
        yield f"{done if fill.node_bytes else 'nothing'} of {redacted(cost.dataset.prefix.uri)}: {why}"


def _start(planned: RunPlan) -> list[tuple[str, str]]:
    rows = []
    if link := planned.link:
        speed = f"{human_bytes(link.bytes_per_second)}/s"
        way = f"{link.latency_seconds * 1000:.1f} ms to the first byte, {speed}, {link.requests_in_flight} in flight"
        rows.append(("link", f"{way} (measured)"))
    for start in planned.starts[:MOST_PLACES]:
        requests = start.requests
        text = f"{requests.heads:,} HEAD, {requests.lists:,} LIST, {requests.gets:,} GET to {redacted(start.place)}"
        text += f", {human_bytes(start.num_bytes)}, ${start.dollars:,.2f}"
        if start.seconds_at_limit:
            limit = f"{start.prices.reads_per_second:,.0f} a second, as published"
            text += f"; at least {human_seconds(start.seconds_at_limit)} at {limit}"
        rows.append(("to start", f"{text} ({counts(ranks=planned.num_processes, nodes=planned.nodes)})"))
    return rows


main = Command("plan", __doc__, add_options, plan)
