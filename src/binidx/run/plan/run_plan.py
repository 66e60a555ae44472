"""Plan of a run: its inventory, costs, start-up time and warnings, computed before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from binidx.dataset.config import Split
from binidx.errors import ConfigError
from binidx.run.global_order import GlobalOrder
from binidx.run.plan.costs import (
    Costs,
    epoch_bytes_per_node,
    is_remote_prefix,
    measure_link,
    request_dollars,
    source_costs,
    start_phases,
    total_costs,
)
from binidx.run.plan.forecast import (
    SECONDS_PER_BLENDED_SAMPLE,
    Link,
    ReadCost,
    StartPhase,
    blend_bytes,
    build_memory_bytes,
    build_seconds,
    gpt_index_bytes,
    start_seconds,
)
from binidx.run.plan.inventory import BlendInventory, IndexInventory, RunInventory, take_inventory
from binidx.run.plan.warnings import run_warnings
from binidx.run.run_file import Run


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run.

    Attributes:
        num_samples, num_steps: remaining samples and whole steps; of a cyclic run None, and the samples of an epoch.
        nodes: nodes that share the ranks.
        link: connection to the largest remote source; None if all sources are local.
        same_order_up_to: largest number of train samples that keeps the present order; None if unknown.
        epoch_bytes: bytes of a node's disk cache for its part of an epoch.
    """

    inventory: RunInventory
    num_samples: int
    num_steps: int | None
    nodes: int
    tokens_per_second: float | None
    costs: Sequence[Costs]
    link: Link | None
    waits: Sequence[StartPhase]
    epoch_bytes: float
    same_order_up_to: int | None
    cautions: Sequence[str]

    @property
    def is_remote(self) -> bool:
        return any(is_remote_prefix(prefix) for prefix in self.inventory.summaries)

    @property
    def reading(self) -> ReadCost:
        """The cost of reading in the whole run."""
        return total_costs(self.costs)

    @property
    def dollars(self) -> Mapping[str, float]:
        return request_dollars(self.costs)

    @property
    def start_seconds(self) -> float:
        return start_seconds(self.waits, self.link)

    def repeated_documents(self, costs: Costs) -> int:
        """Return the documents of a source that are read more than once, over whole and partial epochs."""
        return floor(min(max(costs.source.epochs - 1, 0.0), 1.0) * costs.source.documents)

    def index_rows(self) -> list[dict[str, Any]]:
        """Return each index as JSON values, split by split; the blend of a split comes first."""
        rows = []
        for split in Split:
            rows += [_blend_row(each) for each in self.inventory.blends if each.wanted.split is split]
            rows += [_index_row(each) for each in self.inventory.indices if each.wanted.split is split]
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "samples": self.num_samples,
            "steps": self.num_steps,
            "tokens": self.num_samples * self.inventory.run.config.sequence_length,
            "ranks": self.inventory.run.data_parallel_size,
            "nodes": self.nodes,
            "same_order_up_to": self.same_order_up_to,
            "sources": [self._source(each) for each in self.costs],
            "indices": self.index_rows(),
            "requests": self.reading.requests,
            "num_bytes": self.reading.num_bytes,
            "dollars": dict(self.dollars),
            "epoch_on_a_node_bytes": self.epoch_bytes,
            "link": None if self.link is None else vars(self.link),
            "start": {"seconds": self.start_seconds, "waits": [vars(each) for each in self.waits]},
            "cautions": [*self.cautions],
        }

    def _source(self, costs: Costs) -> dict[str, Any]:
        source, headline = costs.source, costs.source.headline
        return {
            "prefix": headline.prefix,
            "store": costs.store,
            "documents": source.documents,
            "tokens": source.tokens,
            "samples": source.samples,
            "epochs": source.epochs,
            "repeated_documents": self.repeated_documents(costs),
            "pieces_per_sample": costs.pieces,
            "stored_bytes": headline.stored_bytes,
            "idx_bytes": headline.idx_bytes,
            "compressed": headline.compressed,
            "checked": headline.checked,
            "num_parts": headline.num_parts,
            "requests": costs.reading.requests,
            "num_bytes": costs.reading.num_bytes,
        }


def _blend_row(blend: BlendInventory) -> dict[str, Any]:
    return {
        "split": blend.wanted.split.name,
        "source": f"blend of {len(blend.wanted.members):,}",
        "documents": None,
        "samples": blend.size,
        "epochs": None,
        "num_bytes": blend_bytes(blend.size),
        "memory_bytes": blend_bytes(blend.size),
        "build_seconds": blend.size * SECONDS_PER_BLENDED_SAMPLE,
        "cache": blend.cache.state,
        "why": blend.cache.why,
    }


def _index_row(index: IndexInventory) -> dict[str, Any]:
    plan = index.plan
    return {
        "split": index.wanted.split.name,
        "source": index.wanted.prefix,
        "documents": index.documents,
        "samples": index.num_samples,
        "epochs": plan.num_epochs if plan else 0,
        "num_bytes": gpt_index_bytes(index.documents, plan) if plan else 0,
        "memory_bytes": build_memory_bytes(index.documents, plan) if plan else 0,
        "build_seconds": build_seconds(index.documents, plan) if plan else 0.0,
        "cache": index.cache.state,
        "why": index.problem or index.cache.why,
    }


def plan_run(run: Run, *, nodes: int = 1, tokens_per_second: float | None = None) -> RunPlan:
    """Read the state of a run and compute its plan.

    Args:
        nodes: nodes that share the ranks.
        tokens_per_second: throughput of all ranks.

    Raises:
        ConfigError: nodes or tokens_per_second is not positive.
        ObjectNotFoundError, FormatError, StorageError: the data is absent, malformed or unreachable.
    """
    if nodes < 1 or (tokens_per_second is not None and not tokens_per_second > 0):
        raise ConfigError(f"plan: found {nodes} nodes, {tokens_per_second} tokens/s, needs numbers above 0")
    inventory = take_inventory(run)
    order = _order_of(run, inventory)
    steps = order.num_steps() if order else 0
    num_samples = inventory.num_samples if steps is None else run.schedule.samples_before(steps) - run.consumed_samples
    costs = source_costs(inventory, num_samples, nodes=nodes)
    remote = [each for each in inventory.summaries.values() if is_remote_prefix(each.prefix) and not each.num_parts]
    largest = max(remote, key=lambda each: each.stored_bytes, default=None)
    link = measure_link(largest, run.config.storage_options) if largest and largest.stored_bytes else None
    epoch_bytes = epoch_bytes_per_node(inventory, nodes=nodes)
    return RunPlan(
        inventory,
        num_samples,
        steps,
        nodes,
        tokens_per_second,
        costs,
        link,
        start_phases(inventory, costs),
        epoch_bytes,
        _same_order_up_to(inventory),
        run_warnings(inventory, order, costs, link, tokens_per_second, epoch_bytes),
    )


def _order_of(run: Run, inventory: RunInventory) -> GlobalOrder | None:
    if inventory.num_samples < run.schedule.block:
        return None
    return GlobalOrder(run.schedule, inventory.num_samples, run.dataloader_type, run.data_sharding)


def _same_order_up_to(inventory: RunInventory) -> int | None:
    """Return the number of train samples at which the first of its sources exhausts its order."""
    asked = inventory.run.sizes[0]
    train = [each for each in inventory.indices if each.wanted.split is Split.train and each.wanted.num_samples]
    if not asked or not train or inventory.run.stages is not None:
        return None
    return floor(min(asked * each.order.most / (each.wanted.num_samples or 1) for each in train if each.order))
