"""Requests of a start of all ranks with cached indices, the rate that a store grants, and what would lower both.

                                       each process                    the first process of a node, besides
    pair, opened alone                 5 HEAD, 1 GET                   its .idx
    ... compressed                     6 HEAD, 1 GET, 1 LIST           its .idx
    pairs of one folder, 8 or more     2 LIST for 450 of them          their .idx
    ... with a path_to_cache           1 HEAD of their bundle          the bundle instead of the .idx
    checksums of a pair                1 GET
    virtual merge                      6 HEAD, 2 GET, 2 LIST, pairs    the .idx of all parts
    cached index, or blend             1 GET: its manifest             its 3 arrays, or 2
    pinned file, if any is possible    1 HEAD
    ... if it exists                   no request for its pairs        the file

A file takes a GET for each 8 MiB. Without a directory of index files every process is the first of its node. Counted on
S3; `tests/run/plan/test_fleet.py` compares these counts with the log of a proxy. GCS lists nothing for a missing name.
Not counted: the first rank of a pinned run compares all pairs with the store, by one LIST for 1,000 objects, or HEADs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from binidx.dataset.pinned_run import PinnedFile
from binidx.errors import redacted
from binidx.format.prefix_listing import IdxBundle, ListedPair
from binidx.format.source import DatasetFiles
from binidx.index.cache.inspection import CacheState
from binidx.run.plan.forecast import Amounts, blend_bytes, gpt_index_bytes
from binidx.run.plan.inventory import RunInventory
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import MAX_REQUEST, object_identity
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
    """

    place: str
    requests_per_second: float
    prices: Prices

    @property
    def is_exceeded(self) -> bool:
        """True if the store publishes a lower limit."""
        return 0 < self.prices.reads_per_second < self.requests_per_second

    @property
    def ramp_seconds(self) -> float | None:
        """Seconds in which the store grants the rate, if it doubles its limit; None if that has no published time."""
        if not self.is_exceeded:
            return 0.0
        doublings = math.log2(self.requests_per_second / self.prices.reads_per_second)
        return None if math.isinf(self.prices.doubling_seconds) else doublings * self.prices.doubling_seconds


def start_costs(inventory: RunInventory) -> Mapping[str, StartCost]:
    """Return the cost of a start for each bucket, by its URI, when all indices are cached."""
    config, costs = inventory.run.config, defaultdict[str, StartCost](StartCost)
    remote = [dataset for dataset in inventory.datasets.values() if dataset.prefix.local_path is None]
    directory = config.path_to_cache and Location(config.path_to_cache, config.storage_options)
    pins, pinned = PinnedFile.of(config), set[str]()
    if pins is not None and pins.location.local_path is None:
        costs[pins.location.place] += StartCost(StartRequests(heads=1))
        if (content := pins.read()) is not None:
            num_bytes = object_identity(pins.location)["size"]
            costs[pins.location.place] += StartCost(NONE, _gets(num_bytes), num_bytes)
            pinned = {*content[0].pairs}
    listed = [dataset.prefix for dataset in remote if dataset.prefix.uri not in pinned]
    for place, count in ListedPair.count_lists(listed).items():
        costs[place] += StartCost(StartRequests(lists=count))
    bundled: set[str] = set()
    if directory and len(remote) >= IdxBundle.LEAST:
        idx = {each.prefix.uri: each.opened["idx"] for each in remote if each.prefix.uri in inventory.listed}
        bundled = {*IdxBundle.select(idx)}
        num_bytes = sum(each.idx_bytes for each in remote if each.prefix.uri in bundled)
        if directory.local_path is None:
            costs[directory.place] += StartCost(StartRequests(heads=1), _gets(num_bytes), num_bytes)
    for dataset in remote:
        num_bytes = 0 if dataset.prefix.uri in bundled else dataset.idx_bytes
        files = _gets(num_bytes, max(dataset.num_parts, 1)) if num_bytes else NONE
        opened = _requests_of_source(dataset, listed=dataset.prefix.uri in inventory.listed | pinned)
        costs[dataset.prefix.place] += StartCost(opened, files, num_bytes)
    for index in inventory.indices:
        at = directory or Location(index.wanted.prefix, config.storage_options)
        if index.plan and index.cache.state not in (CacheState.SMALL_ONE, CacheState.UNNAMED) and at.local_path is None:
            num_bytes = gpt_index_bytes(index.documents, index.plan)
            costs[at.place] += StartCost(StartRequests(gets=1), _gets(num_bytes, GPT_ARRAYS), num_bytes)
    for blend in inventory.blends:
        if directory and blend.cache.state != CacheState.SMALL_ONE and directory.local_path is None:
            num_bytes = blend_bytes(blend.size)
            costs[directory.place] += StartCost(StartRequests(gets=1), _gets(num_bytes, BLEND_ARRAYS), num_bytes)
    return costs


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
    """

    place: str
    requests: StartRequests
    num_bytes: int
    prices: Prices

    @property
    def seconds_at_limit(self) -> float:
        """Seconds that the requests take at the published limit; 0 if there is none."""
        return self.requests.total / self.prices.reads_per_second if self.prices.reads_per_second else 0.0

    @property
    def dollars(self) -> float:
        """List price; a LIST costs as much as a PUT."""
        reads = self.requests.heads + self.requests.gets
        return reads * self.prices.dollars_per_read + self.requests.lists * self.prices.dollars_per_write

    def to_json(self) -> dict[str, Any]:
        """Return the start as JSON values."""
        numbers = {"bytes": self.num_bytes, "seconds_at_limit": self.seconds_at_limit, "dollars": self.dollars}
        return {"place": redacted(self.place), **asdict(self.requests), **numbers}
