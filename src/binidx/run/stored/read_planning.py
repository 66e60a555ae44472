"""Write the read plan of a run: the places of the tokens of its samples, in its order, for `binidx.PlannedDataset`.

For runs whose many nodes start from one bucket: a node reads kilobytes instead of every `.idx` and index. The plan has
56 bytes for a sample of 5 pieces, and copies no token.

The work is cut into parts that are written atomically and in any order, by any workers. Existing parts are kept, so an
interrupted job resumes, and several machines may share it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import xxhash

from binidx.dataset.config import Split
from binidx.dataset.stored.planned import PlannedDataset
from binidx.errors import ConfigError, trims_traceback
from binidx.jobs.parts import Values, Workers, make_parts
from binidx.jobs.runner import check_stop
from binidx.order.blended_order import MembersOrder
from binidx.order.source_order import SourceOrder
from binidx.order.stored import planned_order
from binidx.order.stored.planned_order import PlannedSource, ReadPlan
from binidx.run.global_order import GlobalOrder
from binidx.run.run_order import RunOrder
from binidx.run.run_parts import PerProcess, RangePart
from binidx.run.schedule import BatchSchedule, check_steps
from binidx.storage.location import Location
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import create_object, put_if_absent

PART_SAMPLES = 1 << 18
"""Samples of a part: 15 MB with 5 pieces a sample, 54 MB with 20."""

PLANNED_AT_ONCE = 256 * planned_order.BLOCK_SAMPLES
"""Samples whose places are computed at once: 3 MB of arrays with 5 pieces a sample."""

TWO_THREADS = Workers(count=2)

PLANNED_KINDS = ("GPTDataset", "BestFitGPTDataset")
"""Recorded names of the datasets whose samples are their tokens, pieces and the config alone."""


@trims_traceback
def plan_reads(order: RunOrder, steps: range) -> ReadPlan:
    """Return the description of a read plan, which lists where the tokens of the samples of some steps are stored.

    The description covers the run and its token files, without the samples. `write_read_plan` takes it, computes the
    places of the tokens and writes them in parts; `PlannedDataset` reads the result. The function looks up the
    checksums of each token file in the store.

    Args:
        order: the order of the run.
        steps: consecutive steps whose samples the plan covers.

    Returns:
        The content of `readplan.json`: range of samples, options of the run, URIs and identities of its token files.

    Raises:
        IndexError: a step is beyond the end of the run.
        ConfigError: `steps` is empty; or a source is not a GPT or best-fit dataset of the run's `sequence_length`, so
            that the places of tokens alone do not determine its samples.

    Source: ours.
    """
    check_planned(order, steps, "plan")
    return _describe_plan(order, steps)


def _describe_plan(order: RunOrder, steps: range) -> ReadPlan:
    length = order.config.sequence_length
    for member in order.reads.members:
        options = member.identity if isinstance(member.identity, dict) else {}
        kind, found = str(options.get("class", type(member).__name__)), options.get("sequence_length", 0)
        if kind.partition("-")[0] not in PLANNED_KINDS or found != length:
            kinds = " or ".join(PLANNED_KINDS)
            raise ConfigError(f"order: found {kind} of {found} tokens, a read plan needs {kinds} of {length}")
    is_single = order.reading.dataloader_type == "single"
    identity = order.order.identity if is_single else {"class": "PlannedDataset", "fingerprint": order.fingerprint}
    return ReadPlan(
        **describe_samples(order, steps, PART_SAMPLES),
        order=json.loads(json.dumps(identity, default=str)),
        masks_ends=any(isinstance(member, SourceOrder) and member.ends_documents for member in order.reads.members),
        sources=OPENS.map(PlannedSource.of, order.sources),
    )


def check_planned(order: RunOrder, steps: range, purpose: str) -> None:
    """Raise IndexError or ConfigError unless a run has these steps, at least one."""
    check_steps(steps, order.num_steps(), first_step=order.first_step)
    if not steps:
        raise ConfigError(f"steps: found {steps.start}:{steps.stop}, need one to {purpose}")


def describe_samples(order: RunOrder, steps: range, samples_per_part: int) -> dict[str, Any]:
    """Return the fields of a `Baked` of some steps of a run.

    Args:
        order: the order of the run.
        steps: the steps.
        samples_per_part: number of samples in each part but the last.
    """
    return {
        "fingerprint": order.fingerprint,
        "first": order.reading.schedule.samples_before(steps.start),
        "stop": order.reading.schedule.samples_before(steps.stop),
        "samples_per_part": samples_per_part,
        "sequence_length": order.config.sequence_length,
        "add_extra_token": order.config.add_extra_token_to_sequence,
        "blended": isinstance(order.order, MembersOrder) and order.order.is_blend,
        "options": PlannedDataset.describe_options(order.config, Split.train),
    }


@trims_traceback
def write_read_plan(
    order: RunOrder,
    directory: str,
    plan: ReadPlan,
    *,
    workers: Workers = TWO_THREADS,
    storage_options: Mapping[str, Any] | None = None,
    watch: Callable[[int], object] = lambda num_samples: None,
) -> tuple[int, int]:
    """Write the read plan of a run, which `PlannedDataset` reads; keep the parts that exist.

    Args:
        order: the order of the run.
        directory: path or URI of the target.
        plan: the result of `plan_reads`, the same for all machines that share the work.
        workers: workers that write the parts, each a part at a time, and this call's share of the parts.
        storage_options: options of the target's store.
        watch: called with the number of samples of each part that is written or exists.

    Returns:
        The number of parts written, and of those that are still missing: shares of other machines. The plan can be
        read when none is.

    Raises:
        ObjectExistsError: the directory holds the plan of another run, or of other data.
        ObjectChangedError: a worker in another process found other data.

    Source: ours.
    """
    target = Location(Location.of(directory).absolute, storage_options)
    description = plan.write_first(target)
    parts = [RangePart(plan.part_file(target, positions).name, positions) for positions in plan.parts()]
    write = partial(_write_part, order.per_process(), target, xxhash.xxh3_128_hexdigest(description))
    results = make_parts(write, parts, workers, advance=watch, remote_data=target.local_path is None)
    missing = OPENS.map(object_exists, [target / part.name for part in parts]).count(False)
    if not missing:
        put_if_absent(target / plan.last_file, description)
    return sum(result["written"] for result in results.values()), missing


def prepare_read_plan(
    dataset: Any,
    num_samples: int | None,
    workers: Workers = TWO_THREADS,
    watch: Callable[[int], object] = lambda num_samples: None,
) -> str | None:
    """Write the read plan of all samples of a dataset into its `path_to_cache`, where builds with `read_plan` find it.

    Args:
        dataset: a GPT dataset, or a blend of them.
        num_samples: the number of samples that was requested of the builder.
        workers, watch: as for `write_read_plan`.

    Returns:
        URI of the plan; None without a `path_to_cache`, or for one of several validation sets.

    Raises:
        ConfigError: the places of tokens alone do not determine the samples.
        ObjectExistsError: there is a plan of other data.
    """
    part = dataset.parts[0]
    places = PlannedDataset.locate(part.source_request.kind, dataset.config, part.index_split, num_samples)
    if not places:
        return None
    folder = next((place for place in places if object_exists(place / ReadPlan.last_file)), places[0])
    order = RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(1, 1, 1), max(1, len(dataset))))
    options = PlannedDataset.describe_options(dataset.config, part.index_split)
    plan = replace(_describe_plan(order, range(len(dataset))), options=options)
    write_read_plan(order, folder.uri, plan, workers=workers, storage_options=folder.options, watch=watch)
    return folder.uri


def _write_part(shared: PerProcess[RunOrder], target: Location, plan_digest: str, part: RangePart) -> Values:
    """Write a part of a read plan, unless it exists, in a worker."""
    file, sizes = target / part.name, list[int]()
    if object_exists(file):
        return {"written": False}
    order = shared.get()
    with create_object(file) as out:
        for first, stop in cut((part.items.start, part.items.stop), PLANNED_AT_ONCE):
            check_stop()
            pieces = order.reads.locate(order.reading.samples_at(np.arange(first, stop)))
            sizes += map(out.write, planned_order.format_blocks(pieces, first, plan_digest))
        out.write(planned_order.seal(np.array(sizes, "<u4").tobytes(), part.items, plan_digest))
    return {"written": True}
