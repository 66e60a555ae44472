"""One request of S3 to a URL that its client signs, over its driver's session: a fifth of the driver's own CPU.

Asked once, as it is. What cannot be asked in this way, or is refused, raises NotDirectError and is the driver's to
ask, and so is for four minutes whatever its filesystem is asked by that method: else each would be asked twice.

Small objects of S3 without its driver: one request over its session, to a URL that its client signs.

Around a PUT botocore spends 2.6 ms of CPU, and over plain HTTP 0.7 ms a megabyte for a SHA-256; around a GET or DELETE
1.7 ms. Here it is 0.5 ms to sign, and 0.16 ms a megabyte for a CRC32 that is part of what is signed: the store refuses
what came otherwise. Each is tried once. What fails, or is refused, the driver asks for again, so answers, retries and
errors are its own.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.json_models import MAX_BYTES
from binidx.storage.requests.retries import PASSING, SLOWEST, HTTPStatusError
from binidx.storage.settings import ReadSettings
from binidx.storage.stores import filesystem
from binidx.storage.stores.address import RENEW_SECONDS, Address, NotDirectError, object_key, signed

VERBS = {
    "get_object": "GET",
    "head_object": "HEAD",
    "list_objects_v2": "GET",
    "put_object": "PUT",
    "upload_part": "PUT",
    "delete_object": "DELETE",
}
"""method of S3's client -> of HTTP"""


