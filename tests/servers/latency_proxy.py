"""A proxy in its own process that makes any HTTP server as slow and as unreliable as a distant object store, and logs.

    with latency_proxy(server.endpoint, delay_ms=30, faults={"503": 0.02, "stall": 0.001}) as proxy:
        with proxy.in_environment():            # s3fs and boto3; "STORAGE_EMULATOR_HOST" for gcsfs
            before = proxy.counts()
            ...
            moved = proxy.counts() - before     # requests, bytes, connections, statuses, faults
            proxy.become(each=["503", "reset"]) # another weather: each range fails twice, then it is answered
            proxy.log()                         # every request: connection, range, status, fault, bytes, times

What can be asked for is `faults.Weather`; what the faults do, `faults`. All of it is drawn by the seed, the range and
how often that range was asked for before: the same reads meet the same faults in whatever order, and a retry can do
better.

The first byte of an answer leaves `delay_ms` after the last byte of its request came: S3's latency is think time, not
distance, so one connection carries one request at a time and more connections help. SigV4 signs the Host header:
clients are given the proxy's address, never the server's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servers.faults import Weather
from servers.log import Counts, Logged


@dataclass
class Proxy:
    """The running proxy, seen from the process that started it; any of its threads may ask."""

    endpoint: str
    weather: Weather
    process: subprocess.Popen[str]
    lock: threading.Lock = field(default_factory=threading.Lock)

    def counts(self) -> Counts:
        found = self._ask("counts")
        return Counts(**{**found, "statuses": Counter(found["statuses"]), "faults": Counter(found["faults"])})

    def log(self) -> list[Logged]:
        """The last requests in the order in which they came, at most `relay.LOGGED`."""
        return [Logged(*each) for each in self._ask("log")]

    def reset(self) -> None:
        """Count from zero and forget the log."""
        self._ask("reset")

    def become(self, **weather: Any) -> None:
        """From now on: what is named here, and otherwise what it was started with; nothing was asked for before."""
        self._ask("become", dataclasses.asdict(dataclasses.replace(self.weather, **weather)))

    def _ask(self, question: str, argument: Any = None) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.lock:
            self.process.stdin.write(json.dumps([question, argument]) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

    @contextlib.contextmanager
    def in_environment(self, name: str = "AWS_ENDPOINT_URL") -> Iterator[None]:
        """s3fs and boto3 speak to the proxy, or gcsfs by STORAGE_EMULATOR_HOST; credentials stay as they are."""
        before = os.environ.get(name)
        os.environ[name] = self.endpoint
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before


@contextlib.contextmanager
def latency_proxy(target_endpoint: str, *, host: str = "127.0.0.1", **weather: Any) -> Iterator[Proxy]:
    """Run a proxy before `target_endpoint` (http://host:port); it ends with the block, or when this process dies.

    Args:
        host: address of this machine on which it listens.
        weather: fields of `Weather`.
    """
    today = Weather(**weather)
    arguments = [sys.executable, "-m", "servers.relay", target_endpoint, json.dumps(dataclasses.asdict(today)), host]
    tests = Path(__file__).parents[1]
    with subprocess.Popen(arguments, cwd=tests, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Proxy(f"http://{host}:{int(process.stdout.readline())}", today, process)
        finally:
            process.kill()
