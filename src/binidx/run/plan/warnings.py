"""Warnings about a planned run, one line each; none if the plan has no problem."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from binidx.loader.readahead import BUDGET_BYTES
from binidx.run.global_order import GlobalOrder
from binidx.run.plan.costs import Costs, total_costs
from binidx.run.plan.forecast import Link, sample_memory_bytes
from binidx.run.plan.inventory import STALE, UNPROVEN, RunInventory, order_changes
from binidx.storage.settings import ReadSettings
from binidx.storage.stats import bytes_text

MOST_EPOCHS = 4.0
"""After so many passes tokens that are repeated teach less than new ones. Source: Muennighoff et al. 2023,
https://arxiv.org/abs/2305.16264"""

LARGE_IDX_BYTES = 64 << 20
"""Smaller ones are read in a moment."""

NAMED = 3
"""Things of a kind that are named; of others the number."""


def run_warnings(
    inventory: RunInventory,
    order: GlobalOrder | None,
    costs: Sequence[Costs],
    link: Link | None,
    tokens_per_second: float | None,
    epoch_bytes: float,
) -> list[str]:
    """Return all warnings of a plan.

    Args:
        order: the inventory's order; None if there are too few samples for one.
        costs, epoch_bytes: costs of training, and bytes of a node's disk cache.
        tokens_per_second: throughput of all ranks.
    """
    return [
        *_few(_empty(inventory)),
        *_of_order(inventory, order),
        *_few(_repeated(costs)),
        *_few(order_changes(inventory)),
        *_few(_doubtful(inventory)),
        *_too_slow(inventory, costs, link, tokens_per_second),
        *_too_full(inventory, epoch_bytes),
    ]


def _few(lines: Iterator[str] | list[str]) -> Iterator[str]:
    found = [*lines]
    yield from found[:NAMED]
    if len(found) > NAMED:
        yield f"... and {len(found) - NAMED:,} more of this kind"


def _empty(inventory: RunInventory) -> Iterator[str]:
    in_blend = {id(member) for blend in inventory.blends if blend.wanted.size != 0 for member in blend.wanted.members}
    for each in inventory.indices:
        name = f"{each.wanted.prefix}, {each.wanted.split.name}"
        if each.problem:
            yield f"{name}: {each.problem}"
        elif not each.num_samples and (each.wanted.num_samples != 0 or id(each.wanted) in in_blend):
            fails = "; a blend refuses it" if id(each.wanted) in in_blend else ""
            yield f"{name}: no sample in {each.documents:,} documents of {each.tokens:,} tokens{fails}"


def _of_order(inventory: RunInventory, order: GlobalOrder | None) -> Iterator[str]:
    run = inventory.run
    if order is None:
        yield f"train: {inventory.num_samples:,} samples, one micro-batch of each rank needs {run.schedule.block:,}"
        return
    stages = run.schedule.stages
    if len(stages) > 1:
        yield (
            f"the batch grows from {stages[0].batch_size:,} to {stages[-1].batch_size:,} samples in {len(stages):,} "
            f"stages, until step {stages[-1].first_step:,}: steps are not samples over batch size"
        )
    size, steps = run.schedule.global_batch_size, order.num_steps()
    if steps is not None:
        left = inventory.num_samples - run.schedule.samples_before(steps)
        if steps and left > 0:
            yield f"the last {left:,} samples fill no step of {stages[-1].batch_size:,}, and are not read"
    elif not run.data_sharding and inventory.num_samples % size:
        yield (
            f"cyclic without data_sharding: {inventory.num_samples:,} samples are no whole steps of {size:,}; "
            "the first ranks get more batches at the end of each epoch, as in Megatron"
        )
    elif rest := inventory.num_samples % run.schedule.block:
        yield f"cyclic: {rest:,} samples fill no micro-batch of all ranks, and are never read"


def _repeated(costs: Sequence[Costs]) -> Iterator[str]:
    for each in sorted(costs, key=lambda each: -each.source.epochs):
        if each.source.epochs > MOST_EPOCHS:
            yield (
                f"{each.source.headline.prefix}: read {each.source.epochs:.1f} times; after about "
                f"{MOST_EPOCHS:.0f} passes repeated tokens teach less"
            )


def _doubtful(inventory: RunInventory) -> Iterator[str]:
    for each in inventory.indices:
        idx_bytes = inventory.summaries[each.wanted.prefix].idx_bytes
        if each.cache.state == STALE or (each.cache.state == UNPROVEN and idx_bytes >= LARGE_IDX_BYTES):
            yield f"{each.wanted.prefix}, {each.wanted.split.name}: cache {each.cache.state}: {each.cache.why}"
    for blend in inventory.blends:
        if blend.cache.state == STALE:
            yield f"blend, {blend.wanted.split.name}: cache {blend.cache.state}: {blend.cache.why}"


def _too_slow(
    inventory: RunInventory, costs: Sequence[Costs], link: Link | None, tokens_per_second: float | None
) -> Iterator[str]:
    if link is None or tokens_per_second is None:
        return
    run, samples = inventory.run, sum(each.source.samples for each in costs) or 1.0
    needed = tokens_per_second / run.data_parallel_size / run.config.sequence_length
    reading = total_costs(costs).times(1 / samples)
    most = link.most_samples_per_second(reading.requests, reading.num_bytes)
    if needed > most:
        yield (
            f"a rank needs {needed:.3g} samples/s, and can have {most:.3g} of this store: {link.requests_in_flight} "
            f"requests in flight, {link.latency_seconds * 1000:.0f} ms, {reading.requests:.3g} requests a sample, "
            f"{bytes_text(link.bytes_per_second)}/s; a cache_dir, longer documents or more ranks help"
        )
        return
    mask = bool(run.config.create_attention_mask)
    window = BUDGET_BYTES / sample_memory_bytes(run.config.sequence_length, attention_mask=mask)
    if needed * link.latency_seconds * 2 > window:
        yield (
            f"look-ahead: a rank needs {needed * link.latency_seconds * 2:.3g} samples on their way, and its window "
            f"holds {window:.3g} ({bytes_text(BUDGET_BYTES)}); give look_ahead=n"
        )


def _too_full(inventory: RunInventory, epoch_bytes: float) -> Iterator[str]:
    settings = ReadSettings.of(inventory.run.config.storage_options)
    if settings.cache_dir is not None and settings.cache_bytes is not None and epoch_bytes > settings.cache_bytes:
        yield (
            f"{settings.cache_dir}: bound to {bytes_text(settings.cache_bytes)}, one epoch of a node takes "
            f"{bytes_text(epoch_bytes)}; what it has no room for is fetched again"
        )
