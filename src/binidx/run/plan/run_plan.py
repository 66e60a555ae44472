"""Plan of a run: its inventory, costs and warnings, computed before it starts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, floor
from typing import Any

from binidx.corpus.whole_dataset import other_tokenizers
from binidx.dataset.config import Split
from binidx.errors import ConfigError, redacted
from binidx.forks import cached_property
from binidx.format.prefix_listing import IdxBundle
from binidx.html_table import format_html_table
from binidx.index.cache.inspection import CacheState
from binidx.loader.readahead_window import count_first_reads
from binidx.run.global_order import GlobalOrder
from binidx.run.plan.fleet import FleetStart, PlaceRate, StartCost, StartRequests, sample_rates, start_costs
from binidx.run.plan.forecast import (
    SECONDS_PER_BLENDED_SAMPLE,
    Costs,
    Link,
    ReadCost,
    blend_bytes,
    build_memory_bytes,
    build_seconds,
    gpt_index_bytes,
    measure_link,
    source_costs,
    total_costs,
)
from binidx.run.plan.inventory import BlendInventory, IndexInventory, RunInventory, order_changes, take_inventory
from binidx.run.run_file import Run
from binidx.storage.cache.block_files import directory_of_index
from binidx.storage.location import Location
from binidx.storage.settings import ReadSettings
from binidx.storage.usage_report import bytes_text

MAX_EPOCHS = 4.0
"""Number of epochs after which repeated tokens teach less than new ones. Source: Muennighoff et al. 2023,
https://arxiv.org/abs/2305.16264"""

LONG_START_SECONDS, LARGE_BYTES = 10.0, 1 << 30
"""Time of a start of all ranks at the published limit, and bytes, from which on there is advice."""

