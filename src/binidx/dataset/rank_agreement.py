"""Agreement of the ranks of a run: a build succeeds on all ranks, or raises on all; all read one order of one data.

Under torch.distributed, the ranks exchange these keys through the key-value store of the process group, which needs no
collective and no GPU, so that a rank can learn of an error at any time:

    outcome            "ok", set by the last rank that finishes; or the name and traceback of the first that fails
    entered            number of ranks that entered the build
    finished           number of ranks whose work succeeded
    informed           number of ranks that have read the outcome; a failed rank, and rank 0, whose process may hold the
                       store, wait for the others before they leave
    heartbeat/{rank}   changes while the rank is in the build; "left" afterwards

An error wins: every rank in the build raises, even if its own work succeeded. Each rank watches the heartbeat of the
next one, and reports it when it stops. A rank that never enters is not waited for. Without torch.distributed only the
build locks of the indices carry errors.

Cost: one request to the store per second and rank, and another every three seconds.

Source: ours. In Megatron Core rank 0 builds while the others wait in `torch.distributed.barrier()`; if one rank raises,
the others wait until the process group times out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from inspect import get_annotations
from typing import Any

import numpy as np
import xxhash

from binidx.dataset.config import find_token
from binidx.dataset.megatron.blended import BlendedDataset
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import OrderedDataset
from binidx.dataset.planned import PlannedDataset
from binidx.dataset.torch_bridge import GroupStore, group_store
from binidx.errors import PeerError, redacted
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.cache.build_lock import Checks
from binidx.index.cache.index_cache import library_version
from binidx.index.cache.index_files import hash_npy, recorded_name
from binidx.index.cache.manifest import ALGORITHM, Fields
from binidx.storage.interfaces import RangeReader
from binidx.storage.ranges import read_many
from binidx.storage.stores.registry import local_path

POLL_SECONDS, HEARTBEAT_SECONDS = 1.0, 3.0

HEARTBEAT_TIMEOUT_SECONDS = 30.0
"""Time without a heartbeat after which a rank counts as failed: its process, its machine or its network."""

ABSENT_SECONDS = 10.0
"""Time for which finished ranks wait for ranks that never entered. Only errors of those ranks are lost."""

INFORM_SECONDS = 5.0
"""Time for which a rank waits until the others have read the outcome, since its process may hold the store."""

MAX_STORE_FAILURES = 3

FIRST_PAUSE_SECONDS, PAUSE_FRACTION = 0.002, 32
"""Pause between polls of the outcome: a 32nd of the time waited, at least 2 ms."""

MAX_POLLS_PER_SECOND = 20_000
"""Polls of the outcome by all ranks together: the store is one thread of one process."""

FIELDS_SECONDS = 60.0
"""Time for which a rank with another digest waits for the fields of the first rank, stored right after its digest."""

LIBRARY = ("binidx", "megatron")
"""Packages whose configs have the fields that ranks compare; a user's subclass may add fields of one rank."""

NOT_COMPARED = frozenset({
    "blend", "blend_per_split", "split", "split_matrix", "mid_level_dataset_surplus", "sequences_per_dataset",
    "num_dataset_builder_threads", "path_to_cache", "object_storage_cache_path", "mmap_bin_files", "storage_options",
    "trust_cache", "cache_small_indices", "written_paths", "fast_cache_load", "defer_npy_index_mmap",
    "token_dtype_code",
})  # fmt: skip
"""Fields of a config that name places and ways to read, or of which all that matters is in the order."""

TOKENIZER_FIELDS = ("unique_identifiers", "eod", "pad", "eos", "bos", "cls", "sep", "mask", "vocab_size")

NUM_PROBES, PROBE_BYTES = 4, 1024
"""Number and size of the pieces of a local `.bin` that ranks compare, at equal distances."""

MAX_DIFFERENCES = 3
"""Largest number of differing fields in one message."""

OK, LEFT = "ok", "left"

STORE_GONE = "the store of the process group does not answer: its process is dead, or has left"

logger = logging.getLogger(__name__)

_build_numbers = itertools.count()


