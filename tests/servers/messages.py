"""HTTP/1.1 as far as a proxy reads it: heads, Content-Length and chunked bodies, over asyncio streams."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

BLOCK = 256 << 10

LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r]*chunked", re.IGNORECASE)
CLOSES = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
RANGE = re.compile(rb"\r\n(?:x-ms-)?range:[ \t]*([^\r]*)", re.IGNORECASE)


class Request(NamedTuple):
    """What the head of a request says; `path` without its query, `range` as it was sent or empty."""

    method: str
    path: str
    range: str
    body_bytes: int | None

    @classmethod
    def of(cls, head: bytes) -> Request:
        method, target, _ = head.split(b" ", 2)
        found = RANGE.search(head)
        path, _, _ = target.partition(b"?")
        return cls(method.decode(), path.decode(), found[1].decode() if found else "", length_of(head, request=True))


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """Up to and with the empty line; nothing when the other side has closed between two messages."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return b""


def status_of(head: bytes) -> int:
    return int(head[9:12])


def length_of(head: bytes, *, request: bool) -> int | None:
    """Bytes of the body; -1 if it is chunked, None if it lasts until the connection closes."""
    if found := LENGTH.search(head):
        return int(found[1])
    if CHUNKED.search(head):
        return -1
    return 0 if request else None


def answer_length(request: Request, head: bytes) -> int | None:
    """Bytes of the body of an answer, as `length_of`; some have none, whatever their head says."""
    bodiless = request.method == "HEAD" or status_of(head) in (204, 304)
    return 0 if bodiless else length_of(head, request=False)


async def body_blocks(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """The body as it came, chunk heads and trailers included."""
    if length == -1:
        async for block in chunked_blocks(reader):
            yield block
        return
    while length is None or length > 0:
        block = await reader.read(BLOCK if length is None else min(length, BLOCK))
        if not block and length is None:
            return
        if not block:
            raise asyncio.IncompleteReadError(b"", length)
        length = None if length is None else length - len(block)
        yield block


async def chunked_blocks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    size = -1
    while size:
        line = await reader.readline()
        size = int(line.split(b";")[0], 16)
        yield line + await reader.readexactly(size)
        # After the last chunk come trailers up to an empty line, after others just the empty line.
        while (line := await reader.readline()) not in (b"\r\n", b""):
            yield line
        yield line


async def send_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None) -> None:
    """Pass a request's body on; returns when its last byte was passed."""
    async for block in body_blocks(reader, length):
        writer.write(block)
        await writer.drain()