MAX_NAMED = 3
"""Largest number of warnings of one kind; further ones are only counted."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run.

    Attributes:
        inventory: state of the run's data and caches.
        order: which rank reads which sample at which step; None if the samples do not fill a micro-batch of each rank.
        num_samples: number of remaining samples in whole steps; of a cyclic run all samples.
        nodes: number of nodes that share the ranks.
        tokens_per_second: throughput of all ranks; None if it was not given.
        costs: requests, bytes and prices of each source.
        link: connection to the largest remote source; None if all sources are local.
        changes: a warning for each source whose order differs from that of the last run.
        partitions: number of parts into which the store has divided each bucket; None: as names tell.
    """

    inventory: RunInventory
    order: GlobalOrder | None
    num_samples: int
    nodes: int
    tokens_per_second: float | None
    costs: Sequence[Costs]
    link: Link | None
    changes: Sequence[str]
    partitions: int | None = None

    @property
    def num_steps(self) -> int | None:
        """Number of remaining whole steps; None if the run is cyclic."""
        stop = self.order.num_steps() if self.order else self.inventory.run.first_step
        return None if stop is None else stop - self.inventory.run.first_step

    def _repr_html_(self) -> str:
        head = ("source", "documents", "tokens", "epochs", "repeated documents")
        rows = [
            (cost.dataset.prefix.uri, cost.documents, cost.tokens, cost.epochs, cost.repeated_documents)
            for cost in self.costs
        ]
        steps = "no end" if self.num_steps is None else f"{self.num_steps:,} steps"
        return format_html_table(f"RunPlan: {self.num_samples:,} samples, {steps}", rows, head)

    @property
    def same_order_up_to(self) -> int | None:
        """Largest number of train samples that keeps the order of all sources; None if unknown."""
        run, train = self.inventory.run, [index for index in self.inventory.train if index.wanted.num_samples]
        if not run.sizes[0] or run.stages is not None or any(index.wanted.uncounted for index in train):
            return None
        most = [run.sizes[0] * index.order.most / (index.wanted.num_samples or 1) for index in train if index.order]
        return floor(min(most)) if most else None  # no source has tokens

    @property
    def cautions(self) -> Sequence[str]:
        """Warnings, one line each."""
        return [*_warnings(self)]

    @property
    def is_remote(self) -> bool:
        return any(dataset.prefix.local_path is None for dataset in self.inventory.datasets.values())

    @property
    def reading(self) -> ReadCost:
        """Requests and bytes of all reads of the run."""
        return total_costs(self.costs)

    @property
    def dollars(self) -> Mapping[str, float]:
        """The list price of the requests, by store."""
        dollars: dict[str, float] = {}
        for cost in self.costs:
            if price := cost.prices.dollars_per_read:
                dollars[cost.store] = dollars.get(cost.store, 0.0) + cost.reading.requests * price
        return dollars

    @property
    def request_rates(self) -> Sequence[PlaceRate]:
        """Requests a second to each bucket, the most first; none without `tokens_per_second`."""
        if self.tokens_per_second is None:
            return []
        samples = self.tokens_per_second / self.inventory.run.config.sequence_length
        return [replace(rate, requests_per_second=rate.requests_per_second * samples) for rate in self.sample_rates]

    @property
    def sample_rates(self) -> Sequence[PlaceRate]:
        """Requests to each bucket for one sample a second, the most first."""
        return sample_rates(self.costs, self.partitions)

    @property
    def samples_at_once(self) -> tuple[int, int]:
        """Samples that all ranks read at once: in lock-step a micro-batch each, and the first read-ahead of each."""
        ranks, batch = self.inventory.run.data_parallel_size, self.inventory.run.micro_batch_size
        return ranks * batch, ranks * count_first_reads(batch)

    @property
    def index_files_seconds(self) -> float:
        """Seconds in which the measured link moves the index files of a node, once or for each process; 0: no link."""
        copies = 1 if self.shares_index_files else ceil(self.num_processes / self.nodes)
        return copies * self.index_dir_bytes / self.link.bytes_per_second if self.link else 0.0

    @property
    def shares_index_files(self) -> bool:
        """True if the processes of a node share a directory of index files."""
        return directory_of_index(ReadSettings.of(self.inventory.run.config.storage_options)) is not None

    @property
    def num_processes(self) -> int:
        """Number of processes that start: the data-parallel ranks, and at least one for each node."""
        return max(self.inventory.run.data_parallel_size, self.nodes)

    @cached_property
    def index_dir_bytes(self) -> int:
        """Bytes of `.idx` files and cached indices that a node fetches and keeps, or each of its processes."""
        return sum(cost.node_bytes for cost in self._start_costs.values())

    @property
    def starts(self) -> Sequence[FleetStart]:
        """Requests and bytes of a start of all ranks with cached indices, for each bucket, the most first."""
        options, ranks = self.inventory.run.config.storage_options, self.num_processes
        first = self.nodes if self.shares_index_files else ranks
        parts = defaultdict[str, list[tuple[StartRequests, int]]](list)
        for (place, _), cost in self._start_costs.items():
            requests = cost.of_process.times(ranks) + cost.of_node.times(first)
            parts[place].append((requests, cost.node_bytes * first))
        starts = []
        for place, each in parts.items():
            requests, num_bytes = sum((one for one, _ in each), StartRequests()), sum(size for _, size in each)
            busiest = max(one.total for one, _ in each) if self.partitions is None else requests.total / self.partitions
            starts.append(FleetStart(place, requests, num_bytes, Location(place, options).store.prices(), busiest))
        return sorted(starts, key=lambda start: -start.requests.total)

    @cached_property
    def _start_costs(self) -> Mapping[tuple[str, str], StartCost]:
        return start_costs(self.inventory)

    @property
    def exceeds_a_limit(self) -> bool:
        """True if the run sends a bucket more requests a second than its store publishes as the limit."""
        return any(rate.is_exceeded for rate in self.request_rates)

    @property
    def advice(self) -> Sequence[str]:
        """Ways to lower the load on the store, a line each, with the figure that is the reason."""
        return [*_advice(self)]

    @property
    def epoch_bytes(self) -> float:
        """Bytes of a node's disk cache for the node's part of one epoch of all remote sources."""
        return sum(cost.epoch_bytes for cost in self.costs)

    def index_rows(self) -> list[dict[str, Any]]:
        """Return a row of JSON values for each blend and index, split by split; the blend of a split comes first."""
        rows, threads = list[dict[str, Any]](), self.inventory.run.config.num_dataset_builder_threads
        for split in Split:
            rows += [_blend_row(blend) for blend in self.inventory.blends if blend.wanted.split == split.name]
            rows += [_index_row(index, threads) for index in self.inventory.indices if index.wanted.split == split.name]
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
            "sources": [_source_row(cost) for cost in self.costs],
            "indices": self.index_rows(),
            **vars(self.reading),
            "dollars": self.dollars,
            "epoch_on_a_node_bytes": self.epoch_bytes,
            "link": None if self.link is None else vars(self.link),
            "index_files_seconds": self.index_files_seconds,
            "samples_at_once": dict(zip(("micro_batches", "first_reads"), self.samples_at_once, strict=True)),
            "disk_of_a_node": {"index_files_bytes": self.index_dir_bytes, "epoch_bytes": self.epoch_bytes},
            "start": {
                "bytes_of_all_nodes": sum(start.num_bytes for start in self.starts),
                "places": [start.to_json() for start in self.starts],
            },
            "request_rates": [
                {
                    "place": rate.place,
                    "requests_per_second": rate.requests_per_second,
                    "partitions": rate.partitions,
                    "requests_per_second_to_busiest": rate.to_busiest,
                    "limit": rate.prices.reads_per_second or None,
                    "ramp_seconds": rate.ramp_seconds,
                }
                for rate in self.request_rates
            ],
            "cautions": [*self.cautions],
            "advice": [*self.advice],
        }


