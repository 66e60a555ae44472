"""Comparison of the ranks of a run: all read one order of one data, and each data-parallel rank once.

Under torch.distributed, the ranks exchange these keys through the key-value store of the process group:

    {key}/first     digest of the values of the first rank that compares, and its name
    {key}/fields    these values: the order, options and arrays of datasets, or the versions of their data
    claims/{rank}   number of ranks that claim a data-parallel rank
    first/{rank}    name of the first of them

A rank whose digest is not that of the first one raises, and names both: either may be the one that is wrong.

A claim is refused if more ranks make it than world size / data-parallel size. If every rank has a loader, each
data-parallel rank is then claimed equally often, and none is missing. Ranks without a loader leave room for claims that
cannot be distinguished from right ones, such as with Megatron's tensor parallelism.

Cost: two requests a build and rank, and four a loader; one more for local data.

Source: ours.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any

import numpy as np
import xxhash

import binidx
from binidx.dataset.affects import described_fields, words_of
from binidx.dataset.config import find_token
from binidx.dataset.megatron.blended import BlendedDataset
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import OrderedDataset
from binidx.dataset.rank_agreement import SILENCE, name_rank, store_errors
from binidx.dataset.served import list_parts
from binidx.dataset.stored.baked import StoredRunDataset
from binidx.dataset.torch_bridge import GroupStore, group_store
from binidx.errors import PeerError, redacted
from binidx.format.tokens import StoredTokens, Tokens
from binidx.index.cache.index_files import hash_npy, recorded_name
from binidx.index.cache.manifest import ALGORITHM, Fields
from binidx.storage.effects import Call, Sleep, Steps, run
from binidx.storage.ranges import provides, read_many
from binidx.storage.stores.registry import local_path

FIELDS_POLLS, FIELDS_POLL_SECONDS = 600, 0.1
"""Polls of the fields of the first rank, stored right after its digest, by a rank with another one, and their pauses.
The `wait` of a store would hold up all other requests of the process, and with them its heartbeats."""

LIBRARY = ("binidx", "megatron")
"""Packages whose configs have the fields that ranks compare; a user's subclass may add fields of one rank."""

IN_THE_ORDER = ("split", "split_matrix", "mid_level_dataset_surplus")
"""Fields that only the identity of the order has, with the documents and numbers of samples that follow from them."""

TOKENIZER_FIELDS = ("unique_identifiers", "eod", "pad", "eos", "bos", "cls", "sep", "mask", "vocab_size")

NUM_PROBES, PROBE_BYTES = 4, 1024
"""Number and size of the pieces of a local `.bin` that ranks compare, at equal distances."""

MAX_DIFFERENCES = 3
"""Largest number of differing fields in one message."""

CLAIM_REMEDY = (
    "give each replica of the model a data-parallel rank of its own: binidx.find_topology(), with tensor, pipeline "
    'or context parallelism find_topology(mesh["dp"]) or (parallel_state). Replicas of HSDP read samples of their own: '
    'find_topology(mesh["replicate", "shard"]._flatten("dp"))'
)


SHARED = (
    "up to %d ranks share each of %d data-parallel ranks and read the same samples, which is right with tensor, "
    'pipeline or context parallelism; HSDP replicas need ranks of their own: mesh["replicate", "shard"]._flatten("dp")'
)

logger = logging.getLogger(__name__)


def compare_with_ranks(
    subject: str, name: str, fields: Fields, datasets: Fields, data_parallel: tuple[int, int] | None = None
) -> None:
    """Compare the order, options and data of some datasets with those of the first rank that compares under this name.

    Does not wait for other ranks, and does nothing without torch.distributed, or without datasets.

    Args:
        subject: the caller, as the error message names it.
        name: name of this comparison in the store, equal on all ranks.
        fields: further JSON values to compare, by name.
        datasets: datasets by name.
        data_parallel: data-parallel rank and size that this rank claims; None: not compared.

    Raises:
        PeerError: fields differ; names this rank, the first one, the fields and both values. Or too many ranks claim
            one data-parallel rank; names this rank and the first of them.
    """
    if not datasets or (group := group_store(f"binidx/{name}")) is None:
        return
    comparison = Comparison(f"{subject} on {name_rank(group[1])}", group[0], name_rank(group[1]), group[2])
    versions: dict[str, Any] = {"library": binidx.__version__, "algorithm": ALGORITHM}
    versions |= {} if data_parallel is None else {"data_parallel_size": data_parallel[1]}
    orders = {key: identify(dataset) for key, dataset in datasets.items()}
    arrays = {key: identify_arrays(dataset) for key, dataset in datasets.items()}
    bins, data = identify_data([*datasets.values()])
    options = identify_options([*datasets.values()])
    compared = {"order": [{**versions, **fields, **orders, "options": options}, arrays]}
    # Copies of the data in other places have other names, and in a store other versions.
    compared[_digest(json.dumps(sorted(data)))] = [data, {"bin": bins}]
    if all(local_path(uri) is not None for uri in data):
        compared["local"] = [{"bin": [data[uri] for uri in bins]}]
    for key, values in compared.items():
        run(comparison.compare(key, values))
    if data_parallel is not None:
        run(comparison.check_claim(data_parallel))


