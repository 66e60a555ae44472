"""`start()` with arguments CACHE LOG JSON: a process that requests an index, as each of a run does.

It appends a line to LOG when it begins to build, and prints one JSON object at its end: its result, the seconds since
its request, and the time by the clock of the machine. JSON may hold

    build      seconds that a build takes
    until      a file: the build ends when it appears
    fail       a text: the build raises it
    away       seconds after which a check raises, as after the failure of another rank
    dead, beat seconds, instead of those of `Lease`
    start      a file: request the index when it appears, so that all do at once
    waits      a file: gets a line with the pid once this process waits for another one, which it has seen at work
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from binidx.errors import PeerError
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.build_lock import Lease
from binidx.index.cache.index_cache import BuildContext, IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.storage.location import Location

NAME = "0f-Kind-train"
FINGERPRINT = {"option": True}


def request_index(cache: str, log: str, how: dict[str, Any]) -> dict[str, object]:
    def build(writer: ArrayWriter) -> None:
        with open(log, "a") as file:
            file.write(f"{os.getpid()} {time.monotonic()}\n")
        time.sleep(how.get("build", 0))
        while "until" in how and not Path(how["until"]).exists():
            time.sleep(0.01)
        if "fail" in how:
            raise ValueError(how["fail"])
        with writer.array("a", (100_000,), np.int64) as array:
            array[:] = np.arange(100_000)

    began, calls = time.monotonic(), 0

    def check(exact: bool) -> None:
        nonlocal calls
        calls += not exact
        if "waits" in how and calls == 2:  # the first one is before it looks for another process
            with open(how["waits"], "a") as file:
                file.write(f"{os.getpid()}\n")
        if time.monotonic() - began > how.get("away", np.inf):
            raise PeerError("another rank of its run failed")

    try:
        context = BuildContext().with_check(check)
        arrays = IndexCache(IndexFiles(Location.of(cache), NAME), context=context).load_or_build(
            "described", FINGERPRINT, ["a"], build
        )
    except (PeerError, ValueError) as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
    return {"sum": int(arrays["a"].sum()), "seconds": time.monotonic() - began}


def main(cache: str, log: str, how: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    Lease.dead_seconds = how.get("dead", Lease.dead_seconds)
    Lease.beat_seconds = how.get("beat", Lease.beat_seconds)
    print("ready", flush=True)
    while "start" in how and not Path(str(how["start"])).exists():
        time.sleep(0.005)
    print(json.dumps({**request_index(cache, log, how), "pid": os.getpid(), "ended": time.monotonic()}), flush=True)


def start() -> None:
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