@contextlib.contextmanager
def agree_on_outcome() -> Iterator[tuple[Checks, str]]:
    """Make the block succeed on all ranks, or raise on all; a plain block without torch.distributed.

    Every rank must enter, equally often. It is no barrier: a rank that enters late finds the outcome of the others.

    Yields:
        Checks, to be called while the block waits: they raise once another rank has failed. And the name under which
        the block may call `compare_with_ranks`.

    Raises:
        PeerError: another rank failed or died.
    """
    name = f"build/{next(_build_numbers)}"
    group = group_store(f"binidx/{name}")
    if group is None:
        yield (), name
        return
    with Participant(*group).joined() as participant:
        yield (participant.check,), name


class Participant:
    """This rank in the agreement on one build.

    Args:
        store: key-value store for this build alone.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, store: GroupStore, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.outcome: str | None = None
        self._lock, self._left = threading.Lock(), threading.Event()
        self._neighbour, self._neighbour_changed = "", time.monotonic()
        self._thread = threading.Thread(target=self._run, name="binidx-ranks", daemon=True)

    @contextlib.contextmanager
    def joined(self) -> Iterator[Participant]:
        """Take part in the agreement during the block; raise PeerError if another rank fails.

        After the block, wait for the other ranks; if the block raises, report its error to them.
        """
        try:
            with store_errors():
                self.store.add("entered", 1)
                self._send_heartbeat()
            self.check(exact=True)
            self._thread.start()
            yield self
            with store_errors():
                self._agree()
        except BaseException as error:
            self._report(error)
            raise
        finally:
            self._left.set()
            if self._thread.is_alive():
                self._thread.join(POLL_SECONDS)
            with contextlib.suppress(Exception):
                self.store.set(f"heartbeat/{self.rank}", LEFT)

    def check(self, exact: bool) -> None:
        """Raise PeerError if another rank has failed.

        Args:
            exact: ask the process group's store now; else use the outcome that the background thread last read there.
        """
        if exact:
            with store_errors():
                self._poll()
        if self.outcome not in (None, OK):
            raise PeerError(self.outcome)

    def _poll(self) -> None:
        """Read the outcome from the store if there is one, unless this rank has read it already."""
        with self._lock:
            if self.outcome is None and self.store.check(["outcome"]):
                self.outcome = self.store.get("outcome").decode()
                self.store.add("informed", 1)

    def _agree(self) -> None:
        """Wait for the outcome; stop if all ranks that entered have finished, and the others do not enter in time."""
        if self.store.add("finished", 1) == self.size:
            self._set_outcome(OK)
        started = time.monotonic()
        self.check(exact=True)
        while self.outcome is None:
            waited = time.monotonic() - started
            if waited > ABSENT_SECONDS and self._finished_without_absent():
                return
            pause = max(waited / PAUSE_FRACTION, self.size / MAX_POLLS_PER_SECOND, FIRST_PAUSE_SECONDS)
            time.sleep(min(pause, POLL_SECONDS))
            self.check(exact=True)
        if self.rank == 0:
            self._wait_for_informed()

    def _wait_for_informed(self) -> None:
        deadline = time.monotonic() + INFORM_SECONDS
        while self.store.add("informed", 0) < self.store.add("entered", 0) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _finished_without_absent(self) -> bool:
        entered, finished = self.store.add("entered", 0), self.store.add("finished", 0)
        if finished < entered or entered == self.size:
            return False
        logger.warning(
            "%d of %d ranks have not entered build(); continuing without them, their errors will not be raised here. "
            "Call build() on every rank; is_built_on_rank selects the ranks that need datasets",
            self.size - entered,
            self.size,
        )
        return True

    def _report(self, error: BaseException) -> None:
        """Set the outcome to this error, unless there is an outcome already."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        summary = "".join(traceback.format_exception_only(error)).partition("\n")[0]
        with contextlib.suppress(Exception):
            self._set_outcome(f"{name_rank(self.rank)} failed: {summary}; its traceback:\n\n{trace}")
            self._poll()
            if isinstance(error, Exception):  # not after Ctrl-C
                self._wait_for_informed()

    def _set_outcome(self, outcome: str) -> bool:
        """Set the outcome unless there is one already; return whether the outcome is now the given one."""
        return self.store.compare_set("outcome", "", outcome).decode() == outcome

    # The thread

    def _run(self) -> None:
        last_heartbeat, failures = time.monotonic(), 0
        while not self._left.wait(POLL_SECONDS):
            try:
                self._poll()
                if time.monotonic() - last_heartbeat >= HEARTBEAT_SECONDS:
                    last_heartbeat = time.monotonic()
                    self._send_heartbeat()
                    self._watch_neighbour()
                failures = 0
            except Exception as error:
                failures += 1
                if failures == MAX_STORE_FAILURES:
                    self.outcome = self.outcome or f"{STORE_GONE}: {error}"
                    return

    def _send_heartbeat(self) -> None:
        self.store.set(f"heartbeat/{self.rank}", f"{time.monotonic_ns()} {name_rank(self.rank)}")

    def _watch_neighbour(self) -> None:
        """Report the next rank in the build as failed if its heartbeat has stopped."""
        heartbeat = next(self._heartbeats_of_others(), "")
        if heartbeat != self._neighbour:
            self._neighbour, self._neighbour_changed = heartbeat, time.monotonic()
        silent = time.monotonic() - self._neighbour_changed
        if heartbeat and silent > HEARTBEAT_TIMEOUT_SECONDS:
            name = heartbeat.partition(" ")[2]
            if self._set_outcome(f"{name}: no heartbeat for {silent:.0f} s; it was killed, or its machine is gone"):
                self.store.add("informed", 1)  # on its behalf

    def _heartbeats_of_others(self) -> Iterator[str]:
        """Yield the heartbeats of ranks in the build, from the next rank on."""
        for step in range(1, self.size):
            key = f"heartbeat/{(self.rank + step) % self.size}"
            heartbeat = self.store.get(key).decode() if self.store.check([key]) else LEFT
            if heartbeat != LEFT:
                yield heartbeat


