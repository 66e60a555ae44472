"""One start of a run over many prefixes, from its config to the first batch: `cold_start.py` says whose and where.

Prints the machine's monotonic time at the end of the imports, when the datasets stood, and when the first batch was
there, the most anonymous memory since the imports, and binidx's requests to stores.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpt import Tokenizer

SIZES = [100_000, 2_000, 1_000]
BATCH = 8


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "random_seed": 1234, "sequence_length": given["sequence_length"], "path_to_cache": given["cache"],
        "blend": (given["prefixes"], given["weights"]), "split": given.get("split", "90,7,3"), "tokenizer": Tokenizer(),
        "num_dataset_builder_threads": 2, "mid_level_dataset_surplus": 0.5, "create_attention_mask": False,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip


def start_binidx(given: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    import s3fs  # noqa: F401  the driver, which we would import in our own time

    import binidx

    def build() -> Any:
        config = binidx.GPTDatasetConfig(**arguments(given))
        if "plan" in given:
            return binidx.PlannedDataset(given["plan"], config)
        return binidx.BlendedMegatronDatasetBuilder(
            binidx.GPTDataset, given.get("sizes", SIZES), lambda: True, config
        ).build()[0]

    def first(train: Any) -> Any:
        return next(iter(binidx.build_pretraining_data_loader(train, 0, BATCH, 0, 1)))

    binidx.build_pretraining_data_loader, binidx.GPTDataset, binidx.BlendedMegatronDatasetBuilder, binidx.PlannedDataset  # noqa: B018  lazy
    return build, first


def start_megatron(given: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from helpers.oracle import megatron

    if given.get("write"):  # a blend that is cached asks which rank writes it
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def build() -> Any:
        config = megatron.gpt.GPTDatasetConfig(**arguments(given))
        built = megatron.builder.BlendedMegatronDatasetBuilder(megatron.gpt.GPTDataset, SIZES, lambda: True, config)
        return built.build()[0]

    def first(train: Any) -> Any:
        sampler = [[*range(BATCH)]]
        return next(iter(torch.utils.data.DataLoader(train, batch_sampler=sampler, num_workers=0)))

    return build, first


def anonymous_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def main() -> None:
    given = dict(json.load(sys.stdin))
    build, first = {"binidx": start_binidx, "megatron": start_megatron}[given["side"]](given)
    imported, before, cpu = time.monotonic(), anonymous_bytes(), time.process_time()
    train = build()
    built = time.monotonic()
    tokens = np.asarray(first(train)["tokens"])
    told = {"imported": imported, "built": built, "first": time.monotonic(), "cpu": time.process_time() - cpu}
    told |= {"tokens": int(tokens.sum()), "anonymous": anonymous_bytes() - before}
    from binidx.storage.stats import usage
    from binidx.storage.usage_report import sum_usage  # after all that is measured

    print(json.dumps({**told, "requests": sum_usage(usage())["requests"]}))
    sys.stdout.flush()
    os._exit(0)  # what comes after the first batch is nobody's start


if __name__ == "__main__":
    main()
