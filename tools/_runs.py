"""Work of the commands about a saved run: the run, its sizes, its steps, and rows with documents and text."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from binidx.errors import ConfigError
from binidx.format.sidecars.lineage import origin_text
from binidx.format.tokens import index_of
from binidx.order.order_protocols import Numbers
from binidx.order.view import DocumentList
from binidx.packed.packed_run import PackedRunOrder, load_packed_run
from binidx.run.history import LoadPacked, RunHistory, Runs
from binidx.run.loaded_dataset import load_dataset
from binidx.run.provenance.exposures import EXPOSURE_STEPS, Exposures
from binidx.run.run_file import Run
from binidx.run.run_kind import is_packed_run
from binidx.run.run_order import RunOrder
from binidx.run.schedule import check_steps, split_sizes
from binidx.search.document_search import find_tokenizer
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.ranges import cut
from binidx.storage.writing.publish import write_object
from binidx.tokenizers.library import open_decoder

from ._display import print_above, print_note
from ._options import chosen

TEXT_WIDTH = 100
"""Characters of a document's text that are printed where the output is no terminal."""


def print_comparison(normalized: bool) -> None:
    """Print how texts were compared, to stderr."""
    rules = "in normal form (NFKC, case folded, a run of blanks and punctuation is one blank)"
    plain = "byte for byte; --normalize folds case, Unicode, blanks, punctuation"
    print(f"compared {rules if normalized else plain}", file=sys.stderr)


def load_sized(arguments: argparse.Namespace) -> Run:
    """Return the run that the argument RUN names, with the sizes that the options of `add_sizes` give.

    Raises:
        ConfigError: evaluations without a length, a length for a run in stages, or invalid numbers.
    """
    run = load_run(arguments)
    evaluation = _given(arguments, "eval_interval", "eval_iters")
    if arguments.train_iters is None and arguments.train_samples is None:
        if evaluation:
            raise ConfigError("--eval-interval, --eval-iters: need --train-iters or --train-samples")
        return run
    if run.stages is not None:
        raise ConfigError("--train-iters, --train-samples: stages have sizes of their own")
    length = chosen(arguments, "train_iters", "train_samples")
    if 0 in length.values():
        raise ConfigError("--train-iters, --train-samples: found 0, needs 1 or more")
    sizes = split_sizes(run.schedule, **length, full_validation=bool(run.config.full_validation), **evaluation)
    return replace(run, sizes=sizes)


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    given = vars(arguments)
    return {name: given[name] for name in names if given.get(name) is not None}


def load_run(arguments: argparse.Namespace) -> Run:
    """Return the run that the argument RUN names, with the ranks and batch sizes that `add_topology` gives."""
    batch = _given(arguments, "data_parallel_size", "micro_batch_size", "global_batch_size")
    if (length := getattr(arguments, "sequence_length", None)) is None:
        return replace(Run.load(arguments.run, arguments.storage_options), **batch)
    dataset = load_dataset(arguments.run, length, storage_options=arguments.storage_options)
    return dataset.as_run(**{"micro_batch_size": 1, **batch})


def open_run(arguments: argparse.Namespace, run: Run) -> RunOrder:
    """Return the order of the run, without those before it, with its indices loaded.

    Args:
        arguments: with those of `add_run`.
        run: the run that they name.
    """
    if run.build(planned=False)[0] is None:
        raise ConfigError(f"{arguments.run}: has no train split")
    return RunOrder.of(run)


