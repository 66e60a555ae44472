"""The proxy of `latency_proxy`, a process of its own: python -m servers.relay TARGET WEATHER HOST, the second as JSON.

Requests go to the server over a few connections that all clients share; what comes back is held until it is due and
changed as `faults` say. Standard input takes questions, one a line, until it ends, and so does the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from servers.faults import FAULTS, OF_CONTENT, VERSIONS, Answer, Luck, Play, Weather, without_versions
from servers.log import Counts, Logged
from servers.messages import BLOCK, CLOSES, Request, answer_length, body_blocks, read_head, send_body, status_of

WHOLE_BYTES = 1 << 20
"""Bodies up to here are passed on in one piece."""
LOGGED = 200_000

IDLE_SECONDS = 2.0
"""A connection to the server is used again within this time, before it may have been closed for standing idle."""

Idle = tuple[asyncio.StreamReader, asyncio.StreamWriter, float]
GONE = (ConnectionError, asyncio.IncompleteReadError)


@dataclass
class Relay:
    """One `handle` for each connection of a client."""

    target: str
    weather: Weather
    count: Counts = field(default_factory=Counts)
    log: deque[Logged] = field(default_factory=lambda: deque(maxlen=LOGGED))
    asked: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    script: deque[str | None] = field(default_factory=deque)
    idle: list[Idle] = field(default_factory=list)
    numbered: int = 0
    in_flight: int = 0
    total_due: float = 0.0
    grants: float = 0.0
    granted_at: float = 0.0

    def __post_init__(self) -> None:
        self.become(self.weather)

    def become(self, weather: Weather) -> None:
        """From now on; nothing was asked for before."""
        self.weather, self.script, self.asked = weather, deque(weather.script), Counter()

    async def handle(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.count.connections += 1
        self.numbered += 1
        number = self.numbered
        with contextlib.closing(to_client), contextlib.suppress(*GONE):
            while head := await read_head(client):
                request = Request.of(head)
                with self.flying(request, number) as logged:
                    exchange = Exchange(self, request, self.luck(request, logged.time), logged, client, to_client)
                    if not await exchange.run(head):
                        return

    def luck(self, request: Request, time: int) -> Luck:
        luck = self.weather.luck(request, time)
        if self.weather.befalls(request) and not self.is_granted():
            return luck._replace(fault="503")
        if self.script and self.weather.befalls(request):
            return luck._replace(fault=self.script.popleft())
        return luck

    def is_granted(self) -> bool:
        """Whether the rate allows a request now; up to a second's worth may come at once."""
        rate, now = self.weather.granted_per_second, time.monotonic()
        if rate is None:
            return True
        self.grants = min(self.grants + (now - self.granted_at) * rate, rate)
        self.granted_at = now
        if self.grants < 1:
            return False
        self.grants -= 1
        return True

    @contextlib.contextmanager
    def flying(self, request: Request, connection: int) -> Iterator[Logged]:
        key = request.method, request.path, request.range
        logged = Logged(connection, *key, self.asked[key], time.monotonic())
        self.asked[key] += 1
        self.log.append(logged)
        self.in_flight += 1
        self.count.requests += 1
        self.count.most_at_once = max(self.count.most_at_once, self.in_flight)
        try:
            yield logged
        finally:
            self.in_flight -= 1
            logged.ended = time.monotonic()

    @contextlib.asynccontextmanager
    async def server(self) -> Any:
        """A connection to the server, for one exchange; kept for the next unless this one breaks off."""
        while self.idle:
            reader, writer, since = self.idle.pop()
            if not reader.at_eof() and not writer.is_closing() and time.monotonic() < since + IDLE_SECONDS:
                break
            writer.close()
        else:
            address = urlsplit(self.target)
            reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=BLOCK)
        try:
            yield reader, writer
        except BaseException:
            writer.close()
            raise
        self.idle.append((reader, writer, time.monotonic()))

    async def due(self, block: bytes, connection_due: float) -> float:
        """Wait until the block may have arrived: it is there when its last byte is. When this connection is free."""
        weather, now = self.weather, time.monotonic()
        if weather.megabytes_per_second:
            connection_due += len(block) / (weather.megabytes_per_second * 1e6)
        if weather.total_megabytes_per_second:
            self.total_due = max(self.total_due, now) + len(block) / (weather.total_megabytes_per_second * 1e6)
        if (late := max(connection_due, self.total_due) - now) > 0:
            await asyncio.sleep(late)
        return connection_due


