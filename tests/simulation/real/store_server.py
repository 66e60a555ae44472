"""HTTP server of one file that grants and delays requests as a simulated store does, and logs them.

    with served_store(Store(50.0), content, cluster.address) as server:
        server.begin(time.monotonic() + 1.0)      # time 0 of the store's faults
        server.log(60.0)                          # [Logged(seconds, path, granted, num_bytes), ...] of all ranges

`simulation.stores.Store` decides in both, so a simulated run and a real one differ in all but that: clocks, sockets,
threads, processes and the library around the machines. Any path is the file; each folder is a partition. HEADs are
answered, and not rated. A fork of this process serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from servers.rated_objects import RANGE, Connection, Server
from simulation.stores import Store

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}


class Logged(NamedTuple):
    """Range that was requested."""

    seconds: float
    path: str
    granted: bool
    num_bytes: int


class StoreGrants:
    """What `servers.rated_objects` asks of its `Rated`, by a simulated store."""

    retry_after = 0.0

    def __init__(self, store: Store) -> None:
        self.store, self.began, self.random = store, 0.0, random.Random()
        self.log: list[Logged] = []
        self.num_bytes = 0

    @property
    def delay_ms(self) -> float:
        """Return a round trip: half of it before the request comes, in the simulation."""
        return 1e3 * (self.store.delay(self.random) + self.store.delay(self.random))

    def answers(self, path: str) -> bool:
        now = time.monotonic() - self.began
        granted = self.store.grants(path.rpartition("/")[0], now, self.random)
        self.log.append(Logged(now, path, granted, self.num_bytes))
        return granted


class StoreServer(Server):
    """Server whose requests a simulated store grants."""

    def __init__(self, content: bytes, store: Store) -> None:
        self.content, self.rated = content, StoreGrants(store)  # type: ignore[assignment]

    def answer(self, head: bytes) -> bytes:
        if (found := RANGE.search(head)) and found[1] and found[2]:
            self.rated.num_bytes = int(found[2]) - int(found[1]) + 1  # type: ignore[attr-defined]
        return super().answer(head)

    def reply(self, question: str, argument: Any) -> Any:
        grants: Any = self.rated
        if question == "begin":
            grants.began, grants.log = argument, []
            grants.store = replace(grants.store, buckets={})
            return None
        return grants.log


class ServedStore:
    """The running server, seen from the process that forked it."""

    def __init__(self, endpoint: str, control: socket.socket) -> None:
        self.endpoint, self._lines, self._control = endpoint, control.makefile("r"), control

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which s3:// means this server."""
        return {"AWS_ENDPOINT_URL": self.endpoint, **CREDENTIALS}

    def begin(self, moment: float) -> None:
        """Begin anew: buckets are full, and a time of `time.monotonic` is time 0 of the log and of the faults."""
        self._ask("begin", moment)

    def log(self, until: float) -> list[Logged]:
        """Return the ranges that were requested from time 0 until a time."""
        return [line for line in itertools.starmap(Logged, self._ask("log", None)) if 0 <= line.seconds < until]

    def _ask(self, question: str, argument: Any) -> Any:
        self._control.sendall(json.dumps([question, argument]).encode() + b"\n")
        return json.loads(self._lines.readline())


async def serve(server: StoreServer, address: str, control: socket.socket) -> None:
    """Serve until the other end of the control socket is closed."""
    listening = await asyncio.get_running_loop().create_server(lambda: Connection(server), address, 0, backlog=1024)
    reader, writer = await asyncio.open_connection(sock=control)
    writer.write(f"{listening.sockets[0].getsockname()[1]}\n".encode())
    while line := await reader.readline():
        writer.write(json.dumps(server.reply(*json.loads(line))).encode() + b"\n")
        await writer.drain()


@contextlib.contextmanager
def served_store(store: Store, content: bytes, address: str) -> Iterator[ServedStore]:
    """Serve a file from a fork of this process during the block."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        try:
            ours.close()
            asyncio.run(serve(StoreServer(content, store), address, theirs))
        finally:
            os._exit(0)
    theirs.close()
    try:
        with ours:
            port = b""
            while not port.endswith(b"\n"):
                port += ours.recv(1)
            yield ServedStore(f"http://{address}:{int(port)}", ours)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