def name_rank(rank: int) -> str:
    """Return the name of this process, which is a rank of the group, in messages."""
    return f"rank {rank} ({socket.gethostname()}, process {os.getpid()})"


def compare_with_ranks(subject: str, name: str, fields: Fields, datasets: Fields) -> None:
    """Compare the order, options and data of some datasets with those of the first rank that compares under this name.

    Does not wait for other ranks, and does nothing without torch.distributed, or without datasets.

    Args:
        subject: the caller, as the error message names it.
        name: name of this comparison in the store, equal on all ranks.
        fields: further JSON values to compare, by name.
        datasets: datasets by name.

    Raises:
        PeerError: fields differ; names both ranks, the fields, and the values of both.
    """
    if datasets and group_store(name) is not None:
        versions = {"library": library_version(), "algorithm": ALGORITHM}
        orders = {key: identify(dataset) for key, dataset in datasets.items()}
        options = {"options": identify_options([*datasets.values()])}
        _compare(subject, f"{name}/order", {**versions, **fields, **orders, **options})
        data = identify_data([*datasets.values()])
        _compare(subject, f"{name}/data/{_digest(json.dumps([*data]))}", data)
        _compare(subject, f"{name}/arrays", {key: identify_arrays(dataset) for key, dataset in datasets.items()})


def _compare(subject: str, name: str, fields: Fields) -> None:
    group = group_store(f"binidx/{name}")
    assert group is not None
    store, rank, _ = group
    text = json.dumps(fields, default=str)
    own = f"{_digest(text)} {name_rank(rank)}"
    with store_errors():
        first = store.compare_set("first", "", own).decode()
        if first == own:
            store.set("fields", text)
        digest, _, peer = first.partition(" ")
        if digest == _digest(text):
            return
        store.wait(["fields"], timedelta(seconds=FIELDS_SECONDS))
        theirs = json.loads(store.get("fields"))
    differences = itertools.islice(list_field_differences(json.loads(text), theirs), MAX_DIFFERENCES)
    listed = "; ".join(f"{field}: found {ours}, {peer} has {other}" for field, ours, other in differences)
    subject = f"{subject} on {name_rank(rank)}"
    raise PeerError(f"{subject}: ranks disagree ({listed}); start all ranks with the same options and data")


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