def open_order(arguments: argparse.Namespace, *, whole: bool = False) -> RunHistory | PackedRunOrder:
    """Return the history of the run as `open_history`, also after packed files, or the order of a run over those.

    Args:
        arguments, whole: as for `open_history`.
    """
    file = Location(arguments.run, arguments.storage_options)
    is_prefix = getattr(arguments, "sequence_length", None) is not None
    if is_prefix or not is_packed_run(file):
        return open_history(arguments, whole=whole, load_packed=load_packed_run)
    given = _given(arguments, "data_parallel_size", "micro_batch_size", "global_batch_size")
    if wrong := next((name for name, size in given.items() if size < 1), None):
        raise ConfigError(f"{wrong}: found {given[wrong]}, needs a whole number from 1")
    order = load_packed_run(arguments.run, arguments.storage_options)
    micro = given.get("micro_batch_size", order.packed.micro_batch_size)
    ranks = given.get("data_parallel_size", order.num_ranks)
    size = given.get("global_batch_size", micro * ranks * order.packed.accumulation)
    if size % (micro * ranks):
        raise ConfigError(f"global_batch_size: found {size}, needs a multiple of {micro * ranks}")
    return order.replace(micro_batch_size=micro, num_ranks=ranks, accumulation=size // (micro * ranks))


def open_history(
    arguments: argparse.Namespace, *, whole: bool = False, load_packed: LoadPacked | None = None
) -> RunHistory:
    """Return the history of the run, of whose indices ranges are read as needed, or which are loaded whole.

    How a run continues the one before it is printed on stderr, where the two have another option `order`.

    Args:
        arguments: with those of `add_run`, and of `add_topology` if the command has them.
        whole: whether to load indices.
        load_packed: as for `RunHistory.of`.
    """
    history = RunHistory.of(load_run(arguments), whole=whole, load_packed=load_packed)
    for line in history.describe_continuations():
        print_note("binidx", line)
    return history


def parse_steps(order: Runs, text: str | None) -> range:
    """Parse `A:B`, `A:`, `:B`, a single step or nothing, as in a slice, into steps of the run.

    Args:
        order: the run or history.
        text: the value of --steps.
    """
    first, colon, stop = (text or ":").partition(":")
    count = order.num_steps() if not stop and (colon or not text) else None
    if not stop and colon and count is None:
        raise ConfigError("steps: this run has no end, needs A:B")
    try:
        start = int(first) if first else order.first_step
        steps = range(start, (int(stop) if stop else count or 0) if colon else start + 1)
    except ValueError:
        raise ConfigError(f"steps: found {text}, needs A:B, or a step") from None
    try:
        check_steps(steps, order.num_steps(), "steps", order.first_step)
    except IndexError as error:
        raise ConfigError(str(error)) from None
    return steps


def stop_step(order: Runs, text: str | None) -> int:
    """Return the first step that is not counted, of the value `:N` of --steps; by default the end of the run."""
    steps = parse_steps(order, text)
    if steps.start != order.first_step:
        raise ConfigError(f"steps: found {text}, counts are of all steps before one; need :{steps.stop}")
    return steps.stop


def stop_before(history: RunHistory, arguments: argparse.Namespace) -> int:
    """Return the first step that is not counted: of --steps :N, or of a checkpoint, --consumed-samples C."""
    consumed = arguments.consumed_samples
    return stop_step(history, arguments.steps if consumed is None else f":{step_at(history, consumed)}")


def step_at(history: RunHistory, consumed_samples: int) -> int:
    """Return the step with which a checkpoint of `consumed_samples` resumes; ConfigError if none begins there.

    In a history of several runs the number is Megatron's, of the samples of all datasets.
    """
    schedules = [*([] if history.packed is None else [history.packed.reading.schedule])]
    schedules += [run.schedule for run in history.runs]
    totals = [schedule.consumed_samples + schedule.earlier_samples for schedule in schedules]
    schedule = schedules[max(bisect_right(totals, consumed_samples) - 1, 0)]
    consumed_samples -= schedule.earlier_samples
    step = schedule.step_of(max(consumed_samples, schedule.consumed_samples))
    if schedule.samples_before(step) != consumed_samples:
        near = f"{schedule.samples_before(step):,} and {schedule.samples_before(step + 1):,}"
        raise ConfigError(f"--consumed-samples {consumed_samples}: within a step; steps begin at {near}")
    return step


def decoder(
    uri: str | None, options: Mapping[str, Any] | None, prefixes: Iterable[str]
) -> Callable[[list[int]], str] | None:
    """Return a function that decodes ids by the tokenizer `uri`, of any kind of `preprocess`; None without `uri`.

    Args:
        uri: any name that `describe_tokenizer` takes.
        options: fsspec's options of its store.
        prefixes: of the datasets; a warning if a manifest names another tokenizer.
    """
    if uri is None:
        return None
    return open_decoder(find_tokenizer([Location(prefix, options) for prefix in prefixes], uri), options)


def write_text(uri: str, text: str, options: Mapping[str, Any] | None) -> None:
    """Write text to an object; what is no file, such as /dev/stdout or a pipe, is written to and not replaced."""
    target = Location.of(uri, options)
    path = Path(target.local_path or "")
    if path.is_symlink() or path.is_fifo() or path.is_char_device():
        path.write_text(text, "utf-8")
    else:
        write_object(target, [text.encode()])


MANY_DOCUMENTS = 10_000
"""Number of documents of a list from which on indices are loaded whole: reads of ranges cost more than that."""


def read_list(uri: str, options: Mapping[str, Any] | None) -> DocumentList:
    """Return a list of documents, as `binidx.View` takes it.

    Args:
        uri: of the list; "-" for stdin.
        options: fsspec's options of its store.
    """
    if uri == "-":
        return DocumentList("stdin", sys.stdin.buffer.read())
    return DocumentList(uri, bytes(read_whole(open_object(uri, storage_options=options))))


def listed_documents(history: Runs, listed: DocumentList) -> dict[str, Numbers]:
    """Return prefix -> numbers of the documents in a list; ConfigError if a line names no document of the history."""
    sources, listed = history.select_sources(), listed.renamed(history.joined.names)
    listed.check_sources(sources.keys())
    return {
        name: listed.documents_of(name, len(index_of(source.dataset).document_indices) - 1, is_only=len(sources) == 1)
        for name, source in sources.items()
        if {name, None} & listed.by_source.keys()
    }


def exposure_rows(found: Mapping[str, Exposures], rows_at_once: int = 4096) -> Iterator[dict[str, Any]]:
    """Yield a row of JSON values for each document or match; `rows_at_once` are in memory together."""
    for source, each in found.items():
        for rows in cut((0, len(each.document)), rows_at_once):
            columns = {name: values[slice(*rows)] for name, values in vars(each).items()}
            yield from ({"source": source, **row} for row in column_rows(columns))


def column_rows(columns: Mapping[str, Numbers]) -> list[dict[str, Any]]:
    """Return columns of `Exposures` as rows of JSON values, None where a step or token is not known."""
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    return [row | {name: None for name in (*EXPOSURE_STEPS, "stop_token") if row.get(name, 0) < 0} for row in rows]


READ_HEAD = ("whole", "in steps", "part", "in steps")


def read_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells below `READ_HEAD` of a row of `column_rows`."""
    return [cell for of in ("_whole", "_part") for cell in (f"{row[f'samples{of}']:,}", steps_cell(row, of))]


def steps_cell(row: Mapping[str, Any], of: str = "") -> str:
    """Return the first and the last step of a row of `column_rows`, of the column `of`, as text."""
    first, last = (row[f"{end}_step{of}"] for end in ("first", "last"))
    shown = ["earlier" if first is None else f"{first:,}"] if first != last else []
    return " to ".join([*shown, "-" if last is None else f"{last:,}"])


def print_rows(rows: Iterator[dict[str, Any]], as_json: bool) -> int:
    """Print one JSON object per line, or some lines per row; return the number of rows.

    Args:
        rows: as `build_rows` yields them.
        as_json: whether to print JSON.
    """
    count = 0
    for row in rows:
        print_above(json.dumps(row) if as_json else _lines(row))
        count += 1
    return count


def _lines(row: Mapping[str, Any]) -> str:
    """Return a sample, or a block of packed files with a text of its own, as text."""
    where = f"before consumed_samples  position {row['position']:,}"
    if row["step"] is not None:
        where = f"step {row['step']:,}  rank {row['rank']}  slot {row['slot']}"
        where += "" if row.get("trained", True) else "  not trained"
    named = f"{row['source']}, epoch {row['epoch']}"
    is_block = "block" in row
    place = f"{named}  {row['file']}, block {row['block']:,}" if is_block else f"sample {row['sample']:,}  {named}"
    lines, width = [f"{where}  {place}"], shutil.get_terminal_size((TEXT_WIDTH + 5, 0)).columns - 5
    for doc in [*row.get("docs", ()), *([row] if is_block else [])]:
        if "doc" in doc:
            label = "  only the last label" if "only_label" in doc else ""
            lines.append(
                f"  document {doc['doc']:>12,}  tokens {doc['start']:,} to {doc['start'] + doc['len']:,}{label}"
            )
        if "origin" in doc:
            lines.append(f"    from {origin_text(doc['origin'])}")
        if "text" in doc:
            text = " ".join(doc["text"].split())
            lines.append(f"    {text[:width]}{'…' * (len(text) > width)}")
    return "\n".join(lines)
