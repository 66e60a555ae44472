"""Indices of a run, which `binidx prepare index` builds and prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from binidx.dataset.pinned_run import PinnedFile
from binidx.index.cache.index_cache import Outcome
from binidx.index.cache.index_files import NpyLayout
from binidx.order.requests import find_blend
from binidx.run.run_file import Run
from binidx.run.run_order import count_source

from ._display import MOST_ROWS, Bar, human_bytes, human_seconds, shortened, table

UNWRITTEN = "not written"


def build(wanted: Run, bar: Bar, *, pin: bool) -> tuple[list[dict[str, Any]], str | None, list[str]]:
    """Build all indices of a run and pin its objects.

    Returns:
        a row for each index, the URI of the pinned file, and the prefixes without ETags.
    """
    outcomes: dict[str, Outcome] = {}
    bar.begin("indices", num_indices(wanted), 0, "indices")

    def record(outcome: Outcome) -> None:
        outcomes[outcome.files.name] = outcome if outcome.is_written() else replace(outcome, how=UNWRITTEN)
        bar.advance(1)

    built = [phase.build(on_outcome=record, pinned=False, planned=False) for phase in wanted.phases]
    # Phases have one validation set, and one index where they have as many samples.
    named = {dataset.index_name: dataset for each in built for dataset in PinnedFile.list_indexed(each)}
    rows = [describe_index(each, name.rpartition("-")[2], outcomes.get(name)) for name, each in named.items()]
    return rows, *PinnedFile.pin(wanted.config, [*named.values()] if pin else [])


def describe_unpinned(prefixes: Sequence[str]) -> str:
    """Return the line of the prefixes that have no pins, and the way out."""
    more = f" and {len(prefixes) - 1:,} more" if len(prefixes) > 1 else ""
    return (
        f"not pinned: no ETags of {prefixes[0]}{more}; a start does not notice that they were replaced. Let the store "
        "send ETags (JuiceFS: gateway --keep-etag, and upload the files through it), then give the command again"
    )


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
    how = outcome.how if outcome else Outcome.NOT_KEPT
    blended = dataset not in dataset.parts
    files = outcome.files if outcome and how not in (Outcome.NOT_KEPT, UNWRITTEN) else None
    return {
        "split": split,
        "source": f"blend of {len(dataset.datasets):,}" if blended else dataset.dataset_path,
        "directory": files.directory.uri if files else "",
        "files": [f"{files.name}-{name}.npy" for name in arrays] if files else [],
        "documents": None if blended else count_source(dataset.index_order.sources[0])[0],
        "samples": len(dataset.index_order),
        "epochs": None if blended else dataset.num_epochs,
        "num_bytes": sum(NpyLayout(array.shape, array.dtype).size for array in arrays.values()),
        "seconds": outcome.seconds if outcome else 0.0,
        "how": how,
    }


def describe_indices(rows: Sequence[dict[str, Any]]) -> str:
    """Return the indices as text: a table of counts, then the locations of the files, then sums."""
    head = ["index", "documents", "samples", "epochs", "size", "time", ""]
    shown = rows if len(rows) <= MOST_ROWS else [row for row in rows if row["how"] != Outcome.NOT_KEPT]
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
    small = "; what is not kept is built at each start, sooner than fetched" if counts[Outcome.NOT_KEPT] else ""
    return f"{len(rows)} {'index' if len(rows) == 1 else 'indices'}: {text}; {human_bytes(kept)} kept{small}"