def _source_row(costs: Costs) -> dict[str, Any]:
    counts = ("store", "documents", "tokens", "samples", "epochs", "repeated_documents", "pieces_per_sample")
    sizes = ("stored_bytes", "idx_bytes", "compressed", "checked", "num_parts")
    return {
        "prefix": costs.dataset.prefix.uri,
        **{name: getattr(costs, name) for name in counts},
        **{name: getattr(costs.dataset, name) for name in sizes},
        **vars(costs.reading),
        "cache_fill": None if costs.fill is None else vars(costs.fill),
    }


def _blend_row(blend: BlendInventory) -> dict[str, Any]:
    size, num_bytes, name = blend.size, blend_bytes(blend.size), f"blend of {len(blend.wanted.parts):,}"
    row = {"split": blend.wanted.split, "source": name, "documents": None, "samples": size, "epochs": None}
    needs = {"num_bytes": num_bytes, "memory_bytes": num_bytes, "build_seconds": size * SECONDS_PER_BLENDED_SAMPLE}
    return {**row, **needs, "cache": blend.cache.state, "why": blend.cache.why}


def _index_row(index: IndexInventory, threads: int) -> dict[str, Any]:
    documents, plan, split = index.documents, index.plan, index.wanted.split
    row = {"split": split, "source": index.wanted.prefix, "documents": documents, "samples": index.num_samples}
    needs: dict[str, float] = {"epochs": 0, "num_bytes": 0, "memory_bytes": 0, "build_seconds": 0.0}
    if plan is not None:
        memory, seconds = build_memory_bytes(documents, plan, threads), build_seconds(documents, plan)
        sizes = plan.num_epochs, gpt_index_bytes(documents, plan), memory, seconds
        needs = dict(zip(needs, sizes, strict=True))
    return {**row, **needs, "cache": index.cache.state, "why": index.problem or index.cache.why}


