"""Process of a run that builds its datasets; a rank of a gloo group if WORLD_SIZE > 1.

    python -m helpers.build_process JSON

Prints one JSON object: when build() began and ended, a digest of the indices or what was raised. JSON has

    prefix, cache    URIs
    samples          of the train split
    sequence_length
    log              a file: each building process appends a line to it
    slow             additional seconds that a build takes
    fail             a text: the building process raises it
    start            a file: begin when it appears; "ready" is printed before
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed
import xxhash
from helpers.gpt_data import TOKENIZER

import binidx
from binidx.order import gpt_order
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_exists

HOW: dict[str, Any] = {}


build_gpt_index = gpt_order.build_gpt_index


def build_and_log(*given: Any, **how: Any) -> None:
    with open(HOW["log"], "a") as file:
        file.write(f"{os.getpid()} {time.monotonic()}\n")
    time.sleep(HOW.get("slow", 0))
    if "fail" in HOW:
        raise ValueError(HOW["fail"])
    build_gpt_index(*given, **how)


def build() -> list[Any]:
    config = binidx.GPTDatasetConfig(
        random_seed=1234, sequence_length=HOW["sequence_length"], blend=([HOW["prefix"]], None), split="1,0,0",
        path_to_cache=HOW["cache"], tokenizer=TOKENIZER, create_attention_mask=False,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [HOW["samples"], 0, 0], lambda: True, config).build()


def main(how: dict[str, Any]) -> None:
    HOW.update(how)
    gpt_order.build_gpt_index = build_and_log
    logging.basicConfig(level=logging.INFO)
    group = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if group:
        torch.distributed.init_process_group("gloo")
    # The driver is loaded: a second of a core, and these processes share a few.
    object_exists(Location.of(HOW["prefix"] + ".bin"))
    print("ready", flush=True)
    parent = os.getppid()
    while "start" in HOW and not Path(HOW["start"]).exists():
        if os.getppid() != parent:
            sys.exit("the process that started this has died")
        time.sleep(0.005)
    if group:
        torch.distributed.barrier()  # under load they start seconds apart
    began, found = time.monotonic(), {}
    try:
        train = build()[0]
        ended = time.monotonic()
        arrays = (train.document_index, train.sample_index, train.shuffle_index)
        found = {"digest": [xxhash.xxh3_64_hexdigest(each) for each in arrays], "samples": len(train)}
    except ValueError as error:
        ended = time.monotonic()
        found = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps({**found, "pid": os.getpid(), "began": began, "ended": ended}), flush=True)
    if group and "error" not in found:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
