"""Requests of a start of all ranks with cached indices, the rate that a store grants, and what would lower both.

                                       each process                    the first process of a node, besides
    pair, opened alone                 5 HEAD, 1 GET                   its .idx
    ... compressed                     6 HEAD, 1 GET, 1 LIST           its .idx
    pairs of one folder, 8 or more     2 LIST for 450 of them          their .idx
    ... with a path_to_cache           1 HEAD of their bundle          the bundle instead of the .idx
    checksums of a pair                1 GET
    virtual merge                      6 HEAD, 2 GET, 2 LIST, pairs    the .idx of all parts
    cached index, or blend             1 GET: its manifest             its 3 arrays, or 2
    read plans, with a path_to_cache   1 HEAD
    ... if each split has one          2 HEAD, 1 GET a split, and those of the pinned file alone
    pinned file, if any is possible    1 HEAD
    ... if it exists                   no request for its pairs        the file

A file takes a GET for each 8 MiB. Without a directory of index files every process is the first of its node. Counted on
S3; `tests/run/plan/test_fleet.py` compares these counts with the log of a proxy. GCS lists nothing for a missing name.
Not counted: the first rank of a pinned run compares all pairs with the store, by one LIST for 1,000 objects, or HEADs.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.dataset.config import Split
from binidx.dataset.pinned_run import PinnedFile
from binidx.dataset.stored.planned import PlannedDataset
from binidx.errors import redacted
from binidx.format.prefix_listing import IdxBundle, ListedPair
from binidx.format.source import DatasetFiles
from binidx.index.cache.inspection import CacheState
from binidx.order.stored.planned_order import ReadPlan
from binidx.run.plan.forecast import Amounts, Costs, blend_bytes, gpt_index_bytes
from binidx.run.plan.inventory import RunInventory
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import MAX_REQUEST, object_exists, object_identity
from binidx.storage.store_protocols import Prices

GPT_ARRAYS, BLEND_ARRAYS = 3, 2


@dataclass(frozen=True)
class StartRequests(Amounts):
    """Requests of a start: HEADs, LISTs and GETs."""

    heads: int = 0
    lists: int = 0
    gets: int = 0

    @property
    def total(self) -> int:
        return self.heads + self.lists + self.gets


NONE, ALONE = StartRequests(), StartRequests(5, 0, 1)
COMPRESSED, VIRTUAL = StartRequests(heads=1, lists=1), StartRequests(6, 2, 2)


@dataclass(frozen=True)
class StartCost(Amounts):
    """Cost of a start for one bucket.

    Attributes:
        of_process: requests of each process.
        of_node: requests of the first process of a node besides.
        node_bytes: bytes that a node fetches, and keeps in its directory of index files.
    """

    of_process: StartRequests = NONE
    of_node: StartRequests = NONE
    node_bytes: int = 0


@dataclass(frozen=True)
class PlaceRate:
    """Requests a second of all ranks together to one bucket.

    Attributes:
        place: the bucket, as a URI.
        requests_per_second: mean, while the run trains.
        prices: has the limit that the store publishes.
        partitions: parts of the bucket that have this limit each.
        busiest_share: share of the requests to the part with the most.
    """

    place: str
    requests_per_second: float
    prices: Prices
    partitions: int = 1
    busiest_share: float = 1.0

    @property
    def to_busiest(self) -> float:
        """Requests a second to the part of the bucket with the most."""
        return self.requests_per_second * self.busiest_share

    @property
    def is_exceeded(self) -> bool:
        """True if the store publishes a lower limit."""
        return 0 < self.prices.reads_per_second < self.to_busiest

    def seconds(self, num_samples: float) -> float:
        """Return the seconds of a number of samples at the limit, where this is the rate of one sample a second."""
        return self.to_busiest * num_samples / self.prices.reads_per_second if self.prices.reads_per_second else 0.0

    @property
    def ramp_seconds(self) -> float | None:
        """Seconds in which the store grants the rate, if it doubles its limit; None if that has no published time."""
        if not self.is_exceeded:
            return 0.0
        doublings = math.log2(self.to_busiest / self.prices.reads_per_second)
        return None if math.isinf(self.prices.doubling_seconds) else doublings * self.prices.doubling_seconds


def sample_rates(costs: Sequence[Costs], partitions: int | None = None) -> list[PlaceRate]:
    """Return the requests to each bucket for one sample a second, the most first.

    A store divides a bucket by prefixes of names, never an object. Names tell the most that it may do: a partition for
    each folder with tokens, once all were hot.

    Args:
        costs: of the sources.
        partitions: number of parts into which the store has divided each bucket; None: as the names tell.
    """
    places: dict[str, tuple[Prices, Counter[str], Counter[str]]] = {}
    samples = sum(cost.samples for cost in costs) or 1.0
    for cost in costs:
        for pair in cost.dataset.pairs if cost.reading.requests else ():
            requests = cost.reading.requests / samples * pair.stored_bytes / max(cost.dataset.stored_bytes, 1)
            _, folders, objects = places.setdefault(cost.dataset.prefix.place, (cost.prices, Counter(), Counter()))
            folders[pair.bin.partitions[0]] += requests  # type: ignore[assignment]
            objects[pair.bin.uri] += requests  # type: ignore[assignment]
    rates = []
    for place, (prices, folders, objects) in places.items():
        total = sum(folders.values())
        busiest = max(folders.values()) if partitions is None else max(total / partitions, *objects.values())
        rates.append(PlaceRate(place, total, prices, partitions or len(folders), busiest / total))
    return sorted(rates, key=lambda rate: -rate.requests_per_second)


def start_costs(inventory: RunInventory) -> Mapping[tuple[str, str], StartCost]:
    """Return the cost of a start when all indices are cached, by bucket and partition, which its names tell."""
    config, costs = inventory.run.config, defaultdict[tuple[str, str], StartCost](StartCost)
    remote = [dataset for dataset in inventory.datasets.values() if dataset.prefix.local_path is None]
    directory = config.cache_directory
    pins, pinned = PinnedFile.of(config), inventory.pinned
    if pins is not None and pins.location.local_path is None:
        costs[_part(pins.location)] += StartCost(StartRequests(heads=1))
        if pinned:
            num_bytes = object_identity(pins.location)["size"]
            costs[_part(pins.location)] += StartCost(NONE, _gets(num_bytes), num_bytes)
    plans = _read_plans(inventory)
    if directory and directory.local_path is None:
        costs[_part(directory / "")] += StartCost(plans)
    if plans.gets:
        return costs
    listed = [dataset.prefix for dataset in remote if dataset.prefix.uri not in pinned]
    for place, count in ListedPair.count_lists(listed).items():
        costs[place, place] += StartCost(StartRequests(lists=count))
    bundled: set[str] = set()
    if directory and len(remote) >= IdxBundle.LEAST:
        idx = {each.prefix.uri: each.opened["idx"] for each in remote if each.prefix.uri in inventory.listed}
        bundled = {*IdxBundle.select(idx)}
        num_bytes = sum(each.idx_bytes for each in remote if each.prefix.uri in bundled)
        if directory.local_path is None:
            costs[_part(directory / "")] += StartCost(StartRequests(heads=1), _gets(num_bytes), num_bytes)
    for dataset in remote:
        num_bytes = 0 if dataset.prefix.uri in bundled else dataset.idx_bytes
        files = _gets(num_bytes, max(dataset.num_parts, 1)) if num_bytes else NONE
        opened = _requests_of_source(dataset, listed=dataset.prefix.uri in inventory.listed | pinned)
        costs[_part(dataset.prefix)] += StartCost(opened, files, num_bytes)
    for index in inventory.indices:
        at = directory or Location(index.wanted.prefix, config.storage_options)
        if index.plan and index.cache.state not in (CacheState.SMALL_ONE, CacheState.UNNAMED) and at.local_path is None:
            num_bytes = gpt_index_bytes(index.documents, index.plan)
            costs[_part(at / "")] += StartCost(StartRequests(gets=1), _gets(num_bytes, GPT_ARRAYS), num_bytes)
    for blend in inventory.blends:
        if directory and blend.cache.state != CacheState.SMALL_ONE and directory.local_path is None:
            num_bytes = blend_bytes(blend.size)
            costs[_part(directory / "")] += StartCost(StartRequests(gets=1), _gets(num_bytes, BLEND_ARRAYS), num_bytes)
    return costs


def _part(location: Location) -> tuple[str, str]:
    return location.place, location.partitions[0]


def _read_plans(inventory: RunInventory) -> StartRequests:
    """Return the requests by which each process finds the read plans of a run; GETs only if each split has one."""
    run, names = inventory.run, {index.wanted.split for index in inventory.indices}
    splits = [split for split in Split if split.name in names] if run.stages is None else []
    places = [PlannedDataset.locate("GPTDataset", run.config, split, run.sizes[split.value])[:1] for split in splits]
    if not places or not places[0]:
        return NONE
    found = [bool(place) and object_exists(place[0] / ReadPlan.last_file) for place in places]
    return StartRequests(heads=2 * len(found), gets=len(found)) if all(found) else StartRequests(heads=1)


def _requests_of_source(dataset: DatasetFiles, *, listed: bool) -> StartRequests:
    """Return the requests by which each process opens a pair, or the parts of a virtual merge."""
    sums = StartRequests(gets=int(dataset.checked))
    if listed:
        return sums
    pair = ALONE + sums + (COMPRESSED if dataset.compressed else NONE)
    if not dataset.num_parts:
        return pair
    lists = ListedPair.count_lists([part.prefix for part in dataset.pairs]).total()
    alone = NONE if lists and not dataset.compressed else pair.times(dataset.num_parts)
    return VIRTUAL + StartRequests(lists=lists) + alone


def _gets(num_bytes: int, num_files: int = 1) -> StartRequests:
    """Return the requests for whole files that have so many bytes together."""
    return StartRequests(gets=max(num_files, math.ceil(num_bytes / MAX_REQUEST)))


@dataclass(frozen=True)
class FleetStart:
    """Start of all ranks together at one bucket.

    Attributes:
        requests: of all ranks.
        num_bytes: bytes that all nodes together fetch.
        prices: list prices and the published limit.
        to_busiest: requests to the partition with the most.
    """

    place: str
    requests: StartRequests
    num_bytes: int
    prices: Prices
    to_busiest: float

    @property
    def seconds_at_limit(self) -> float:
        """Seconds that the requests take at the published limit; 0 if there is none."""
        return self.to_busiest / self.prices.reads_per_second if self.prices.reads_per_second else 0.0

    @property
    def dollars(self) -> float:
        """List price; a LIST costs as much as a PUT."""
        reads = self.requests.heads + self.requests.gets
        return reads * self.prices.dollars_per_read + self.requests.lists * self.prices.dollars_per_write

    def to_json(self) -> dict[str, Any]:
        """Return the start as JSON values."""
        numbers = {"bytes": self.num_bytes, "seconds_at_limit": self.seconds_at_limit, "dollars": self.dollars}
        return {"place": redacted(self.place), **asdict(self.requests), **numbers}
