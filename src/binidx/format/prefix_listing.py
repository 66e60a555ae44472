"""Open many prefixes with two lists of their folders instead of five requests for each.

    first list     p0.bin B0   p0.idx E0   p1.bin B1   p1.idx E1 …
    second list    p0.bin B0   p0.idx E0   p1.bin B2   p1.idx E3 …
                   unchanged: a pair       changed: opened alone, by `pair`

A writer removes the `.idx` first and publishes the new one last. If `.idx` and `.bin` are the same in both lists, both
existed at the moment between the lists, and so belong to one dataset. Later reads are pinned to these versions: an
`.idx` that was replaced since is not read.

A list costs two requests for each thousand objects. Lists are made if at least `MIN_LISTED_PREFIXES` prefixes are in
one folder, or in folders of one bucket with few other objects between them; compressed datasets, and folders that may
not be listed, are opened alone. The bytes of listed `.idx` files come from the bundle of the run, if there is one:
`idx_bundle`.

1,000 prefixes 30 ms away, cold start to the first batch (two cores, proxy and server on them): 1.0 s with lists and
bundle, 7.3 s with lists alone, 15 s with neither. The bundle needs the lists, which prove that it is current.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from binidx.errors import StorageError
from binidx.format.idx import get_bin_path, get_idx_path
from binidx.format.idx_bundle import IdxBundle
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.requests.metadata import PAGE_KEYS, Found, list_objects
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import OPENS

logger = logging.getLogger(__name__)
MIN_LISTED_PREFIXES = 8
"""Fewest prefixes of a folder for which it is listed: lists save time, but S3 charges twelve times as much for one."""

OTHER_OBJECTS_PER_PREFIX = 8
"""Other objects for each prefix, in the folder or between folders, after which listing is given up."""


@dataclass
class ListedPair:
    """Pair that is the same in both lists: the `.idx`, the plain `.bin`, and its checksums if there are any.

    Attributes:
        sidecars: suffixes of its sidecars, of `SIDECARS`.
        index: bytes of the `.idx`, from a bundle or after they were read.
    """

    idx: Found
    bin: Found
    sums: Found | None
    sidecars: frozenset[str] = frozenset()
    index: memoryview | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the `.idx`."""
        return dict(self.idx.info.identity)


@contextlib.contextmanager
def list_pairs_with_bundle(
    prefixes: Sequence[str], storage_options: Mapping[str, Any] | None, bundle: IdxBundle | None
) -> Iterator[dict[str, ListedPair]]:
    """Return `list_pairs`, with the bytes of each `.idx` in the bundle.

    Args:
        bundle: rewritten at the end of the block with the `.idx` files opened in it, if it lacked some; None for none.
    """
    pending = OPENS.submit(partial(bundle.read, prefixes)) if bundle and len(prefixes) >= MIN_LISTED_PREFIXES else None
    found = list_pairs(prefixes, storage_options)
    if bundled := pending and pending.result():
        for prefix, each in found.items():
            each.index = bundled.find(prefix, each.identity)
    missing = [prefix for prefix, each in found.items() if each.index is None]
    yield found
    if bundle and bundle.writable:
        bundle.update(prefixes, {prefix: (each.identity, each.index) for prefix, each in found.items()}, missing)


def list_pairs(prefixes: Sequence[str], storage_options: Mapping[str, Any] | None = None) -> dict[str, ListedPair]:
    """Return, by prefix, the pairs that are the same in two lists."""

    def list_twice(folder: list[str]) -> dict[str, ListedPair]:
        names = [name for prefix in folder for name in (get_bin_path(prefix), get_idx_path(prefix))]
        pages = 2 * len(names) // PAGE_KEYS + 2 + OTHER_OBJECTS_PER_PREFIX * len(folder) // PAGE_KEYS
        try:
            before = list_objects(names, storage_options, most_pages=pages)
            after = None if before is None else list_objects(names, storage_options, most_pages=pages)
        except StorageError as error:
            # Objects may be readable without permission to list; opening each raises the error of an unreachable store.
            logger.debug("%s: opening each dataset alone: %s", names[0], error)
            return {}
        return {} if before is None or after is None else _unchanged_pairs(folder, before, after)

    found = [OPENS.submit(partial(list_twice, folder)) for folder in group_prefixes(prefixes)]
    return {prefix: each for folder in found for prefix, each in folder.result().items()}


def group_prefixes(prefixes: Sequence[str]) -> list[list[str]]:
    """The remote prefixes that are listed at once: MANY of a folder, or else of a bucket."""
    remote = [prefix for prefix in dict.fromkeys(prefixes) if local_path(prefix) is None]
    folders: dict[str, list[str]] = defaultdict(list)
    buckets: dict[str, list[str]] = defaultdict(list)
    for prefix in remote:
        folders[prefix.rpartition("/")[0]].append(prefix)
    for folder, those in folders.items():
        if len(those) < MIN_LISTED_PREFIXES:
            buckets["/".join(folder.split("/")[:3])] += those
    return [those for those in (*folders.values(), *buckets.values()) if len(those) >= MIN_LISTED_PREFIXES]


def _unchanged_pairs(
    prefixes: Sequence[str], before: Mapping[str, ObjectInfo], after: Mapping[str, ObjectInfo]
) -> dict[str, ListedPair]:
    found = {}
    for prefix in prefixes:
        idx, tokens = get_idx_path(prefix), get_bin_path(prefix)
        names = (idx, tokens, tokens + SUFFIX)
        there = (
            idx in after
            and tokens in after
            and all(_identity(before, name) == _identity(after, name) for name in names)
        )
        if there:
            sums = after.get(tokens + SUFFIX)
            beside = frozenset(end for end in SIDECARS if prefix + end in after)
            found[prefix] = ListedPair(Found(after[idx]), Found(after[tokens]), Found(sums) if sums else None, beside)
    return found


def _identity(infos: Mapping[str, ObjectInfo], name: str) -> Any:
    return name in infos and infos[name].identity