@dataclass
class Exchange:
    """One request and its answer."""

    relay: Relay
    request: Request
    luck: Luck
    logged: Logged
    client: asyncio.StreamReader
    to_client: asyncio.StreamWriter

    async def run(self, head: bytes) -> bool:
        """Whether the connection may carry another."""
        self.logged.sent = self.request.body_bytes or 0
        async with self.relay.server() as (server, to_server):
            answer, complete = await self.ask(head, server, to_server)
            versionless = self.relay.weather.versionless
            if versionless:
                answer = VERSIONS.sub(b"", answer)
            length = answer_length(self.request, answer)
            fault = self.fault(answer, length)
            slow = self.relay.weather.at(self.request.path).slow_ms / 1e3 if fault == "slow" else 0.0
            due = complete + self.luck.lateness + slow
            if length is None or not 0 <= length <= (sys.maxsize if fault else WHOLE_BYTES):
                await self.wait(due)
                await self.stream(answer, length, server)
                return True
            body = await server.readexactly(length) if length else b""
            if CLOSES.search(answer):
                to_server.close()
        good = Answer(answer, body)
        play = self.play(fault, without_versions(good) if versionless else good)
        await self.wait(due)
        return await self.perform(play)

    async def stream(self, answer: bytes, length: int | None, server: asyncio.StreamReader) -> None:
        self.head(answer)
        await self.blocks(body_blocks(server, length))
        if length is None:
            raise ConnectionResetError("nothing but the end of the connection ends this answer")

    async def ask(
        self, head: bytes, server: asyncio.StreamReader, to_server: asyncio.StreamWriter
    ) -> tuple[bytes, float]:
        """The head of the answer and when the request was complete; its body may wait for a 100 Continue."""
        to_server.write(head)
        complete = time.monotonic()
        if not self.request.body_bytes:
            return await self.final_head(server), complete
        upload = asyncio.create_task(send_body(self.client, to_server, self.request.body_bytes))
        try:
            answer = await self.final_head(server)
            await upload
        finally:
            upload.cancel()
        return answer, time.monotonic()

    async def final_head(self, server: asyncio.StreamReader) -> bytes:
        answer = await read_head(server)
        while answer.startswith(b"HTTP/1.1 1"):
            self.to_client.write(answer)
            answer = await read_head(server)
        if not answer:
            raise ConnectionResetError("the server closed an idle connection")
        return answer

    async def wait(self, due: float) -> None:
        if (late := due - time.monotonic()) > 0:
            await asyncio.sleep(late)

    def fault(self, answer: bytes, length: int | None) -> str | None:
        """The one that befalls, if this answer can have it."""
        has_content = status_of(answer) in (200, 206) and bool(length) and length != -1
        return self.luck.fault if has_content or self.luck.fault not in OF_CONTENT else None

    def play(self, fault: str | None, answer: Answer) -> Play:
        if fault is None:
            return Play(*answer)
        self.logged.fault = fault
        self.relay.count.faults[fault] += 1
        return FAULTS[fault](self.request, answer, self.luck.chance)

    async def perform(self, play: Play) -> bool:
        weather = self.relay.weather
        if play.head:
            self.head(play.head)
        if weather.megabytes_per_second or weather.total_megabytes_per_second:
            await self.blocks(blocks_of(play.body))
        else:
            self.body(play.body)
            await self.to_client.drain()
        if play.end == "hang":
            await self.client.read(1)  # until the client has enough of it
        elif play.end == "reset":
            reset(self.to_client)
        return play.end == "stay"

    async def blocks(self, blocks: Any) -> None:
        due = time.monotonic()
        async for block in blocks:
            due = await self.relay.due(block, due)
            self.body(block)
            await self.to_client.drain()

    def head(self, head: bytes) -> None:
        self.logged.status = status_of(head)
        self.relay.count.statuses[str(self.logged.status)] += 1
        self.relay.count.head_bytes += len(head)
        self.to_client.write(head)

    def body(self, block: bytes) -> None:
        # Counted first: a client that has it may ask at once.
        self.logged.bytes += len(block)
        self.relay.count.bytes += len(block)
        self.to_client.write(block)


async def blocks_of(body: bytes) -> Any:
    for start in range(0, len(body), BLOCK):
        yield body[start : start + BLOCK]


def reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def answered(relay: Relay, question: str, argument: Any) -> Any:
    """What a line of standard input asks."""
    match question:
        case "counts":
            return vars(relay.count)
        case "log":
            return [list(vars(each).values()) for each in relay.log]
        case "reset":
            relay.count = Counts()
            relay.log.clear()
        case "become":
            relay.become(Weather(**argument))
    return None


async def serve(relay: Relay, host: str) -> None:
    """Run until standard input ends."""
    server = await asyncio.start_server(relay.handle, host, 0, limit=BLOCK, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    questions = asyncio.StreamReader(limit=BLOCK)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    while line := await questions.readline():
        print(json.dumps(answered(relay, *json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Relay(sys.argv[1], Weather(**json.loads(sys.argv[2]))), sys.argv[3]))