@dataclass(frozen=True)
class Comparison:
    """Comparison of JSON values of this rank with those of the others.

    The first rank stores its values, the others compare their digest: a request each.

    Args:
        subject: beginning of messages.
        store: key-value store for this comparison alone.
        name: of this rank.
        size: number of ranks.
    """

    subject: str
    store: GroupStore
    name: str
    size: int

    def compare(self, key: str, values: list[Any]) -> Steps[None]:
        """Raise PeerError if the first rank has other values under this key."""
        text = json.dumps(values, default=str)
        own = f"{_digest(text)} {self.name}"
        with store_errors(self.name):
            first = (yield from Call(self.store.compare_set, (f"{key}/first", "", own))).decode()
            if first == own:
                yield from Call(self.store.set, (f"{key}/fields", text))
            digest, _, peer = first.partition(" ")
            if digest == _digest(text):
                return
            for _ in range(FIELDS_POLLS):
                if (yield from Call(self.store.check, ([f"{key}/fields"],))):
                    break
                yield from Sleep(FIELDS_POLL_SECONDS)
            else:
                raise PeerError(f"{self.subject}: ranks disagree, and {peer} does not store its values; {SILENCE}")
            theirs = yield from Call(self.store.get, (f"{key}/fields",))
        pairs = zip(json.loads(text), json.loads(theirs), strict=True)
        differences = itertools.chain.from_iterable(list_field_differences(ours, other) for ours, other in pairs)
        listed = "; ".join(
            f"{field}: found {ours}, {peer} has {other}"
            for field, ours, other in itertools.islice(differences, MAX_DIFFERENCES)
        )
        raise PeerError(f"{self.subject}: ranks disagree ({listed}); start all ranks with the same options and data")

    def check_claim(self, data_parallel: tuple[int, int]) -> Steps[None]:
        """Raise PeerError if this data-parallel rank has too many ranks already, or there are too few for all."""
        rank = data_parallel[0]
        with store_errors(self.name):
            first = (yield from Call(self.store.compare_set, (f"first/{rank}", "", self.name))).decode()
            count = yield from Call(self.store.add, (f"claims/{rank}", 1))
        # Ranks of one replica of the model share a data-parallel rank: as many as there are for each of them.
        most = self.size // data_parallel[1]
        if count > most:
            group = f"data_parallel_size {data_parallel[1]} in a group of {self.size} ranks"
            found = f"found {count} of data-parallel rank {rank}, {first} first, need at most {most}"
            problem = found if most else "found fewer ranks than data-parallel ranks"
            raise PeerError(f"{self.subject}: {group}: {problem}; {CLAIM_REMEDY}")
        if (count, rank) == (2, 0):
            logger.info(SHARED, most, data_parallel[1])


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())


