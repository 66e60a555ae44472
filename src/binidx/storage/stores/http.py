"""Objects of web servers, and of the Hugging Face Hub, read only, over the session of fsspec's driver.

    http://HOST/PATH, https://
    hf://datasets/NAME/PATH, hf://datasets/NAME@REVISION/PATH, also of models and spaces

Redirects are followed here: aiohttp would send the user's own headers, such as X-Api-Key, to whatever host a server
names.
"""

from __future__ import annotations

import base64
import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from binidx.storage.interfaces import Bytes, Range
from binidx.storage.settings import drivers_own
from binidx.storage.store_protocols import Driver, ObjectInfo, Prices
from binidx.storage.stores.direct import (
    MAX_REDIRECTS,
    PLAIN,
    PLAIN_OPTIONS,
    RENEW_SECONDS,
    Address,
    DirectStore,
    bounded_session,
    default_tls,
    get_range,
    if_match,
    new_session,
    plain_connections,
    read_at_most,
    redirect_guard,
    request_options,
)
from binidx.storage.stores.driver_errors import HTTPStatusError, storage_errors
from binidx.storage.stores.fsspec_store import FsspecStore, checked_info
from binidx.storage.stores.identity import size_and_tail

HUB_FILE = re.compile(r"hf://(?:(dataset|space)s/)?([^/@]+/[^/@]+)(?:@(refs/\w+/[^/]+|[^/]+))?/(.+)")


class HttpStore(DirectStore):
    """Store of a web server. Reads are pinned to a strong ETag, where the server sends one, else to a date."""

    list_prices = Prices("http")
    driver = Driver("aiohttp", "aiohttp", "those in the URL: a signature runs out")

    @staticmethod
    def default_options(uri: str, given: Mapping[str, Any], reading: int) -> dict[str, Any]:
        from fsspec.config import conf

        request = move_to_headers({**conf.get("http", {}), **conf.get("https", {}), **given})
        client = move_to_headers(request.get("client_kwargs") or {})
        request["headers"] = {**PLAIN, **client.pop("headers"), **request["headers"]}
        guard = {} if reading else {"trace_configs": [*client.get("trace_configs", []), redirect_guard()]}
        unlimited = {"get_client": new_session} if reading else {}
        return {**unlimited, **request, "client_kwargs": {**bounded_session(None), **client, **guard}}

    async def head(self, uri: str, *, tail_bytes: int = 0, folders: bool = False) -> tuple[ObjectInfo, bytes]:
        if folders and not tail_bytes:
            with contextlib.suppress(Exception):  # some servers refuse HEAD, or send no length
                return await self._head("HEAD", uri)
        return await self._head("GET" if tail_bytes or folders else "HEAD", uri, tail_bytes)

    async def _head(self, method: str, uri: str, tail_bytes: int = 0) -> tuple[ObjectInfo, bytes]:
        address = await self._url(uri, method)
        wanted = {"Range": f"bytes=-{tail_bytes}"} if tail_bytes else {}
        while True:
            headers = {**address.headers, **wanted}
            async with address.session.request(method, address.url, headers=headers, **address.options) as response:
                target = address.redirected(response)
                if target is None:
                    return await _report(uri, response, tail_bytes)
            address = target

    async def address(self, info: ObjectInfo) -> Address:
        address = await self._url(info.uri)
        return replace(address, headers={**address.headers, **if_match(info)})

    async def fetch(self, info: ObjectInfo, where: Range) -> Bytes:
        route = self.route(info)
        if route.address is None or time.monotonic() >= route.until:
            route.address, route.until = await self.address(info), time.monotonic() + RENEW_SECONDS
        answer = await get_range(info, route.address, where)
        if not isinstance(answer, int):
            return answer
        raise FileNotFoundError(info.uri) if answer == 404 else HTTPStatusError(answer, "refused")

    def signed(self, uri: str, method: str) -> str:
        """Return the URL of requests for an object; signed for this method, where the provider signs URLs."""
        return self.path(uri)

    async def _url(self, uri: str, method: str = "GET") -> Address:
        fs = self.fs
        # Else a server that takes no connections looks like one that sends nothing.
        timeout = {} if "timeout" in fs.client_kwargs else {"timeout": request_options()["timeout"]}
        options: dict[str, Any] = {**timeout, **fs.kwargs, "allow_redirects": False}
        redirects = options.pop("max_redirects", MAX_REDIRECTS) if fs.kwargs.get("allow_redirects", True) else 0
        headers, url = {**options.pop("headers", {}), **PLAIN}, fs.encode_url(self.signed(uri, method))
        if url.user is not None:  # as a header, so that a redirect to the same origin keeps it
            user = f"{url.user}:{url.password or ''}".encode("latin1")
            headers["Authorization"] = f"Basic {base64.b64encode(user).decode()}"
        is_plain = fs.kwargs.keys() <= {"headers", "allow_redirects", "max_redirects"}
        is_plain = is_plain and fs.get_client is new_session and fs.client_kwargs.keys() <= PLAIN_OPTIONS
        session, url = await fs.set_session(), url.with_user(None)
        connections = plain_connections(fs, session, url, default_tls if is_plain else None)
        return Address(session, url, headers, options, redirects, connections=connections)


