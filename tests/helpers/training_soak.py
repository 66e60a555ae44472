"""One rank of a run that reads a blend through a faulty proxy and compares every sample.

    python -m helpers.training_soak JSON

    remote, local    prefixes of the same datasets, far away and here, in the same order
    rank, ranks      of the data-parallel group
    workers          of the DataLoader, and `context`, how they are made
    samples          of the whole run
    settings         ours, of storage_options
    memory           bytes that caches in memory may have

Prints one line of JSON: samples compared, processes that read them, what it cost this one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from itertools import zip_longest
from typing import Any

from helpers.gpt_data import TOKENIZER, assert_same_sample

import binidx
from binidx.storage.cache.memory import STORE
from binidx.storage.open import SEGMENTS
from binidx.storage.stats import usage

MICRO_BATCH = 8
SEQUENCE_LENGTH = 512


def build(prefixes: list[str], samples: int, caches: str, options: dict[str, Any] | None) -> Any:
    config = binidx.GPTDatasetConfig(
        random_seed=7,
        sequence_length=SEQUENCE_LENGTH,
        blend=(prefixes, [0.5, 0.3, 0.2]),
        split="1,0,0",
        tokenizer=TOKENIZER,
        reset_position_ids=True,
        reset_attention_mask=False,
        eod_mask_loss=True,
        path_to_cache=caches,
        storage_options=options,
    )
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


def batches(dataset: Any, rank: int, ranks: int, **options: Any) -> Any:
    return iter(binidx.build_pretraining_data_loader(dataset, 0, MICRO_BATCH, rank, ranks, **options) or ())


def soak(told: dict[str, Any], directory: str) -> dict[str, Any]:
    """Read, and compare with what is read here."""
    for store in (STORE, SEGMENTS):
        store.budget = told["memory"]
    far = build(told["remote"], told["samples"], f"{directory}/far", {"binidx": told["settings"]})
    near = build(told["local"], told["samples"], f"{directory}/near", None)
    group = told["rank"], told["ranks"]
    workers = {"num_workers": told["workers"], "multiprocessing_context": told["context"]} if told["workers"] else {}
    compared = 0
    for found, needed in zip_longest(batches(far, *group, **workers), batches(near, *group)):
        assert_same_sample(found, needed)
        compared += len(needed["tokens"])
    return {
        "compared": compared,
        "pid": os.getpid(),
        "requests": usage()["local requests"] + usage()["remote requests"],
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(soak(json.loads(sys.argv[1]), directory), default=str))
