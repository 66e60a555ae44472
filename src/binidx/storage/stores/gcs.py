"""Google Cloud Storage through gcsfs: gs://bucket/key, gcs://bucket/key.

Ranges are requested directly at the media URL with the bearer header of gcsfs' credentials (`direct`), and pinned
to a generation. gcsfs sends a request up to six times within half a minute, also where nothing listens, so its request
function is used without its retries. Zonal buckets speak gRPC, so gcsfs reads those by itself, unpinned.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from binidx.storage.interfaces import Range
from binidx.storage.store_protocols import Driver, ListRequest, ObjectInfo, Prices
from binidx.storage.stores.direct import (
    PLAIN,
    PLAIN_OPTIONS,
    Address,
    DirectStore,
    NotDirectError,
    SessionOptions,
    bounded_session,
    default_tls,
    direct_address,
)
from binidx.storage.stores.fsspec_store import FsspecWrites, open_filesystem
from binidx.storage.stores.identity import check_length, check_response, object_info

AIOHTTP_LIMIT = 100
"""Connections of a session unless its connector has another limit."""


class GcsStore(FsspecWrites, DirectStore):
    """Store of Google Cloud Storage. Reads are pinned to the generation, but for zonal buckets."""

    # One region, Standard, November 2026: $0.004 per 10,000 class B, $0.05 per 10,000 class A requests
    # (cloud.google.com/storage/pricing).
    list_prices = Prices(
        *("gs", 0.004 / 10_000, 0.05 / 10_000, 5_000, "a bucket, which GCS doubles every 20 minutes"),
        doubling_seconds=1_200,
    )
    driver = Driver(
        "gcsfs",
        "'binidx[gcs]'",
        "GOOGLE_APPLICATION_CREDENTIALS, or storage_options={'token': 'anon'} "
        """(--storage-options '{"token": "anon"}') for a public bucket""",
    )
    hides_uploads = True
    max_composed = 32

    @staticmethod
    def default_options(uri: str, given: Mapping[str, Any], reading: int) -> dict[str, Any]:
        from fsspec.config import conf

        if (os.environ.get("STORAGE_EMULATOR_HOST") or given.get("endpoint_url")) and "gcsfs" not in sys.modules:
            # gcsfs asks the gRPC storage-control API for the bucket's type, which no emulator speaks: each operation
            # would wait 30-88 s for the handshake to fail. Read once, when gcsfs is imported.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        session = {**conf.get("gs", {}), **conf.get("gcs", {}), **given}.get("session_kwargs") or {}
        headers = {**PLAIN, **session.get("headers", {})}
        bounded = {**bounded_session(()), **session, "headers": headers}
        return {"use_listings_cache": False, **given, "session_kwargs": bounded}

    def pins(self, info: ObjectInfo) -> bool:
        return "generation" in info.identity

    async def report(self, uri: str) -> ObjectInfo:
        self.fs.invalidate_cache()
        bucket, key, generation = self.fs.split_path(self.path(uri))
        if not key:
            raise FileNotFoundError(uri)
        _, _, body = await request(self.fs, "b/{}/o/{}", bucket, key, generation=generation)
        return object_info(uri, json.loads(body))

    async def address(self, info: ObjectInfo) -> Address:
        from google.auth.transport.mtls import has_default_client_cert_source

        fs = self.fs
        if has_default_client_cert_source():  # type: ignore[no-untyped-call]
            raise NotDirectError("it may need a client certificate")
        if await self._is_zonal(info.uri):
            raise NotDirectError("a zonal bucket speaks gRPC")
        headers: dict[str, str] = {}
        # A token may have to be fetched, which blocks.
        await asyncio.get_running_loop().run_in_executor(None, fs.credentials.apply, headers)
        url = self._pinned_url(info)
        if payer := fs.requester_pays:
            url += f"&userProject={payer if isinstance(payer, str) else fs.project}"
        is_plain = fs.session_kwargs.keys() <= PLAIN_OPTIONS
        options = SessionOptions(fs.session_kwargs, default_tls if is_plain else None)
        return await direct_address(fs, url, headers, lambda: options)

    def _pinned_url(self, info: ObjectInfo) -> str:
        url, generation = str(self.fs.url(self.path(info.uri))), info.identity.get("generation")
        return url if generation is None or "&generation=" in url else f"{url}&generation={generation}"

    async def fetch_by_driver(self, info: ObjectInfo, where: Range) -> bytes:
        start, stop = where
        if await self._is_zonal(info.uri):
            whole: bytes = await self.fs._cat_file(self.path(info.uri), start=start, end=stop)
            return check_length(info.uri, where, whole)
        url = self._pinned_url(info)
        headers = {"Range": f"bytes={start}-{stop - 1}", **PLAIN}
        status, received, body = await request(self.fs, url, headers=headers)
        check_response(info, where, status, received)
        return check_length(info.uri, where, body)

    async def list_page(self, page: ListRequest) -> tuple[dict[str, ObjectInfo], str]:
        more = {"pageToken": page.token} if page.token else {}
        wanted = {"prefix": page.prefix, "delimiter": page.delimiter, "startOffset": page.after, **more}
        _, _, body = await request(self.fs, "b/{}/o", page.bucket, **wanted)
        answer = json.loads(body)
        objects = {item["name"]: object_info(item["name"], item) for item in answer.get("items", [])}
        return objects, answer.get("nextPageToken", "")

    def compose(self, uri: str, sources: Sequence[ObjectInfo]) -> ObjectInfo:
        bucket, key = self.split(uri)
        generations = [source.identity.get("generation") for source in sources]
        body = {
            "sourceObjects": [
                {"name": self.split(source.uri)[1], **({"generation": str(generation)} if generation else {})}
                for source, generation in zip(sources, generations, strict=True)
            ],
            "destination": {"contentType": "application/octet-stream"},
        }
        driver, _ = open_filesystem(uri, self.storage_options)
        made = driver.call("POST", "b/{}/o/{}/compose", bucket, key, json=body, json_out=True)
        driver.invalidate_cache()
        return object_info(uri, made)

    async def _is_zonal(self, uri: str) -> bool:
        try:
            is_zonal = private(self.fs, "_is_zonal_bucket")
        except AttributeError:
            return False
        return bool(await is_zonal(self.split(uri)[0]))


def private(owner: Any, name: str) -> Any:
    """Return a private member of gcsfs. Every caller has another way for a release that lacks the member.

    Raises:
        AttributeError: gcsfs lacks it.
    """
    return getattr(owner, name)


async def request(fs: Any, path: str, *names: str, **options: Any) -> tuple[int, Mapping[str, str], bytes]:
    """Send one GET by gcsfs without its retries; return status, headers and body.

    If a release of gcsfs lacks the private member for that, it sends with its retries, and the status is inferred.

    Args:
        path: URL, or path of the API with {} for each of the names.
        options: query parameters, and `headers`.
    """
    try:
        connector = (await private(fs, "_set_session")()).connector
        if connector.limit == AIOHTTP_LIMIT:
            connector._limit = 0  # the scheduler bounds requests, and gcsfs has no option for this
        send = inspect.unwrap(private(type(fs), "_request"))
    except AttributeError:
        headers, body = await fs._call("GET", path, *names, **options)
        return 206 if "Content-Range" in headers else 200, headers, body
    status, headers, _, body = await send(fs, "GET", path, *names, **options)
    return status, headers, body
