"""New worlds of all kinds for some seconds, on its cores: SIM_SECONDS=99 taskset -c 1 python -m simulation.soak [SEED]

Prints the worlds and events of each kind, and each seed that fails, with its last events. `make soak-worlds` runs it.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from simulation import convert_world, test_agreement, test_rates, test_readahead, test_requests
from simulation.build_world import BuildWorld
from simulation.cache_world import CacheWorld
from simulation.job_world import play
from simulation.queue_world import QueueWorld
from simulation.world import World

KINDS: dict[str, Callable[[int], object]] = {
    "requests": test_requests.test_any_world_keeps_the_invariants_and_all_reads_end_when_its_faults_do,
    "rates": test_rates.test_any_world_keeps_the_invariants_and_goes_on_when_its_faults_end,
    "caches": lambda seed: CacheWorld(seed).run(),
    "read-ahead": test_readahead.test_any_trainer_has_the_batches_of_its_order_whatever_fails_and_whoever_is_collected,
    "builds": lambda seed: BuildWorld(seed).run(),
    "ranks": lambda seed: test_agreement.run(seed),
    "jobs": play,
    "queues": lambda seed: QueueWorld(seed).play(),
    "converts": convert_world.play,
}
"""Kind -> function that runs the world of a seed, and raises if a claim does not hold."""

MOST_FAILURES = 3
"""Failures of a kind after which no more of its worlds are run."""


def run_chunk(first: int, seconds: float) -> tuple[Counter[str], Counter[str], list[str]]:
    """Run seeds of each kind for some seconds; return worlds and events by kind, and texts of failures."""
    logging.disable(logging.WARNING)
    worlds, events, failures = Counter[str](), Counter[str](), list[str]()
    for kind, run in KINDS.items():
        until, before = time.process_time() + seconds / len(KINDS), World.num_events_in_all
        for seed in range(first, first + 1_000_000):
            if time.process_time() > until or sum(text.startswith(kind) for text in failures) == MOST_FAILURES:
                break
            try:
                run(seed)
            except Exception as error:
                lines = traceback.format_exception(error)
                failures.append(f"{kind}, seed {seed}: {type(error).__name__}: {error}\n{lines[-1][-1_500:]}")
            worlds[kind] += 1
        events[kind] = World.num_events_in_all - before
    return worlds, events, failures


def main() -> int:
    seconds = float(os.environ.get("SIM_SECONDS", "600"))
    first = int(sys.argv[1]) if sys.argv[1:] else random.SystemRandom().randrange(10**6, 10**9)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    print(f"commit {commit}, seeds from {first:,} on, {seconds:g} s on {cores} cores", flush=True)
    worlds, events, failures = Counter[str](), Counter[str](), list[str]()
    with ProcessPoolExecutor(cores) as pool:
        for found in pool.map(run_chunk, itertools.islice(itertools.count(first, 1_000_000), cores), [seconds] * cores):
            worlds += found[0]
            events += found[1]
            failures += found[2]
    for kind in KINDS:
        print(f"{kind:12} {worlds[kind]:10,} worlds {events[kind]:14,} events")
    print(f"{'in all':12} {worlds.total():10,} worlds {events.total():14,} events, {len(failures)} failures")
    print(*failures, sep="\n\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
