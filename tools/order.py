"""Export the global order of a run as parquet files, by rank or by steps, without any GPU.

RUN describes a GPT run (what binidx.Run.save wrote) or a run over packed files (binidx.packed.packed_run).
One row is one sequence: step, rank, slot, sample, source, epoch, its documents, and where it starts in the first of
them and stops in the last; rows of packed files have file and block instead. --tokens adds the tokens,
which are read from the data. Existing files are kept, so an interrupted export resumes; --shard I/N splits it between
machines, as N jobs of a Slurm array.

  worker_{rank}-of-{ranks}_ordered_dataset.parquet     one a rank (default), as the Gemstones are published
  steps-{first}-{stop}.parquet                         with --steps-per-file

--check-nesting 64,256,512 prints for packed files where runs of so many ranks have read the same set of blocks.

exit status: 0 done, 1 the data is bad, 2 the call is wrong

example:
  binidx order run.json --to s3://corpus/order --workers 8
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import binidx
from binidx import packed
from binidx.errors import ConfigError

from ._command import RESUMES, Command, print_result
from ._display import counts
from ._options import add_workers, chosen, workers
from ._run_options import add_run, add_steps, add_topology


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run(options)
    options.add_argument("--to", metavar="URI", help="directory of the files")
    add_steps(options)
    options.add_argument("--steps-per-file", type=int, metavar="N", help="a file for N steps of all ranks")
    options.add_argument("--no-docs", action="store_true", help="without documents: twice as fast")
    options.add_argument("--spans", action="store_true", help="each piece of a document with its length and place")
    options.add_argument("--tokens", action="store_true", help="with the tokens of each sequence, input_ids")
    add_workers(options, "files")
    options.add_argument("--check-nesting", metavar="N,M,...", help="numbers of ranks to compare, for packed files")
    add_topology(options)


def export_order(arguments: argparse.Namespace) -> None:
    """Export the order, or with --check-nesting compare numbers of ranks."""
    from ._runs import open_order, parse_steps

    order = open_order(arguments, whole=True)
    if arguments.check_nesting:
        check_nesting(order, arguments)
        return
    if not arguments.to:
        raise ConfigError("to, check_nesting: found none, need one of them")
    from binidx.run.provenance.export import count_rows, export, plan_by_rank, plan_by_steps  # needs pyarrow

    steps, place = parse_steps(order, arguments.steps), workers(arguments)
    per_file, plans = arguments.steps_per_file, list[tuple[Any, Sequence[Any]]]()
    for own, part in order.orders(steps):
        files = plan_by_rank(own.num_ranks, part) if per_file is None else plan_by_steps(part, per_file)
        plans.append((own, place.select(files)))
    if len(plans) > 1 and not per_file:
        raise ConfigError("steps_per_file: found none, the steps are those of several runs, needs a number; or --steps")
    share = [part for _, parts in plans for part in parts]
    rows, written = sum(count_rows(own, part) for own, parts in plans for part in parts), 0
    arguments.watch.begin("order", rows, 0, "rows")
    docs = None if arguments.no_docs else "spans" if arguments.spans else "ends"
    trained = isinstance(order, binidx.RunHistory) and any(run.iterations_to_skip for run in order.runs)
    options = {"docs": docs, "workers": place, "trained": trained, **chosen(arguments, "tokens", "storage_options")}
    for own, parts in plans:
        written += export(own, arguments.to, parts, **options, watch=arguments.watch.advance)
    text = f"{arguments.to}: {counts(files=len(share))}, {written:,} written now, {counts(rows=rows)}"
    print_result({"to": arguments.to, "files": len(share), "written": written, "rows": rows}, text, arguments)


def check_nesting(order: Any, arguments: argparse.Namespace) -> None:
    """Print for each packed set after how many tokens all numbers of ranks have read the same blocks."""
    text, lines, sets = arguments.check_nesting, [], []
    if not isinstance(order, packed.PackedRunOrder) or order.files is None:
        found = "the order of a GPT run is the same for any number of ranks"
        raise ConfigError(f"--check-nesting: {found}; needs packed files")
    try:
        ranks = [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--check-nesting: found {text}, needs numbers of ranks such as 64,256,512") from None
    for name, of, files in zip(order.packed.names, order.packed.sets, order.files, strict=True):
        nesting = packed.Nesting(of, files.block_size, [count * max(1, order.packed.num_workers) for count in ranks])
        last, tokens, rests = nesting.num_syncs, nesting.sync_tokens, []
        every = f"{tokens:,} tokens ({counts(files=nesting.sync_files)})"
        lines.append(f"{name}: {', '.join(map(str, ranks))} ranks read the same set of blocks every {every}")
        lines.append(f"  {last} times in a pass, the last after {last * tokens:,} tokens")
        for count, shards in zip(ranks, nesting.shards, strict=True):
            read = nesting.files_read(shards)
            behind, dropped = read - last * nesting.sync_files, of.num_files - read
            rests.append({"ranks": count, "files_behind": behind, "files_dropped": dropped})
            lines.append(f"  {count} ranks: {behind:,} files after it are not in step, {dropped:,} are never read")
        row = {"name": name, "sync_tokens": tokens, "sync_files": nesting.sync_files, "syncs": last}
        sets.append({**row, "ranks": rests})
    print_result(sets, "\n".join(lines), arguments)


main = Command("order", __doc__, add_options, export_order, RESUMES, progress=True)
