"""Objects of web servers, by http:// and https://; read only. fsspec's session carries the requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from binidx.storage.interfaces import ObjectInfo, Range
from binidx.storage.stores.driver_errors import HTTPStatusError
from binidx.storage.stores.fsspec_store import checked_info
from binidx.storage.stores.http_session import PLAIN, Address, DirectStore, get_range, if_match, unlimited
from binidx.storage.stores.identity import is_weak
from binidx.storage.stores.response_check import size_and_tail


class HttpStore(DirectStore):
    """Store of a web server. Reads are pinned to a strong ETag, where the server sends one."""

    def pins(self, info: ObjectInfo) -> bool:
        return "etag" in info.identity and not is_weak(info.identity["etag"])

    async def head(self, uri: str, *, tail_bytes: int = 0, folders: bool = False) -> tuple[ObjectInfo, bytes]:
        if folders and not tail_bytes:
            return await self.look(uri), b""  # fsspec sends a GET where a server refuses HEAD
        method, wanted = ("GET", {"Range": f"bytes=-{tail_bytes}"}) if tail_bytes else ("HEAD", {})
        address = await self._address(uri)
        options = {"allow_redirects": True, **address.options, "headers": {**address.headers, **wanted}}
        async with address.session.request(method, address.url, **options) as response:
            response.raise_for_status()
            length = response.headers.get("Content-Length")
            whole = None if length is None else int(length)
            size, part_bytes = size_and_tail(response.headers.get("Content-Range"), whole)
            tail = await response.read() if part_bytes else b""
        info = checked_info(uri, {"size": size, "ETag": response.headers.get("ETag")})
        return info, tail if len(tail) == part_bytes else b""

    async def address(self, info: ObjectInfo) -> Address:
        found = await self._address(info.uri)
        return replace(found, headers={**found.headers, **if_match(info)})

    async def fetch(self, info: ObjectInfo, where: Range) -> bytes:
        slot = self._slot(info)
        if slot.address is None:
            slot.address = await self.address(info)
        answer = await get_range(info, slot.address, where)
        if isinstance(answer, bytes):
            return answer
        raise FileNotFoundError(info.uri) if answer == 404 else HTTPStatusError(answer, "refused")

    async def _address(self, uri: str) -> Address:
        fs = self.fs
        options: dict[str, Any] = dict(fs.kwargs)
        headers = {**options.pop("headers", {}), **PLAIN}
        return Address(unlimited(await fs.set_session()), fs.encode_url(self.path(uri)), headers, options)