def plan_run(
    run: Run, *, nodes: int = 1, tokens_per_second: float | None = None, partitions: int | None = None
) -> RunPlan:
    """Read the state of a run and compute its plan.

    Args:
        run: the run.
        nodes: number of nodes that share the ranks.
        tokens_per_second: throughput of all ranks, for a warning if the store is too slow; None: no such warning.
        partitions: number of parts into which the store has divided each bucket; None: as names tell.

    Raises:
        ConfigError: nodes, tokens_per_second or partitions is not positive.
        ObjectNotFoundError, FormatError, StorageError: the data is absent, malformed or unreachable.
    """
    if nodes < 1 or (tokens_per_second is not None and not tokens_per_second > 0):
        raise ConfigError(f"nodes, tokens_per_second: found {nodes}, {tokens_per_second}, need numbers above 0")
    if partitions is not None and partitions < 1:
        raise ConfigError(f"partitions: found {partitions}, needs 1 or more")
    inventory = take_inventory(run)
    order = run.order_samples(inventory.num_samples) if inventory.num_samples >= run.schedule.block else None
    steps = order.num_steps() if order else run.first_step
    num_samples = inventory.num_samples if steps is None else run.schedule.samples_before(steps) - run.consumed_samples
    datasets = inventory.datasets.values()
    remote = [dataset for dataset in datasets if dataset.prefix.local_path is None and not dataset.num_parts]
    largest = max(remote, key=lambda dataset: dataset.stored_bytes, default=None)
    link = measure_link(largest) if largest and largest.stored_bytes else None
    costs = source_costs(inventory, num_samples, nodes=nodes, link=link)
    changes = order_changes(inventory)
    return RunPlan(inventory, order, num_samples, nodes, tokens_per_second, costs, link, changes, partitions)


def _warnings(plan: RunPlan) -> Iterator[str]:
    """Yield all warnings of a plan, one line each."""
    inventory, costs, link = plan.inventory, plan.costs, plan.link
    kinds: Sequence[Iterable[str]] = (
        inventory.uncounted,
        _empty_indices(inventory),
        map(": ".join, other_tokenizers(inventory.tokenizers.items())),
        _order_warnings(inventory, plan.order),
        _repeated_sources(costs),
        plan.changes,
        _stale_caches(inventory),
        _small_cache(plan),
        _busy_places(plan.request_rates),
        _bursts(plan),
    )
    for kind in kinds:
        lines = iter(kind)
        yield from islice(lines, MAX_NAMED)
        if more := len([*lines]):
            yield f"... and {more:,} more of this kind"
    if link is None or plan.tokens_per_second is None:
        return
    run, samples = inventory.run, sum(cost.samples for cost in costs) or 1.0
    needed = plan.tokens_per_second / run.data_parallel_size / run.config.sequence_length
    reading = plan.reading.times(1 / samples)
    most = link.most_samples_per_second(reading.requests, reading.num_bytes)
    if needed > most:
        yield (
            f"a rank needs {needed:.3g} samples/s, and can have {most:.3g} of this store: {link.requests_in_flight} "
            f"requests in flight, {link.latency_seconds * 1000:.0f} ms, {reading.requests:.3g} requests a sample, "
            f"{bytes_text(link.bytes_per_second)}/s; a cache_dir, longer documents or more ranks help"
        )


def _busy_places(rates: Sequence[PlaceRate]) -> Iterator[str]:
    for rate in filter(lambda rate: rate.is_exceeded, rates):
        prices, ramp = rate.prices, rate.ramp_seconds
        grown = "" if ramp is None else f"; it grants this {ramp / 60:,.0f} minutes after the run began, at best"
        part = f"{rate.to_busiest:,.0f} to the busiest of {rate.partitions:,} partitions, " * (rate.partitions > 1)
        yield (
            f"{redacted(rate.place)}: {rate.requests_per_second:,.0f} requests/s of all ranks, {part}{prices.store} "
            f"publishes {prices.reads_per_second:,.0f} for {prices.limit}, and refuses the rest{grown}"
        )


