"""A trainer that takes micro-batches from binidx, at its own pace or as fast as they come: how long it waits for them.

Told: look_ahead, num_steps, step_seconds (0: as fast as they come), rest_seconds (at the end, with all read ahead);
collect_steps: garbage is collected after so many steps, as by Megatron's --manual-gc and torchtitan (0: by Python).
"""

import gc
import json
import resource
import time
from pathlib import Path

from gpt import run_config
from stopwatch import arguments, leave

import binidx

given = arguments()
# Of each step Python holds the interpreter so long, as a training loop does between kernels.
PYTHON_SECONDS = 0.01


def step(began: float, seconds: float) -> None:
    """Python for a moment, then what a GPU would take."""
    while time.perf_counter() < began + min(PYTHON_SECONDS, seconds):
        pass
    time.sleep(max(0.0, began + seconds - time.perf_counter()))


def resident_bytes() -> int:
    """Now; the peak so far is that of building the indices."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


began = time.perf_counter()
config = binidx.GPTDatasetConfig(**run_config(given))
train = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
opened = time.perf_counter()
batches = iter(binidx.build_pretraining_data_loader(train, 0, given["batch"], look_ahead=given["look_ahead"]))
waits = []
if given["collect_steps"]:
    gc.disable()
for number in range(given["num_steps"]):
    asked = time.perf_counter()
    next(batches)
    waits.append(time.perf_counter() - asked)
    if len(waits) == 1:
        first, before = time.perf_counter(), resident_bytes()
        most = before
    most = max(most, resident_bytes())
    stepped = time.perf_counter()
    if given["collect_steps"] and number % given["collect_steps"] == 0:
        gc.collect(1)
    step(stepped, given["step_seconds"])
last = time.perf_counter()
time.sleep(given["rest_seconds"])
found = {
    "open": opened - began,
    "first": waits[0],
    "waits": waits[1:],
    "seconds": last - first,
    "grown": max(most, resident_bytes()) - before,
    "report": binidx.report(),
}
print(json.dumps(found), flush=True)
leave()
