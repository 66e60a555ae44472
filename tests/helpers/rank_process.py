"""One rank of a process group, by RANK, WORLD_SIZE and MASTER_ADDR and _PORT, or STORE, a file.

`helpers.forked_ranks` forks it. Prints one JSON object: what the agreement came to, and when by the clock of the
machine. `how` is what each rank does in the block, by its number, or "else":

    {"else": {"sleep": 1}, "3": {"fail": "no tokens"}}

    after    a rank: nothing is done in the block before that rank is in its own
    late     it comes when the processes of all others have ended
    sleep    seconds
    wait     seconds in which the block asks whether another rank failed, as those do that wait for an index
    fail     a text: the block raises it
    kill     after the sleep the process kills itself
    absent   it does not come, and ends when all others are done
    again    do it twice
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch.distributed
from servers.processes import wait_until_gone

from binidx.dataset import rank_agreement
from binidx.errors import PeerError
from binidx.index.cache.build_lock import Checks

MOMENTS: dict[str, list[float]] = {"slept": [], "agreed": []}
"""When each block had slept, and when it was left, by the clock of the machine."""


def act(how: dict[str, Any]) -> None:
    def work(checks: Checks, _: str) -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        store.set(f"entered/{os.environ['RANK']}", "")
        if "after" in how:
            store.wait([f"entered/{how['after']}"])
        time.sleep(how.get("sleep", 0))
        MOMENTS["slept"].append(time.monotonic())
        if "kill" in how:
            os.kill(os.getpid(), signal.SIGKILL)
        if "fail" in how:
            raise ValueError(how["fail"])
        until = time.monotonic() + how.get("wait", 0)
        while time.monotonic() < until:
            for check in checks:
                check(False)
            time.sleep(0.02)

    rank_agreement.agree_on_outcome(work)
    MOMENTS["agreed"].append(time.monotonic())


def main(how: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO)
    for name in ("HEARTBEAT_TIMEOUT_SECONDS", "ABSENT_SECONDS", "POLL_SECONDS"):
        setattr(rank_agreement, name, how.get(name, getattr(rank_agreement, name)))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"file://{os.environ['STORE']}" if "STORE" in os.environ else "env://"
    torch.distributed.init_process_group("gloo", place, rank=rank, world_size=size)
    mine, others = how.get(str(rank), how.get("else", {})), [each for each in range(size) if each != rank]
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"process/{rank}", str(os.getpid()))
    processes = [int(store.get(f"process/{each}")) for each in others]
    store.set(f"began/{rank}", "")
    if "kill" in mine:
        store.wait([f"began/{each}" for each in others])
    began, found = time.monotonic(), {"rank": rank, "error": None}
    try:
        if "absent" in mine:
            store.wait([f"ended/{each}" for each in others], timedelta(minutes=10))
        else:
            for each in processes if "late" in mine else ():
                wait_until_gone(each)
            act(mine)
            if "again" in how:
                act(mine)
    except (PeerError, ValueError) as error:
        found = {"rank": rank, "error": type(error).__name__, "text": str(error)}
    print(json.dumps({**found, **MOMENTS, "seconds": time.monotonic() - began, "ended": time.monotonic()}), flush=True)
    if "late" in mine:
        return  # the store may have gone
    # The store goes with rank 0, so it ends last.
    store.set(f"ended/{rank}", "")
    if rank == 0:
        ranks = map(str, range(size))
        living = [each for each in ranks if not {"kill", "late"} & how.get(each, how.get("else", {})).keys()]
        keys = [*(f"began/{each}" for each in range(size)), *(f"ended/{each}" for each in living)]
        store.wait(keys, timedelta(minutes=10))
