"""Write the read plan of a run: the places of the tokens of its samples, in its order, for `dataset/planned.py`.

For runs whose many nodes start from one bucket: a node reads kilobytes instead of every `.idx` and index. The plan has
56 bytes for a sample of 5 pieces, and copies no token.

The work is cut into parts that are written atomically and in any order. Existing parts are kept, so an interrupted job
resumes, and several machines may share it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from binidx.dataset.planned import check_plannable
from binidx.errors import ConfigError, ObjectExistsError, StorageError
from binidx.order.blended_order import list_members
from binidx.order.document_packing import PackedOrder
from binidx.order.gpt_order import GPTOrder, LazyOrder
from binidx.order.order_protocols import Numbers, Order, Source
from binidx.order.read_plan import (
    BLOCK_SAMPLES,
    PLAN_FILE,
    PlannedFile,
    PlannedPieces,
    PlannedSource,
    ReadPlan,
    format_blocks,
    format_table,
    part_location,
    read_plan,
)
from binidx.run.provenance.run_order import RunOrder
from binidx.run.schedule import check_steps
from binidx.storage.adapters import JoinedReader
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import codec_of, read_document
from binidx.storage.ranges import stored_reader
from binidx.storage.requests.remote_object import is_absent, object_exists, object_identity
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import create_object, put_if_absent

PART_SAMPLES = 1 << 18
"""Samples of a part: 15 MB with 5 pieces a sample, 54 MB with 20."""

AT_ONCE = 256 * BLOCK_SAMPLES
"""Samples whose places are computed at once: 3 MB of arrays with 5 pieces a sample."""

KINDS = ("GPTDataset", "BestFitGPTDataset")
"""Recorded names of the datasets whose samples are their tokens, pieces and the config alone."""


class WrittenPlan(NamedTuple):
    """Result of `write_read_plan`: the number of parts written, and of all parts that other machines must still write.

    The plan can be read if none is missing."""

    written: int
    missing: int


def plan_reads(order: RunOrder, steps: range) -> ReadPlan:
    """Return the description of a read plan of these steps.

    Args:
        order: the order of the run.
        steps: steps whose samples the plan has.

    Returns:
        The description, which `write_read_plan` publishes beside the parts.

    Raises:
        IndexError: a step is beyond the end of the run.
        ConfigError: there are no steps, or the samples depend on more than the places of their tokens.

    Source: ours.
    """
    check_steps(steps, order.num_steps())
    if not steps:
        raise ConfigError(f"steps: found {steps.start} to {steps.stop}, need one to plan")
    config, schedule, members = order.config, order.reading.schedule, list_members(order.order)
    check_plannable(config)
    for member in members:
        _check_member(member, config.sequence_length)
    is_single = order.reading.dataloader_type == "single"
    identity = order.order.identity if is_single else {"class": "PlannedDataset", "fingerprint": order.fingerprint}
    return ReadPlan(
        fingerprint=order.fingerprint,
        order=json.loads(json.dumps(identity, default=str)),
        first=schedule.samples_before(steps.start),
        stop=schedule.samples_before(steps.stop),
        samples_per_part=PART_SAMPLES,
        sequence_length=config.sequence_length,
        add_extra_token=config.add_extra_token_to_sequence,
        masks_ends=any(isinstance(member, PackedOrder) and member.ends_documents for member in members),
        blended=order.is_blended,
        sources=OPENS.map(_describe_source, order.sources),
    )


def _check_member(member: Order, sequence_length: int) -> None:
    """Raise ConfigError unless the samples of a source are GPT samples of this length."""
    order = member.order if isinstance(member, LazyOrder) else member
    if not isinstance(order, GPTOrder | PackedOrder) or order.parameters.kind.partition("-")[0] not in KINDS:
        kind = order.parameters.kind if isinstance(order, GPTOrder | PackedOrder) else type(order).__name__
        raise ConfigError(f"order: found samples of {kind}, a read plan needs those of {' or '.join(KINDS)}")
    if order.parameters.sequence_length != sequence_length:
        lengths = f"{order.parameters.sequence_length} and {sequence_length} tokens"
        raise ConfigError(f"order: found samples of {lengths}, a read plan stores one length")


def _describe_source(source: Source) -> PlannedSource:
    dataset = source.dataset
    reader, parts = dataset.bin_reader, [(dataset.bin_reader, dataset.index.num_bytes)]
    if isinstance(reader, JoinedReader):  # of a virtual merge
        parts = [*zip(reader.parts, reader.sizes, strict=True)]
    files = [_describe_file(*part, dataset.storage_options) for part in parts]
    return PlannedSource(source.prefix, np.dtype(dataset.index.dtype).name, files)


def _describe_file(reader: RangeReader, num_bytes: int, options: Mapping[str, Any] | None) -> PlannedFile:
    stored = stored_reader(reader)
    sums = _find_identity(Location(stored.uri + SUFFIX, options)) if codec_of(stored.uri) == "raw" else None
    return PlannedFile(stored.uri, dict(stored.identity), sums, reader.size, num_bytes)


def _find_identity(location: Location) -> dict[str, Any] | None:
    """Return the identity of an object; None if there is none."""
    try:
        return object_identity(location)
    except StorageError as error:
        if is_absent(error):
            return None
        raise


def locate_pieces(order: RunOrder, positions: Numbers) -> PlannedPieces:
    """Return the places of the tokens of the samples at some positions of a run.

    Args:
        order: the order of the run.
        positions: shape (B,).
    """
    samples = order.reading.samples_at(positions)
    spans, bounds = order.order.spans(samples)
    starts = np.empty(len(spans), np.int64)
    for source in np.unique(spans[:, 0]).tolist():
        rows = np.flatnonzero(spans[:, 0] == source)
        starts[rows] = order.sources[source].dataset.locate_all(np.ascontiguousarray(spans[rows, 1:]))[:, 0]
    return PlannedPieces(order.order.locate(samples)[0], bounds, starts, spans[:, 3])


def write_read_plan(
    order: RunOrder,
    directory: str,
    plan: ReadPlan,
    *,
    threads: int = 2,
    shard: int = 0,
    num_shards: int = 1,
    storage_options: Mapping[str, Any] | None = None,
    watch: Callable[[int], object] = lambda num_samples: None,
) -> WrittenPlan:
    """Write the read plan of a run, which `PlannedDataset` reads; keep the parts that exist.

    Args:
        order: the order of the run.
        directory: path or URI of the target.
        plan: the result of `plan_reads`, the same for all machines that share the work.
        threads: number of threads, each of which writes a part.
        shard, num_shards: this machine's share: every num_shards-th part, from part `shard` on.
        storage_options: options of the target's store.
        watch: called with the number of samples that were written, and for each part that exists.

    Returns:
        The number of parts written, and of those that are still missing: shares of other machines. The plan can be
        read when none is.

    Raises:
        ObjectExistsError: the directory holds the plan of another run, or of other data.

    Source: ours.
    """
    target = Location.of(directory, storage_options)
    draft = target / "draft.json"
    put_if_absent(draft, plan.format())
    found, plan_digest = read_plan(draft)
    if found != plan:
        raise ObjectExistsError(
            f"{draft}: is of another run, of other steps, or of data that changed since; write into another directory"
        )

    def write(part: range) -> bool:
        file = part_location(target, part)
        if object_exists(file):
            watch(len(part))
            return False
        sizes: list[int] = []
        with create_object(file) as out:
            for first in range(part.start, part.stop, AT_ONCE):
                positions = np.arange(first, min(first + AT_ONCE, part.stop))
                sizes += map(out.write, format_blocks(locate_pieces(order, positions), first, plan_digest))
                watch(len(positions))
            out.write(format_table(sizes, part, plan_digest))
        return True

    with OPENS.executor(threads) as pool:
        written = sum(pool.map(write, plan.parts()[shard::num_shards]))
    others = [part_location(target, part) for part in plan.parts()] if num_shards > 1 else []
    missing = OPENS.map(object_exists, others).count(False)
    if not missing:
        put_if_absent(target / "readplan.json", read_document(PLAN_FILE, draft))
    return WrittenPlan(written, missing)
