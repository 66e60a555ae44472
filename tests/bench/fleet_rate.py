"""Eight processes that read through the read-ahead want more ranges a second than a server grants: a table.

    python -m tests.bench.fleet_rate [SECONDS] [ROW ...]

BINIDX_BENCH_PROCESSES=16 is another number of them. In the row of kills, one process after the other is killed with
SIGKILL, at a random moment of each `KILL_SECONDS`, and a new one takes its place.

Each row runs for SECONDS. `used` is the part of the rate that was granted, without the second's worth that the server
gives at once; `longest` the longest wait of any process for a batch of 45 ranges, and `after 5 s` leaves out those that
began before; the processes take their batches at 1,100 ranges a second in all.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from servers.rated_objects import rated_objects

PROCESSES, WANTED, RANGES = int(os.environ.get("BINIDX_BENCH_PROCESSES", "8")), 1_100, 45
KILL_SECONDS = 10.0
KILLS = "500/s, kills"
ROWS: dict[str, dict[str, Any]] = {
    "500/s": {"rate": 500},
    "500/s, Retry-After: 1": {"rate": 500, "retry_after": 1},
    "30/s, outage_seconds=60": {"rate": 30},
    "20 % refused at random": {"random_share": 0.2},
    "no limit": {},
    KILLS: {"rate": 500},
}

HEADER = "| grants | sent/served | used | steps | longest | after 5 s | died | |\n" + "|---" * 8 + "|"


def start(endpoint: str, seconds: float, seed: int) -> subprocess.Popen[str]:
    """Start one process, which begins to read at a line on its stdin and ends after `seconds`."""
    environment = {
        **os.environ, "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s",
        "BINIDX_OUTAGE_SECONDS": "60",
    }  # fmt: skip
    command = [sys.executable, "-m", "helpers.throttled_reader", "s3://bench/data/tokens.bin"]
    command += [str(PROCESSES * RANGES / WANTED), str(seconds), str(seed)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    return reader


def begin(reader: subprocess.Popen[str]) -> None:
    """Let a process read."""
    assert reader.stdin is not None
    reader.stdin.write("\n")
    reader.stdin.flush()


def run(endpoint: str, seconds: float, *, kills: bool = False) -> list[dict[str, Any]]:
    """Run the processes to their end; return what each printed, {"died": ...} of those that failed."""
    readers = [start(endpoint, seconds, seed) for seed in range(PROCESSES)]
    for reader in readers:
        begin(reader)
    until, choose = time.monotonic() + seconds, random.Random(0)
    while kills and time.monotonic() + KILL_SECONDS < until:
        time.sleep(choose.uniform(0, KILL_SECONDS))
        killed = readers.pop(choose.randrange(PROCESSES))
        killed.kill()
        killed.wait()
        readers.append(start(endpoint, until - time.monotonic(), choose.randrange(1000)))
        begin(readers[-1])
    printed = [reader.communicate()[0].splitlines()[-1:] for reader in readers]
    return [json.loads(lines[0]) if lines else {"died": True} for lines in printed]


def measure(server: Any, name: str, seconds: float) -> str:
    server.become(**ROWS[name])
    began = time.monotonic()
    ends = run(server.endpoint, seconds, kills=name == KILLS)
    lasted = time.monotonic() - began
    counts = server.counts().get("", {"granted": 0, "refused": 0})
    granted, rate = counts["granted"], ROWS[name].get("rate")
    alive = [end for end in ends if "died" not in end]
    steps = sorted(end["steps"] for end in alive) or [0]
    longest, late = (max((end[name] for end in alive), default=0.0) for name in ("longest", "late"))
    used = f"{(granted - rate) / rate / seconds:.0%}" if rate else f"{granted / seconds:.0f}/s"
    return (
        f"| {name} | {(granted + counts['refused']) / max(1, granted):.2f} | {used} | {steps[0]}, {steps[-1]} | "
        f"{longest:.1f} s | {late:.1f} s | {PROCESSES - len(alive)} | {lasted:.0f} s, load {os.getloadavg()[0]:.1f} |"
    )


def main(seconds: float, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokens.bin"
        path.write_bytes(os.urandom(64 << 20))
        with rated_objects(path) as server:
            print(HEADER)
            for name in names:
                print(measure(server, name, seconds), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0, sys.argv[2:] or list(ROWS))
