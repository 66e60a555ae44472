"""How one range of an object is asked for once: a coroutine for each kind of filesystem.

    s3, gs, http     straight of the driver's session (`direct`), else of the driver
    other async      the filesystem's _cat_file, which drops the response: only its length is checked
    the rest         no coroutine: cat_ranges in the thread that reads

The drivers' own retries are left out, all but the shortest: they nest (25 requests and 42 s for one that was refused
for ever), and ours count for all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from binidx.storage.requests.retries import Fetch
from binidx.storage.stores import filesystem
from binidx.storage.stores.address import PLAIN, address_of, address_on_http, object_key, unlimited
from binidx.storage.stores.direct import DirectRequests, receive
from binidx.storage.stores.pinned import PinnedObject
from binidx.storage.stores.response_check import ResponseHead, check_length, check_response

MakeFetch = Callable[[Any, PinnedObject], Fetch]


def fetch_of(fs: Any, opened: PinnedObject, *, fast: bool) -> Fetch:
    """What asks for a range of an object on a filesystem that `has_coroutines`.

    Args:
        fast: without the driver where that is possible.
    """
    driver = (filesystem.of_its_class(fs, DRIVERS) or _of_any)(fs, opened)
    address = address_of(fs)

    async def by_driver(start: int, stop: int) -> bytes:
        return check_length(opened.uri, (start, stop), await driver(start, stop))

    return DirectRequests(fs, opened, address, by_driver).fetch if fast and address else by_driver


def has_coroutines(fs: Any, uri: str) -> bool:
    """Chains say so of what they are made of, and do something else."""
    return bool(type(fs).async_impl) and len(filesystem.protocols(uri)) == 1


def _of_s3(fs: Any, opened: PinnedObject) -> Fetch:
    condition = {"IfMatch": opened.identity["etag"]} if "etag" in opened.identity else {}
    wanted = {**object_key(fs, opened.path), **condition}

    async def fetch(start: int, stop: int) -> bytes:
        from botocore.exceptions import ClientError
        from s3fs.errors import translate_boto_error

        await fs.set_session()
        get = (await fs.get_s3(wanted["Bucket"])).get_object
        try:
            response = await get(**fs._get_s3_method_kwargs(get, Range=f"bytes={start}-{stop - 1}", **wanted))
        except ClientError as error:
            raise translate_boto_error(error) from error
        told = response["ResponseMetadata"]
        head = ResponseHead(told["HTTPStatusCode"], told["HTTPHeaders"])
        async with response["Body"] as body:
            return await receive(opened, (start, stop), head, body.read)

    return fetch


def _of_gcs(fs: Any, opened: PinnedObject) -> Fetch:
    url = fs.url(opened.path, generation=opened.identity.get("generation"))
    request = inspect.unwrap(type(fs)._request)  # without its six tries

    async def fetch(start: int, stop: int) -> bytes:
        answer: bytes
        unlimited(await fs._set_session())
        if hasattr(fs, "_is_zonal_bucket") and await fs._is_zonal_bucket(fs.split_path(opened.path)[0]):
            answer = await fs._cat_file(opened.path, start=start, end=stop)
        else:
            status, headers, _, answer = await request(
                fs, "GET", url, headers={"Range": f"bytes={start}-{stop - 1}", **PLAIN}
            )
            check_response(opened, (start, stop), ResponseHead(status, headers))
        return answer

    return fetch


def _of_http(fs: Any, opened: PinnedObject) -> Fetch:
    async def fetch(start: int, stop: int) -> bytes:
        address = await address_on_http(fs, opened)
        headers = {**address.headers, "Range": f"bytes={start}-{stop - 1}"}
        async with address.session.get(address.url, headers=headers, **address.options) as response:
            if response.status == 404:
                raise FileNotFoundError(opened.path)
            response.raise_for_status()
            return await receive(
                opened, (start, stop), ResponseHead(response.status, response.headers), response.content.read
            )

    return fetch


def _of_any(fs: Any, opened: PinnedObject) -> Fetch:
    async def fetch(start: int, stop: int) -> bytes:
        answer: bytes = await fs._cat_file(opened.path, start=start, end=stop)
        return answer

    return fetch


DRIVERS: dict[str, MakeFetch] = {
    "S3FileSystem": _of_s3,
    "GCSFileSystem": _of_gcs,
    "HTTPFileSystem": _of_http,
}
"""class of the filesystem, or a base of it -> how it is asked for ranges of one content"""
