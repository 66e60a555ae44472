"""Azure Blob Storage through adlfs: abfs://container/key, abfs://container@account.dfs.core.windows.net/key, az://.

Ranges are requested directly (`direct`), at a URL that adlfs signs, or with the token of its credential. adlfs returns
bytes without their response, so HEAD requests, and ranges that are refused, are sent by the Azure client within it, and
checked as those of other stores. The client's own retries are switched off, as `storage.requests` retries; only a body
that is cut off is requested by it up to three times.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any
from urllib.request import getproxies_environment

from binidx.storage.interfaces import Range
from binidx.storage.store_protocols import Driver, ObjectInfo
from binidx.storage.stores.direct import (
    Address,
    DirectStore,
    NotDirectError,
    SessionOptions,
    default_tls,
    direct_address,
    if_match,
)
from binidx.storage.stores.driver_errors import HTTPStatusError
from binidx.storage.stores.fsspec_store import FsspecWrites, Result
from binidx.storage.stores.identity import check_length, check_response, object_info, wrong_length

SCOPE = "https://storage.azure.com/.default"
"""Of a token for any account."""


def _nothing(*_: object) -> None:
    """Do nothing: replacement of a method of a file object."""


class AzureStore(FsspecWrites, DirectStore):
    """Store of Azure Blob Storage. Reads are pinned to the ETag."""

    driver = Driver(
        "adlfs",
        "'binidx[azure]'",
        "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or storage_options={'anon': True} "
        """(--storage-options '{"anon": true}') if it is public""",
    )
    hides_uploads = True

    @staticmethod
    def default_options(uri: str, given: Mapping[str, Any], reading: int) -> dict[str, Any]:
        return {"use_listings_cache": False, **given}

    def pins(self, info: ObjectInfo) -> bool:
        return "etag" in info.identity

    def find(self, uri: str, *, pattern: bool) -> list[str]:
        # adlfs returns container/key, without the account.
        _, key = self.split(uri)
        root = uri.rstrip("/").removesuffix(key.rstrip("/")).rstrip("/")
        return [f"{root}/{self.fs.split_path(path)[1]}" for path in super().find(uri, pattern=pattern)]

    async def report(self, uri: str) -> ObjectInfo:
        async with self._blob(uri) as (blob, options):
            report = await blob.get_blob_properties(**options)
        if (report.metadata or {}).get("hdi_isfolder") == "true":  # of an account with a hierarchical namespace
            raise FileNotFoundError(uri)
        return object_info(uri, {"size": report.size, "ETag": report.etag, "Last-Modified": report.last_modified})

    async def address(self, info: ObjectInfo) -> Address:
        if {"http", "https", "all"} & getproxies_environment().keys():
            raise NotDirectError("a proxy may stand before it")
        async with self._blob(info.uri) as (blob, options):
            url, credential, headers = blob.url, blob.credential, {"x-ms-version": blob.api_version, **if_match(info)}
        has_token = credential is not None and hasattr(credential, "get_token")
        if has_token:
            headers["Authorization"] = f"Bearer {(await credential.get_token(SCOPE)).token}"
        elif credential is not None:  # an account key; without one the URL has a signature, or needs none
            sign = functools.partial(self.fs.url, self.path(info.uri))
            url = await asyncio.get_running_loop().run_in_executor(None, sign)
        if options["version_id"] and (has_token or credential is None):
            raise NotDirectError("its URL names no version")
        return await direct_address(
            self.fs, url, headers, lambda: SessionOptions({"auto_decompress": False}, default_tls)
        )

    async def fetch_by_driver(self, info: ObjectInfo, where: Range) -> bytes:
        check = functools.partial(check_response, info, where)
        return check_length(info.uri, where, await self._download(info.uri, where, check))

    def read_start(self, fs: Any, uri: str, num_bytes: int) -> bytes:
        from fsspec.asyn import sync

        return bytes(sync(fs.loop, self._download, uri, (0, num_bytes), _nothing))

    async def _download(self, uri: str, where: Range, check: Callable[[int, Mapping[str, str]], None]) -> bytes:
        """Return the body of a response that `check` accepts, at most as long as its range."""
        start, stop = where

        def check_all(response: Any) -> None:
            status, headers = response.http_response.status_code, response.http_response.headers
            if status in (200, 206):
                check(status, headers)
                # The client inflates a body, and reads one without a length to its end.
                length, encoding = headers.get("content-length"), headers.get("content-encoding")
                if encoding or length is None or int(length) > stop - start:
                    raise wrong_length(uri, where, f"{encoding or 'plain'} content of {length or 'unknown'}")

        async with self._blob(uri) as (blob, options):
            stream = await blob.download_blob(start, stop - start, raw_response_hook=check_all, **options)
            body: bytes = await stream.readall()
            return body

    @contextlib.asynccontextmanager
    async def _blob(self, uri: str) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
        """Yield the client of an object, and options of its requests."""
        container, key, version = self.fs.split_path(self.path(uri))
        if not key:
            raise FileNotFoundError(uri)
        with _unwrapped_errors():
            async with self.fs.service_client.get_blob_client(container, key) as blob:
                yield blob, {"version_id": version, "retry_total": 0}

    def send(self, call: Callable[[Any], Result]) -> Result:
        with _unwrapped_errors():
            return super().send(call)

    def open_stream(self, uri: str) -> Any:
        file = super().open_stream(uri)
        # Closing the file makes its blocks an object. Azure removes the blocks of others after a week.
        file.commit, file.close, file.discard = file.close, _nothing, _nothing
        return file


@contextlib.contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """Replace an exception of the Azure client in the block by the one that it wraps, or by an `HTTPStatusError`."""
    from azure.core.exceptions import AzureError, HttpResponseError, ResourceNotFoundError

    try:
        yield
    except AzureError as error:
        cause: BaseException = error
        while isinstance(cause, AzureError) and cause.inner_exception is not None:
            cause = cause.inner_exception
        if isinstance(cause, ResourceNotFoundError):
            raise FileNotFoundError(cause.reason) from None
        if isinstance(cause, HttpResponseError) and cause.status_code:
            raise HTTPStatusError(cause.status_code, cause.reason or "") from None
        raise cause from cause.__cause__
