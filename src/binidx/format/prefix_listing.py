"""Pairs of many prefixes, found by two lists of their folders instead of five requests for each.

    list     p0.bin B0   p0.idx E0   p1.bin B1   p1.idx E1 …
    again    p0.bin B0   p0.idx E0   p1.bin B2   p1.idx E3 …
             steady: a pair          not steady: opened alone, as `pair` does

Whoever replaces a dataset removes the .idx first and publishes the new one last. So where an .idx and a .bin are the
same in both lists, both were there in the moment between them, and they are of one dataset, whatever happened while
the lists were made. What is read then is pinned to these marks: an .idx that was replaced since is not read.

Lists cost two requests for each thousand objects. They are made where MANY prefixes lie in one folder, or in folders of
a bucket with little else between them; what is stored otherwise (compressed) or may not be listed is opened alone. The
bytes of the listed `.idx` files come from the bundle of the run, where there is one: `bundled`.

1,000 prefixes 30 ms away, cold start to the first batch (two cores, proxy and server on them): 1.0 s with lists and
bundle, 7.3 s with lists alone, 15 s with neither. The bundle depends on the lists, which prove that it is current.
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
from binidx.format.idx_bundle import BundlePlace
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.storage.codecs.checksums import SUFFIX
from binidx.storage.interfaces import ObjectInfo
from binidx.storage.requests.head import Found
from binidx.storage.requests.listing import PAGE_KEYS, list_objects
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import Threads

logger = logging.getLogger(__name__)


MANY = 8


"""Prefixes in a folder: two lists of it are cheaper, but S3 takes twelve times the money for one."""


OBJECTS_EACH = 8


"""Objects in the folder, or between the folders, for each prefix that are listed in vain, at most."""


@dataclass
class ListedPair:
    """A pair that both lists agree on: the `.idx`, the plain `.bin`, and its checksums if there are any.

    Attributes:
        sidecars: suffixes of `SIDECARS` that stand beside it.
        index: the bytes of the `.idx`, from a bundle or once they were read.
    """

    idx: Found
    bin: Found
    sums: Found | None
    sidecars: frozenset[str] = frozenset()
    index: memoryview | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Of the `.idx`."""
        return dict(self.idx.info.identity)


@contextlib.contextmanager
def list_with_bundle(
    prefixes: Sequence[str], storage_options: Mapping[str, Any] | None, place: BundlePlace | None
) -> Iterator[dict[str, ListedPair]]:
    """`list_pairs`, with the bytes of each `.idx` that the bundle has.

    Args:
        place: of the bundle, which is written at the end of the block from the `.idx` files opened in it, if it lacked
            some; None: there is no bundle.
    """
    bundle = _submit(partial(place.read, prefixes)) if place and len(prefixes) >= MANY else None
    found = list_pairs(prefixes, storage_options)
    if bundled := bundle and bundle.result():
        for prefix, each in found.items():
            each.index = bundled.find(prefix, each.identity)
    lacking = [prefix for prefix, each in found.items() if each.index is None]
    yield found
    if place and place.writes:
        place.complete(prefixes, {prefix: (each.identity, each.index) for prefix, each in found.items()}, lacking)


def list_pairs(prefixes: Sequence[str], storage_options: Mapping[str, Any] | None = None) -> dict[str, ListedPair]:
    """Return, by prefix, the pairs that are the same in two lists: those in folders of many, or in many of a bucket."""

    def look(folder: list[str]) -> dict[str, ListedPair]:
        names = [name for prefix in folder for name in (get_bin_path(prefix), get_idx_path(prefix))]
        pages = 2 * len(names) // PAGE_KEYS + 2 + OBJECTS_EACH * len(folder) // PAGE_KEYS
        try:
            before = list_objects(names, storage_options, most_pages=pages)
            after = None if before is None else list_objects(names, storage_options, most_pages=pages)
        except StorageError as error:
            # Who may not list may still read; what cannot be reached is named by who opens it.
            logger.debug("%s: each is asked for alone: %s", names[0], error)
            return {}
        return {} if before is None or after is None else _steady(folder, before, after)

    found = [_submit(partial(look, folder)) for folder in prefixes_to_list(prefixes)]
    return {prefix: each for folder in found for prefix, each in folder.result().items()}


def prefixes_to_list(prefixes: Sequence[str]) -> list[list[str]]:
    """The remote prefixes that are listed at once: MANY of a folder, or else of a bucket."""
    remote = [prefix for prefix in dict.fromkeys(prefixes) if local_path(prefix) is None]
    folders: dict[str, list[str]] = defaultdict(list)
    buckets: dict[str, list[str]] = defaultdict(list)
    for prefix in remote:
        folders[prefix.rpartition("/")[0]].append(prefix)
    for folder, those in folders.items():
        if len(those) < MANY:
            buckets["/".join(folder.split("/")[:3])] += those
    return [those for those in (*folders.values(), *buckets.values()) if len(those) >= MANY]


def _steady(
    prefixes: Sequence[str], before: Mapping[str, ObjectInfo], after: Mapping[str, ObjectInfo]
) -> dict[str, ListedPair]:
    found = {}
    for prefix in prefixes:
        idx, tokens = get_idx_path(prefix), get_bin_path(prefix)
        names = (idx, tokens, tokens + SUFFIX)
        there = idx in after and tokens in after and all(_mark(before, name) == _mark(after, name) for name in names)
        if there:
            sums = after.get(tokens + SUFFIX)
            beside = frozenset(end for end in SIDECARS if prefix + end in after)
            found[prefix] = ListedPair(Found(after[idx]), Found(after[tokens]), Found(sums) if sums else None, beside)
    return found


def _mark(infos: Mapping[str, ObjectInfo], name: str) -> Any:
    return name in infos and infos[name].identity


_submit = Threads("binidx-list", lambda: 8).submit
