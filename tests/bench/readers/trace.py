"""A run's file and a rank, or null, to seconds of a step traced: from the run's file, again after another one, and CPU.

Most of the CPU is the import of the store's driver.
"""

import json
import sys
import time

from binidx import RunOrder
from binidx.run.run_file import Run


def seconds_of(order: RunOrder, step: int, rank: int | None) -> float:
    began = time.perf_counter()
    order.trace(range(step, step + 1), rank)
    return time.perf_counter() - began


uri, rank = json.loads(sys.argv[1])
began, used = time.perf_counter(), time.process_time()
order = RunOrder.open(Run.load(uri))
step = (order.num_steps() or 0) // 2
seconds_of(order, step, rank)
cold, cpu = time.perf_counter() - began, time.process_time() - used
seconds_of(order, step + 1, rank)
print(json.dumps([cold, seconds_of(order, step, rank), cpu]))
