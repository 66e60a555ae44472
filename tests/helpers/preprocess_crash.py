"""A preprocess that is killed again and again until it is done.

    python -m helpers.preprocess_crash OUTPUT KILLS SEED INPUT...

Each attempt is a forked child that gets a SIGKILL after a random time, a fifth of that of the whole job at most; some
die while they finish. After each the output must be no dataset, or the whole one. Prints a JSON object: the exit status
of each attempt, how many parts were there after each, and the names that are left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from helpers.preprocess_jobs import job_of, run


def attempt(output: str, inputs: list[str], seconds: float) -> int:
    child = os.fork()
    if child == 0:
        try:
            run(job_of(inputs, output, part_bytes=3000))
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return killed_after(child, seconds)


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_after(child: int, seconds: float) -> int:
    """Kill a child after some time; return its status."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    return status_of(child)


def main(output: str, kills: int, seed: int, inputs: list[str]) -> None:
    choose, statuses, records = random.Random(seed), [], []
    needed = [Path(f"{output}.needed.{end}").read_bytes() for end in ("bin", "idx")]
    began = time.monotonic()
    assert attempt(f"{output}.needed.again", inputs, 600) == 0
    longest = (time.monotonic() - began) / 5
    for number in range(kills + 1):
        statuses.append(attempt(output, inputs, choose.uniform(0, longest) if number < kills else 600))
        records.append(len(list(Path(f"{output}-parts").glob("*.json"))))
        found = [Path(f"{output}_text_document.{end}") for end in ("bin", "idx")]
        if all(each.exists() for each in found):
            assert [each.read_bytes() for each in found] == needed
        if statuses[-1] != -signal.SIGKILL:
            break
    left = sorted(
        each.name for each in Path(output).parent.glob(f"{Path(output).name}*") if ".needed." not in each.name
    )
    print(json.dumps({"statuses": statuses, "records": records, "left": left}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