def list_field_differences(ours: Any, theirs: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the path and both values of each field in which two JSON values differ.

    Args:
        ours, theirs: the JSON values of this rank and of another one.
        name: path of both values, before that of the fields in them.
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            yield from list_field_differences(ours.get(key), theirs.get(key), f"{name}.{key}" if name else key)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from list_field_differences(one, other, f"{name}[{number}]")
    elif ours != theirs:
        yield name, f"{json.dumps(ours):.200}", f"{json.dumps(theirs):.200}"


def identify(dataset: Any, *, is_part: bool = False) -> Any:
    """Return all values that samples and their order depend on, without the place of the data, in JSON values.

    Args:
        dataset: a dataset; a user's own is identified by its class and number of samples.
        is_part: whether it is one of the datasets of a blend, which draws from the order of its index.
    """
    served = dataset.opened.order if is_part else dataset.order if isinstance(dataset, OrderedDataset) else dataset
    size: dict[str, Any] = {"num_samples": len(served)}
    if isinstance(dataset, StoredRunDataset):
        size["order"] = dataset.stored.fingerprint
    if isinstance(dataset, BlendedDataset):
        parts = [identify(part, is_part=True) for part in dataset.datasets]
        return {**dataset.order_identity, **size, "datasets": parts}
    if not isinstance(dataset, MegatronDataset):
        return {"class": recorded_name(type(dataset)), **size}
    order = served.identity
    if isinstance(order, str):  # Megatron's text, which has the place of the data, and not the data
        order = {key: value for key, value in json.loads(order).items() if key != "dataset_path"}
        if provides(dataset.dataset, Tokens):
            order["data"] = dataset.dataset.identity
    return {**order, **size}


def identify_options(datasets: list[Any]) -> Any:
    """Return the options that samples depend on: of the one config of some datasets, or a list for several."""
    owners = [part for dataset in datasets for part in list_parts(dataset) or [dataset]]
    configs = {id(own.config): own.config for own in owners if isinstance(own, MegatronDataset | StoredRunDataset)}
    # An object of a user is identified by its class: its text may have its address.
    options = json.loads(json.dumps([*map(_list_options, configs.values())], default=_describe_object))
    return options[0] if len(options) == 1 else options


def _list_options(config: Any) -> dict[str, Any]:
    kinds = [kind for kind in type(config).__mro__ if kind.__module__.partition(".")[0] in LIBRARY]
    known = described_fields(type(config))
    names = dict.fromkeys(name for kind in kinds for name in get_annotations(kind))
    tokenizer = {name: find_token(config.tokenizer, name) for name in TOKENIZER_FIELDS}
    lacking = {*IN_THE_ORDER, *(name for name in known if not words_of(known[name]) <= {"order", "samples"})}
    options = {name: getattr(config, name) for name in names if name not in lacking}
    return {**options, "tokenizer": {name: value for name, value in tokenizer.items() if value is not None}}


def _describe_object(thing: Any) -> Any:
    if isinstance(thing, Mapping):
        return dict(thing)
    return thing.item() if isinstance(thing, np.generic) else recorded_name(type(thing))


def identify_arrays(dataset: Any) -> Any:
    """Return the XXH3 of each array of the index of a dataset, by name.

    A loaded or published array has been hashed; one that is only in memory is hashed here, once.
    """
    digests: dict[str, Any] = {}
    if isinstance(dataset, OrderedDataset):
        for name, array in dataset.index_arrays.items():
            if name not in dataset.index_digests:
                dataset.index_digests[name] = hash_npy(array)
            digests[name] = dataset.index_digests.get(name)
    if isinstance(dataset, BlendedDataset):
        digests["datasets"] = [*map(identify_arrays, dataset.datasets)]
    return digests


def identify_data(datasets: list[Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the URI of the `.bin` of each dataset, in order; and by URI its size and version, sorted."""
    parts = [part.dataset for each in datasets for part in list_parts(each) if isinstance(part.dataset, StoredTokens)]
    bins = [redacted(dataset.bin_reader.uri) for dataset in parts]
    readers = {uri: dataset.bin_reader for uri, dataset in zip(bins, parts, strict=True)}
    local = [uri for uri in sorted(readers) if local_path(uri) is not None]
    probes = read_many([(readers[uri], _probe_ranges(readers[uri].size)) for uri in local])
    versions: dict[str, str | None] = {}
    for uri, probe in zip(local, probes, strict=True):
        versions[uri] = xxhash.xxh3_128_hexdigest(b"".join(probe))
    for uri in readers.keys() - versions.keys():
        # Not the whole identity: a list of objects reports less of a version than a HEAD.
        marks = (readers[uri].identity.get(name) for name in ("generation", "etag"))
        versions[uri] = next((str(mark).removeprefix("W/").strip('"') for mark in marks if mark), None)
    return bins, {uri: {"size": readers[uri].size, "version": versions[uri]} for uri in sorted(readers)}


def _probe_ranges(size: int) -> list[tuple[int, int]]:
    """Return the byte ranges (start, stop) of an object of `size` bytes that ranks compare."""
    starts = range(0, size, max(size // NUM_PROBES, PROBE_BYTES))
    return [(start, min(start + PROBE_BYTES, size)) for start in starts]
