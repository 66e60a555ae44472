"""What a store tells of the many objects of a folder: one request for a thousand, where each alone would be one.

    names asked for, sorted         p000.bin p000.idx ... p499.idx    p500.bin ... p999.idx
    lists, at the same time         after p000.bi, up to p500.bi      after p500.bi, up to p999.idx

S3 and GCS list what is there now (S3 since 2020). A list is not one moment: what was replaced while it was made may be
in it old beside new. Who needs more takes two: `format.listed`.

On S3 a page is asked for by a signed URL, and its XML read here: botocore spends 50 ms on it, most of them on times.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from binidx.storage.settings import ReadSettings
from binidx.storage.stores import filesystem
from binidx.storage.stores.address import NotDirectError
from binidx.storage.stores.head import request_with_retries
from binidx.storage.stores.signed import ask_signed
from binidx.storage.threads import REQUESTS

logger = logging.getLogger(__name__)
PAGE_KEYS = 1000
NAMES_AT_ONCE = 900
"""So that a page goes beyond them, where there is nothing else."""

Info = dict[str, Any]
"""As fsspec's `info` of one object."""


def list_together(
    uris: Sequence[str], storage_options: Mapping[str, Any] | None = None, *, most_pages: int
) -> dict[str, Info] | None:
    """What there is in one folder, or in folders of a bucket, from the first to the last of these names.

    Args:
        uris: in the same bucket. What lies between them in other folders is listed too, unless they are all in one.
        most_pages: requests; there may be a million other objects.

    Returns:
        By URI. None: this store has no way to list in pages, or there are more of them.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    options = storage_options or {}
    settings = ReadSettings.of(options)
    in_flight = filesystem.max_in_flight(uris[0], options, settings)
    fs, path = filesystem.open_filesystem(uris[0], options, reading=in_flight)
    page_of = filesystem.of_its_class(fs, PAGES)
    if page_of is None or len(filesystem.protocols(uris[0])) != 1:
        return None
    bucket, key, _ = fs.split_path(path)
    root = uris[0][: len(uris[0]) - len(key)]
    common = common_start(uris)[len(root) :]
    delimiter = "/" if len({uri.rpartition("/")[0] for uri in uris}) == 1 else ""
    stretches = stretches_of([uri[len(root) :] for uri in uris])
    pages_each = most_pages // len(stretches)

    def list_stretch(first: str, stop: str) -> dict[str, Info] | None:
        found: dict[str, Info] = {}
        token = ""
        for _ in range(pages_each):
            wanted = ListRequest(bucket, common, delimiter, first, token, settings.fast is not False)
            page, token = request_with_retries(
                fs, root + first, partial(page_of, fs, wanted), settings, in_flight=in_flight
            )
            found |= {root + name: info for name, info in page.items()}
            if not token or max(page, default="") > stop:
                return found
        return None

    pending = [REQUESTS.submit(partial(list_stretch, *each)) for each in stretches[1:]]
    lists = [list_stretch(*stretches[0]), *(each.result() for each in pending)]
    return None if None in lists else {name: info for each in lists if each for name, info in each.items()}


def stretches_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Where to begin and to end a list of these and all between them, in pages at the same time: (after, up to)."""
    names = sorted(names)
    # All but the last letter: less than the name itself, which is to be in the page.
    starts = [name[:-1] for name in names[::NAMES_AT_ONCE]]
    return [*pairwise([*starts, names[-1]])]


def common_start(names: Sequence[str]) -> str:
    """What all of the names begin with."""
    first, last = min(names), max(names)
    count = next(
        (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first)
    )
    return first[:count]


@dataclass(frozen=True)
class ListRequest:
    """A page of names of a bucket that begin with `common` and come after `after`, or that goes on from `token`.

    delimiter: "/" for those of one folder; empty for all.
    """

    bucket: str
    common: str
    delimiter: str
    after: str
    token: str
    fast: bool


async def _page_on_s3(fs: Any, wanted: ListRequest) -> tuple[dict[str, Info], str]:
    place = {"ContinuationToken": wanted.token} if wanted.token else {"StartAfter": wanted.after}
    asked = {"Bucket": wanted.bucket, "Prefix": wanted.common, "Delimiter": wanted.delimiter, **place}
    if wanted.fast:
        try:
            return parse_page((await ask_signed(fs, "list_objects_v2", asked)).body)
        except Exception as error:  # whatever it is, the driver meets it too if it matters
            logger.debug("%s: its driver lists: %s", wanted.bucket, error)
    told = await fs._call_s3("list_objects_v2", fs.kwargs, **asked)
    found = {
        each["Key"]: {"size": each["Size"], "ETag": each.get("ETag"), "LastModified": each.get("LastModified")}
        for each in told.get("Contents", [])
    }
    return found, told.get("NextContinuationToken", "") if told.get("IsTruncated") else ""


def parse_page(text: bytes) -> tuple[dict[str, Info], str]:
    """The objects of an answer to ListObjectsV2, and where the next page begins.

    Raises:
        NotDirectError: an object without an ETag, or another answer.
    """
    root = ElementTree.fromstring(text)
    space = root.tag.removesuffix("ListBucketResult")
    encoded = root.findtext(f"{space}EncodingType") == "url"
    found: dict[str, Info] = {}
    for each in root.iter(f"{space}Contents"):
        key, size, etag = (each.findtext(space + name) for name in ("Key", "Size", "ETag"))
        if not key or not size or not etag:
            raise NotDirectError("a list without names, sizes or ETags")
        found[unquote_plus(key) if encoded else key] = {"size": int(size), "ETag": etag}
    more = root.findtext(f"{space}IsTruncated") == "true"
    return found, root.findtext(f"{space}NextContinuationToken") or "" if more else ""


async def _page_on_gcs(fs: Any, wanted: ListRequest) -> tuple[dict[str, Info], str]:
    request = inspect.unwrap(type(fs)._request)  # without its six tries
    more = {"pageToken": wanted.token} if wanted.token else {}
    asked = {"prefix": wanted.common, "delimiter": wanted.delimiter, "startOffset": wanted.after, **more}
    *_, answer = await request(fs, "GET", "b/{}/o", wanted.bucket, **asked)
    told = json.loads(answer)
    found = {each["name"]: fs._process_object(wanted.bucket, dict(each)) for each in told.get("items", [])}
    return found, told.get("nextPageToken", "")


Page = Callable[[Any, ListRequest], Coroutine[Any, Any, tuple[dict[str, Info], str]]]
PAGES: dict[str, Page] = {"S3FileSystem": _page_on_s3, "GCSFileSystem": _page_on_gcs}
"""class of the filesystem, or a base of it -> one page of names, and the token of the next one"""
