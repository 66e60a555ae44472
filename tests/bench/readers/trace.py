"""A run's file and a rank, or null, to seconds of a step traced: from the run's file, and again after another one."""

import json
import sys
import time

from binidx.loader.run import Run
from binidx.order.run_order import RunOrder


def seconds_of(order: RunOrder, step: int, rank: int | None) -> float:
    began = time.perf_counter()
    order.trace(range(step, step + 1), rank)
    return time.perf_counter() - began


uri, rank = json.loads(sys.argv[1])
began = time.perf_counter()
order = RunOrder.open(Run.load(uri))
step = (order.num_steps() or 0) // 2
seconds_of(order, step, rank)
cold = time.perf_counter() - began
seconds_of(order, step + 1, rank)
print(json.dumps([cold, seconds_of(order, step, rank)]))