def _bursts(plan: RunPlan) -> Iterator[str]:
    for rate in plan.sample_rates:
        samples, seconds = plan.samples_at_once[1], rate.seconds(plan.samples_at_once[1])
        if seconds >= LONG_START_SECONDS:
            requests = f"{rate.requests_per_second * samples:,.0f} requests at once when all ranks begin to read"
            yield f"{redacted(rate.place)}: {requests}, {seconds:,.0f} s at the published limit; the first batch waits"


def _advice(plan: RunPlan) -> Iterator[str]:
    """Yield ways to lower the load on the store, each with its reason."""
    inventory, ranks = plan.inventory, plan.num_processes
    unbuilt = [row for row in plan.index_rows() if row["cache"] in (CacheState.MISSING, CacheState.STALE)]
    if unbuilt and plan.nodes > 1:
        seconds = sum(row["build_seconds"] for row in unbuilt)
        wait = f"{ranks:,} ranks would wait {seconds:,.1f} s and for their upload"
        yield f"binidx prepare index: {len(unbuilt):,} indices are not built, and {wait}"
    yield from _advise_pins(plan)
    slow = max(plan.starts, key=lambda start: start.seconds_at_limit, default=None)
    if slow is not None and slow.seconds_at_limit >= LONG_START_SECONDS:
        limit = f"{slow.seconds_at_limit:,.0f} s at the {slow.prices.reads_per_second:,.0f} a second that it publishes"
        requests = f"{slow.requests.total:,} requests to {redacted(slow.place)}, {limit}"
        reads = f"no .idx and no index; without it all ranks send {requests}"
        yield f"binidx prepare read-plan: a start with it reads {reads}"
    elif plan.index_dir_bytes >= LARGE_BYTES:
        moved = f", {plan.index_files_seconds:,.0f} s of its link" if plan.link else ""
        reads = f"kilobytes, without it a node {bytes_text(plan.index_dir_bytes)}{moved}"
        yield f"binidx prepare read-plan: a start with it reads {reads}"
    run, samples = inventory.run, sum(cost.samples for cost in plan.costs) or 1.0
    a_batch = plan.reading.requests / samples * run.micro_batch_size
    if plan.exceeds_a_limit and a_batch > 2:
        yield f"binidx prepare bake: {a_batch:,.1f} requests for each micro-batch, 1 of a baked run"
    for rate in filter(lambda rate: rate.is_exceeded and rate.ramp_seconds is None, plan.request_rates):
        needed = ceil(rate.requests_per_second / rate.prices.reads_per_second)
        asks = f"{rate.requests_per_second:,.0f} requests/s to {redacted(rate.place)} need {needed:,} partitions"
        found = f"the busiest of {rate.partitions:,} gets {rate.busiest_share:.0%}"
        yield f"more pairs about as large, in folders whose names differ early (a7/en-00): {asks}, {found}"
    stored = sum(cost.dataset.stored_bytes for cost in plan.costs if cost.reading.requests)
    fetched = plan.reading.num_bytes
    if plan.nodes > 1 and (plan.exceeds_a_limit or fetched > max(2 * stored, LARGE_BYTES)):
        times = f"{bytes_text(fetched)} in {plan.reading.requests:,.0f} requests, of {bytes_text(stored)} stored"
        yield f"cache_dir on a file system that all nodes share: they fetch {times}; such a cache fetches a byte once"


def _advise_pins(plan: RunPlan) -> Iterator[str]:
    datasets = plan.inventory.datasets
    remote = {uri: each.prefix for uri, each in datasets.items() if each.prefix.local_path is None}
    if plan.nodes > 1 and len(unpinned := remote.keys() - plan.inventory.pinned) >= IdxBundle.LEAST:
        folders = {remote[uri].uri.rpartition("/")[0] for uri in unpinned}
        alone = len(unpinned - plan.inventory.listed)
        looks = f"each rank looks up {len(unpinned):,} prefixes in {len(folders):,} folders"
        yield f"binidx prepare index: pins the data; without it {looks}, {alone:,} of them by six requests each"


