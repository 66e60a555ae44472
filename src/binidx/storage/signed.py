"""One request of S3 to a URL that its client signs, over its driver's session: a fifth of the driver's own CPU.

Asked once, as it is. What cannot be asked in this way, or is refused, raises NotDirectError and is the driver's to
ask, and so is for four minutes whatever its filesystem is asked by that method: else each would be asked twice.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.json_models import MAX_BYTES
from binidx.storage.address import RENEW_SECONDS, Address, NotDirectError, signed
from binidx.storage.retries import PASSING, HTTPStatusError

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
