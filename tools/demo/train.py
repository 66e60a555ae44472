"""The training process: a record for each step, a checkpoint in the middle, and a resume from it.

python -m binidx.tools.demo.train PLAN.json [--resume]        prints each record as a line of JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import binidx
from binidx.storage.stats import total

from .model import GPT
from .tokenizer import EOD

SPLIT = "98,2,0"
VALID_BATCHES = 2
PEAK_LEARNING_RATE = 6e-3
WARMUP_STEPS = 10

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """A run over a blend, from its first step to its last.

    Args:
        prefixes: URIs of the datasets.
        weights: share of samples taken from each.
        cache: URI for the index caches.
        tokenizer: path of the tokenizer.json.
        checkpoint: path where the checkpoint is kept.
        num_steps: steps of the whole run.
        checkpoint_step: after this many steps a checkpoint is written.
        batch_size: samples per step.
        sequence_length: tokens fed per sample.
        seed: of the data's order and of the model's first weights.
    """

    prefixes: list[str]
    weights: list[float]
    cache: str
    tokenizer: str
    checkpoint: str
    num_steps: int
    checkpoint_step: int
    batch_size: int
    sequence_length: int
    seed: int = 1234


@dataclass(frozen=True)
class Step:
    """One step of the run, and the reads of its process so far.

    Args:
        number: steps of the run done after this one, counted over all processes.
        batch: hash of the batch.
        loss: loss of the step, in nats per token, before its update.
        wait_seconds: time from the request for the batch to its arrival.
        seconds: time of the whole step, waiting included.
        open_seconds: time that this process needed to open the datasets.
        requests: requests to the store by this process since its start; the next two are counted likewise.
        bytes_asked: bytes that the reads requested.
        bytes_moved: bytes that were transferred for them.
        valid_loss: loss on the valid split, after the last step of the run.
    """

    number: int
    batch: str
    loss: float
    wait_seconds: float
    seconds: float
    open_seconds: float
    requests: int
    bytes_asked: int
    bytes_moved: int
    valid_loss: float | None = None


def build_datasets(plan: Plan) -> tuple[Any, Any]:
    """Return the train and the valid dataset of the URIs; existing index caches are used."""
    config = binidx.GPTDatasetConfig(
        random_seed=plan.seed,
        sequence_length=plan.sequence_length,
        split=SPLIT,
        blend=(plan.prefixes, plan.weights),
        path_to_cache=plan.cache,
        tokenizer=binidx.describe_tokenizer(plan.tokenizer, eod=EOD),
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
    return sha256(batch["tokens"].numpy().tobytes() + batch["labels"].numpy().tobytes()).hexdigest()[:12]


def train(plan: Plan, *, resume: bool) -> Iterator[Step]:
    """Run the plan from its start, or from its checkpoint, to its end; yield a record after each step."""
    torch.manual_seed(plan.seed)
    model = GPT(binidx.describe_tokenizer(plan.tokenizer).vocab_size, plan.sequence_length)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    consumed_samples = load_checkpoint(plan, model, optimizer) if resume else 0
    start = time.perf_counter()
    dataset, valid = build_datasets(plan)
    open_seconds = time.perf_counter() - start
    loader = batches(dataset, plan, consumed_samples)
    for number in range(consumed_samples // plan.batch_size + 1, plan.num_steps + 1):
        start = time.perf_counter()
        batch = next(loader)
        arrived = time.perf_counter()
        loss = train_step(model, optimizer, batch, learning_rate(number, plan.num_steps))
        seconds = time.perf_counter() - start
        if number == plan.checkpoint_step:
            save_checkpoint(plan, model, optimizer, number * plan.batch_size)
        valid_loss = mean_loss(model, batches(valid, plan)) if number == plan.num_steps else None
        reads = total()
        counters = (reads.requests, reads.bytes_asked, reads.bytes_moved)
        yield Step(number, batch_hash(batch), loss, arrived - start, seconds, open_seconds, *counters, valid_loss)


def learning_rate(number: int, num_steps: int) -> float:
    """Return the rate of step `number`, counted from 1: a warm-up, then a linear decay to a tenth."""
    warm = min(1.0, number / WARMUP_STEPS)
    return PEAK_LEARNING_RATE * warm * (1 - 0.9 * (number - 1) / num_steps)


def train_step(model: GPT, optimizer: torch.optim.Optimizer, batch: Batch, rate: float) -> float:
    """Train on one batch; return the loss before the update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = model.loss(batch)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def mean_loss(model: GPT, valid: Iterator[Batch]) -> float:
    """Return the mean loss over VALID_BATCHES batches."""
    return sum(model.loss(batch).item() for batch in islice(valid, VALID_BATCHES)) / VALID_BATCHES


def save_checkpoint(plan: Plan, model: GPT, optimizer: torch.optim.Optimizer, consumed_samples: int) -> None:
    """Write the checkpoint atomically: a killed process leaves a complete one or none."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "consumed_samples": consumed_samples}
    torch.save(state, f"{plan.checkpoint}.part")
    os.replace(f"{plan.checkpoint}.part", plan.checkpoint)


def load_checkpoint(plan: Plan, model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint; return its consumed samples."""
    state = torch.load(plan.checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    consumed_samples: int = state["consumed_samples"]
    return consumed_samples


if __name__ == "__main__":
    for record in train(Plan(**json.loads(Path(sys.argv[1]).read_text())), resume="--resume" in sys.argv):
        print(json.dumps(asdict(record)), flush=True)
