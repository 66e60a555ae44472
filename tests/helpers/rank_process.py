"""One rank of a process group, by RANK, WORLD_SIZE and MASTER_ADDR and _PORT, or STORE, a file.

`helpers.forked_ranks` forks it. Prints one JSON object: what the agreement came to, and when by the clock of the
machine. `how` is what each rank does in the block, by its number, or "else":

    {"else": {"sleep": 1}, "3": {"fail": "no tokens"}}

    late     seconds before it comes
    sleep    seconds
    wait     seconds in which the block asks whether another rank failed, as those do that wait for an index
    fail     a text: the block raises it
    kill     after the sleep the process kills itself
    absent   seconds before the end of the process; it does not come
    again    do it twice
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from typing import Any

import torch.distributed

from binidx.dataset import rank_agreement
from binidx.errors import PeerError
from binidx.index.cache.build_lock import run_checks


def act(how: dict[str, Any]) -> None:
    time.sleep(how.get("late", 0))
    with rank_agreement.agree_on_outcome() as (checks, _):
        time.sleep(how.get("sleep", 0))
        if "kill" in how:
            os.kill(os.getpid(), signal.SIGKILL)
        if "fail" in how:
            raise ValueError(how["fail"])
        until = time.monotonic() + how.get("wait", 0)
        while time.monotonic() < until:
            run_checks(checks)
            time.sleep(0.02)


def main(how: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    for name in ("HEARTBEAT_TIMEOUT_SECONDS", "ABSENT_SECONDS", "HEARTBEAT_SECONDS", "POLL_SECONDS"):
        setattr(rank_agreement, name, how.get(name, getattr(rank_agreement, name)))
    rank = int(os.environ["RANK"])
    place = f"file://{os.environ['STORE']}" if "STORE" in os.environ else "env://"
    torch.distributed.init_process_group("gloo", place, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    mine = how.get(str(rank), how.get("else", {}))
    began, found = time.monotonic(), {"rank": rank, "error": None}
    try:
        if "absent" in mine:
            time.sleep(mine["absent"])
        else:
            act(mine)
            if "again" in how:
                act(mine)
    except (PeerError, ValueError) as error:
        found = {"rank": rank, "error": type(error).__name__, "text": str(error)}
    print(json.dumps({**found, "seconds": time.monotonic() - began, "ended": time.monotonic()}), flush=True)
