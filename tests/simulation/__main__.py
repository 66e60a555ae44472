"""Worlds of rates, as two tables: python -m simulation [SEED ...]                    PYTHONPATH=tests

A row is a fleet of nodes that always have demand, and know their number or do not. `1 s`: requests sent in the first
second. `2 min`: least and most served node in the first two minutes, in fair shares, and requests sent for each served
one. `from minute 10`: a window in which a node is served 1,000 requests; least and most, in medians, and sent/served.

In the second table nodes wait for one another after each step, as ranks do. Times are in those of the limit alone.
"""

from __future__ import annotations

import itertools
import statistics
import sys

from simulation.fleet import Fleet, Steps
from simulation.stores import Store
from simulation.world import World

ROWS = ((10, 220.0, False), (10, 220.0, True), (40, 220.0, False), (40, 220.0, True), (150, 220.0, True))
HEADER = (
    "| nodes | limit | known | seed | 1 s | 2 min | sent/served | from minute 10 | sent/served | events |\n"
    + "|---" * 10
    + "|"
)


def row(num_nodes: int, limit: float, is_known: bool, seed: int) -> str:
    """Run one world; return its row."""
    world, fair, window = World(seed), limit / num_nodes, int(1_050 * num_nodes / limit)
    fleet = Fleet(world, Store(limit), num_nodes, is_known=is_known)
    world.run(1.0)
    at_once = fleet.sent
    world.run(120.5)
    first = [node.served / fair / 120 for node in fleet.nodes]
    at_first = fleet.sent / fleet.served
    world.run(600.5)
    sent, served = fleet.sent, fleet.served
    world.run(600.5 + window)
    last = fleet.served_between(600, 600 + window)
    median = statistics.median(last)
    known = "yes" if is_known else "no"
    return (
        f"| {num_nodes} | {limit:g}/s | {known} | {seed} | {at_once:,} | "
        f"{min(first):.2f} to {max(first):.2f} | {at_first:.2f} | "
        f"{last[0] / median:.2f} to {last[-1] / median:.2f} | {(fleet.sent - sent) / (fleet.served - served):.3f} | "
        f"{world.num_events:,} |"
    )


STEPS = ((10, 220.0, 50), (40, 220.0, 50), (40, 220.0, 10), (150, 220.0, 20))
STEPS_HEADER = (
    "| nodes | limit | ranges | known | seed | first step | after 5 min: mean | longest | sent/served |\n"
    + "|---" * 9
    + "|"
)


def steps_row(num_nodes: int, limit: float, num_ranges: int, is_known: bool, seed: int) -> str:
    """Run one world of nodes that wait for one another; return its row."""
    world = World(seed)
    steps = Steps(num_ranges, wait_for_others=True)
    fleet = Fleet(world, Store(limit), num_nodes, steps=steps, is_known=is_known)
    world.run(900.0)
    ideal, late = num_nodes * num_ranges / limit, [time for time in fleet.steps_at if time > 300]
    seconds = [(end - begin) / ideal for begin, end in itertools.pairwise(late)]
    return (
        f"| {num_nodes} | {limit:g}/s | {num_ranges} | {'yes' if is_known else 'no'} | {seed} | "
        f"{fleet.steps_at[0] / ideal:.2f} | {statistics.fmean(seconds):.2f} | {max(seconds):.2f} | "
        f"{fleet.sent / fleet.served:.2f} |"
    )


if __name__ == "__main__":
    seeds = [*map(int, sys.argv[1:] or ["0"])]
    print(HEADER)
    for num_nodes, limit, is_known in ROWS:
        for seed in seeds:
            print(row(num_nodes, limit, is_known, seed), flush=True)
    print("\n" + STEPS_HEADER)
    for num_nodes, limit, num_ranges in STEPS:
        for is_known in (False, True):
            for seed in seeds:
                print(steps_row(num_nodes, limit, num_ranges, is_known, seed), flush=True)
