"""One start of a run over many prefixes, from its config to the first batch: `cold_start.py` says whose and where.

Prints the machine's monotonic time at the end of the imports, when the datasets stood, and when the first batch was
there, the anonymous memory since the imports then and at most over `batches` more, and binidx's requests to stores.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
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


def start_binidx(given: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], Iterator[Any]]]:
    import s3fs  # noqa: F401  the driver, which we would import in our own time

    import binidx

    def build() -> Any:
        config = binidx.GPTDatasetConfig(**arguments(given))
        if "plan" in given:
            return binidx.PlannedDataset(given["plan"], config)
        return binidx.BlendedMegatronDatasetBuilder(
            binidx.GPTDataset, given.get("sizes", SIZES), lambda: True, config
        ).build()[0]

    def batches(train: Any) -> Iterator[Any]:
        return iter(binidx.build_pretraining_data_loader(train, 0, BATCH, 0, 1))

    binidx.build_pretraining_data_loader, binidx.GPTDataset, binidx.BlendedMegatronDatasetBuilder, binidx.PlannedDataset  # noqa: B018  lazy
    return build, batches


def start_megatron(given: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[Any], Iterator[Any]]]:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from helpers.oracle import megatron

    if given.get("write"):  # a blend that is cached asks which rank writes it
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def build() -> Any:
        config = megatron.gpt.GPTDatasetConfig(**arguments(given))
        built = megatron.builder.BlendedMegatronDatasetBuilder(megatron.gpt.GPTDataset, SIZES, lambda: True, config)
        return built.build()[0]

    def batches(train: Any) -> Iterator[Any]:
        sampler = [[*range(BATCH)]]
        return iter(torch.utils.data.DataLoader(train, batch_sampler=sampler, num_workers=0))

    return build, batches


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("Anonymous:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    given = dict(json.load(sys.stdin))
    build, batches_of = {"binidx": start_binidx, "megatron": start_megatron}[given["side"]](given)
    imported, before, cpu = time.monotonic(), anonymous_bytes(), time.process_time()
    train = build()
    built = time.monotonic()
    batches = batches_of(train)
    tokens = np.asarray(next(batches)["tokens"])
    told = {"imported": imported, "built": built, "first": time.monotonic(), "cpu": time.process_time() - cpu}
    told |= {"tokens": int(tokens.sum()), "anonymous": anonymous_bytes() - before}
    later = [anonymous_bytes() for _ in islice(batches, given.get("batches", 0))]
    told["later"] = max(later, default=before) - before
    from binidx.storage.stats import usage
    from binidx.storage.usage_report import sum_usage  # after all that is measured

    print(json.dumps({**told, "requests": sum_usage(usage())["requests"]}))
    sys.stdout.flush()
    os._exit(0)  # what comes after the first batch is nobody's start


if __name__ == "__main__":
    main()
