"""A proxy in its own process that makes any HTTP server as slow as a distant object store, and counts what passes.

    with latency_proxy(server.endpoint, delay_ms=30) as proxy, proxy.in_environment():
        before = proxy.counts()
        ...
        moved = proxy.counts() - before         # requests, bytes

The first byte of an answer leaves `delay_ms` (plus up to `jitter_ms`) after the last byte of its request came: S3's
latency is think time, not distance, so one connection carries one request at a time and more connections help. After
that a connection carries `megabytes_per_second`, if given. SigV4 signs the Host header: clients are given the proxy's
address, never the server's.

HTTP/1.1 is read as far as counting needs: heads, Content-Length and chunked bodies, interim answers (100 Continue).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field, fields
from urllib.parse import urlsplit

BLOCK = 256 << 10


@dataclass
class Counts:
    """Answers that passed, and the bytes of their bodies; `most_at_once` is the peak of requests in flight."""

    requests: int = 0
    bytes: int = 0
    head_bytes: int = 0
    connections: int = 0
    most_at_once: int = 0

    def __sub__(self, before: Counts) -> Counts:
        """What passed since `before`; a peak cannot be taken apart and stays."""
        found = Counts(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))
        found.most_at_once = self.most_at_once
        return found


@dataclass
class Proxy:
    """The running proxy, seen from the process that started it."""

    endpoint: str
    process: subprocess.Popen[str]

    def counts(self) -> Counts:
        return Counts(**self._ask("counts"))

    def reset(self) -> None:
        """Count from zero."""
        self._ask("reset")

    def _ask(self, question: str) -> dict[str, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """s3fs and boto3 speak to the proxy; credentials stay as they are."""
        before = os.environ.get("AWS_ENDPOINT_URL")
        os.environ["AWS_ENDPOINT_URL"] = self.endpoint
        try:
            yield
        finally:
            os.environ.pop("AWS_ENDPOINT_URL")
            if before is not None:
                os.environ["AWS_ENDPOINT_URL"] = before


@contextlib.contextmanager
def latency_proxy(
    target_endpoint: str,
    *,
    delay_ms: float = 30.0,
    jitter_ms: float = 0.0,
    megabytes_per_second: float | None = None,
    seed: int = 0,
) -> Iterator[Proxy]:
    """Run a proxy before `target_endpoint` (http://host:port); it ends with the block, or when this process dies."""
    options = json.dumps([target_endpoint, delay_ms / 1e3, jitter_ms / 1e3, megabytes_per_second, seed])
    with subprocess.Popen(
        [sys.executable, __file__, options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield Proxy(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
        finally:
            process.kill()


@dataclass
class Relay:
    """The proxy itself: one `handle` for each connection of a client."""

    target: str
    delay: float
    jitter: float
    megabytes_per_second: float | None
    seed: int
    count: Counts = field(default_factory=Counts)
    started: int = 0
    in_flight: int = 0

    async def handle(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.count.connections += 1
        address = urlsplit(self.target)
        with contextlib.closing(to_client), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            server, to_server = await asyncio.open_connection(address.hostname, address.port, limit=BLOCK)
            with contextlib.closing(to_server):
                while head := await read_head(client):
                    with self.flying():
                        await self.exchange(head, client, to_server, server, to_client)

    def lateness(self, number: int) -> float:
        """Seconds to the first byte for a request: the same requests in the same order are late by the same."""
        return self.delay + self.jitter * random.Random(f"{self.seed} {number}").random()

    @contextlib.contextmanager
    def flying(self) -> Iterator[None]:
        self.in_flight += 1
        self.count.most_at_once = max(self.count.most_at_once, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1

    async def exchange(
        self,
        head: bytes,
        client: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
    ) -> None:
        """One request and its answer. The body goes up while answers come down: it may wait for a 100 Continue."""
        lateness = self.lateness(self.started)
        self.started += 1
        to_server.write(head)
        upload = asyncio.create_task(send_body(client, to_server, length_of(head, request=True)))
        try:
            answer = await read_head(server)
            while answer.startswith(b"HTTP/1.1 1"):
                to_client.write(answer)
                answer = await read_head(server)
            if not answer:
                raise ConnectionResetError("the server closed an idle connection")
            complete = await upload
        finally:
            upload.cancel()
        await asyncio.sleep(complete + lateness - time.monotonic())
        await self.answer(head, answer, server, to_client)

    async def answer(
        self, request: bytes, head: bytes, server: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        to_client.write(head)
        due, moved = time.monotonic(), 0
        bodiless = request.startswith(b"HEAD ") or head.split(b" ", 2)[1] in (b"204", b"304")
        async for block in body_blocks(server, 0 if bodiless else length_of(head, request=False)):
            if self.megabytes_per_second:
                # A block is there when its last byte is.
                due += len(block) / (self.megabytes_per_second * 1e6)
                await asyncio.sleep(due - time.monotonic())
            to_client.write(block)
            await to_client.drain()
            moved += len(block)
        await to_client.drain()
        self.count.requests += 1
        self.count.bytes += moved
        self.count.head_bytes += len(head)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    """Up to and with the empty line; nothing when the other side has closed between two messages."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return b""


def length_of(head: bytes, *, request: bool) -> int | None:
    """Bytes of the body; -1 if it is chunked, None if it lasts until the connection closes."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
        if name.lower() == b"transfer-encoding" and b"chunked" in value.lower():
            return -1
    return 0 if request else None


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


async def send_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None) -> float:
    """Pass a request's body on; returns when its last byte was passed."""
    async for block in body_blocks(reader, length):
        writer.write(block)
        await writer.drain()
    return time.monotonic()


async def serve(relay: Relay) -> None:
    """Run until standard input ends; answer questions that come there, one a line."""
    server = await asyncio.start_server(relay.handle, "127.0.0.1", 0, limit=BLOCK, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    questions = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    while question := await questions.readline():
        if question == b"reset\n":
            relay.count = Counts()
        print(json.dumps(asdict(relay.count)), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Relay(*json.loads(sys.argv[1]))))
