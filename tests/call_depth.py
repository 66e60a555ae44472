"""Count the modules of binidx that a call on s3:// passes through: `python tests/call_depth.py [--list]`.

A module counts if a Python function of it is called, in any thread, while the measured call runs. Samples and
batches are measured at the second call, so that imports and first connections do not count; and without hedges, which
a slow machine sends. Calls of Python functions are counted, too, each step of a generator as one. `--list` prints
modules and their calls. Exit status 1 if a call passes through more than LIMITS allow: in `make check`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from servers.seaweed import s3_server

import binidx
from binidx.storage.requests.scheduler import scheduler

PACKAGE = f"{Path(binidx.__file__).parent}{os.sep}"
STANDARD = f"{PACKAGE}forks.py"
"""Module that is not counted, as functools is not: its `cached_property` stands for that one."""

LIMITS = {"dataset[i]": 18, "batch of 8": 18, "build with cached index": 56, "cold build": 73}
"""They only fall: a rise needs a line on the decision page of the change, as `orders.md` and `simulation.md` have."""

CALLS = {"build with cached index": 1_950}
"""Most calls of Python functions, which only falls, too: 1,855 on a quiet machine, 1,914 beside lint, as late requests
add some."""

called: list[str] | None = None
"""The file of each call of the running measurement."""


@dataclass
class Tokenizer:
    """Tokenizer with the attributes that datasets read."""

    vocab_size: int = 30_000
    eod: int = 0
    pad: int = 1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "Tokenizer"}


def record(frame: FrameType, event: str, _: Any) -> None:
    file = frame.f_code.co_filename
    if event == "call" and called is not None and file.startswith(PACKAGE) and file != STANDARD:
        called.append(file.removeprefix(PACKAGE))


@contextmanager
def modules_called() -> Iterator[list[str]]:
    """Collect the file of each call of a function of the package during the block."""
    global called
    called = files = list[str]()
    try:
        yield files
    finally:
        called = None


def write_data(prefix: str) -> None:
    """Write 80,000 documents of 256 tokens: too many bytes to be cached in memory, and an index worth a cache."""
    rng = np.random.default_rng(0)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for tokens in rng.integers(2, 30_000, (80_000, 256), dtype=np.uint16):
            builder.add_document(tokens, [256])
        builder.finalize(f"{prefix}.idx")


def build(prefix: str, cache: str) -> Any:
    config = binidx.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=128,
        blend=([prefix], None),
        split="1",
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [300_000, None, None]
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config).build()[0]


def modules_of_second_call(call: Callable[[int], Any]) -> list[str]:
    call(0)
    with modules_called() as files:
        call(1)
    return files


def measure(bucket: str) -> dict[str, Counter[str]]:
    """Return the modules of each call in LIMITS, with the number of calls of their functions."""
    found = {}
    for name in ("warm up", "cold build"):
        prefix = f"{bucket}/{name.replace(' ', '-')}"
        write_data(prefix)
        with modules_called() as found[name]:
            build(prefix, f"{bucket}/cache")
    with modules_called() as found["build with cached index"]:
        dataset = build(prefix, f"{bucket}/cache")
    found["dataset[i]"] = modules_of_second_call(lambda number: dataset[number])
    found["batch of 8"] = modules_of_second_call(
        lambda number: dataset.__getitems__([*range(8 * number, 8 * number + 8)])
    )
    return {name: Counter(found[name]) for name in LIMITS}


def main() -> int:
    # Before any thread starts: Python 3.11 cannot set the profile function of a running thread.
    threading.setprofile(record)
    sys.setprofile(record)
    for limit in (64, 128):  # with a driver, and without
        scheduler(limit).schedule.watch_seconds = 3600.0  # a slow machine looks more often for late requests
    with tempfile.TemporaryDirectory() as directory, s3_server(Path(directory, "server")) as server:
        os.environ |= {"BINIDX_INDEX_DIR": f"{directory}/node", "BINIDX_HEDGE": "0"}
        with server.in_environment():
            found = measure(server.make_bucket("depth"))
    sys.setprofile(None)
    for name, files in found.items():
        most = f" (limit {CALLS[name]:,})" if name in CALLS else ""
        print(f"{name}: {len(files)} modules (limit {LIMITS[name]}), {files.total():,} calls{most}")
        if "--list" in sys.argv:
            print(*(f"    {file} {files[file]}" for file in sorted(files)), sep="\n")
    too_deep = any(len(files) > LIMITS[name] for name, files in found.items())
    return int(too_deep or any(found[name].total() > most for name, most in CALLS.items()))


if __name__ == "__main__":
    sys.exit(main())