def identify(dataset: Any) -> Any:
    """Return all values that samples and their order depend on, without the place of the data, in JSON values.

    Args:
        dataset: a dataset; a user's own is identified by its class and number of samples.
    """
    size: dict[str, Any] = {"num_samples": len(dataset)}
    if isinstance(dataset, PlannedDataset):
        size["order"] = dataset.plan.fingerprint
    if isinstance(dataset, BlendedDataset):
        return {**dataset.order_identity, **size, "datasets": [*map(identify, dataset.datasets)]}
    if not isinstance(dataset, MegatronDataset):
        return {"class": recorded_name(type(dataset)), **size}
    order = dataset.order_identity
    if isinstance(order, str):  # Megatron's text, which has the place of the data, and not the data
        order = {key: value for key, value in json.loads(order).items() if key != "dataset_path"}
        if isinstance(dataset.dataset, IndexedDataset):
            order["data"] = dataset.dataset.identity
    return {**order, **size}


def identify_options(datasets: list[Any]) -> Any:
    """Return the options that samples depend on: of the one config of some datasets, or a list for several."""
    configs = {id(dataset.config): dataset.config for dataset in _list_parts(datasets)}
    # An object of a user is identified by its class: its text may have its address.
    options = json.loads(json.dumps([*map(_list_options, configs.values())], default=_describe_object))
    return options[0] if len(options) == 1 else options


def _list_options(config: Any) -> dict[str, Any]:
    kinds = [kind for kind in type(config).__mro__ if kind.__module__.partition(".")[0] in LIBRARY]
    names = dict.fromkeys(name for kind in kinds for name in get_annotations(kind))
    tokenizer = {name: find_token(config.tokenizer, name) for name in TOKENIZER_FIELDS}
    options = {name: getattr(config, name) for name in names if name not in NOT_COMPARED}
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
        for name in dataset.index_names:
            if name not in dataset.index_digests:
                dataset.index_digests[name] = hash_npy(getattr(dataset, name))
            digests[name] = dataset.index_digests.get(name)
    if isinstance(dataset, BlendedDataset):
        digests["datasets"] = [*map(identify_arrays, dataset.datasets)]
    return digests


def _list_parts(datasets: Sequence[Any]) -> list[MegatronDataset]:
    """Return the datasets of which some datasets and blends are made."""
    return [part for dataset in datasets if isinstance(dataset, OrderedDataset) for part in dataset.parts]


def identify_data(datasets: list[Any]) -> dict[str, Any]:
    """Return the size and the version of each `.bin` of some datasets, by URI, sorted."""
    readers: dict[str, RangeReader] = {}
    for dataset in _list_parts(datasets):
        if isinstance(dataset.dataset, IndexedDataset):
            readers[redacted(dataset.dataset.bin_reader.uri)] = dataset.dataset.bin_reader
    local = [uri for uri in sorted(readers) if local_path(uri) is not None]
    probes = read_many([(readers[uri], _probe_ranges(readers[uri].size)) for uri in local])
    versions: dict[str, str | None] = {}
    for uri, probe in zip(local, probes, strict=True):
        versions[uri] = xxhash.xxh3_128_hexdigest(b"".join(probe))
    for uri in readers.keys() - versions.keys():
        # Not the whole identity: a list of objects reports less of a version than a HEAD.
        marks = (readers[uri].identity.get(name) for name in ("generation", "etag"))
        versions[uri] = next((str(mark).removeprefix("W/").strip('"') for mark in marks if mark), None)
    return {uri: {"size": readers[uri].size, "version": versions[uri]} for uri in sorted(readers)}


def _probe_ranges(size: int) -> list[tuple[int, int]]:
    """Return the byte ranges (start, stop) of an object of `size` bytes that ranks compare."""
    starts = range(0, size, max(size // NUM_PROBES, PROBE_BYTES))
    return [(start, min(start + PROBE_BYTES, size)) for start in starts]


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Convert errors of the process group's store in the block to PeerError."""
    try:
        yield
    except PeerError:
        raise
    except Exception as error:
        raise PeerError(f"{STORE_GONE}: {error}") from error
