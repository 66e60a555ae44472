"""From s3:// URIs to batches: the part of the demo that a user's training script contains, too."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from torch import Tensor

import binidx

from .plan import Plan
from .tokenizer import DemoTokenizer

SPLIT = "98,2,0"
VALID_BATCHES = 2

Batch = dict[str, Tensor]


def build_datasets(plan: Plan) -> tuple[Any, Any]:
    """Return the train and the valid dataset of the URIs; existing index caches are used."""
    config = binidx.GPTDatasetConfig(
        random_seed=plan.seed,
        sequence_length=plan.sequence_length,
        split=SPLIT,
        blend=(plan.prefixes, plan.weights),
        path_to_cache=plan.cache,
        tokenizer=DemoTokenizer(plan.tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [plan.num_steps * plan.batch_size, VALID_BATCHES * plan.batch_size, 0]
    train, valid, _ = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config).build()
    return train, valid


def batches(dataset: Any, plan: Plan, consumed_samples: int = 0) -> Iterator[Batch]:
    """Return the batches after a number of consumed samples, which is the whole state of a resume."""
    loader = binidx.build_pretraining_data_loader(dataset, consumed_samples, micro_batch_size=plan.batch_size)
    assert loader is not None
    return iter(loader)


def batch_hash(batch: Batch) -> str:
    """Return 48 bits of SHA-256 over the batch's tokens and labels, in hex."""
    digest = sha256()
    for name in ("tokens", "labels"):
        digest.update(batch[name].numpy().tobytes())
    return digest.hexdigest()[:12]
