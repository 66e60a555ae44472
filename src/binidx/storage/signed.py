"""One request of S3 to a URL that its client signs, over its driver's session: a fifth of the driver's own CPU.

Asked once, as it is: whoever asks decides what comes of a refusal. What cannot be asked in this way raises
NotDirectError, and is the driver's to ask.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.storage.address import signed

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
    sent: Mapping[str, str] | None = None,
    data: Sequence[memoryview] | None = None,
    seconds: float | None = None,
) -> Answer:
    """The answer to a question of one of its client's methods.

    Args:
        asked: the method's parameters, the bucket among them.
        sent: headers that come of what is asked, and are signed with it.
        data: the body, piece by piece; a piece a connection is given at once.
        seconds: for all of it; None: whoever asks calls it off.

    Raises:
        NotDirectError: it cannot be asked like this.
        Exception: aiohttp's, for a connection that fails.
    """
    address = await signed(fs, asked["Bucket"], method, asked, sent)
    options = {**address.options, **({"timeout": _within(seconds)} if seconds else {})}
    body = {} if data is None else {"data": _pieces_class()(data)}
    ask = address.session.request(VERBS[method], address.url, headers=address.headers, **body, **options)
    async with ask as response:
        return Answer(response.status, response.headers, await response.read())


def key_of(fs: Any, path: str) -> dict[str, str]:
    """What names an object of a bucket, of one version if the path says which."""
    bucket, key, version = fs.split_path(path)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


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
