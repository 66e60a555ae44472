"""Lists of many objects of a folder: one request for a thousand, where a HEAD request for each would be a thousand.

    names, sorted                   p000.bin p000.idx ... p499.idx    p500.bin ... p999.idx
    lists, at the same time         after p000.bi, up to p500.bi      after p500.bi, up to p999.idx

S3 and GCS list the current objects (S3 since 2020). A list is not one moment: an object that was replaced while the
list was made may be in it in its old version beside new ones. `format.prefix_listing` compares two lists for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from binidx.storage.interfaces import ListableStore, ListRequest, ObjectInfo
from binidx.storage.requests.head import request_with_retries
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.registry import open_store
from binidx.storage.threads import REQUESTS

PAGE_KEYS = 1000
NAMES_AT_ONCE = 900
"""Names of one list. A page then goes beyond them, if there is nothing else."""


def list_objects(
    uris: Sequence[str], storage_options: Mapping[str, Any] | None = None, *, most_pages: int
) -> dict[str, ObjectInfo] | None:
    """Return the objects of one folder, or of folders of a bucket, from the first to the last of these names.

    Args:
        uris: in the same bucket. Objects of other folders between them are listed too, unless they are all in one.
        most_pages: requests; there may be a million other objects.

    Returns:
        By URI. None: this store does not list in pages, or there are more of them.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    store, settings = open_store(uris[0], storage_options), ReadSettings.of(storage_options)
    if not isinstance(store, ListableStore):
        return None
    bucket, key = store.split(uris[0])
    root = uris[0][: len(uris[0]) - len(key)]
    prefix = common_start(uris)[len(root) :]
    delimiter = "/" if len({uri.rpartition("/")[0] for uri in uris}) == 1 else ""
    stretches = stretches_of([uri[len(root) :] for uri in uris])
    pages_each = most_pages // len(stretches)

    def list_stretch(first: str, stop: str) -> dict[str, ObjectInfo] | None:
        found: dict[str, ObjectInfo] = {}
        token = ""
        for _ in range(pages_each):
            page = partial(store.list_page, ListRequest(bucket, prefix, delimiter, first, token))
            infos, token = request_with_retries(store, root + first, page, settings)
            found |= {root + name: replace(info, uri=root + name) for name, info in infos.items()}
            if not token or max(infos, default="") > stop:
                return found
        return None

    pending = [REQUESTS.submit(partial(list_stretch, *each)) for each in stretches[1:]]
    lists = [list_stretch(*stretches[0]), *(each.result() for each in pending)]
    return None if None in lists else {name: info for each in lists if each for name, info in each.items()}


def stretches_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (after, up to) of the lists, made at the same time, that cover these names and all between them."""
    names = sorted(names)
    # All but the last letter: less than the name itself, which must be in the page.
    starts = [name[:-1] for name in names[::NAMES_AT_ONCE]]
    return [*pairwise([*starts, names[-1]])]


def common_start(names: Sequence[str]) -> str:
    """Return what all of the names begin with."""
    first, last = min(names), max(names)
    pairs = enumerate(zip(first, last, strict=False))
    count = next((place for place, (one, other) in pairs if one != other), len(first))
    return first[:count]
