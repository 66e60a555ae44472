"""One rank that trains on a prefix until its standard input ends; its log has the lines of incidents.

    python -m helpers.oncall_rank PREFIX [SECONDS [alone]]

With RANK it is one of a process group, whose ranks meet in an all-reduce after each step, unless it is `alone`.
SECONDS: each sample takes so long to read. The first line of its output is the port at which it serves its metrics.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed

import binidx


class SlowSamples(torch.utils.data.Dataset[Any]):
    """Samples that each take some seconds to read."""

    def __init__(self, samples: Any, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        time.sleep(self.seconds)
        return self.samples[number]


def main(prefix: str, seconds: str = "0", alone: str = "") -> None:
    logging.basicConfig(level=logging.WARNING)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    is_rank = "RANK" in os.environ
    if is_rank:
        torch.distributed.init_process_group("gloo")
    dataset = binidx.load_dataset(prefix, 1024)
    samples: Any = dataset if float(seconds) == 0 else SlowSamples(dataset, float(seconds))
    rank, size = binidx.find_topology() if is_rank else (0, 1)
    loader = binidx.build_pretraining_data_loader(samples, 0, 4, rank, size)
    assert loader is not None
    with binidx.serve_metrics(loader, 0, address="127.0.0.1") as server:
        print(server.port, flush=True)
        for _ in itertools.chain.from_iterable(itertools.repeat(loader)):
            time.sleep(0.05)  # the step
            has_ended = torch.tensor([float(ended.is_set())])
            if is_rank and not alone:
                torch.distributed.all_reduce(has_ended)
            if has_ended:
                break
            if loader.consumed_samples + 4 * size > len(samples):
                loader.consumed_samples = 0
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