class HubStore(HttpStore):
    """Store of the files of the Hugging Face Hub: ranges are pinned to the ETag, as those of a web server.

    huggingface_hub makes the URLs, finds the token and lists repositories. The token stays with the Hub when it
    redirects to another host for the bytes.

    Options are those of huggingface_hub's HfFileSystem: `endpoint` (HF_ENDPOINT), `token` (HF_TOKEN, or that of the
    login; False: none).
    """

    list_prices = Prices("hf")
    driver = Driver("huggingface_hub", "'binidx[hub]'", "HF_TOKEN, or hf auth login")

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        with storage_errors(uri):
            import aiohttp  # noqa: F401
            from huggingface_hub import constants, get_token
        options = drivers_own(storage_options)
        self._endpoint = str(options.get("endpoint") or constants.ENDPOINT)
        token = options.get("token")
        token = get_token() if token in (None, True) else token
        ours = {name: value for name, value in (storage_options or {}).items() if name not in options}
        super().__init__(self._endpoint, {**ours, "headers": {"Authorization": f"Bearer {token}"} if token else {}})
        self._given = uri, dict(storage_options or {})

    default_options = staticmethod(FsspecStore.default_options)

    def path(self, uri: str) -> str:
        from huggingface_hub import hf_hub_url

        if (parts := HUB_FILE.fullmatch(uri)) is None:
            raise FileNotFoundError(uri)
        kind, repository, revision, path = parts.groups()
        return str(hf_hub_url(repository, path, repo_type=kind, revision=revision, endpoint=self._endpoint))


async def _report(uri: str, response: Any, tail_bytes: int) -> tuple[ObjectInfo, bytes]:
    """Return what a response reports of an object, and its body if that is no more than the end of the object."""
    response.raise_for_status()
    if response.status not in (200, 206):
        raise HTTPStatusError(response.status, "refused")
    length = response.headers.get("Content-Length")
    whole = None if length is None else int(length)
    size, part_bytes = size_and_tail(response.headers.get("Content-Range"), whole, tail_bytes)
    tail = await read_at_most(response.content.read, part_bytes) if part_bytes else b""
    marks = {name: response.headers.get(name) for name in ("ETag", "Last-Modified")}
    return checked_info(uri, {"size": size, **marks}), tail if len(tail) == part_bytes else b""


def move_to_headers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of aiohttp with `auth` and `cookies` moved to the headers, for `headers_for`."""
    given = dict(options)
    headers = dict(given.pop("headers", None) or {})
    if auth := given.pop("auth", None):
        headers["Authorization"] = auth.encode()
    if cookies := dict(given.pop("cookies", None) or {}):
        headers["Cookie"] = "; ".join(f"{name}={getattr(value, 'value', value)}" for name, value in cookies.items())
    return {**given, "headers": headers}
