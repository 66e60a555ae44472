"""Worlds of rates, as a table: python -m simulation [SEED ...]                       PYTHONPATH=tests

A row is a fleet of nodes that always have demand, and know their number or do not. `1 s`: requests sent in the first
second. `2 min`: least and most served node in the first two minutes, in fair shares, and requests sent for each served
one. `from minute 10`: a window in which a node is served 1,000 requests; least and most, in medians, and sent/served.
"""

from __future__ import annotations

import statistics
import sys

from simulation.rate_alone import Fleet
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


if __name__ == "__main__":
    print(HEADER)
    for num_nodes, limit, is_known in ROWS:
        for seed in map(int, sys.argv[1:] or ["0"]):
            print(row(num_nodes, limit, is_known, seed), flush=True)
