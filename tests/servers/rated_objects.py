"""A server of one file that grants a rate of requests to each partition and refuses the rest, with its own log.

    with rated_objects(path, rate=500, partitions=("/a/", "/b/")) as server:
        open_object("s3://bucket/a/key", storage_options={"endpoint_url": server.endpoint, "key": "k", "secret": "s"})
        server.counts()                   # partition -> granted, refused, and its rate now
        server.become(rate=30)            # the same file; all buckets are full again, and the counts zero

Any path is the file. Only ranges are rated; HEADs are answered. The first byte of any answer leaves `delay_ms` after
its request came. A process of its own: python -m servers.rated_objects PATH ARGUMENTS; what is granted, `grants` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers.grants import Grants

RANGE = re.compile(rb"\r\nrange: bytes=(\d*)-(\d*)", re.IGNORECASE)
BODY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass
class RatedServer:
    """The running server, seen from the process that started it."""

    endpoint: str
    process: subprocess.Popen[str]

    def counts(self) -> dict[str, dict[str, float]]:
        counts: dict[str, dict[str, float]] = self._ask("counts", None)
        return counts

    def become(self, **arguments: Any) -> None:
        self._ask("become", arguments)

    def _ask(self, question: str, argument: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([question, argument]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextlib.contextmanager
def rated_objects(path: Path, **arguments: Any) -> Iterator[RatedServer]:
    """Serve a file; the fields of `Rated` are the arguments."""
    command = [sys.executable, "-m", "servers.rated_objects", str(path), json.dumps(arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield RatedServer(f"http://127.0.0.1:{int(process.stdout.readline())}", process)
        finally:
            process.kill()


@dataclass
class Rated:
    """What is granted, and what is refused anyway.

    Args:
        rate, burst_seconds, doubling_seconds, partitions: of `Grants`.
        delay_ms: time to the first byte.
        random_share: requests that are refused whatever the rate.
        retry_after: seconds in the header of refusals; 0: no header.
    """

    rate: float = 1e9
    burst_seconds: float = 1.0
    doubling_seconds: float = 1e18
    partitions: tuple[str, ...] = ()
    delay_ms: float = 30.0
    random_share: float = 0.0
    retry_after: float = 0.0
    grants: Grants = field(init=False)

    def __post_init__(self) -> None:
        self.grants = Grants(self.rate, self.burst_seconds, self.doubling_seconds, self.partitions)
        self.random = random.Random(0)

    def answers(self, path: str) -> bool:
        bucket = self.grants.of(path)
        if self.random.random() < self.random_share:
            bucket.refused += 1
            return False
        return bucket.grants(time.monotonic())

    def counts(self) -> dict[str, dict[str, float]]:
        return {
            name: {"granted": bucket.granted, "refused": bucket.refused, "rate": bucket.rate}
            for name, bucket in self.grants.buckets.items()
        }


class Connection(asyncio.Protocol):
    """Answers the requests of one connection, one after the other."""

    def __init__(self, server: Server) -> None:
        self.server, self.data = server, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head, self.data = self.data[: end + 2], self.data[end + 4 :]
            answer = self.server.answer(head)
            asyncio.get_running_loop().call_later(self.server.rated.delay_ms / 1e3, self.transport.write, answer)


class Server:
    def __init__(self, content: bytes, arguments: dict[str, Any]) -> None:
        self.content, self.rated = content, Rated(**arguments)
        self.arguments = arguments

    def answer(self, head: bytes) -> bytes:
        found, size = RANGE.search(head), len(self.content)
        method, path = head.split(b" ", 2)[:2]
        if method == b"GET" and found and not self.rated.answers(path.decode()):
            later = f"Retry-After: {self.rated.retry_after:g}\r\n" if self.rated.retry_after else ""
            return f"HTTP/1.1 503 SlowDown\r\nContent-Length: {len(BODY)}\r\n{later}\r\n".encode() + BODY
        first = int(found[1]) if found and found[1] else size - int(found[2]) if found else 0
        stop = min(int(found[2]) + 1, size) if found and found[1] and found[2] else size
        status = "206 Partial Content" if found else "200 OK"
        lines = [
            f"HTTP/1.1 {status}", f"Content-Length: {stop - first}", 'ETag: "0"', "Accept-Ranges: bytes",
            "Last-Modified: Fri, 20 Nov 2026 00:00:00 GMT", "Content-Type: application/octet-stream",
            *([f"Content-Range: bytes {first}-{stop - 1}/{size}"] if found else []),
        ]  # fmt: skip
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == b"HEAD" else self.content[first:stop])

    def reply(self, question: str, argument: Any) -> Any:
        if question == "become":
            self.rated = Rated(**{**self.arguments, **argument})
            return None
        return self.rated.counts()


async def serve(server: Server) -> None:
    """Run until standard input ends."""
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", 0, backlog=1024)
    print(listening.sockets[0].getsockname()[1], flush=True)
    questions = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    while line := await questions.readline():
        print(json.dumps(server.reply(*json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Server(Path(sys.argv[1]).read_bytes(), json.loads(sys.argv[2]))))