def _empty_indices(inventory: RunInventory) -> Iterator[str]:
    in_blend = {id(member) for blend in inventory.blends if blend.wanted.size != 0 for member in blend.wanted.sources}
    for index in inventory.indices:
        name = f"{index.wanted.prefix}, {index.wanted.split}"
        if index.problem:
            yield f"{name}: {index.problem}"
        elif not index.num_samples and (index.wanted.num_samples != 0 or id(index.wanted) in in_blend):
            refused = "; a blend refuses it" if id(index.wanted) in in_blend else ""
            yield f"{name}: no sample in {index.documents:,} documents of {index.tokens:,} tokens{refused}"


def _order_warnings(inventory: RunInventory, order: GlobalOrder | None) -> Iterator[str]:
    run, stages, size = inventory.run, inventory.run.schedule.stages, inventory.run.schedule.global_batch_size
    if order is not None and len(stages) > 1:
        first, last = stages[0].batch_size, stages[-1].batch_size
        yield (
            f"the batch {'grows' if first < last else 'changes'} from {first:,} to {last:,} samples in {len(stages):,} "
            f"stages, until step {stages[-1].first_step:,}: steps are not samples over batch size"
        )
    if inventory.uncounted:  # the number of samples is another one
        return
    if order is None:
        yield f"train: {inventory.num_samples:,} samples, one micro-batch of each rank needs {run.schedule.block:,}"
    elif (steps := order.num_steps()) is not None:
        left = inventory.num_samples - run.schedule.samples_before(steps)
        blocked_by = run.schedule.blocked_by
        if blocked_by and run.schedule.end == run.schedule.samples_before(steps) and steps != run.stop_step:
            yield (
                f"step {steps:,} needs a batch of {blocked_by:,}, no multiple of {run.schedule.block:,}, a micro-batch "
                f"of each rank: Megatron stops there, and {left:,} samples are not read"
            )
        elif steps == run.stop_step and left > 0:
            yield f"the run ends before step {steps:,} (stop_step); {left:,} samples are not read"
        elif steps and left > 0:
            those = "sample fills" if left == 1 else f"{left:,} samples fill"
            yield f"the last {those} no step of {stages[-1].batch_size:,}, and {'is' if left == 1 else 'are'} not read"
    elif not run.data_sharding and inventory.num_samples % size:
        yield (
            f"cyclic without data_sharding: {inventory.num_samples:,} samples are no whole steps of {size:,}; "
            "the first ranks get more batches at the end of each epoch, as in Megatron"
        )
    elif rest := inventory.num_samples % run.schedule.block:
        yield f"cyclic: {rest:,} samples fill no micro-batch of all ranks, and are never read"


def _repeated_sources(costs: Sequence[Costs]) -> Iterator[str]:
    for cost in sorted(costs, key=lambda cost: -cost.epochs):
        if cost.epochs > MAX_EPOCHS:
            yield (
                f"{cost.dataset.prefix.uri}: read {cost.epochs:.1f} times; after about "
                f"{MAX_EPOCHS:.0f} passes repeated tokens teach less"
            )


def _stale_caches(inventory: RunInventory) -> Iterator[str]:
    caches = [(index.wanted.prefix, index.wanted.split, index.cache) for index in inventory.indices]
    caches += [("blend", blend.wanted.split, blend.cache) for blend in inventory.blends]
    for source, split, cache in caches:
        if cache.state == CacheState.STALE:
            yield f"{source}, {split}: index stale: {cache.why}"


def _small_cache(plan: RunPlan) -> Iterator[str]:
    settings, needed = ReadSettings.of(plan.inventory.run.config.storage_options), plan.epoch_bytes
    if settings.cache_dir is not None and settings.cache_bytes is not None and needed > settings.cache_bytes:
        yield (
            f"{settings.cache_dir}: limited to {bytes_text(settings.cache_bytes)}, one epoch of a node takes "
            f"{bytes_text(needed)}; chunks that do not fit are fetched again"
        )