@dataclass(frozen=True)
class Answer:
    """What the store said."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def ask_signed(
    fs: Any,
    method: str,
    asked: Mapping[str, Any],
    *,
    good: Collection[int] = (200,),
    sent: Mapping[str, str] | None = None,
    data: Sequence[memoryview] | None = None,
    seconds: float | None = None,
) -> Answer:
    """The answer to a question of one of its client's methods.

    Args:
        asked: the method's parameters, the bucket among them.
        good: the statuses that are answers.
        sent: headers that come of what is asked, and are signed with it.
        data: the body, piece by piece; a piece a connection is given at once.
        seconds: for all of it; None: whoever asks calls it off.

    Raises:
        NotDirectError: it cannot be asked like this, or the store refuses.
        HTTPStatusError: a status that passes.
        Exception: aiohttp's, for a connection that fails.
    """
    with refusals_remembered(fs, method):
        return await _asked(await signed(fs, asked["Bucket"], method, asked, sent), method, good, data, seconds)


@contextlib.contextmanager
def refusals_remembered(fs: Any, method: str) -> Iterator[None]:
    """After a NotDirectError in the block the next such blocks raise one at once, for four minutes."""
    if time.monotonic() < _by_driver_until.get((id(fs), method), 0.0):
        raise NotDirectError("not long ago its driver had to be asked")
    try:
        yield
    except NotDirectError:
        _by_driver_until[id(fs), method] = time.monotonic() + RENEW_SECONDS
        raise


_by_driver_until: dict[tuple[int, str], float] = {}
"""id of a filesystem, which is kept for ever, and a method -> when that is tried again without its driver."""


async def _asked(
    address: Address, method: str, good: Collection[int], data: Sequence[memoryview] | None, seconds: float | None
) -> Answer:
    options = {**address.options, **({"timeout": _within(seconds)} if seconds else {})}
    sent = {} if data is None else {"data": _pieces_class()(data)}
    ask = address.session.request(VERBS[method], address.url, headers=address.headers, **sent, **options)
    async with ask as response:
        if (response.content_length or 0) > MAX_BYTES:
            raise NotDirectError(f"{response.content_length} bytes, which are too many for one body in memory")
        body = await response.read()
    if response.status in PASSING:
        raise HTTPStatusError(response.status, response.reason or "")
    if response.status not in good:
        raise NotDirectError(f"status {response.status}")
    return Answer(response.status, response.headers, body)


def _within(seconds: float) -> Any:
    from aiohttp import ClientTimeout

    return ClientTimeout(total=seconds, sock_connect=5)


@functools.cache
def _pieces_class() -> Any:
    """What aiohttp sends piece by piece, as it would copy what a connection does not take at once; and again if asked.

    Made once: a class is a cycle, and would keep the bytes of its object until the next collection.
    """
    from aiohttp.payload import Payload

    class Pieces(Payload):
        def __init__(self, data: Sequence[memoryview]) -> None:
            super().__init__(data)
            self._size = sum(map(len, data))

        def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            raise NotImplementedError

        async def write(self, writer: Any) -> None:
            for piece in self._value:
                await writer.write(piece)

    return Pieces


ANSWER_SECONDS = 30.0
"""For an answer, besides what the bytes need on the slowest link; then the driver has its turn."""


def put_small(
    uri: str, data: Sequence[memoryview], storage_options: Mapping[str, Any], *, part: Mapping[str, Any] | None = None
) -> str | None:
    """The ETag of the object that now stands there, whole; None: it is to be sent by its driver.

    Args:
        data: its bytes, piece by piece; a piece a connection is given at once.
        part: UploadId and PartNumber, if it is to be a part of an upload.
    """

    async def ask(fs: Any, path: str) -> str:
        method = "upload_part" if part else "put_object"
        with refusals_remembered(fs, method):  # before sums are made in vain
            await fs.set_session()
            bucket, key, _ = fs.split_path(path)
            asked, sent = {"Bucket": bucket, "Key": key, **(part or {})}, {}
            if not _wants_no_sums(await fs.get_s3(bucket)):
                asked["ChecksumCRC32"] = sent["x-amz-checksum-crc32"] = _crc32(data)
            await _check_nothing_else(fs, bucket, method, asked)
            seconds = ANSWER_SECONDS + sum(map(len, data)) / SLOWEST
            answer = await ask_signed(fs, method, asked, sent=sent, data=data, seconds=seconds)
            return answer.headers.get("ETag", "")

    tag: str | None = _tried(uri, storage_options, ask)
    return tag


def get_small(uri: str, storage_options: Mapping[str, Any]) -> tuple[bytes | None] | None:
    """All of an object in a tuple, or None in it where there is none; None: its driver is to be asked."""

    async def ask(fs: Any, path: str) -> tuple[bytes | None]:
        answer = await ask_signed(fs, "get_object", object_key(fs, path), good=(200, 404), seconds=ANSWER_SECONDS)
        return (answer.body if answer.status == 200 else None,)

    found: tuple[bytes | None] | None = _tried(uri, storage_options, ask)
    return found


def delete_one(uri: str, storage_options: Mapping[str, Any]) -> bool:
    """Whether there is no such object afterwards; False: its driver is to delete it."""

    async def ask(fs: Any, path: str) -> bool:
        bucket, key, _ = fs.split_path(path)  # the newest version: the driver leaves others, too
        named = {"Bucket": bucket, "Key": key}
        await ask_signed(fs, "delete_object", named, good=(200, 204, 404), seconds=ANSWER_SECONDS)
        return True

    return bool(_tried(uri, storage_options, ask))


async def _check_nothing_else(fs: Any, bucket: str, method: str, asked: Mapping[str, Any]) -> None:
    """NotDirectError if its user wants more said of what is written: encryption, class, tags, types, metadata ..."""
    wanted = fs._get_s3_method_kwargs(getattr(await fs.get_s3(bucket), method), **asked)
    if more := wanted.keys() - asked.keys() - {"RequestPayer"}:
        raise NotDirectError(f"it is to be written with {', '.join(sorted(more))}")


def _tried(uri: str, options: Mapping[str, Any], ask: Callable[[Any, str], Any]) -> Any:
    """What it gives; None where the driver is to be asked instead."""
    # How much a driver's file holds is nothing to us, and would make another client of it.
    options, settings = {k: v for k, v in options.items() if k != "default_block_size"}, ReadSettings.of(options)
    if filesystem.protocols(uri)[0] not in ("s3", "s3a") or not filesystem.goes_direct(uri, settings):
        return None
    # The one that reads: its client and its connections are there already, and it repeats nothing by itself.
    fs, path = filesystem.open_filesystem(uri, options, reading=filesystem.max_in_flight(uri, options, settings))
    from fsspec.asyn import sync

    try:
        return sync(fs.loop, ask, fs, path)
    except Exception:  # whatever it is, the driver meets it too if it matters, and tells it in its own words
        return None


def _wants_no_sums(client: Any) -> bool:
    """Whether its user said so: for a store that does not know them."""
    return getattr(client.meta.config, "request_checksum_calculation", None) == "when_required"


def _crc32(data: Sequence[memoryview]) -> str:
    found = functools.reduce(lambda crc, piece: binascii.crc32(piece, crc), data, 0)
    return base64.b64encode(found.to_bytes(4, "big")).decode()
