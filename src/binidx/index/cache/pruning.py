"""Removal of old indices from a `path_to_cache`: those that no run needs, with their leases, records and bundles.

    {md5}-{class}-{split}-...             an index: manifest, description, arrays and lease, also of other versions
    {digest}-binidx-orders.json           removed with the last of its indices
    {digest}-binidx-idx.bundle            a bundle of `.idx` files

Everything else is left alone, such as Megatron Core's indices, which have no manifest of ours. An index is as old as
its newest file. It is removed under its lease, so no process builds it meanwhile; one with a lease younger than an hour
is being built.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from binidx.errors import StorageError
from binidx.index.cache.build_lock import HeldLease, Lease
from binidx.index.cache.index_files import DESCRIPTION, LEFT_SECONDS, MANIFEST
from binidx.index.cache.lease import NO_LEASE
from binidx.index.cache.order_record import ORDERS, parse_known
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small
from binidx.storage.steps import run
from binidx.storage.stores.fsspec_store import StoredFile, list_stored_files
from binidx.storage.writing.publish import delete_object

INDEX_FILE = re.compile(
    r"([0-9a-f]{32}-[A-Za-z_]\w*(?:-[a-z]+)??)(?:-\d+)?-(?:description\.txt|binidx\.json(?:-claim(?:-after-.*)?)?|[a-z_]+\.npy)"
)
RECORD_NAME = re.compile(r"[0-9a-f]{32}(-\d+)?-binidx-(orders\.json|idx\.bundle)")

CLAIM = "-claim"
State = Literal["remove", "kept", "young", "being built"]


@dataclass(frozen=True)
class CachedIndex:
    """Index, record or bundle in a folder.

    Attributes:
        name: `{md5}-{class}-{split}`, or the name of the file.
        files: its files, by their names.
        state: "remove" if it is old; "kept" for a run; "young": not old enough; "being built" by a process just now.
    """

    name: str
    files: Mapping[str, StoredFile]
    state: State

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    @property
    def changed_at(self) -> float:
        """Time of the newest file, in seconds since 1970."""
        return max(file.changed_at for file in self.files.values())

    def remove(self, directory: Location) -> bool:
        """Remove its files in a folder, the manifest first; return False if a process has begun to build it.

        Raises:
            StorageError: the store refuses a request.
        """
        problem = None
        with contextlib.ExitStack() as leases:
            for name in dict.fromkeys(name.partition(CLAIM)[0] for name in self.files if MANIFEST in name):
                held = _hold_lease(directory, name + CLAIM, self.files.get(name + CLAIM))
                if held is None:
                    return False
                leases.enter_context(held)
            try:
                for name in sorted(self.files, key=lambda name: not name.endswith(MANIFEST)):
                    if not name.endswith(CLAIM):
                        delete_object(directory / name)
            except StorageError as error:
                problem = error  # raised after the leases: they record errors of builds
        if problem is not None:
            raise problem
        return True


def find_indices(
    directory: Location, is_needed: Callable[[str, str], bool], older_than: float, now: float | None = None
) -> list[CachedIndex]:
    """Return the indices, records and bundles of a folder, the oldest first, with what pruning does with each.

    Args:
        directory: a `path_to_cache`.
        is_needed: returns whether a run needs an index or a bundle, by its name and its description.
        older_than: age in seconds from which on an index is removed.
        now: seconds since 1970; by default the present.

    Raises:
        ObjectNotFoundError: there is no such folder.
    """
    now = time.time() if now is None else now
    groups, others = defaultdict[str, dict[str, StoredFile]](dict), dict[str, StoredFile]()
    for name, file in list_stored_files(directory.uri, directory.options or {}).items():
        if RECORD_NAME.fullmatch(name):
            others[name] = file
        elif match := INDEX_FILE.fullmatch(name):
            groups[match[1]][name] = file

    def state_of(files: Mapping[str, StoredFile], needed: Callable[[], bool]) -> State:
        leases = [file.changed_at for name, file in files.items() if CLAIM in name]
        if max(leases, default=-math.inf) > now - LEFT_SECONDS:
            return "being built"
        if max(file.changed_at for file in files.values()) > now - older_than:
            return "young"
        return "kept" if needed() else "remove"

    def is_needed_index(name: str, files: Mapping[str, StoredFile]) -> bool:
        texts = [read_small(directory / file) or b"" for file in files if file.endswith(DESCRIPTION)]
        return is_needed(name, b"\n".join(texts).decode(errors="replace"))

    indices = [
        CachedIndex(name, files, state_of(files, partial(is_needed_index, name, files)))
        for name, files in groups.items()
        if any(MANIFEST in file for file in files)
    ]
    left = groups.keys() - {index.name for index in indices if index.state == "remove"}

    def is_needed_file(name: str) -> bool:
        if not name.endswith(ORDERS):
            return is_needed(name, "")
        return any(known.name in left for known in parse_known(read_small(directory / name) or b""))

    indices += [
        CachedIndex(name, {name: file}, state_of({name: file}, partial(is_needed_file, name)))
        for name, file in others.items()
    ]
    return sorted(indices, key=lambda index: index.changed_at)


def _hold_lease(directory: Location, name: str, listed: StoredFile | None) -> HeldLease | None:
    """Acquire the lease of an index, or take over the old one that is listed; None if another process has it."""
    lease = Lease(directory / name)
    if listed is None:
        return run(lease.acquire())
    record = run(lease.read())
    if record == NO_LEASE or list_stored_files(directory.uri, directory.options or {}).get(name) != listed:
        return None
    return run(lease.take_over(record))
