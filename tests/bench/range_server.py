"""Ranges of one object over HTTP, 25 to 30 ms to the first byte, in its own process: the physical limit of a client.

    with range_server() as endpoint:
        GET, HEAD endpoint/anything                      the object, by Range: S3 without signatures
        GET endpoint/storage/v1/b/B/o/anything           what gcsfs asks for first

A request costs 30 us here, so that the client is what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SIZE = 256 << 20
PIECE = memoryview(bytes(range(256)) * (64 << 10))  # 16 MiB
LEAST_MS, MOST_MS = 25, 30

RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.IGNORECASE)
VERSION = b'ETag: "x"\r\nx-goog-generation: 1\r\n'
COMMON = VERSION + b"Last-Modified: Fri, 20 Nov 2026 03:53:17 GMT\r\nAccept-Ranges: bytes\r\n\r\n"
METADATA = json.dumps({"name": "data", "bucket": "bench", "size": str(SIZE), "generation": "1", "etag": "x"}).encode()


class Connection(asyncio.Protocol):
    delays = itertools.cycle(LEAST_MS + (MOST_MS - LEAST_MS) * step * 7 % 16 / 16 for step in range(16))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.received = transport, b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head, self.received = self.received[: end + 2], self.received[end + 4 :]
            asyncio.get_running_loop().call_later(next(self.delays) / 1e3, self.answer, head)

    def answer(self, head: bytes) -> None:
        if head.startswith(b"GET /storage/"):
            kind = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            self.transport.write(kind + b"Content-Length: %d\r\n\r\n" % len(METADATA) + METADATA)
        elif found := RANGE.search(head):
            start, last = int(found[1]), int(found[2])
            place = b"Content-Range: bytes %d-%d/%d\r\n" % (start, last, SIZE)
            length = b"Content-Length: %d\r\n" % (last + 1 - start)
            self.transport.write(b"HTTP/1.1 206 Partial Content\r\n" + length + place + COMMON)
            self.transport.write(PIECE[start % 4096 : start % 4096 + last + 1 - start])
        else:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % SIZE + COMMON)


async def serve(certificate: str = "") -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
    if tls:
        tls.load_cert_chain(certificate)
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=1024, ssl=tls)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def range_server(*certificate: Path) -> Iterator[str]:
    """The endpoint, until the block ends; of https with a certificate."""
    with subprocess.Popen([sys.executable, __file__, *certificate], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http{'s' * bool(certificate)}://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
