"""What a store tells of the many objects of a folder: one request for a thousand, where each alone would be one.

S3 and GCS list what is there now (S3 since 2020). A list is not one moment: what was replaced while it was made may be
in it old beside new. Who needs more takes two: `format.listed`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from binidx.storage import filesystem
from binidx.storage.inquiry import ask_store
from binidx.storage.settings import ReadSettings

PAGE_KEYS = 1000

Info = dict[str, Any]
"""As fsspec's `info` of one object."""


def list_together(
    uris: Sequence[str], storage_options: Mapping[str, Any] | None = None, *, most_pages: int
) -> dict[str, Info] | None:
    """What there is in one folder under names that begin as all of these do.

    Args:
        uris: in the same folder.
        most_pages: requests; a folder may hold a million other objects.

    Returns:
        By URI. None: this store has no way to list in pages, or there are more of them.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    uri, options = common_start(uris), storage_options or {}
    settings = ReadSettings.of(options)
    in_flight = filesystem.in_flight(uri, options, settings)
    fs, path = filesystem.open_filesystem(uris[0], options, reading=in_flight)
    pages = next((PAGES[each.__name__] for each in type(fs).__mro__ if each.__name__ in PAGES), None)
    if pages is None or len(filesystem.protocols(uri)) != 1:
        return None
    bucket, key, _ = fs.split_path(path)
    common, folder = key[: len(key) - len(uris[0]) + len(uri)], uris[0][: len(uris[0]) - len(key)]
    found: dict[str, Info] = {}
    token = ""
    for _ in range(most_pages):

        def ask(token: str = token) -> Coroutine[Any, Any, tuple[dict[str, Info], str]]:
            return pages(fs, bucket, common, token)

        page, token = ask_store(fs, uri, ask, settings, in_flight=in_flight)
        found |= {folder + name: info for name, info in page.items()}
        if not token:
            return found
    return None


def common_start(names: Sequence[str]) -> str:
    """What all of the names begin with."""
    first, last = min(names), max(names)
    count = next(
        (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first)
    )
    return first[:count]


async def _page_on_s3(fs: Any, bucket: str, common: str, token: str) -> tuple[dict[str, Info], str]:
    more = {"ContinuationToken": token} if token else {}
    told = await fs._call_s3("list_objects_v2", fs.kwargs, Bucket=bucket, Prefix=common, Delimiter="/", **more)
    found = {
        each["Key"]: {"size": each["Size"], "ETag": each.get("ETag"), "LastModified": each.get("LastModified")}
        for each in told.get("Contents", [])
    }
    return found, told.get("NextContinuationToken", "") if told.get("IsTruncated") else ""


async def _page_on_gcs(fs: Any, bucket: str, common: str, token: str) -> tuple[dict[str, Info], str]:
    request = inspect.unwrap(type(fs)._request)  # without its six tries
    wanted = {"prefix": common, "delimiter": "/", **({"pageToken": token} if token else {})}
    *_, answer = await request(fs, "GET", "b/{}/o", bucket, **wanted)
    told = json.loads(answer)
    return {each["name"]: fs._process_object(bucket, dict(each)) for each in told.get("items", [])}, told.get(
        "nextPageToken", ""
    )


Page = Callable[[Any, str, str, str], Coroutine[Any, Any, tuple[dict[str, Info], str]]]

PAGES: dict[str, Page] = {"S3FileSystem": _page_on_s3, "GCSFileSystem": _page_on_gcs}
"""class of the filesystem, or a base of it -> one page of names that begin so, and where the next one begins"""
